"""Decisions. Events in, `handle(event, now)`, actions out. Standard library only."""
