"""The coordinator's state as a question to the planner, and its answer as an event.

    coordinator, measurements ──► question ──► think ──► chosen ──► AssignmentChosen
                                  facts        a thread   waits, moves

A task can use any number of workers from one per stage up to its shape: places without a worker are worked
around, and its batch and its losses stay what they are. It can also take another shape, at a step boundary.
What a worker does is the same for all tasks here, as they share the machines.

A change of shape stops the whole task, and when the next event comes is not known. So it is made once nothing
has come or gone for as long as the change takes to pay for itself, five minutes at most, and once enough
steps of the shape it has are measured. A task that cannot train as it is waits for nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.task import OVER, Task, TaskState
from everstep.plan.change_times import Changes, ChangeTimes
from everstep.plan.explain import sentence, weighed
from everstep.plan.measured import Measurements, TaskMeasurements
from everstep.plan.moves import moves
from everstep.plan.options import Decision, Kind, Option, TaskAsked, Today, decide
from everstep.plan.throughput import TaskSpeed, Way
from everstep.protocol.durations import span
from everstep.protocol.incidents import IncidentLog
from everstep.protocol.messages import AssignmentChosen, ChosenShape, Patience, WeighedOption
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape

DAY_S = 86_400.0
FAILURES_PER_1000_NODE_DAYS = 6.5  # Meta RSC-1, 24,000 A100 over 11 months
RECENT = 8  # failures
LONGEST_WAIT_S = 300.0
UNEVEN = 0.02  # stages whose costs differ by less are alike


class ClusterView(Protocol):
    """What a question is made from: a coordinator."""

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    @property
    def tasks(self) -> Mapping[str, Task]: ...

    @property
    def log(self) -> IncidentLog: ...

    @property
    def patience(self) -> Patience: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Of one task, apart from the coordinator's own objects, which change meanwhile."""

    name: str
    shape: Shape
    weight: float
    live: tuple[int, ...]  # workers of each stage; empty: it has none
    least: int
    most: int | None
    stages: range | None  # that it may be cut into; None: it keeps its shape
    shards: tuple[int, ...]
    known: TaskMeasurements
    slow: Mapping[Worker, float]
    times: ChangeTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    tasks: tuple[TaskFacts, ...]
    sizes: Mapping[int, int]  # of nodes, in slots, and how many there are
    running_s: float
    review_s: float | None  # when the next event is expected later, if nothing happens


class Thought(NamedTuple):
    """The best for the whole cluster, what it is while no task that trains changes its shape, and what else
    each task could have done.
    """

    decision: Decision
    stay: Decision
    weighed: tuple[WeighedOption, ...]
    costs: Mapping[str, tuple[float, ...]]  # of stages, where they differ
    review_s: float | None


def choose(
    view: ClusterView,
    version: int,
    event: str,
    *,
    now: float = 0.0,
    measured: Measurements | None = None,
) -> AssignmentChosen:
    """How many workers each task shall have, and in which shape, now that `event` has happened."""
    measured = measured or Measurements()
    asked = question(view, now, measured)
    thought = None if asked is None else think(asked)
    return chosen(view, version, event, thought, measured, now)


def is_about(asked: PlanQuestion, view: ClusterView) -> bool:
    """Are the tasks that want slots those of the question?"""
    return {task.name for task in asked.tasks} == {task.name for task in _wanting(view)}


def _wanting(view: ClusterView) -> list[Task]:
    return [t for t in view.tasks.values() if t.state not in OVER and t.state is not TaskState.PAUSED]


# ------------------------------------------------------------------ the question


def question(view: ClusterView, now: float, measured: Measurements) -> PlanQuestion | None:
    """None: there are no slots, or nobody wants one."""
    tasks = _wanting(view)
    up = {name for name, node in view.nodes.items() if node.admin is NodeAdmin.UP and node.reachable}
    sizes = Counter(view.nodes[name].slots - len(view.nodes[name].lost_slots) for name in up)
    if not tasks or not any(sizes):
        return None
    changes = Changes(view.tasks.values(), view.log, measured)
    running_s, review_s = _next_event(view, now, len(up))
    return PlanQuestion(
        tasks=tuple(_facts(task, up, changes, measured.of(task.name)) for task in tasks),
        sizes=sizes,
        running_s=running_s,
        review_s=review_s,
    )


def _facts(task: Task, up: set[str], changes: Changes, known: TaskMeasurements) -> TaskFacts:
    may_change, request = _may_change(task), task.request
    live = [0] * task.shape.stages
    for worker, seat in task.seats.items():
        if not seat.leaving and seat.node in up:
            live[worker.stage] += 1
    slow = {worker: factor for worker, factor in task.speeds.slow.items() if _is_there(task, worker, up)}
    TaskSpeed(task.shape, known, slow).learn(live)
    return TaskFacts(
        name=task.name,
        shape=task.shape,
        weight=task.weight,
        live=tuple(live) if any(live) else (),
        least=_least_workers(task),
        most=_most_workers(task),
        stages=range(max(1, request.least_stages), request.most_stages + 1) if may_change else None,
        shards=tuple(_shards(task)) if may_change else (),
        known=replace(known, steps=dict(known.steps), off_by=dict(known.off_by)),
        slow=slow,
        times=changes.of(task),
    )


def _is_there(task: Task, worker: Worker, up: set[str]) -> bool:
    seat = task.seats.get(worker)
    return seat is not None and not seat.leaving and seat.node in up


def _shards(task: Task) -> list[int]:
    """How many shards its workers may have, where that may change."""
    request = task.request
    if not request.least_shards:
        return []
    counts = range(request.least_shards, request.most_shards + 1)
    return [count for count in counts if request.most_shards % count == 0]


def _most_workers(task: Task) -> int | None:
    """An operator's word, else the user's; a shape that an operator chose may be larger."""
    asked = task.request.most_workers
    if task.bounds.workers is not None or not asked:
        return task.bounds.workers
    return max(asked, task.shape.replicas * task.shape.stages) if task.bounds.is_shape_kept else asked


def _least_workers(task: Task) -> int:
    """The user's word; an operator who gives it fewer is right."""
    most = _most_workers(task)
    least = max(1, task.request.least_workers)
    return least if most is None else max(1, min(least, most))


def _may_change(task: Task) -> bool:
    return (
        task.request.most_stages > 0
        and not task.bounds.is_shape_kept
        and task.next_shape is None
        and task.state in (TaskState.RUNNING, TaskState.WAITING)
    )


def _next_event(view: ClusterView, now: float, up: int) -> tuple[float, float | None]:
    """When it is expected, and when to look again because it is expected later then. A node that was
    announced to leave is an event.
    """
    usual_s = 1000 * DAY_S / (FAILURES_PER_1000_NODE_DAYS * max(1, up))
    began = min((task.submitted_at for task in view.tasks.values()), default=now)
    began = max(began, view.log.forgotten.since)  # what is counted below has happened since
    seen = sorted({incident.evidence_at for incident in view.log.incidents if incident.stops_training})
    expected_s, elapsed = next_event_s(usual_s, seen, began, now)
    leaves = [n.leaves_at for n in view.nodes.values() if n.leaves_at is not None and n.admin is NodeAdmin.UP]
    soonest = min([expected_s, *(max(1.0, at - now) for at in leaves)])
    return soonest, elapsed if expected_s < usual_s else None


def next_event_s(usual_s: float, seen: Sequence[float], began: float, now: float) -> tuple[float, float]:
    """With n failures in t seconds after t / (n - 1), and t. `seen`: their moments, oldest first; `began`:
    since when they count.

    The published rate is a floor. Rejected: to add those seen to it as if that were one observation. It
    stands for years of exposure, and eighty failures in six minutes did not outweigh it. Only the last few
    count, so that calm after a bad hour is noticed; one alone says little.
    """
    recent = seen[-RECENT:]
    since = recent[0] if len(seen) > RECENT else began
    number = len(recent) - (len(seen) > RECENT)  # the oldest one begins the time
    elapsed = max(1.0, now - since)
    return (min(usual_s, elapsed / (number - 1)) if number > 1 else usual_s), elapsed


# ------------------------------------------------------------------ the answer


def think(asked: PlanQuestion) -> Thought:
    """Of the question alone: a thread does it while the coordinator goes on."""
    unit = _unit(asked.tasks)
    rooms = {n: sum(size // n * count for size, count in asked.sizes.items()) for n in _sizes(asked.tasks)}
    tasks, costs = [], {}
    for facts in asked.tasks:
        speed = TaskSpeed(facts.shape, facts.known, facts.slow)
        tasks.append(_asked(facts, speed, rooms, unit))
        if len(facts.live) > 1 and (found := _uneven(speed.costs)):
            costs[facts.name] = found
    capacity = sum(size // unit * count for size, count in asked.sizes.items())
    decision = stay = decide(tasks, capacity, asked.running_s)
    while moving := [name for name, choice in stay.choices.items() if choice.kind is Kind.RESHAPE]:
        stay = stay.without(Kind.RESHAPE, moving)
    return Thought(decision, stay, weighed(decision), costs, asked.review_s)


def _sizes(tasks: Iterable[TaskFacts]) -> set[int]:
    """Shards that a worker of some task may have."""
    return {count for task in tasks for count in (task.shape.shards, *task.shards)}


def _unit(tasks: Iterable[TaskFacts]) -> int:
    """Slots that are given away together. A worker with shards takes as many of one node; where all tasks are
    alike in that, capacity is counted in workers. Else the planner does not see that the slots left on a node
    by another task may be too few.
    """
    return math.gcd(*_sizes(tasks))


def _asked(facts: TaskFacts, speed: TaskSpeed, rooms: Mapping[int, int], unit: int) -> TaskAsked:
    slots = max(rooms[count] * count for count in (facts.shape.shards, *facts.shards))
    if facts.most is not None:
        slots = min(slots, facts.most * max((facts.shape.shards, *facts.shards)))
    live = facts.live or (0,) * facts.shape.stages
    ways = [speed.own(live), *speed.others(facts.stages, facts.shards, slots)]
    return TaskAsked(
        name=facts.name,
        ways=[Way(way.shape, way.throughput[: rooms[way.shape.shards] + 1]) for way in ways],
        times=facts.times,
        today=Today(facts.shape, sum(live), speed.now(live)) if facts.live else None,
        evened=float(speed.own(live, evened=True).throughput[sum(live)]),
        weight=facts.weight,
        least=facts.least,
        most=facts.most,
        slots_per_unit=unit,
    )


def _uneven(costs: Sequence[float]) -> tuple[float, ...]:
    """Of each stage over the largest; empty: they are alike."""
    found = tuple(round(cost / max(costs), 2) for cost in costs)
    return found if min(found) < 1 - UNEVEN else ()


def chosen(
    view: ClusterView,
    version: int,
    event: str,
    thought: Thought | None,
    measured: Measurements,
    now: float,
) -> AssignmentChosen:
    """What was thought of, as far as it is to be carried out at once."""
    if thought is None:
        because = "no slots to allocate, or no task that wants one"
        return AssignmentChosen(version=version, workers={}, because=because)
    wait_s = _wait_s(view, thought, measured, now)
    carried_out = thought.decision if wait_s <= 0 else thought.stay
    changes = {
        name: (choice, shape)
        for name, choice in thought.decision.choices.items()
        if choice.workers and (shape := choice.shape) is not None and shape != view.tasks[name].shape
    }
    wishes = {name: shape for name, (choice, shape) in changes.items() if choice.kind is Kind.RESHAPE}
    shapes = {
        name: ChosenShape(in_shape(view.tasks[name].job, shape), shape)
        for name, choice in carried_out.choices.items()
        if choice.workers and (shape := choice.shape) is not None and shape != view.tasks[name].shape
    }
    because = sentence(carried_out, _waits(wishes, wait_s) if wait_s > 0 else "")
    reviews = [s for s in (wait_s if wait_s > 0 else None, thought.review_s) if s is not None]
    choices = carried_out.choices
    return AssignmentChosen(
        version=version,
        workers={name: choice.workers for name, choice in choices.items()},
        because=f"{event}: {because}" if event else because,
        shapes=shapes,
        wishes=wishes if wait_s > 0 else {},
        costs=thought.costs,
        spread=tuple(name for name, choice in choices.items() if choice.kind is Kind.SPREAD),
        moved=moves(view, carried_out, measured, now),
        review_s=min(reviews, default=None),
        weighed=thought.weighed,
    )


def _waits(wishes: Mapping[str, Shape], wait_s: float) -> str:
    named = ", ".join(f"{name} ({shape})" for name, shape in list(wishes.items())[:3])
    return f"in {span(wait_s)}, if nothing else happens, a change of shape pays for itself: {named}"


def _wait_s(view: ClusterView, thought: Thought, measured: Measurements, now: float) -> float:
    """Until changes of shape are made; 0 or less: now, or there are none."""
    best, stay = thought.decision, thought.stay
    moving = [name for name, choice in best.choices.items() if choice.kind is Kind.RESHAPE]
    if not moving:
        return 0.0
    rate = _sum(best, _rate) - _sum(stay, _rate)
    paid = _sum(best, _paid) - _sum(stay, _paid)
    pays_s = min(LONGEST_WAIT_S, paid / rate) if rate > 0 else LONGEST_WAIT_S
    settles = [
        measured.of(name).settles_in_s(view.tasks[name].shape, best.choices[name].transition_s)
        for name in moving
    ]
    return max(pays_s - (now - _calm_since(view, measured)), *settles)


def _sum(decision: Decision, of: Any) -> float:
    return float(sum(of(decision, option) for option in decision.choices.values()))


def _rate(decision: Decision, option: Option) -> float:
    return option.earns / decision.running_s


def _paid(decision: Decision, option: Option) -> float:
    return option.pays


def _calm_since(view: ClusterView, measured: Measurements) -> float:
    """When a node, a slot or a task has come or gone last, or a shape was changed."""
    return max(
        (
            measured.reshaped_at,
            *(max(node.admin_since, node.liveness_since) for node in view.nodes.values()),
            *(max(task.submitted_at, task.ended_at) for task in view.tasks.values()),
            *(incident.evidence_at for incident in view.log.incidents if incident.stops_training),
        )
    )


def in_shape(job: Any, shape: Shape) -> Any:
    """The same job, cut otherwise; a job that is no table is passed on as it is."""
    if not isinstance(job, Mapping):
        return job
    cut = {"replicas": shape.replicas, "stages": shape.stages, "microbatches": shape.microbatches}
    return {**job, **cut, **({"shards": shape.shards} if shape.shards > 1 or "shards" in job else {})}
