"""What was measured in each task: how long steps took in each shape, and what changes of shape have cost.

It is fed by the process that runs the coordinator, from what the journal holds anyway. What was never
measured, the model fills (`shapes.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.schedule.instance import Instance
from everstep.schedule.modes import STAGGERED

KEPT_STEPS = 9
LEAST_STEPS = 3  # fewer say little: the first ones after a change are slow
CONFIDENCE = 0.9  # that what steps usually take lies between the shortest and the longest of those measured
ENOUGH_STEPS = math.ceil(1 - math.log2(1 - CONFIDENCE))  # one of n is missed with 2 x 0.5 ** n
DOUBT = 0.05  # spreads are rounded up to whole ones of these: a question is not another one for a little
OLD = 0.7  # how shares of collectives are smoothed
KEPT_PROMISES, PROMISE_S = 8, 3600.0  # changes of shape, and for how long they say something
KEPT_CHANGES = 8  # of shape, of all tasks
Placed = tuple[int, int, int]  # replicas, stages, workers


@dataclass(slots=True)
class TaskMeasurements:
    """Of one task."""

    steps: dict[Placed, deque[float]] = field(default_factory=dict)
    off_by: dict[Placed, float] = field(default_factory=dict)  # step over bound, when last there
    reshape_s: float | None = None  # of the last change of shape
    instance: Instance | None = None  # op times in the shape it has
    mode: str = STAGGERED  # of the schedule in force
    slow: Mapping[Worker, float] = field(default_factory=dict)  # the speeds that are in these times
    last_at: float | None = None  # when its last step was recorded
    last: Placed | None = None
    is_moving: bool = False
    copying_s: float | None = None  # of the change of shape under way, as its bytes say
    promised: float | None = None  # the shape it takes, or has taken, should be so many times as fast
    before_s: float | None = None  # a step's, before that
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
        share = DOUBT * round(share / DOUBT)
        moved = (1 - 1 / others) / (1 - 1 / shards) if shards > 1 else 0.0
        return (1 - share) * shards / others + share * moved

    def step_s(self, placed: Placed) -> float | None:
        known = self.steps.get(placed, ())
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
        return DOUBT * math.ceil(found / DOUBT - 1e-9)

    def settles_in_s(self, shape: Shape, usual_s: float) -> float:
        """Until enough steps of this shape are measured to compare it with another; 0: they are. `usual_s`:
        for a step, where none was measured.
        """
        here = [each for placed, each in self.steps.items() if placed[:2] == (shape.replicas, shape.stages)]
        known = max(here, key=len, default=())
        step_s = median(known) if known else usual_s
        return step_s * max(0, ENOUGH_STEPS - len(known))


@dataclass(frozen=True, slots=True)
class ChangeOfShape:
    """Of some task."""

    seconds: float
    copying_s: float | None  # of these, as its bytes say; None: they are not known


class Measurements:
    """Of all tasks, and whether changes of shape brought what was expected of them. That is a matter of the
    machines, not of the task: where cores are fewer than slots, more workers are not faster, whatever the
    times of ops say.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, TaskMeasurements] = {}
        self.changes: deque[ChangeOfShape] = deque(maxlen=KEPT_CHANGES)  # also of tasks that are over
        self._promises: deque[tuple[float, float]] = deque(maxlen=KEPT_PROMISES)  # when, which share was kept

    def of(self, task: str) -> TaskMeasurements:
        return self.tasks.setdefault(task, TaskMeasurements())

    def stepped(self, task: str, shape: Shape, workers: int, at: float) -> None:
        """A step was recorded, with so many workers taking part."""
        known, placed = self.of(task), (shape.replicas, shape.stages, workers)
        seconds = None if known.last_at is None else max(0.0, at - known.last_at)
        if known.is_moving and seconds is not None:
            expected = (known.before_s or 0.0) / (known.promised or 1.0)  # of the step that it holds
            usual = known.step_s(placed) or expected
            known.reshape_s, known.is_moving = max(0.0, seconds - usual), False
            self.changes.append(ChangeOfShape(known.reshape_s, known.copying_s))
        elif seconds and known.last == placed:
            known.steps.setdefault(placed, deque(maxlen=KEPT_STEPS)).append(seconds)
            self._compare(known, placed, at)
        known.last_at, known.last = at, placed

    def _compare(self, known: TaskMeasurements, placed: Placed, at: float) -> None:
        steps = known.steps[placed]
        if known.promised and known.before_s and len(steps) >= ENOUGH_STEPS:
            self._promises.append((at, known.before_s / median(steps) / known.promised))
            known.promised = known.before_s = None

    def promised(self, task: str, gain: float) -> None:
        """The planner changes its shape, because it should then be so many times as fast."""
        self.of(task).promised = gain

    def trust(self, now: float) -> float:
        """Which share of the speed that a change of shape promised was usually there; at most 1."""
        kept = [share for at, share in self._promises if now - at <= PROMISE_S]
        return min(1.0, DOUBT * math.ceil(median(kept) / DOUBT - 1e-9)) if kept else 1.0

    def usual_reshape_s(self, copying_s: float | None) -> float | None:
        """What changes of shape have taken on these machines, with so much copying; None: there was none."""
        if not self.changes:
            return None
        if copying_s is None:
            return median(change.seconds for change in self.changes)
        return copying_s + median(max(0.0, c.seconds - (c.copying_s or 0.0)) for c in self.changes)

    def reshaped(self, task: str, copying_s: float | None = None) -> None:
        """It takes another shape; the next step that is recorded ends the change. `copying_s`: of it, as its
        bytes say.
        """
        known = self.of(task)
        known.copying_s = copying_s
        known.before_s = known.step_s(known.last) if known.last is not None else None
        known.is_moving, known.instance = True, None

    def paused(self, task: str) -> None:
        """The time to its next step is not a step's."""
        known = self.of(task)
        known.last_at, known.last, known.is_moving = None, None, False
        known.promised = known.before_s = None

    def ended(self, task: str) -> None:
        self.tasks.pop(task, None)
