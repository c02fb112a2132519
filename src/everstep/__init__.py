"""LLM training that heals itself."""

__version__ = "0.1.0"
