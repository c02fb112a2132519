"""What changes of a running task take, in seconds: measured in this task, else in any task of the cluster,
else as the model says.

    agree     fewer workers in the same shape: a new epoch
    copy      more workers: each copies a stage's state while training continues
    reshape   another shape: training stops until other workers have the states, from memory
    restore   a stage has no worker left: the newest kept state is loaded, and the work since then redone
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from everstep.core.cluster.task import Task
from everstep.plan.measured import Measurements
from everstep.protocol.incidents import IncidentLog

TRANSITION_S = 2.0  # of a task of whose state nothing is known yet
AGREE_S = 0.2  # to stop between two ops, report ledgers and resume
START_S = 3.0  # for other processes to start and build the model
RESTORE_S = 10.0  # for a state from disk, beside the work since then
PACE = 500e6  # bytes/s at which a worker takes over a state, until a move has been measured
HEALS = 5  # the last ones count


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTimes:
    agree_s: float
    copy_s: float
    reshape_s: float
    restore_s: float


class Changes:
    """Of all tasks; looks through them once."""

    def __init__(self, tasks: Iterable[Task], log: IncidentLog, measured: Measurements) -> None:
        self._measured = measured
        self._heals: dict[str, list[float]] = {}
        for one in log.incidents:
            if one.stops_training and one.resumed_at is not None and one.planned_at is not None:
                self._heals.setdefault(one.task, []).append(one.resumed_at - one.planned_at)
        paces = [pace for task in tasks if (pace := _pace(task)) is not None]
        self._pace = median(paces) if paces else PACE

    def of(self, task: Task) -> ChangeTimes:
        known = self._measured.of(task.name)
        heals = self._heals.get(task.name, [])[-HEALS:]
        copy_s = self.copying_s(task)
        reshape_s = self._measured.reshape_s if known.reshape_s is None else known.reshape_s
        kept = max(task.checkpoints.newest, task.copies.newest or 0)
        return ChangeTimes(
            agree_s=max(median(heals), 1e-3) if heals else AGREE_S,
            copy_s=copy_s,
            reshape_s=AGREE_S + START_S + copy_s if reshape_s is None else max(AGREE_S, reshape_s),
            restore_s=RESTORE_S + max(0, task.next_step - 1 - kept) * (known.step_s() or 0.0),
        )

    def copying_s(self, task: Task) -> float:
        """Until a worker that comes has fetched a stage's state, at the last move's pace: this task's, else
        that of others. Copies in memory are files with a size.
        """
        kept = task.copies.states.get(task.copies.newest or 0)
        if kept is None:
            return TRANSITION_S - AGREE_S
        parts = [part for copies in kept.copies.values() for part in copies.values()]
        return max(int(part.get("bytes", 0)) for part in parts) / (_pace(task) or self._pace)


def _pace(task: Task) -> float | None:
    """Bytes per second and reader of its last move; None: there was none, or of nothing."""
    fetched, kept = task.copies.fetched, task.copies.states.get(task.copies.newest or 0)
    if not fetched:
        return None
    moved = fetched[max(fetched)]
    readers = max(1, kept.stages if kept is not None else task.shape.stages)  # at the least
    return (moved.bytes_here + moved.bytes_elsewhere) / readers / max(moved.seconds, 1e-3) or None
