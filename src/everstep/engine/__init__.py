"""Torch: runs schedules on real workers."""
