"""Which task gets which workers, in which shape, and whether a change pays. Pure."""
