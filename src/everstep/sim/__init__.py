"""A deterministic world around core, schedule and plan: storms for the tests, studies for people."""
