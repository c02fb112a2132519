"""The queue: which tasks wait, for what, and when they are expected to start.

An estimate and no promise. Running tasks are taken to keep their workers until their last step at the pace of
their recent steps, and waiting tasks to start in the order of their weight, then of their submission, as soon
as the slots they need at least are free. The planner may do better: it can give slots of a lighter task to a
heavier one. A running script may end at any time, so what waits for its slots has no expected start.

A task that has begun and has lost all workers of a stage waits for slots too, and is in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from everstep.core.cluster.progress import STALLED, slots_lacking
from everstep.core.cluster.task import OVER, Task, TaskState
from everstep.server.record import ClusterRecord

MOST_HOLDERS = 3  # named, of the tasks that have the slots
USUAL_OF = 32  # steps whose median is the pace of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    task: str
    slots: int  # without which it does nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A running task: what becomes free when it ends."""

    task: str
    slots: int
    in_s: float | None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    in_s: float | None  # None: not known, or never
    because: str


def expected_starts(
    queue: Sequence[Waiting], running: Sequence[Leaving], *, free: int, total: int
) -> dict[str, Expected]:
    """When each of the queue is expected to start, the first one first. A task that starts is taken to hold
    its slots for as long as is looked ahead.
    """
    found: dict[str, Expected] = {}
    leaving = sorted((one for one in running if one.in_s is not None), key=lambda one: one.in_s or 0.0)
    unknown = sum(one.slots for one in running if one.in_s is None)
    at, waits_for = 0.0, ""
    for one in queue:
        if one.slots > total:
            because = f"it needs {one.slots} slots, and the cluster has {total}"
            found[one.task] = Expected(in_s=None, because=because)
            continue
        while free < one.slots and leaving:
            ends = leaving.pop(0)
            free, at, waits_for = free + ends.slots, ends.in_s or 0.0, ends.task
        if free < one.slots:
            others = "whose end is not known" if unknown else "that are ahead of it"
            because = f"it needs {one.slots} slots and waits for those of tasks {others}"
            found[one.task] = Expected(in_s=None, because=because)
            break  # what is behind it starts later, if it does not fit beside it
        free -= one.slots
        because = f"when task {waits_for} ends" if at else "slots for it are free"
        found[one.task] = Expected(in_s=at, because=because)
    for one in queue:
        behind = Expected(in_s=None, because="tasks that are ahead of it have no expected start")
        found.setdefault(one.task, behind)
    return found


def document(record: ClusterRecord) -> dict[str, Any]:
    machine = record.machine
    tasks = [task for task in machine.tasks.values() if task.state not in OVER]
    queue = sorted(
        (task for task in tasks if _slots(task)), key=lambda task: (-task.weight, task.submitted_at)
    )
    running = [
        Leaving(
            task=task.name,
            slots=sum(len(seat.slots) for seat in task.seats.values()),
            in_s=None if _slots(task) else _left_s(record, task),
        )
        for task in tasks
        if task.seats
    ]
    there = [node for node in machine.nodes.values() if node.reachable]
    free, total = machine.roster.num_free, sum(node.slots for node in there)
    waiting = [Waiting(task=task.name, slots=_slots(task)) for task in queue]
    expected = expected_starts(waiting, running, free=free, total=total)
    return {
        "free": free,
        "slots": total,
        "queue": [
            _row(record, task, place, expected, _holders(tasks, task)) for place, task in enumerate(queue, 1)
        ],
        "paused": [task.name for task in tasks if task.state is TaskState.PAUSED],
        "running": [{"task": one.task, "slots": one.slots, "ends_in_s": one.in_s} for one in running],
    }


def _row(
    record: ClusterRecord, task: Task, place: int, expected: Mapping[str, Expected], holders: str
) -> dict[str, Any]:
    start, is_stalled = expected[task.name], task.state is not TaskState.WAITING
    because = f"it has begun, and a stage is without a worker; {task.because}" if is_stalled else task.because
    return {
        "place": place,
        "task": task.name,
        "state": STALLED if is_stalled else task.state,
        "owner": task.request.owner,
        "weight": task.weight,
        "submitted_at": task.submitted_at + record.ahead_s,
        "needs_slots": _slots(task),
        "because": f"{because}; {holders}" if holders else because,
        "starts_in_s": start.in_s,
        "starts": start.because,
    }


def _slots(task: Task) -> int:
    """What it waits for; 0: it does not wait."""
    if task.state is TaskState.WAITING:
        return task.starts_with * task.shape.shards
    return slots_lacking(task)


def _holders(tasks: Sequence[Task], waiting: Task) -> str:
    """Who has the slots."""
    others = [task for task in tasks if task.seats and task is not waiting]
    largest = sorted(others, key=lambda task: (-len(task.seats), task.name))[:MOST_HOLDERS]
    held = [
        f"{task.name} (weight {task.weight:g}) has {sum(len(seat.slots) for seat in task.seats.values())}"
        for task in largest
    ]
    return ", ".join(held) + (
        f" and {len(others) - len(held)} more tasks have others" if len(others) > len(held) else ""
    )


def _left_s(record: ClusterRecord, task: Task) -> float | None:
    """Until its last step, at its usual pace."""
    steps = record.steps.get(task.name)
    if task.is_script or steps is None:
        return None
    recent = [row.seconds for row in list(steps.rows)[-USUAL_OF:]]
    return (task.steps - task.progress.recorded) * median(recent) if recent else None
