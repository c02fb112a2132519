"""What a plan is asked about a task, and how the task stands today."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from everstep.errors import UserError
from everstep.protocol.ops import Worker
from everstep_lab.plan.cluster import Assignment, Cluster
from everstep_lab.plan.curve import Curve
from everstep_lab.plan.offers import ChangeTimes, Offer
from everstep_lab.plan.reroute import dead_groups, live_per_stage, throughput_ratio
from everstep_lab.plan.task_shape import ParallelShape
from everstep_lab.plan.transition import StateSource

UNKNOWN_TIMES = ChangeTimes(agree_s=1.0, copy_s=0.0, reshape_s=10.0, restore_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One training job: what it is worth, what it needs, what it makes of its workers."""

    name: str
    curve: Curve
    weight: float = 1.0
    min_workers: int = 1
    max_workers: int | None = None
    transition_s: float | None = None  # what any change costs, if it is known better
    must_run: bool = False  # not to be stopped while any other plan is possible
    expected: bool = False  # not submitted yet; kept in mind for the table of next events
    offers: tuple[Offer, ...] = ()  # shapes it may take, where they are listed; then `curve` is not asked
    times: ChangeTimes = UNKNOWN_TIMES  # of its changes, where it lists its shapes
    throughput_now: float | None = None  # with the places that are filled today, where it lists its shapes

    def __post_init__(self) -> None:
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise UserError(f"weight of task {self.name!r} is {self.weight:g}; make it more than 0.")
        if self.min_workers < 1:
            raise UserError(f"min_workers of task {self.name!r} is {self.min_workers}; make it at least 1.")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise UserError(
                f"max_workers of task {self.name!r} is {self.max_workers}, below its min_workers "
                f"{self.min_workers}; raise one or lower the other."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSituation:
    """A task as the event left it."""

    workers: int  # before the event
    throughput: float  # before the event
    shape: ParallelShape | None
    damaged: bool  # lost a worker
    missing: tuple[int, ...]  # workers, by number, that are not there now
    dead: frozenset[Worker]  # groups of shards that are not whole now
    rerouted: float  # throughput if it goes on with what is left, same shape
    source: StateSource  # the nearest state
    lost: int = 0  # workers lost by the event
    listed: bool = False  # its throughput is listed by number of workers

    @property
    def live_workers(self) -> int:
        """What re-routing uses: whole groups only."""
        if self.shape is None or self.listed:
            return self.workers - self.lost
        return (self.shape.groups - len(self.dead)) * self.shape.shards


def situation(task: TaskSpec, cluster: Cluster, now: Assignment) -> TaskSituation:
    """Compare where the task's workers are with what is still usable."""
    places = now.of(task.name)
    before = sum(place is not None for place in places)
    holes = [i for i, place in enumerate(places) if place is None]
    sound = cluster.sound
    gone = [
        i
        for i, place in enumerate(places)
        if place is not None and place.node not in sound and not cluster.is_usable(place)
    ]
    shape = now.shapes.get(task.name) or task.curve.shape(len(places))
    expected = None if shape is None else shape.groups if task.offers else shape.workers
    if expected is not None and expected != len(places):
        raise UserError(
            f"task {task.name!r} has {len(places)} places and the shape {shape}; they must agree."
        )
    if not before:
        shape = None
    if task.offers:
        return _offered(task, shape, before, holes, gone)
    if shape is None:
        whole = task.curve.at(before) if before else 0.0
        source = StateSource.LIVE if before > len(gone) and task.curve.replicated else _fallback(cluster)
        return TaskSituation(
            workers=before,
            throughput=whole if before >= task.min_workers else 0.0,
            shape=None,
            damaged=bool(gone),
            missing=tuple(gone),
            dead=frozenset(),
            rerouted=0.0,
            source=source,
            lost=len(gone),
        )
    whole = task.curve.of_shape(shape)
    before_dead, after_dead = dead_groups(shape, holes), dead_groups(shape, holes + gone)
    curve, shares = task.curve, task.curve.shares(shape)
    ratio = {
        dead: throughput_ratio(shape, dead, batch=curve.batch, schedule=curve.schedule, shares=shares)
        for dead in (before_dead, after_dead)
    }
    alive = min(live_per_stage(shape, after_dead)) > 0
    return TaskSituation(
        workers=before,
        throughput=whole * ratio[before_dead] if before >= task.min_workers else 0.0,
        shape=shape,
        damaged=bool(gone),
        missing=tuple(sorted(holes + gone)),
        dead=after_dead,
        rerouted=whole * ratio[after_dead] if task.curve.replicated or not after_dead else 0.0,
        source=StateSource.LIVE if alive and (task.curve.replicated or not gone) else _fallback(cluster),
    )


def _offered(
    task: TaskSpec, shape: ParallelShape | None, before: int, holes: list[int], gone: list[int]
) -> TaskSituation:
    """A task that lists its shapes: throughput by workers, none once a stage has none."""
    offer = next((offer for offer in task.offers if offer.shape == shape), None)
    now = after = 0.0
    if offer is not None and shape is not None:
        groups = replace(shape, shards=1)  # its places are workers, each with all of its shards
        covered = min(live_per_stage(groups, dead_groups(groups, holes))) > 0
        now = task.throughput_now if task.throughput_now is not None else offer.at(before) if covered else 0.0
        left = min(live_per_stage(groups, dead_groups(groups, holes + gone))) > 0
        after = now if not gone else min(now, offer.at(before - len(gone))) if left else 0.0
    return TaskSituation(
        workers=before,
        throughput=now if before >= task.min_workers else 0.0,
        shape=shape,
        damaged=bool(gone),
        missing=tuple(sorted(holes + gone)),
        dead=frozenset() if shape is None else dead_groups(replace(shape, shards=1), holes + gone),
        rerouted=after,
        source=StateSource.LIVE if after > 0 else StateSource.MEMORY,
        lost=len(gone),
        listed=True,
    )


def _fallback(cluster: Cluster) -> StateSource:
    return StateSource.MEMORY if cluster.costs.memory_copies else StateSource.DISK
