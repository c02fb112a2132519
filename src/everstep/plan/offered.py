"""The options of a running task: every shape it may take, with every number of workers.

Worth as in `options.py`. A task that does not train now (new, or a stage of it has no worker) loses the time
of a change at the throughput of the option, as it has none of its own to lose.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from everstep.plan.cluster import Cluster
from everstep.plan.option import MUST_RUN, Horizon, Layer, OptionKind, TaskOption
from everstep.plan.task import TaskSituation, TaskSpec


class _Row(NamedTuple):
    kind: OptionKind
    workers: int
    throughput: float
    seconds: float
    offer: int


def offered_layer(task: TaskSpec, today: TaskSituation, cluster: Cluster, horizon: Horizon) -> Layer:
    """All of them side by side. On a tie the last one wins: the one that changes least."""
    rows = [_Row(OptionKind.STOP, 0, 0.0, task.times.agree_s if today.throughput > 0 else 0.0, -1)]
    for number, offer in enumerate(task.offers):
        room = sum(len(cluster.offered(node)) // offer.slots for node in cluster.nodes)
        most = min(room, task.max_workers or room, len(offer.throughput) - 1)
        counts = range(offer.shape.stages, most + 1)
        now = today.live_workers if offer.shape == today.shape and today.rerouted > 0 else -1
        rows += [_row(task, today, number, n) for n in counts if offer.at(n) > 0 or n == now]
    rows.sort(key=lambda row: (_CHANGES[row.kind], row.offer), reverse=True)
    worth = [_worth(task, today, horizon, row) for row in rows]
    if task.must_run:
        top = max((max(offer.throughput) for offer in task.offers), default=0.0)
        stops = next(i for i, row in enumerate(rows) if row.kind is OptionKind.STOP)
        worth[stops] -= MUST_RUN * task.weight * top * horizon.running_s
    return Layer(
        units=np.array([row.workers * _slots(task, row) for row in rows], dtype=np.int64),
        workers=np.array([row.workers for row in rows], dtype=np.int64),
        throughput=np.array([row.throughput for row in rows]),
        transition_s=np.array([row.seconds for row in rows]),
        kind=np.array([row.kind for row in rows], dtype=np.int8),
        cut=np.array([row.offer for row in rows], dtype=np.int64),
        replicas=np.zeros(len(rows), dtype=np.int64),  # an offer has its own shape
        back_s=np.array([_way_back_s(task, today, horizon.target, row) for row in rows]),
        worth=np.array(worth),
    )


def _slots(task: TaskSpec, row: _Row) -> int:
    return task.offers[row.offer].slots if row.workers else 0


# What changes most comes first, so that the least change wins a tie.
_CHANGES = {
    OptionKind.KEEP: 0,
    OptionKind.REROUTE: 0,
    OptionKind.STOP: 1,
    OptionKind.DROP: 2,
    OptionKind.GROW: 3,
    OptionKind.START: 4,
    OptionKind.RESHAPE: 5,
}


def _row(task: TaskSpec, today: TaskSituation, number: int, workers: int) -> _Row:
    offer, times = task.offers[number], task.times
    throughput, live = offer.at(workers), today.live_workers
    if not today.workers:
        return _Row(OptionKind.START, workers, throughput, times.restore_s, number)
    same = today.shape is not None and offer.shape == today.shape
    if today.rerouted <= 0:
        kind = OptionKind.GROW if same else OptionKind.RESHAPE
        return _Row(kind, workers, throughput, times.restore_s, number)
    if not same:
        return _Row(OptionKind.RESHAPE, workers, throughput, times.reshape_s + _hurt_s(task, today), number)
    if workers == live:
        kind = OptionKind.REROUTE if today.damaged else OptionKind.KEEP
        return _Row(kind, workers, today.rerouted, _hurt_s(task, today), number)
    if workers < live:
        return _Row(OptionKind.DROP, workers, throughput, times.agree_s + _hurt_s(task, today), number)
    gain = (throughput - today.rerouted) / today.throughput if today.throughput > 0 else 0.0
    return _Row(OptionKind.GROW, workers, throughput, times.fill_s(gain) + _hurt_s(task, today), number)


def _hurt_s(task: TaskSpec, today: TaskSituation) -> float:
    """What a task that has just lost a worker pays whatever it does."""
    return task.times.agree_s if today.damaged else 0.0


def charged(task: TaskSpec, today: TaskSituation, throughput: float) -> float:
    """The throughput that is missed during a change."""
    return throughput if task.offers and today.throughput <= 0 else today.throughput


def _worth(task: TaskSpec, today: TaskSituation, horizon: Horizon, row: _Row) -> float:
    after = horizon.target.throughput if horizon.target else 0.0
    return task.weight * (
        row.throughput * horizon.running_s
        - charged(task, today, row.throughput) * row.seconds
        - horizon.ends_by_repair * after * _way_back_s(task, today, horizon.target, row)
    )


def _way_back_s(task: TaskSpec, today: TaskSituation, target: TaskOption | None, row: _Row) -> float:
    """From this option to what the task will want after the repair."""
    if target is None or not target.workers:
        return 0.0
    if row.kind is OptionKind.STOP:
        broken = bool(today.workers) and today.rerouted <= 0
        return task.times.restore_s if broken or not today.workers else task.times.reshape_s
    if task.offers[row.offer].shape != target.shape:
        return task.times.reshape_s
    if row.workers == target.workers:
        return 0.0
    if row.workers > target.workers:
        return task.times.agree_s
    return task.times.fill_s((target.throughput - row.throughput) / target.throughput)
