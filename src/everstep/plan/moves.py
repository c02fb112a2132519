"""Which workers leave slots that are slow: slow workers, slow ranks of scripts, workers behind a slow link.

Free slots on other nodes must be there, and the move must pay until the next event or the end of the task:
what is gained against what is missed while other processes start and get the state. Until then a slow
worker's peers run some of its microbatches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.slowness import node_of_slow_links, slow_links
from everstep.core.cluster.task import Task, TaskState
from everstep.plan.change_times import START_S
from everstep.plan.measured import Measurements, TaskMeasurements
from everstep.plan.options import Decision, Kind
from everstep.plan.throughput import TaskSpeed
from everstep.protocol.messages import MovedWorker
from everstep.protocol.ops import Worker

if TYPE_CHECKING:
    from everstep.plan.ask import ClusterView

SHOWN = 8


class _Candidate(NamedTuple):
    going: tuple[Worker, ...]
    what: str
    today: float  # throughput
    after: float
    meanwhile: float
    coming_s: float | None = None  # None: as long as a process takes to start, and to copy the state
    node: str = ""
    stops: bool = False


def moves(
    view: ClusterView, decision: Decision, measured: Measurements, now: float
) -> dict[str, MovedWorker]:
    """One for each task that keeps what it has."""
    found: dict[str, MovedWorker] = {}
    free: dict[str, int] | None = None
    for name, choice in decision.choices.items():
        task = view.tasks[name]
        if choice.kind is not Kind.KEEP or task.state is not TaskState.RUNNING:
            continue
        known = measured.of(name)
        paying = [
            (gain, move, one)
            for one in _candidates(view, task, known, now)
            if (priced := _priced(task, decision, known, one)) is not None
            for gain, move in [priced]
        ]
        for _, move, one in sorted(paying, key=lambda row: -row[0]):
            free = _free(view) if free is None else free
            left = {task.seats[worker].node for worker in one.going}
            shards = task.shape.shards
            if sum(slots // shards for node, slots in free.items() if node not in left) >= len(one.going):
                found[name] = move
                _take(free, left, len(one.going), shards)
                break
    return found


def _free(view: ClusterView) -> dict[str, int]:
    taken = Counter(
        seat.node for task in view.tasks.values() for seat in task.seats.values() for _ in seat.slots
    )
    return {
        node.name: max(0, node.slots - len(node.unusable) - taken[node.name])
        for node in view.nodes.values()
        if node.state is NodeState.UP and node.leaves_at is None
    }


def _take(free: dict[str, int], left: set[str], count: int, shards: int) -> None:
    for node in free:
        while count and node not in left and free[node] >= shards:
            free[node] -= shards
            count -= 1


def _priced(
    task: Task, decision: Decision, known: TaskMeasurements, one: _Candidate
) -> tuple[float, MovedWorker] | None:
    """None: it does not pay."""
    times = decision.options[task.name].task.times
    step_s = known.step_s()
    left_s = math.inf if step_s is None else step_s * max(0, task.steps - task.next_step + 1)
    coming_s = _start_s(task) + times.copy_s if one.coming_s is None else one.coming_s
    gain = (one.after - one.today) * max(0.0, min(decision.running_s, left_s) - coming_s)
    cost = one.today * 2 * times.agree_s + max(0.0, one.today - one.meanwhile) * coming_s
    if one.today <= 0 or gain <= cost:
        return None
    pays_s = cost / (one.after - one.today) + coming_s
    faster = f"the task is {one.after / one.today - 1:.0%} faster, which pays after {pays_s:.0f} s"
    because, others = f"{one.what} {faster}", () if one.node else one.going[1:]
    return gain - cost, MovedWorker(
        worker=one.going[0], others=others, because=because, node=one.node, stops=one.stops
    )


def _start_s(task: Task) -> float:
    """As long as the longest start of this task so far."""
    return max(START_S, task.starts.longest_s)


def _candidates(view: ClusterView, task: Task, known: TaskMeasurements, now: float) -> Iterator[_Candidate]:
    if task.lives is not None:
        redone_s = task.lives.redone_s(now)
        awaited = {w: factor for w, factor in task.speeds.awaited.items() if w in task.seats}
        if awaited and redone_s is not None:  # all ranks begin again with it
            worker = max(awaited, key=lambda one: awaited[one])
            factor = awaited[worker]
            what = f"steps take {factor:.2f} times as long as without its ranks; on another node"
            yield _Candidate((worker,), what, 1.0, factor, 0.0, _start_s(task) + redone_s)
        return
    slow = {w: f for w, f in task.speeds.slow.items() if w in task.seats and not task.seats[w].leaving}
    links = slow_links(view.log, task)
    if not slow and not links:
        return
    speed = TaskSpeed(task.shape, known, slow)
    yield from (one for group in _groups(task, slow) if (one := _slow_group(view, task, speed, slow, group)))
    node = node_of_slow_links(links, task.seats, view.nodes)
    if node is not None and (link := _off_link(task, known, speed, node)) is not None:
        yield link


def _groups(task: Task, slow: Mapping[Worker, float]) -> list[tuple[Worker, ...]]:
    """The slowest worker alone, all slow ones of a node, all of them: where each of two stages has a slow
    worker, moving one of them gains nothing.
    """
    by_node: dict[str, list[Worker]] = {}
    slowest = sorted(slow, key=lambda one: (-slow[one], one))
    for worker in slowest:
        by_node.setdefault(task.seats[worker].node, []).append(worker)
    return (
        list(dict.fromkeys([tuple(slowest[:1]), *map(tuple, by_node.values()), tuple(slowest)]))
        if slow
        else []
    )


def _live(task: Task, without: tuple[Worker, ...] = ()) -> list[int]:
    live = [0] * task.shape.stages
    for worker, seat in task.seats.items():
        if not seat.leaving and worker not in without:
            live[worker.stage] += 1
    return live


def _slow_group(
    view: ClusterView,
    task: Task,
    speed: TaskSpeed,
    slow: Mapping[Worker, float],
    group: tuple[Worker, ...],
) -> _Candidate | None:
    rest = {one: factor for one, factor in slow.items() if one not in group}
    stops = 0 in _live(task, group)
    if stops and not _is_savable(view, task):
        return None  # the state would go with them
    times = ", ".join(f"{worker} {slow[worker]:.2f}" for worker in group[:SHOWN])
    what = (
        f"worker {group[0]} takes {slow[group[0]]:.2f} times as long; in another slot"
        if len(group) == 1
        else f"{len(group)} workers are slow (times as long: {times}); in other slots"
    )
    today, after = speed.now(_live(task)), speed.now(_live(task), rest)
    meanwhile = speed.now(_live(task, group), rest)
    return _Candidate(group, what, today, after, meanwhile, stops=stops)


def _is_savable(view: ClusterView, task: Task) -> bool:
    """Can its state be made safe before its workers go: on disk, or in the memory of nodes?"""
    return task.request.has_checkpoints or any(
        node.state is NodeState.UP and node.memory_port for node in view.nodes.values()
    )


def _off_link(task: Task, known: TaskMeasurements, speed: TaskSpeed, node: str) -> _Candidate | None:
    """All workers of the node that the slow links have in common. What is gained, steps say: op times do not
    know of a link.
    """
    slowed = known.slowed()
    there = tuple(sorted(w for w, seat in task.seats.items() if seat.node == node and not seat.leaving))
    if slowed is None or not there or 0 in _live(task, there):
        return None  # their state would go with them
    before_s, now_s = slowed
    what = (
        f"steps take {now_s:.3g} s since the link of node {node} is slow, before {before_s:.3g} s; elsewhere"
    )
    faster = now_s / before_s
    today, meanwhile = speed.now(_live(task)), speed.now(_live(task, there))
    return _Candidate(there, what, today, today * faster, meanwhile * faster, node=node)
