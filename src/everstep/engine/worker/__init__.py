"""A worker's loop: carries out what `core.worker` decides."""
