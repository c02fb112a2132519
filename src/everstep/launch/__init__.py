"""Gets a task running: everything on this machine, or agents on many."""
