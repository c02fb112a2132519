"""What the planner weighed, for those who look: every task's alternatives, with their numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedOption:
    """One thing a task could do, in the best plan of the whole cluster in which it does that.

    Amounts are in the work of one worker in one second, times the task's weight.
    """

    task: str
    what: str  # continue with rerouting, change shape to 4x1 …
    workers: int
    shape: str  # 2x2; empty: none
    throughput: float  # in the work of one worker
    transition_s: float
    earns: float  # until the next event
    pays: float  # for the change, and for the way back after a promised repair
    behind: float  # how much less the whole cluster's plan is worth than the best plan
    chosen: bool
    because: str
