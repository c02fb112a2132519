"""What each task could do next, what that is worth, and the best for all tasks together.

An option is a shape and a number of workers; it takes some slots and is worth

    w T(option) D_running  -  w T(today) D_transition

which is Unicron's, with a D_transition of its own for each kind of change. A task that does not train has no
throughput to lose during a change: it loses that of the option.

    keep      as it is, whole or around empty places            nothing
    drop      fewer workers in today's shape                    agree
    grow      more of them                                      agree, and copying while it trains on slower
    spread    workers change their stage (`core.cluster.stages`)  the same
    reshape   another shape                                     it stands still for so long
    start     of one that does not train, in any shape          restore
    stop      its state is kept, its slots are given to others  agree
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from everstep.plan.change_times import ChangeTimes
from everstep.plan.split import Floats, Ints, best_split
from everstep.plan.throughput import Way
from everstep.protocol.shape import Shape

MUST_RUN = 1e4  # stopping a task costs so many times the most it could earn
MORE = 1 + 1e-9  # times as much


class Kind(IntEnum):
    STOP = 0
    KEEP = 1
    DROP = 2
    GROW = 3
    SPREAD = 4
    RESHAPE = 5
    START = 6


class Today(NamedTuple):
    """A task as it is now."""

    shape: Shape
    workers: int
    throughput: float  # 0: a stage has no worker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskAsked:
    """What the planner is asked about one task."""

    name: str
    ways: Sequence[Way]
    times: ChangeTimes
    today: Today | None = None  # None: it has no workers
    evened: float = 0.0  # its throughput with as many workers, at the stages where they do most
    weight: float = 1.0
    least: int = 1  # workers; with fewer it is worth nothing
    most: int | None = None
    slots_per_unit: int = 1  # what is given away together


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    kind: Kind
    shape: Shape | None
    workers: int
    units: int
    throughput: float
    transition_s: float
    earns: float  # w T D_running
    pays: float  # w T(today) D_transition

    @property
    def worth(self) -> float:
        return self.earns - self.pays


class _Columns(NamedTuple):
    """Options side by side."""

    kind: Ints
    way: Ints  # which of the task's; -1: none
    workers: Ints
    units: Ints
    throughput: Floats
    seconds: Floats

    def chosen(self, rows: Ints) -> _Columns:
        return _Columns._make(column[rows] for column in self)


class Options:
    """Of one task on so many units for so long; of each number of units the best is kept."""

    def __init__(
        self, task: TaskAsked, room: int, running_s: float, kinds: Iterable[Kind] = tuple(Kind)
    ) -> None:
        self.task, self.running_s = task, running_s
        every = _joined(_columns(task, room))
        every = every.chosen(np.flatnonzero(np.isin(every.kind, [int(kind) for kind in kinds])))
        worth = self._worth(every)
        rows = np.lexsort((np.arange(len(worth)), worth, every.units))
        last = np.flatnonzero(np.append(np.diff(every.units[rows]) > 0, True))
        self._every, self._all_worth = every, worth
        self._best = rows[last]
        self.units, self.worth = every.units[self._best], worth[self._best]

    def _worth(self, every: _Columns) -> Floats:
        task = self.task
        now = task.today.throughput if task.today is not None else 0.0
        missed = now if now > 0 else every.throughput
        worth = task.weight * (every.throughput * self.running_s - missed * every.seconds)
        top = max((float(way.throughput.max()) for way in task.ways), default=0.0)
        return np.asarray(worth - (every.kind == Kind.STOP) * MUST_RUN * task.weight * top * self.running_s)

    def at(self, index: int) -> Option:
        """The best of one number of units."""
        return self._written_out(int(self._best[index]))

    def each_kind(self, units: int) -> list[tuple[Option, float]]:
        """The best of every kind that takes no more, and its worth."""
        fits = np.flatnonzero(self._every.units <= units)
        found = []
        for kind in np.unique(self._every.kind[fits]):
            rows = fits[self._every.kind[fits] == kind]
            row = int(rows[np.argmax(self._all_worth[rows])])
            found.append((self._written_out(row), float(self._all_worth[row])))
        return found

    def _written_out(self, row: int) -> Option:
        one, task = self._every, self.task
        throughput, seconds, way = float(one.throughput[row]), float(one.seconds[row]), int(one.way[row])
        now = task.today.throughput if task.today is not None else 0.0
        kind = Kind(int(one.kind[row]))
        today = task.today.shape if task.today is not None and kind is not Kind.STOP else None
        return Option(
            kind=kind,
            shape=task.ways[way].shape if way >= 0 else today,
            workers=int(one.workers[row]),
            units=int(one.units[row]),
            throughput=throughput,
            transition_s=seconds,
            earns=task.weight * throughput * self.running_s,
            pays=task.weight * (now if now > 0 else throughput) * seconds,
        )


def _joined(parts: Sequence[_Columns]) -> _Columns:
    return _Columns._make(np.concatenate(column) for column in zip(*parts, strict=True))


def _columns(task: TaskAsked, room: int) -> list[_Columns]:
    """Of equal options the last is taken: the one that changes least."""
    today, times = task.today, task.times
    trains = today is not None and today.throughput > 0
    stop = _one(Kind.STOP, 0, 0, 0.0, times.agree_s if trains else 0.0)
    ways = list(reversed(list(enumerate(task.ways))))
    ways.sort(key=lambda one: today is not None and one[1].shape == today.shape)
    found = [stop, *(_of_way(task, number, way, room) for number, way in ways)]
    if today is not None and trains and task.least <= today.workers <= (task.most or today.workers):
        units = _units(task, today.workers, today.shape)
        if units <= room:
            if task.evened > today.throughput * MORE:
                seconds = times.agree_s + times.copy_s
                found.append(_one(Kind.SPREAD, today.workers, units, task.evened, seconds))
            found.append(_one(Kind.KEEP, today.workers, units, today.throughput, 0.0))
    return found


def _one(kind: Kind, workers: int, units: int, throughput: float, seconds: float) -> _Columns:
    def of(value: int) -> Ints:
        return np.array([value], dtype=np.int64)

    return _Columns(of(kind), of(-1), of(workers), of(units), np.array([throughput]), np.array([seconds]))


def _units(task: TaskAsked, workers: int, shape: Shape) -> int:
    return -(-workers * shape.shards // task.slots_per_unit)


def _of_way(task: TaskAsked, number: int, way: Way, room: int) -> _Columns:
    """One shape with every number of workers."""
    today, times, shards = task.today, task.times, way.shape.shards
    top = min(room * task.slots_per_unit // shards, len(way.throughput) - 1)
    workers = np.arange(max(1, task.least), min(top, task.most or top) + 1)
    workers = workers[way.throughput[workers] > 0]
    rates = way.throughput[workers]
    if today is None or today.throughput <= 0:
        kind = np.full(len(workers), int(Kind.START))
        seconds = np.full(len(workers), times.restore_s)
    elif way.shape != today.shape:
        kind, seconds = np.full(len(workers), int(Kind.RESHAPE)), np.full(len(workers), times.reshape_s)
    else:
        workers, rates = workers[workers != today.workers], rates[workers != today.workers]
        more = workers > today.workers
        kind = np.where(more, int(Kind.GROW), int(Kind.DROP))
        gain = np.maximum(0.0, rates / today.throughput - 1)
        seconds = times.agree_s + np.where(more, times.copy_s * gain, 0.0)
    units = -(-workers * shards // task.slots_per_unit)
    return _Columns(kind, np.full(len(workers), number), workers, units, rates, seconds)


# ------------------------------------------------------------------ all tasks together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """How much each task gets."""

    capacity: int  # in units
    running_s: float
    options: Mapping[str, Options]
    choices: Mapping[str, Option] = field(default_factory=dict)

    @property
    def spare(self) -> int:
        return self.capacity - sum(choice.units for choice in self.choices.values())

    def without(self, kind: Kind, names: Iterable[str]) -> Decision:
        """The best plan in which these tasks do nothing of this kind."""
        kinds = [other for other in Kind if other is not kind]
        fewer = {
            name: Options(self.options[name].task, self.capacity, self.running_s, kinds) for name in names
        }
        return _best(replace(self, options={**self.options, **fewer}))


def decide(tasks: Sequence[TaskAsked], capacity: int, running_s: float) -> Decision:
    """`capacity`: in units. `running_s`: until the next event."""
    options = {task.name: Options(task, capacity, running_s) for task in tasks}
    return _best(Decision(capacity=capacity, running_s=running_s, options=options))


def _best(asked: Decision) -> Decision:
    picked = best_split([(o.units, o.worth) for o in asked.options.values()], asked.capacity)
    choices = {name: o.at(index) for (name, o), index in zip(asked.options.items(), picked, strict=True)}
    return replace(asked, choices=choices)
