"""The coordinator daemon: its journal, its API, its metrics."""
