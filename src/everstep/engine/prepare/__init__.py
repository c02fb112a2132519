"""Before anything starts: what a job's words name, whether it can work, and whether it fits into memory."""
