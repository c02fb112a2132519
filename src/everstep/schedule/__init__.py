"""A step as ops on workers: notation, generators, bounds, checker, pictures. Pure."""
