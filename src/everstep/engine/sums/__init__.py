"""Gradients of many microbatches and workers, added up so that the order does not change the bits."""
