"""The coordinator's state as a question to the planner, and its answer as an event.

    coordinator, measurements ──► question ──► think ──► AssignmentChosen (workers, shapes, what was weighed)

A running Everstep task can use any number of workers from one per stage up to its shape: places without a
worker are worked around, and its batch and its losses stay what they are. It can also take another shape, at
a step boundary. So its options are (shape, workers) pairs (`shapes.py`), each with its price (`offers.py`);
what a worker does in FLOP/s is the same for all tasks here, as they share the machines.

A change of shape is made once staying has cost as much as the change would (`waits.py`). A question holds
rounded numbers only, so that the same situation is the same question, and an answer that was prepared can be
used (`ahead.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from everstep.core.cluster.lives import Lives
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin, NodeState
from everstep.core.cluster.slowness import node_of_slow_links, slow_links
from everstep.core.cluster.task import OVER, TaskState
from everstep.core.cluster.task import Task as RunningTask
from everstep.core.cluster.wishes import circumstances
from everstep.plan.answer import Decision, decide, explained
from everstep.plan.change_times import START_S, change_times
from everstep.plan.cluster import DAY_S, FAILURES_PER_1000_NODE_DAYS, Assignment, Cluster, PlanNode, SlotPlace
from everstep.plan.curve import from_table
from everstep.plan.holes import num_moving
from everstep.plan.measured import Measurements, TaskMeasurements
from everstep.plan.option import OptionKind, TaskOption
from everstep.plan.options import Options
from everstep.plan.reroute import live_per_stage
from everstep.plan.shapes import learn, offered, rounded, throughput_now, throughput_of
from everstep.plan.task import TaskSituation, TaskSpec
from everstep.plan.task_shape import ParallelShape
from everstep.plan.waits import held_back, in_cut
from everstep.plan.weigh import weigh, with_only
from everstep.protocol.incidents import IncidentLog
from everstep.protocol.messages import (
    AssignmentChosen,
    ChosenShape,
    MovedWorker,
    Patience,
    WeighedOption,
)
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape

SHOWN = 8


class ClusterView(Protocol):
    """What a question is made from: a coordinator, or what it would be after an event."""

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    @property
    def tasks(self) -> Mapping[str, RunningTask]: ...

    @property
    def log(self) -> IncidentLog: ...

    @property
    def patience(self) -> Patience: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """All an answer depends on, but for how long a change of shape was wished for."""

    nodes: tuple[PlanNode, ...]
    tasks: tuple[TaskSpec, ...]
    places: tuple[tuple[str, tuple[SlotPlace | None, ...]], ...]
    shapes: tuple[tuple[str, ParallelShape], ...]
    running_s: float

    @property
    def key(self) -> tuple[object, ...]:
        tasks = tuple(
            (t.name, t.weight, t.max_workers, t.offers, t.times, t.throughput_now) for t in self.tasks
        )
        return self.nodes, tasks, self.places, self.shapes, self.running_s

    def cluster(self) -> Cluster:
        return Cluster(nodes=self.nodes, running_s=self.running_s)

    def now(self) -> Assignment:
        return Assignment(places=dict(self.places), shapes=dict(self.shapes))


class Thought(NamedTuple):
    """The best for the whole cluster, and what else there was."""

    decision: Decision
    weighed: tuple[WeighedOption, ...]


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
    if asked is None:
        return nothing_to_share(version)
    return chosen(view, version, event, think(asked), measured, now)


def nothing_to_share(version: int) -> AssignmentChosen:
    because = "no slots to allocate, or no task that wants one"
    return AssignmentChosen(version=version, workers={}, because=because)


def think(asked: PlanQuestion) -> Thought:
    """Of the question alone: a thread may do it while the coordinator goes on."""
    decision = decide(asked.cluster(), asked.tasks, asked.now())
    return Thought(decision, weigh(decision, _interesting(decision)))


def is_about(asked: PlanQuestion, view: ClusterView) -> bool:
    """Are the tasks that want slots those of the question?"""
    return {task.name for task in asked.tasks} == {task.name for task in _wanting(view)}


def _wanting(view: ClusterView) -> list[RunningTask]:
    return [t for t in view.tasks.values() if t.state not in OVER and t.state is not TaskState.PAUSED]


def question(view: ClusterView, now: float, measured: Measurements) -> PlanQuestion | None:
    tasks = _wanting(view)
    unit = _slots_per_worker(tasks)
    nodes = tuple(_node(node, unit) for node in view.nodes.values())
    capacity = sum(node.slots for node in nodes if not node.lost)
    if not tasks or not capacity:
        return None
    slots = sum(node.slots for node in nodes)
    trust = measured.trust(now)
    numbers: dict[str, int] = {}  # with shards, the workers of a node are numbered as they come
    return PlanQuestion(
        nodes=nodes,
        tasks=tuple(_spec(view, task, measured, slots, unit, trust) for task in tasks),
        places=tuple((task.name, _places(task, unit, numbers)) for task in tasks if task.seats),
        shapes=tuple(
            (task.name, ParallelShape(task.shape.replicas, task.shape.stages, task.shape.shards))
            for task in tasks
            if task.seats
        ),
        running_s=_running_s(view, now),
    )


def _slots_per_worker(tasks: list[RunningTask]) -> int:
    """A worker with shards takes as many slots of one node. Where all tasks are alike in that, and stay so,
    the planner counts in workers; else in as few slots as divide them all, and it does not see that those
    left on a node by another task may be too few.
    """
    return math.gcd(*(count for task in tasks for count in (task.shape.shards, *_shards(task)))) or 1


def _shards(task: RunningTask) -> list[int]:
    """How many shards its workers may have, where that may change."""
    request = task.request
    if not _may_change(task) or not request.least_shards:
        return []
    counts = range(request.least_shards, request.most_shards + 1)
    return [count for count in counts if request.most_shards % count == 0]


def _most_workers(task: RunningTask) -> int | None:
    """An operator's word, else the user's; a shape that an operator chose may be larger."""
    asked = task.request.most_workers
    if task.bounds.workers is not None or not asked:
        return task.bounds.workers
    return max(asked, task.shape.replicas * task.shape.stages) if task.bounds.is_shape_kept else asked


def _least_workers(task: RunningTask) -> int:
    """The user's word; an operator who gives it fewer is right."""
    most = _most_workers(task)
    least = max(1, task.request.least_workers)
    return least if most is None else max(1, min(least, most))


def _may_change(task: RunningTask) -> bool:
    return (
        task.request.most_stages > 0
        and not task.bounds.is_shape_kept
        and task.next_shape is None
        and task.state in (TaskState.RUNNING, TaskState.WAITING)
    )


def _node(node: Node, unit: int) -> PlanNode:
    lost = node.admin is not NodeAdmin.UP or not node.reachable
    return PlanNode(
        name=node.name,
        slots=node.slots if unit == 1 else (node.slots - len(node.lost_slots)) // unit,
        bad_slots=frozenset(node.lost_slots) if unit == 1 else frozenset(),
        lost=lost,
    )


def _running_s(view: ClusterView, now: float) -> float:
    """The expected time to the next event; a node that was announced to leave ends it earlier."""
    up = sum(node.reachable and node.admin is NodeAdmin.UP for node in view.nodes.values())
    usual_s = 1000 * DAY_S / (FAILURES_PER_1000_NODE_DAYS * max(1, up))
    began = min((task.submitted_at for task in view.tasks.values()), default=now)
    began = max(began, view.log.forgotten.since)  # what is counted below has happened since
    seen = {incident.evidence_at for incident in view.log.incidents if incident.stops_training}
    expected_s = next_event_s(usual_s, sorted(seen), began, now)
    leaves = [n.leaves_at for n in view.nodes.values() if n.leaves_at is not None and n.admin is NodeAdmin.UP]
    return rounded(min([expected_s, *(max(1.0, at - now) for at in leaves)]))


def _places(task: RunningTask, unit: int, numbers: dict[str, int]) -> tuple[SlotPlace | None, ...]:
    seats = {worker: seat for worker, seat in task.seats.items() if not seat.leaving}
    found: list[SlotPlace | None] = []
    for worker in task.shape.workers():
        seat = seats.get(worker)
        if seat is None or unit == 1:
            found.append(None if seat is None else SlotPlace(seat.node, seat.slot))
            continue
        found.append(SlotPlace(seat.node, numbers.get(seat.node, 0)))
        numbers[seat.node] = numbers.get(seat.node, 0) + 1
    return tuple(found)


def _spec(
    view: ClusterView, task: RunningTask, measured: Measurements, slots: int, unit: int, trust: float
) -> TaskSpec:
    """`slots`: of all nodes, those under repair too, counted as `unit` says."""
    known = measured.of(task.name)
    may_change = _may_change(task)
    stages = range(max(1, task.request.least_stages), task.request.most_stages + 1) if may_change else None
    learn(task.shape, known, task.speeds.slow)
    seats = {worker for worker, seat in task.seats.items() if not seat.leaving}
    slow, live = task.speeds.slow, len(seats)
    offers = tuple(
        replace(offer, slots=offer.shape.shards // unit)
        for offer in offered(task.shape, stages, slots * unit, known, slow, _shards(task), trust, live)
    )
    best = [max(offer.at(w) for offer in offers) for w in range(len(offers[0].throughput))]
    dead = frozenset(worker for worker in task.shape.workers() if worker not in seats)
    return TaskSpec(
        name=task.name,
        curve=from_table(best),
        weight=task.weight,
        min_workers=_least_workers(task),
        max_workers=_most_workers(task),
        must_run=True,
        offers=offers,
        times=change_times(task, view.tasks.values(), view.log, measured),
        throughput_now=throughput_now(task.shape, dead, known, task.speeds.slow) if seats else 0.0,
    )


def chosen(
    view: ClusterView,
    version: int,
    event: str,
    thought: Thought,
    measured: Measurements,
    now: float,
) -> AssignmentChosen:
    """What was thought of, as far as it is to be carried out at once."""
    decision, weighed = thought
    unfinished = [task.name for task in view.tasks.values() if task.state not in OVER]
    held = held_back(view.tasks, decision, measured, circumstances(view.nodes, unfinished), now)
    choices, because = held.carried_out.choices, explained(decision.period.cluster, held.carried_out)
    because += held.sentence()
    shapes = {
        name: ChosenShape(in_shape(view.tasks[name].job, shape), shape)
        for name, choice in choices.items()
        if choice.workers and (shape := in_cut(view.tasks[name].shape, choice)) != view.tasks[name].shape
    }
    stayed = {name: decision.situations[name].rerouted for name in shapes}
    return AssignmentChosen(
        version=version,
        workers={name: choice.workers for name, choice in choices.items()},
        because=f"{event}: {because}" if event else because,
        shapes=shapes,
        wishes=held.wishes,
        losses=held.losses,
        spread=tuple(
            name for name, choice in choices.items() if _is_uneven(decision.situations[name], choice)
        ),
        moved=_moved(view, held.carried_out, measured, now),
        gains={name: choices[name].throughput / stayed[name] for name in shapes if stayed[name] > 0},
        review_s=min(
            (s for s in (held.review_s, _spread_pays_s(held.carried_out)) if s is not None), default=None
        ),
        weighed=weighed,
    )


def _spread_pays_s(decision: Decision) -> float | None:
    """When workers that change their stage will have earned back what it costs, if nothing else happens: in
    a burst of failures the next one is expected too soon, so it is looked at again then.
    """
    found: list[float] = []
    for name, choice in decision.choices.items():
        if choice.kind not in (OptionKind.KEEP, OptionKind.REROUTE):
            continue
        rival = with_only(decision, name, frozenset({OptionKind.SPREAD}))
        if rival is None:
            continue
        rate = sum(
            decision.options[n].task.weight * (other.throughput - decision.choices[n].throughput)
            for n, other in rival.choices.items()
        )
        paid = sum(c.cost + c.way_back for c in rival.choices.values())
        if rate > 0:
            found.append(max(1.0, rounded(paid / rate)))
    return min(found, default=None)


def _moved(
    view: ClusterView, decision: Decision, measured: Measurements, now: float
) -> dict[str, MovedWorker]:
    """Slow workers, slow ranks of scripts, and nodes with a slow link, for which free slots on other nodes
    pay: what is gained until the next event, or the end of the task, against what is missed while other
    processes start and get the state. Until then a slow worker's peers run some of its microbatches.
    """
    seats = [seat for task in view.tasks.values() for seat in task.seats.values()]
    taken = Counter(seat.node for seat in seats for _ in seat.slots)
    free = {
        node.name: node.slots - len(node.unusable) - taken[node.name]
        for node in view.nodes.values()
        if node.state is NodeState.UP and node.leaves_at is None
    }
    room = sum(max(0, slots) for slots in free.values())
    for name, choice in decision.choices.items():
        task = view.tasks[name]
        room -= max(0, choice.workers - len(task.staying())) * task.shape.shards
    found: dict[str, MovedWorker] = {}
    for name, choice in decision.choices.items():
        task, shards = view.tasks[name], view.tasks[name].shape.shards
        if choice.kind not in (OptionKind.KEEP, OptionKind.REROUTE) or room < shards:
            continue
        for move in _moves(view, task, decision.options[name], measured, now):
            going = [task.seats[worker] for worker in (move.worker, *move.others)]
            if move.node:
                going = [seat for seat in task.seats.values() if seat.node == move.node]
            left = {seat.node for seat in going}
            places = sum(max(0, slots) // shards for node, slots in free.items() if node not in left)
            if places >= len(going) and room >= len(going) * shards:
                room -= len(going) * shards
                found[name] = move
                break
    return found


def _moves(
    view: ClusterView, task: RunningTask, given: Options, measured: Measurements, now: float
) -> Iterable[MovedWorker]:
    """Those that pay, the best first."""
    if given.task.times is None or task.state is not TaskState.RUNNING:
        return ()
    known = measured.of(task.name)
    if task.lives is not None:
        priced = [_move_of_ranks(task, task.lives, given, known, now)]
    else:
        priced = [_move_of_slow(view, task, given, known, group) for group in _slow_groups(task)]
        priced.append(_move_off_link(view, task, given, known))
    best = sorted((one for one in priced if one is not None), key=lambda one: -one[0])
    return [move for _, move in best]


def _slow_groups(task: RunningTask) -> list[tuple[Worker, ...]]:
    """The slowest worker alone, all slow ones of a node, all of them: where each of two stages has a slow
    worker, moving one of them gains nothing.
    """
    slow = [w for w in task.speeds.slow if w in task.seats and not task.seats[w].leaving]
    if not slow:
        return []
    by_node: dict[str, list[Worker]] = {}
    for worker in sorted(slow, key=lambda one: (-task.speeds.slow[one], one)):
        by_node.setdefault(task.seats[worker].node, []).append(worker)
    groups = [(max(slow, key=lambda one: task.speeds.slow[one]),), *map(tuple, by_node.values())]
    return list(dict.fromkeys([*groups, tuple(worker for group in by_node.values() for worker in group)]))


def _move_of_slow(
    view: ClusterView,
    task: RunningTask,
    given: Options,
    known: TaskMeasurements,
    group: tuple[Worker, ...],
) -> tuple[float, MovedWorker] | None:
    seats = {worker: seat for worker, seat in task.seats.items() if not seat.leaving}
    slow = {worker: factor for worker, factor in task.speeds.slow.items() if worker in seats}
    stops = {worker.stage for worker in group} - {worker.stage for worker in seats if worker not in group}
    if stops and not _is_savable(view, task):
        return None  # the state would go with them
    dead = frozenset(one for one in task.shape.workers() if one not in seats)
    rest = {one: factor for one, factor in slow.items() if one not in group}
    today = throughput_now(task.shape, dead, known, slow)
    after = throughput_now(task.shape, dead, known, rest)
    if stops:
        assert given.task.times is not None
        price = _price(task, given, known, today, after, 0.0, given.task.times.reshape_s)
    else:
        meanwhile = throughput_now(task.shape, dead.union(group), known, rest)
        price = _price(task, given, known, today, after, meanwhile)
    if price is None:
        return None
    times = ", ".join(f"{worker} {slow[worker]:.2f}" for worker in group[:SHOWN])
    what = (
        f"worker {group[0]} takes {slow[group[0]]:.2f} times as long; in another slot"
        if len(group) == 1
        else f"{len(group)} workers are slow (times as long: {times}); in other slots"
    )
    move = MovedWorker(worker=group[0], others=group[1:], because=f"{what} {price.words}", stops=bool(stops))
    return price.gain, move


def _is_savable(view: ClusterView, task: RunningTask) -> bool:
    """Can its state be made safe before its workers go: on disk, or in the memory of nodes?"""
    return task.request.has_checkpoints or any(
        node.state is NodeState.UP and node.memory_port for node in view.nodes.values()
    )


def _move_of_ranks(
    task: RunningTask, lives: Lives, given: Options, known: TaskMeasurements, now: float
) -> tuple[float, MovedWorker] | None:
    """All ranks of a script begin again with it, so the work since they were saved is part of the price."""
    awaited = {w: factor for w, factor in task.speeds.awaited.items() if w in task.seats}
    redone_s = lives.redone_s(now)
    if not awaited or redone_s is None:
        return None
    worker = max(awaited, key=lambda one: awaited[one])
    price = _price(task, given, known, 1.0, awaited[worker], 0.0, _start_s(task) + redone_s)
    if price is None:
        return None
    what = f"steps take {awaited[worker]:.2f} times as long as without its ranks; on another node"
    return price.gain, MovedWorker(worker=worker, because=f"{what} {price.words}")


def _move_off_link(
    view: ClusterView, task: RunningTask, given: Options, known: TaskMeasurements
) -> tuple[float, MovedWorker] | None:
    """All workers of the node that the slow links have in common. What is gained, steps say: op times do not
    know of a link.
    """
    node = node_of_slow_links(slow_links(view.log, task), task.seats, view.nodes)
    slowed = known.slowed()
    if node is None or slowed is None:
        return None
    seats = {worker: seat for worker, seat in task.seats.items() if not seat.leaving}
    there = sorted(worker for worker, seat in seats.items() if seat.node == node)
    elsewhere = {worker.stage for worker, seat in seats.items() if seat.node != node}
    if not there or not {worker.stage for worker in there} <= elsewhere:
        return None  # their state would go with them
    dead = frozenset(one for one in task.shape.workers() if one not in seats)
    before_s, now_s = slowed
    faster = now_s / before_s
    today = throughput_now(task.shape, dead, known, task.speeds.slow)
    without = throughput_now(task.shape, dead.union(there), known, task.speeds.slow)
    price = _price(task, given, known, today, today * faster, without * faster)
    if price is None:
        return None
    what = (
        f"steps take {now_s:.3g} s since the link of node {node} is slow, before {before_s:.3g} s; elsewhere"
    )
    return price.gain, MovedWorker(worker=there[0], because=f"{what} {price.words}", node=node)


def _start_s(task: RunningTask) -> float:
    """As long as the longest start of this task so far."""
    return max(START_S, task.starts.longest_s)


class _Price(NamedTuple):
    gain: float  # above what it costs
    words: str


def _price(
    task: RunningTask,
    given: Options,
    known: TaskMeasurements,
    today: float,
    after: float,
    meanwhile: float,  # until the new process has the state
    coming_s: float | None = None,  # None: as long as a process takes to start, and to copy the state
) -> _Price | None:
    """None: it does not pay until the next event, or the end of the task."""
    times = given.task.times
    assert times is not None
    step_s = known.step_s(known.last) if known.last is not None else None
    left_s = math.inf if step_s is None else step_s * max(0, task.steps - task.next_step + 1)
    running_s = min(given.horizon.running_s, left_s)
    coming_s = _start_s(task) + times.copy_s if coming_s is None else coming_s
    gain = (after - today) * max(0.0, running_s - coming_s)
    cost = today * 2 * times.agree_s + max(0.0, today - meanwhile) * coming_s
    if today <= 0 or gain <= cost:
        return None
    pays_s = cost / (after - today) + coming_s
    words = f"the task is {after / today - 1:.0%} faster, which pays after {pays_s:.0f} s"
    return _Price(gain - cost, words)


def _is_uneven(today: TaskSituation, choice: TaskOption) -> bool:
    """Its stages have lost unevenly, and the choice counts on as many workers of each as there can be."""
    if choice.kind not in (OptionKind.SPREAD, OptionKind.GROW, OptionKind.DROP) or today.rerouted <= 0:
        return False
    assert today.shape is not None
    live = live_per_stage(today.shape, today.dead)
    return bool(num_moving(live, np.array([choice.workers]), today.shape.stages)[0])


def _interesting(decision: Decision) -> list[str]:
    """Tasks that change first."""
    return sorted(decision.choices, key=lambda name: decision.choices[name].kind is OptionKind.KEEP)


def in_shape(job: Any, shape: Shape) -> Any:
    """The same job, cut otherwise; a job that is no table is passed on as it is."""
    if not isinstance(job, Mapping):
        return job
    cut = {"replicas": shape.replicas, "stages": shape.stages, "microbatches": shape.microbatches}
    return {**job, **cut, **({"shards": shape.shards} if shape.shards > 1 or "shards" in job else {})}


def worth(task: RunningTask, workers: int) -> float:
    """What so many workers bring to the sum the planner maximises, in one worker's work."""
    return task.weight * throughput_of(task.shape, workers)


# When the next failure is to be expected, from what is published and from what was seen here.
#
# The published rate is a floor. Above it every order of magnitude is as likely as any other, until failures
# are seen. With n of them in t seconds the expected time to the next is then
#
#     n = 0    what is published
#     n = 1    t (ln(published / t) - 0.577): one failure says little
#     n >= 2   t / (n - 1)
#
# Rejected: to add those seen to the published rate as if that were one observation. It stands for years of
# exposure, and eighty failures in six minutes did not outweigh it: the planner expected days of calm. Only
# the last few count, so that calm after a bad hour is noticed.

RECENT = 8
EULER = 0.5772156649  # E1(x) is about -EULER - ln x, for small x


def next_event_s(usual_s: float, seen: Sequence[float], began: float, now: float) -> float:
    """`seen`: moments of failures, oldest first; `began`: since when they count. Once there are some, in
    powers of two: time that passes must not make another question of the same one.
    """
    recent = seen[-RECENT:]
    since = recent[0] if len(seen) > RECENT else began
    number = len(recent) - (len(seen) > RECENT)  # the oldest one begins the time
    elapsed = max(1.0, now - since)
    if not number:
        return usual_s
    if number == 1:
        expected_s = elapsed * max(1.0, math.log(usual_s / elapsed) - EULER)
    else:
        expected_s = elapsed / (number - 1)
    return min(usual_s, 2.0 ** round(math.log2(expected_s)))
