"""Everything a task could do next, each with its worth: what the allocation chooses from.

An option is a shape and a number of workers; it takes some units (slots, or nodes) and is worth

    w T(option) D_running  -  w T(today) D_transition  -  P(repair) w T(after) D_back

the first two terms are Unicron's, with our D_transition; the third is what going back will cost when a repair
ends the period (`running.py`).

One planner, for running tasks and for studies. What differs is where the figures come from:

              a running task                            a task of a study, or of `everstep plan`
    shapes    `TaskSpec.offers` (`shapes.py`)           `TaskSpec.curve`, the best shape of any number
    prices    `TaskSpec.times`, measured                `transition.Costs`, modelled

The choices are the same: continue, whole or around the dead; fewer or more workers in today's shape; workers
that change their stage where stages have lost unevenly; any other shape, whole or with places empty, also
one that is larger than the cluster; stop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from everstep_lab.plan.cluster import Cluster
from everstep_lab.plan.holes import in_shape, num_moving, with_holes
from everstep_lab.plan.option import MUST_RUN, NEVER, Horizon, Ints, Layer, OptionKind, TaskOption
from everstep_lab.plan.reroute import live_per_stage
from everstep_lab.plan.task import TaskSituation, TaskSpec
from everstep_lab.plan.task_shape import Floats, ParallelShape
from everstep_lab.plan.transition import Costs, StateSource

Kinds = npt.NDArray[np.int8]


@dataclass(slots=True, eq=False)
class Options:
    """A task's options; `units` and `worth` are what the allocation sees, best of all layers."""

    task: TaskSpec
    situation: TaskSituation
    horizon: Horizon
    layers: tuple[Layer, ...]
    units: Ints = field(init=False)
    worth: Floats = field(init=False)
    _winner: tuple[Ints, Ints] = field(init=False)

    def __post_init__(self) -> None:
        size = max(int(layer.units.max(initial=0)) for layer in self.layers) + 1
        worth = np.full(size, NEVER)
        where, index = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        for number, layer in enumerate(self.layers):
            # Written in rising order of worth, the last to be written is the best. On a tie the later layer
            # wins: it is the one that stays as today, and nothing changes.
            rising = np.argsort(layer.worth, kind="stable")
            rising = rising[layer.worth[rising] >= worth[layer.units[rising]]]
            at = layer.units[rising]
            worth[at], where[at], index[at] = layer.worth[rising], number, rising
        self.units = np.flatnonzero(worth > NEVER)
        self.worth = worth[self.units]
        self._winner = where[self.units], index[self.units]

    def choice(self, units: int) -> TaskOption:
        """The best option of so many units, written out."""
        at = int(np.searchsorted(self.units, units))
        assert self.units[at] == units
        where, index = int(self._winner[0][at]), int(self._winner[1][at])
        return self.written_out(self.layers[where], index)

    def written_out(self, layer: Layer, index: int) -> TaskOption:
        kind, workers = OptionKind(int(layer.kind[index])), int(layer.workers[index])
        throughput, cut = float(layer.throughput[index]), int(layer.cut[index])
        shape: ParallelShape | None = None
        if kind in (OptionKind.KEEP, OptionKind.REROUTE):
            shape = self.situation.shape
        elif cut >= 0 and self.task.offers:
            shape = self.task.offers[cut].shape
        elif cut >= 0:
            same_cut = self.task.curve.cuts[cut]
            filled = workers // (same_cut.stages * same_cut.shards)
            shape = same_cut.shape(int(layer.replicas[index]) or filled)
        w, target = self.task.weight, self.horizon.target
        return TaskOption(
            kind=kind,
            units=int(layer.units[index]),
            workers=workers,
            shape=shape,
            throughput=throughput,
            transition_s=float(layer.transition_s[index]),
            back_s=float(layer.back_s[index]),
            reward=w * throughput * self.horizon.running_s,
            cost=float(w * _missed(self.task, self.situation, throughput) * layer.transition_s[index]),
            way_back=self.horizon.ends_by_repair
            * w
            * (target.throughput if target else 0.0)
            * float(layer.back_s[index]),
        )

    def only(self, kinds: frozenset[OptionKind]) -> Options | None:
        """The same options less those of other kinds."""
        wanted = np.array([int(kind) for kind in kinds])
        layers = tuple(
            replace(layer, worth=np.where(np.isin(layer.kind, wanted), layer.worth, NEVER))
            for layer in self.layers
        )
        if not any((layer.worth > NEVER).any() for layer in layers):
            return None
        return Options(self.task, self.situation, self.horizon, layers)


def options(task: TaskSpec, situation: TaskSituation, cluster: Cluster, horizon: Horizon) -> Options:
    """All options of a task on a cluster of this size."""
    return Options(task, situation, horizon, tuple(_Build(task, situation, cluster, horizon).layers()))


def _missed(task: TaskSpec, today: TaskSituation, throughput: Floats | float) -> Floats | float:
    """During a change. A running task that does not train loses that time at the throughput of the option, as
    it has none of its own to lose; by Unicron's formula it would lose nothing.
    """
    return throughput if task.offers and today.throughput <= 0 else today.throughput


class _Measured:
    """What changes of a running task take: seconds, by number of workers."""

    def __init__(self, task: TaskSpec, today: TaskSituation) -> None:
        self._times, self._today = task.times, today
        self.hurt_s = task.times.agree_s if today.damaged and today.rerouted > 0 else 0.0
        self.roles_s = task.times.copy_s
        self.stop_s = task.times.agree_s if today.throughput > 0 else 0.0
        self.fixed_s: float | None = None

    def start(self, workers: Floats) -> Floats:
        return np.full(len(workers), self._times.restore_s)

    def fewer(self, workers: Floats) -> Floats:
        return np.full(len(workers), self._times.agree_s)

    def more(self, workers: Floats, cut: int, gain: Floats) -> Floats:
        return np.asarray(self._times.agree_s + self._times.copy_s * np.maximum(gain, 0.0))

    def other(self, workers: Floats, cut: Ints) -> Floats:
        trains = self._today.rerouted > 0
        return np.full(len(workers), self._times.reshape_s if trains else self._times.restore_s)

    def other_later(self, workers: Floats, cut: Ints) -> Floats:
        return np.full(len(workers), self._times.reshape_s)

    def resumed(self, workers: Floats, cut: Ints) -> Floats:
        """After a stop."""
        kept = self._today.workers and self._today.rerouted > 0
        return np.full(len(workers), self._times.reshape_s if kept else self._times.restore_s)


class _Modelled:
    """The same for a task whose changes were never timed."""

    def __init__(self, task: TaskSpec, today: TaskSituation, costs: Costs) -> None:
        self._costs, self._bytes, self._source = costs, task.curve.state_bytes, today.source
        self._parts = np.array([c.stages * c.shards for c in task.curve.cuts] or [1], dtype=np.float64)
        self.fixed_s = task.transition_s if task.transition_s is not None else costs.transition_s
        self.hurt_s = self._hurt_s(today, task.curve.step_s(today.throughput))
        cut = max(0, task.curve.cut_index(today.shape))
        self.roles_s = float(costs.fetch_s(StateSource.LIVE, self._bytes, np.array(self._parts[cut])))
        self.stop_s = 0.0
        if today.workers and not today.damaged:
            self.stop_s = costs.stop_s(self._bytes)
        if today.workers and self.fixed_s is not None:
            self.stop_s = self.fixed_s

    def _hurt_s(self, today: TaskSituation, step_s: float) -> float:
        """What a task that was hurt loses in any case."""
        if not today.damaged:
            return 0.0
        if today.source is not StateSource.LIVE:
            return self._costs.lost_work_s(today.source, step_s)
        if today.shape is None:
            share = len(today.missing) / max(1, today.live_workers)
        else:
            per_stage = live_per_stage(today.shape, today.dead)
            share = max((today.shape.replicas - live) / live for live in per_stage)
        return self._costs.interrupted_s(step_s, share)

    def start(self, workers: Floats) -> Floats:
        return np.zeros(len(workers))

    def fewer(self, workers: Floats) -> Floats:
        return self._costs.epoch(workers)

    def more(self, workers: Floats, cut: int, gain: Floats) -> Floats:
        return self._costs.grow_s(self._bytes, workers, float(self._parts[max(0, cut)]), gain)

    def other(self, workers: Floats, cut: Ints) -> Floats:
        return self._costs.reshape_s(self._source, self._bytes, workers, self._parts[np.maximum(cut, 0)])

    def other_later(self, workers: Floats, cut: Ints) -> Floats:
        return self._costs.reshape_s(StateSource.LIVE, self._bytes, workers, self._parts[np.maximum(cut, 0)])

    def resumed(self, workers: Floats, cut: Ints) -> Floats:
        return self._costs.reshape_s(StateSource.DISK, self._bytes, workers, self._parts[np.maximum(cut, 0)])


class _Build:
    """The columns of every layer. One object, because they all read the same dozen facts."""

    def __init__(self, task: TaskSpec, situation: TaskSituation, cluster: Cluster, horizon: Horizon) -> None:
        self.task, self.today, self.horizon = task, situation, horizon
        self.cluster, self.curve, self.unit = cluster, task.curve, cluster.unit
        self.top = cluster.capacity // cluster.unit
        self.hysteresis = 1.0 if situation.damaged else cluster.hysteresis
        self.prices: _Measured | _Modelled
        if task.offers:
            self.prices = _Measured(task, situation)
            shapes = [offer.shape for offer in task.offers]
            self.cut_today = shapes.index(situation.shape) if situation.shape in shapes else -1
        else:
            self.prices = _Modelled(task, situation, cluster.costs)
            self.cut_today = task.curve.cut_index(situation.shape)

    def layers(self) -> Iterator[Layer]:
        """On a tie the last one wins: the one that changes least."""
        if self.task.offers:
            for number in reversed(range(len(self.task.offers))):
                if number != self.cut_today:
                    yield self._offer(number)
            if self.cut_today >= 0:
                yield self._offer(self.cut_today)
        else:
            yield self._best_shapes()
            if self.curve.replicated and self.curve.cuts:
                yield self._places_empty()
            if self.cut_today >= 0 and self.today.workers:
                yield self._todays_cut()
                if self.curve.replicated and self.curve.of_shape(self._shape_today()) > 0:
                    yield self._todays_shape()
        yield self._stay()

    def _offer(self, number: int) -> Layer:
        """A listed shape with every number of workers."""
        offer, task = self.task.offers[number], self.task
        room = self.cluster.room(offer.slots)
        most = min(room, task.max_workers or room, len(offer.throughput) - 1)
        workers = np.arange(max(offer.shape.stages, task.min_workers), most + 1, dtype=np.int64)
        throughput = np.array(offer.throughput)[workers]
        workers, throughput = workers[throughput > 0], throughput[throughput > 0]
        replicas = np.full(len(workers), offer.shape.replicas)
        return self._layer(
            -(-workers * offer.slots // self.unit),
            workers,
            throughput,
            np.full(len(workers), number),
            replicas,
        )

    def _best_shapes(self) -> Layer:
        """For each number of units the best that fits into them and not into one fewer."""
        unit, curve, task = self.unit, self.curve, self.task
        end = max(curve.most, task.min_workers)  # a table may end before the user's minimum
        most = min(self.top * unit, end, task.max_workers or end)
        best, workers = curve.by_units(unit)
        wanted = (best > 0) & (workers >= task.min_workers) & (workers <= most)
        good = np.flatnonzero(wanted[: self.top])
        units, workers, best = good + 1, workers[good], best[good]
        for edge in {-(-task.min_workers // unit), -(-most // unit)}:  # units of which some counts are barred
            least, last = max(task.min_workers, (edge - 1) * unit + 1), min(edge * unit, most)
            if least <= last and edge not in units:
                value, count = curve.best_between(least, last)
                at = int(np.searchsorted(units, edge))
                if value > 0:
                    units, workers = np.insert(units, at, edge), np.insert(workers, at, count)
                    best = np.insert(best, at, value)
        cut = np.where(workers <= curve.most, curve.cut_of[np.minimum(workers, curve.most)], -1)
        return self._layer(units, workers, best, cut, self._filled(workers, cut))

    def _places_empty(self) -> Layer:
        """For each number of workers the best shape that has more places than that."""
        found = with_holes(self.curve)
        return self._of_table(found.throughput, found.cut, found.replicas)

    def _todays_shape(self) -> Layer:
        """Today's shape with more or fewer of its places empty."""
        shape = self._shape_today()
        table = in_shape(self.curve, self.curve.cuts[self.cut_today], shape.replicas, self.today.live_workers)
        size = len(table)
        return self._of_table(table, np.full(size, self.cut_today), np.full(size, shape.replicas))

    def _of_table(self, table: Floats, cut: Ints, replicas: Ints) -> Layer:
        most = min(self.top * self.unit, self.curve.most, self.task.max_workers or self.curve.most)
        workers = np.flatnonzero(table[: most + 1])
        workers = workers[workers >= self.task.min_workers]
        return self._layer(-(-workers // self.unit), workers, table[workers], cut[workers], replicas[workers])

    def _todays_cut(self) -> Layer:
        same = self.curve.cuts[self.cut_today]
        replicas = np.flatnonzero(same.throughput)
        workers = replicas * same.stages * same.shards
        most = min(self.top * self.unit, self.task.max_workers or self.top * self.unit)
        fits = (workers >= self.task.min_workers) & (workers <= most)
        workers, replicas = workers[fits], replicas[fits]
        cut = np.full(len(workers), self.cut_today)
        return self._layer(-(-workers // self.unit), workers, same.throughput[replicas], cut, replicas)

    def _filled(self, workers: Ints, cut: Ints) -> Ints:
        """Replicas that so many workers fill."""
        parts = np.array([c.stages * c.shards for c in self.curve.cuts] or [1], dtype=np.int64)
        return np.where(cut >= 0, workers // parts[np.maximum(cut, 0)], 0)

    def _layer(self, units: Ints, workers: Ints, throughput: Floats, cut: Ints, replicas: Ints) -> Layer:
        kind, seconds, real = self._change(workers, throughput, cut, replicas)
        return self._worth(
            units[real], workers[real], throughput[real], cut[real], kind[real], seconds[real], replicas[real]
        )

    def _change(
        self, workers: Ints, throughput: Floats, cut: Ints, replicas: Ints
    ) -> tuple[Kinds, Floats, npt.NDArray[np.bool_]]:
        """What kind of change leads there, its seconds, and whether it is one: what is so today is in `_stay`
        with the throughput it has.
        """
        today, prices = self.today, self.prices
        count, real = workers.astype(np.float64), np.ones(len(workers), dtype=np.bool_)
        if not today.workers:
            return np.full(len(workers), OptionKind.START, dtype=np.int8), prices.start(count), real
        kind = np.full(len(workers), OptionKind.RESHAPE, dtype=np.int8)
        seconds = prices.other(count, cut)
        if self.cut_today >= 0 and (today.rerouted > 0 or today.listed or today.source is StateSource.LIVE):
            same_cut = cut == self.cut_today
            fewer, more = same_cut & (workers < today.live_workers), same_cut & (workers > today.live_workers)
            kind[fewer], kind[more] = OptionKind.DROP, OptionKind.GROW
            # Other replicas of the same cut are another shape: its workers change between two steps.
            same = same_cut & (replicas == self._shape_today().replicas)
            if today.rerouted > 0:
                gain = (
                    (throughput - today.rerouted) / today.throughput if today.throughput > 0 else 0.0 * count
                )
                seconds = np.where(same & fewer, prices.fewer(count), seconds)
                seconds = np.where(same & more, prices.more(count, self.cut_today, gain), seconds)
                moving = self._moving(workers, same)
                seconds = np.where(moving > 0, seconds + prices.roles_s, seconds)
                stays = same & (workers == today.live_workers)
                seconds = np.where(stays, prices.fewer(count) + prices.roles_s, seconds)
                kind[stays] = OptionKind.SPREAD
                real = ~stays | (moving > 0)
            else:
                kind[same] = OptionKind.GROW
        seconds = seconds + prices.hurt_s
        if self.cut_today < 0 and not today.listed:
            kind[:] = np.where(workers > today.live_workers, OptionKind.GROW, OptionKind.DROP)
        if prices.fixed_s is not None:
            seconds = np.full(len(workers), prices.fixed_s)
        if self.cut_today < 0 and not today.damaged:
            real &= workers != today.workers
        return kind, seconds, real

    def _moving(self, workers: Ints, same: npt.NDArray[np.bool_]) -> Ints:
        """Where stages have lost unevenly, live workers change their stage: they fetch its state."""
        shape = self._shape_today()
        shards = 1 if self.today.listed else shape.shards
        live = live_per_stage(shape, self.today.dead)
        return np.where(same, num_moving(live, workers // shards, shape.stages), 0)

    def _shape_today(self) -> ParallelShape:
        assert self.today.shape is not None
        return self.today.shape

    def _stay(self) -> Layer:
        """Stop; continue as today; continue without the failed workers."""
        today = self.today
        rows = [(0, 0, 0.0, self.prices.stop_s, OptionKind.STOP)]
        live, most = today.live_workers, self.task.max_workers
        if today.workers and not today.damaged and today.throughput > 0:
            rows.append((self._units(today.workers), today.workers, today.throughput, 0.0, OptionKind.KEEP))
        if today.damaged and today.rerouted > 0 and live >= self.task.min_workers:
            rows.append((self._units(live), live, today.rerouted, self.prices.hurt_s, OptionKind.REROUTE))
        allowed = [row for row in rows if row[0] <= self.top and (most is None or row[1] <= most)]
        units, workers, throughput, seconds_, kinds = zip(*allowed, strict=True)
        layer = self._worth(
            np.array(units, dtype=np.int64),
            np.array(workers, dtype=np.int64),
            np.array(throughput),
            np.full(len(allowed), self.cut_today),
            np.array(kinds, dtype=np.int8),
            np.array(seconds_, dtype=np.float64),
            np.full(len(allowed), today.shape.replicas if today.shape is not None else 0),
        )
        if self.task.must_run:
            top = max((max(offer.throughput) for offer in self.task.offers), default=0.0)
            top = top or float(self.curve.throughput.max())
            layer.worth[0] -= MUST_RUN * self.task.weight * top * self.horizon.running_s
        return layer

    def _units(self, workers: int) -> int:
        slots = self.task.offers[self.cut_today].slots if self.task.offers and self.cut_today >= 0 else 1
        return -(-workers * slots // self.unit)

    def _worth(
        self,
        units: Ints,
        workers: Ints,
        throughput: Floats,
        cut: Ints,
        kind: Kinds,
        seconds: Floats,
        replicas: Ints,
    ) -> Layer:
        w, today, horizon = self.task.weight, self.today, self.horizon
        back = self._way_back(workers, throughput, cut, kind, replicas)
        after = horizon.target.throughput if horizon.target else 0.0
        missed = _missed(self.task, today, throughput)
        worth = (
            w * throughput * horizon.running_s
            - self.hysteresis * w * missed * seconds
            - horizon.ends_by_repair * w * after * back
        )
        return Layer(
            units=units,
            workers=workers,
            throughput=throughput,
            transition_s=seconds,
            kind=kind,
            cut=cut,
            replicas=replicas,
            back_s=back,
            worth=worth,
        )

    def _way_back(self, workers: Ints, throughput: Floats, cut: Ints, kind: Kinds, replicas: Ints) -> Floats:
        """Seconds from each option to what the task will want after the repair."""
        target = self.horizon.target
        if target is None or not target.workers or not self.horizon.ends_by_repair:
            return np.zeros(len(workers))
        count = np.full(len(workers), float(target.workers))
        goal = self._cut_of(target.shape)
        cuts = np.full(len(workers), goal)
        seconds = self.prices.other_later(count, cuts)
        same = (cut == goal) & (goal >= 0)
        if target.shape is not None:
            same &= replicas == target.shape.replicas
        gain = (target.throughput - throughput) / target.throughput if target.throughput > 0 else 0.0 * count
        nearer = np.where(
            workers > target.workers, self.prices.fewer(count), self.prices.more(count, goal, gain)
        )
        seconds = np.where(same, nearer, seconds)
        seconds = np.where(kind == OptionKind.STOP, self.prices.resumed(count, cuts), seconds)
        if self.prices.fixed_s is not None:
            seconds = np.full(len(workers), self.prices.fixed_s)
        arrived = (
            (workers == target.workers) & (kind != OptionKind.STOP) & (same | ((cut == goal) & (goal < 0)))
        )
        return np.where(arrived, 0.0, seconds)

    def _cut_of(self, shape: ParallelShape | None) -> int:
        if not self.task.offers:
            return self.curve.cut_index(shape)
        shapes = [offer.shape for offer in self.task.offers]
        return shapes.index(shape) if shape in shapes else -1
