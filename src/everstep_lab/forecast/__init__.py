"""What storms on real processes should earn, foreseen in virtual time by the real coordinator and planner."""
