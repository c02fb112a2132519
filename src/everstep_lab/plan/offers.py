"""The shapes a running task may take, what each brings, and what it costs to get from one to another.

A running Everstep task needs one worker per stage; any other place may be empty, and its peers do its work.
So an option is a shape and a number of workers, and there are four prices, of this task, measured where it
has made such a change before, or another task has:

    agree     fewer workers in the same shape: a new epoch
    copy      more workers: each copies a stage's state while training continues
    reshape   another shape: training stops until other workers have the states, from memory
    restore   a stage has no worker left: the newest kept state is loaded, and the work since then redone
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep_lab.plan.task_shape import ParallelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A shape a task may take, and its throughput by workers, from 0; 0: a stage would have none."""

    shape: ParallelShape
    throughput: tuple[float, ...]
    slots: int = 1  # of each worker, on one node; as the cluster counts them

    def at(self, workers: int) -> float:
        return self.throughput[min(workers, len(self.throughput) - 1)]


class TimeSource(StrEnum):
    """Where the time of a change of shape is from."""

    OWN = "as its last one took"
    OTHERS = "as those of other tasks took"
    MODEL = "an estimate, as no task has made one"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTimes:
    """Seconds that changes of a task take."""

    agree_s: float
    copy_s: float
    reshape_s: float
    restore_s: float
    reshape_from: TimeSource = TimeSource.MODEL
