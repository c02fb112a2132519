"""Running a coordinator: one driver and its ports, under the daemon, a local run, storms and tests."""
