"""Tensor parallel workers: one worker is a group of processes, its shards, that share every large matrix."""
