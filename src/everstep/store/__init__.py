"""The training state on disk, by logical tensor names."""
