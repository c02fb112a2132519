"""Data people have, as functions of (step, microbatch): rows, packed tokens, tables, streams."""
