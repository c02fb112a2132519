"""What was measured in each task: how long steps took in each shape, and what changes of shape have cost.

It is fed by the process that runs the coordinator, from what the journal holds anyway. What was never
measured, the model fills (`throughput.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.protocol.shape import Shape
from everstep.schedule.profile import StageTimes

KEPT_STEPS = 9
LEAST_STEPS = 3  # fewer say little: the first ones after a change are slow
CONFIDENCE = 0.9  # that what steps usually take lies between the shortest and the longest of those measured
ENOUGH_STEPS = math.ceil(1 - math.log2(1 - CONFIDENCE))  # one of n is missed with 2 x 0.5 ** n
OLD = 0.7  # how shares of collectives are smoothed
Placed = tuple[int, int, int]  # replicas, stages, workers


@dataclass(slots=True)
class TaskMeasurements:
    """Of one task."""

    steps: dict[Placed, deque[float]] = field(default_factory=dict)
    off_by: dict[Placed, float] = field(default_factory=dict)  # step over bound, when last there
    reshape_s: float | None = None  # of the last change of shape
    times: StageTimes | None = None  # in the shape it has
    is_staggered: bool = True  # the schedule in force
    last_at: float | None = None  # when its last step was recorded
    last: Placed | None = None
    is_moving: bool = False
    collectives: float | None = None  # the share of ops that its shards spend inside collectives

    def learn_collectives(self, waits: Sequence[float], ops_s: float) -> None:
        """`waits`: seconds inside collectives of each shard of a worker, while its ops took `ops_s`. The
        shard that comes last waits for no other: what is left to it is what collectives take.
        """
        if len(waits) > 1 and ops_s > 0:
            share = min(1.0, min(waits) / ops_s)
            was = share if self.collectives is None else self.collectives
            self.collectives = OLD * was + (1 - OLD) * share

    def longer(self, shards: int, others: int) -> float:
        """How many times as long an op takes with other shards. Its products take what the split says, its
        collectives what an all-reduce among so many moves; those of a worker without shards are not known.
        """
        share = 0.0 if shards == 1 or self.collectives is None else self.collectives
        moved = (1 - 1 / others) / (1 - 1 / shards) if shards > 1 else 0.0
        return (1 - share) * shards / others + share * moved

    def step_s(self, placed: Placed | None = None) -> float | None:
        """Where it is now, if not said."""
        known = self.steps.get(placed or self.last or (0, 0, 0), ())
        return median(known) if len(known) >= LEAST_STEPS else None

    def slowed(self) -> tuple[float, float] | None:
        """A step's seconds before something became slow, and now. What has become slow is found within a few
        steps, so of those that are kept the shortest are from before.
        """
        steps = sorted(recent := list(self.steps.get(self.last, ()) if self.last is not None else ()))
        if len(steps) < 2 * LEAST_STEPS:
            return None
        return steps[len(steps) // 4], median(recent[-LEAST_STEPS:])

    def spread(self) -> float:
        """How far a step usually lies from the median of its shape, as a share of it; where it is most."""
        found = 0.0
        for seconds in self.steps.values():
            if len(seconds) >= LEAST_STEPS and (usual := median(seconds)) > 0:
                found = max(found, median(abs(each - usual) for each in seconds) / usual)
        return found

    def settles_in_s(self, shape: Shape, usual_s: float) -> float:
        """Until enough steps of this shape are measured to compare it with another; 0: they are. `usual_s`:
        for a step, where none was measured.
        """
        here = [each for placed, each in self.steps.items() if placed[:2] == (shape.replicas, shape.stages)]
        known = max(here, key=len, default=())
        return (median(known) if known else usual_s) * max(0, ENOUGH_STEPS - len(known))


class Measurements:
    """Of all tasks."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskMeasurements] = {}
        self.reshape_s: float | None = None  # of the last change of shape of any task
        self.reshaped_at = 0.0  # when it ended

    def of(self, task: str) -> TaskMeasurements:
        return self.tasks.setdefault(task, TaskMeasurements())

    def stepped(self, task: str, shape: Shape, workers: int, at: float) -> None:
        """A step was recorded, with so many workers taking part."""
        known, placed = self.of(task), (shape.replicas, shape.stages, workers)
        seconds = None if known.last_at is None else max(0.0, at - known.last_at)
        if known.is_moving and seconds is not None:
            self.reshape_s = known.reshape_s = max(0.0, seconds - (known.step_s(placed) or 0.0))
            known.is_moving, self.reshaped_at = False, at
        elif seconds and known.last == placed:
            known.steps.setdefault(placed, deque(maxlen=KEPT_STEPS)).append(seconds)
        known.last_at, known.last = at, placed

    def reshaped(self, task: str) -> None:
        """It takes another shape; the next step that is recorded ends the change."""
        known = self.of(task)
        known.is_moving, known.times = True, None

    def paused(self, task: str) -> None:
        """The time to its next step is not a step's."""
        known = self.of(task)
        known.last_at, known.last, known.is_moving = None, None, False

    def ended(self, task: str) -> None:
        self.tasks.pop(task, None)
