"""Master weights and optimizer, whole or in chunks, and learning rates."""
