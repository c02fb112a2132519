"""What changes of a running task take, in seconds: measured in this task, else in other tasks of the cluster,
else as the model says.

Of a change of shape, what another task took is split into copying, which goes with the bytes of a state, and
the rest (to agree, and for other processes to start), which is taken to be the same for all tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from everstep.core.cluster.task import Task
from everstep.plan.measured import Measurements, TaskMeasurements
from everstep.plan.offers import ChangeTimes, TimeSource
from everstep.plan.shapes import rounded
from everstep.protocol.incidents import IncidentLog

TRANSITION_S = 2.0  # of a task of whose state nothing is known yet
AGREE_S = 0.2  # to stop between two ops, report ledgers and resume
START_S = 3.0  # for other processes to start and build the model
RESTORE_S = 10.0  # for a state from disk, beside the work since then
PACE = 500e6  # bytes/s at which a worker takes over a state, until a move has been measured
HEALS = 5  # the last ones count


def change_times(task: Task, tasks: Iterable[Task], log: IncidentLog, measured: Measurements) -> ChangeTimes:
    known = measured.of(task.name)
    heals = [
        incident.resumed_at - incident.planned_at
        for incident in log.incidents
        if incident.task == task.name
        and incident.stops_training
        and incident.resumed_at is not None
        and incident.planned_at is not None
    ][-HEALS:]
    agree_s = rounded(max(median(heals), 1e-3)) if heals else AGREE_S
    copying = copying_s(task, tasks)
    copy_s = rounded(TRANSITION_S - AGREE_S if copying is None else copying)
    reshape_s, source = _reshape_s(known, measured.usual_reshape_s(copying), copy_s)
    kept = max(task.checkpoints.newest, task.copies.newest or 0)
    redone = 1 << max(0, task.next_step - 1 - kept).bit_length()  # coarse: it changes with every step
    step_s = known.step_s(known.last) if known.last is not None else None
    return ChangeTimes(
        agree_s=agree_s,
        copy_s=copy_s,
        reshape_s=rounded(reshape_s),
        restore_s=rounded(RESTORE_S + redone * (step_s or 0.0)),
        reshape_from=source,
    )


def _reshape_s(known: TaskMeasurements, usual_s: float | None, copy_s: float) -> tuple[float, TimeSource]:
    """As measured in this task, else in others, else as the model says."""
    if known.reshape_s:
        return known.reshape_s, TimeSource.OWN
    if usual_s is not None:
        return max(AGREE_S, usual_s), TimeSource.OTHERS
    return AGREE_S + START_S + copy_s, TimeSource.MODEL


def copying_s(task: Task, others: Iterable[Task] = ()) -> float | None:
    """Until a worker that comes has fetched a stage's state, at the last move's pace: this task's, else that
    of others. None: how large the states are is not known. Copies in memory are files with a size.
    """
    kept = task.copies.states.get(task.copies.newest or 0)
    if kept is None:
        return None
    parts = [part for copies in kept.copies.values() for part in copies.values()]
    paces = [pace for other in others if (pace := _pace(other)) is not None]
    pace = _pace(task) or (median(paces) if paces else PACE)
    return max(int(part.get("bytes", 0)) for part in parts) / pace


def _pace(task: Task) -> float | None:
    """Bytes per second and reader of its last move; None: there was none, or of nothing."""
    fetched, kept = task.copies.fetched, task.copies.states.get(task.copies.newest or 0)
    if not fetched:
        return None
    moved = fetched[max(fetched)]
    readers = max(1, kept.stages if kept is not None else task.shape.stages)  # at the least
    return (moved.bytes_here + moved.bytes_elsewhere) / readers / max(moved.seconds, 1e-3) or None
