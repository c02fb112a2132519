"""Other frameworks' checkpoints, read into a `State` and written from one."""
