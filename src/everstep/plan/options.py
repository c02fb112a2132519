"""Everything a task could do next, each with its worth: what the allocation chooses from.

An option takes some units (slots, or nodes) and is worth

    w T(option) D_running  -  w T(today) D_transition  -  P(repair) w T(after) D_back

the first two terms are Unicron's, with our D_transition; the third is what going back will cost when a repair
ends the period (`running.py`). Options come in layers: the best shape for every number of units; today's cut
with more or fewer replicas; shapes with places left empty; and staying as we are, whole or re-routed around
the dead. A task that says which shapes it may take (`TaskSpec.offers`, as running tasks do) has one layer of
its own: `offered.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from everstep.plan.cluster import Cluster
from everstep.plan.holes import num_moving, with_holes
from everstep.plan.offered import charged, offered_layer
from everstep.plan.option import MUST_RUN, NEVER, Horizon, Ints, Layer, OptionKind, TaskOption
from everstep.plan.reroute import live_per_stage
from everstep.plan.shape import Floats, ParallelShape
from everstep.plan.task import TaskSituation, TaskSpec
from everstep.plan.transition import StateSource


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
            cost=w * charged(self.task, self.situation, throughput) * float(layer.transition_s[index]),
            way_back=self.horizon.ends_by_repair
            * w
            * (target.throughput if target else 0.0)
            * float(layer.back_s[index]),
        )

    def without(self, units: int) -> Options | None:
        """The same options less the best one of so many units, in whichever layers it stands."""
        chosen = self.choice(units)
        layers = []
        for layer in self.layers:
            worth = layer.worth.copy()
            for index in np.flatnonzero(layer.units == units):
                if self.written_out(layer, int(index)).same(chosen):
                    worth[index] = NEVER
            layers.append(replace(layer, worth=worth))
        if not any((layer.worth > NEVER).any() for layer in layers):
            return None
        return Options(self.task, self.situation, self.horizon, tuple(layers))

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


def _fraction(part: Floats, whole: float) -> Floats:
    return part / whole if whole > 0 else np.zeros_like(part)


def options(task: TaskSpec, situation: TaskSituation, cluster: Cluster, horizon: Horizon) -> Options:
    """All options of a task on a cluster of this size."""
    if task.offers:
        return Options(task, situation, horizon, (offered_layer(task, situation, cluster, horizon),))
    build = _Build(task, situation, cluster, horizon)
    return Options(task, situation, horizon, tuple(build.layers()))


class _Build:
    """The columns of every layer. One object, because they all read the same dozen facts."""

    def __init__(self, task: TaskSpec, situation: TaskSituation, cluster: Cluster, horizon: Horizon) -> None:
        self.task, self.today, self.horizon = task, situation, horizon
        self.curve, self.costs, self.unit = task.curve, cluster.costs, cluster.unit
        self.top = cluster.capacity // cluster.unit
        self.fixed_s = task.transition_s if task.transition_s is not None else cluster.costs.transition_s
        self.step_s = task.curve.step_s(situation.throughput)
        self.cut_today = task.curve.cut_index(situation.shape)
        self.hysteresis = 1.0 if situation.damaged else cluster.hysteresis
        self.parts = np.array([cut.stages * cut.shards for cut in task.curve.cuts] or [1], dtype=np.float64)

    def layers(self) -> Iterator[Layer]:
        yield self._best_shapes()
        if self.curve.replicated and self.curve.cuts:
            yield self._places_empty()
        if self.cut_today >= 0 and self.today.workers:
            yield self._todays_cut()
        yield self._stay()

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
        return self._layer(units, workers, best, cut)

    def _places_empty(self) -> Layer:
        """For each number of workers the best shape that has more places than that."""
        found, task = with_holes(self.curve), self.task
        most = min(self.top * self.unit, self.curve.most, task.max_workers or self.curve.most)
        workers = np.flatnonzero(found.throughput[: most + 1])
        workers = workers[workers >= task.min_workers]
        return self._layer(
            -(-workers // self.unit),
            workers,
            found.throughput[workers],
            found.cut[workers],
            found.replicas[workers],
        )

    def _todays_cut(self) -> Layer:
        same = self.curve.cuts[self.cut_today]
        each = same.stages * same.shards
        replicas = np.flatnonzero(same.throughput)
        workers = replicas * each
        most = min(self.top * self.unit, self.task.max_workers or self.top * self.unit)
        fits = (workers >= self.task.min_workers) & (workers <= most)
        workers, throughput = workers[fits], same.throughput[replicas[fits]]
        return self._layer(
            -(-workers // self.unit), workers, throughput, np.full(len(workers), self.cut_today)
        )

    def _layer(
        self, units: Ints, workers: Ints, throughput: Floats, cut: Ints, replicas: Ints | None = None
    ) -> Layer:
        kind, seconds = self._change(workers, throughput, cut)
        if replicas is None:
            replicas = np.zeros(len(workers), dtype=np.int64)
        return self._worth(units, workers, throughput, cut, kind, seconds, replicas)

    def _change(self, workers: Ints, throughput: Floats, cut: Ints) -> tuple[npt.NDArray[np.int8], Floats]:
        """What kind of change leads there, and its seconds."""
        today, costs = self.today, self.costs
        if not today.workers:
            return np.full(len(workers), OptionKind.START, dtype=np.int8), np.zeros(len(workers))
        count = workers.astype(np.float64)
        kind = np.full(len(workers), OptionKind.RESHAPE, dtype=np.int8)
        seconds = costs.reshape_s(today.source, self.curve.state_bytes, count, self.parts[np.maximum(cut, 0)])
        if self.cut_today >= 0 and today.source is StateSource.LIVE:
            same = cut == self.cut_today
            fewer = same & (workers <= today.live_workers)
            more = same & ~fewer
            kind[fewer], kind[more] = OptionKind.DROP, OptionKind.GROW
            seconds = np.where(fewer, costs.epoch(count), seconds)
            gain = _fraction(throughput - today.rerouted, today.throughput)
            grown = costs.grow_s(self.curve.state_bytes, count, float(self.parts[self.cut_today]), gain)
            seconds = np.where(more, grown, seconds)
            seconds = seconds + np.where(same, self._roles_s(workers), 0.0)
        seconds = seconds + self._broken_step_s()
        if self.cut_today < 0:
            kind[:] = np.where(workers > today.live_workers, OptionKind.GROW, OptionKind.DROP)
        if self.fixed_s is not None:
            seconds = np.full(len(workers), self.fixed_s)
        if not today.damaged:
            still = (workers == today.workers) & (cut == self.cut_today) & (not today.missing)
            kind[still], seconds = OptionKind.KEEP, np.where(still, 0.0, seconds)
        return kind, seconds

    def _roles_s(self, workers: Ints) -> Floats:
        """Where stages have lost unevenly, live workers change their stage: they fetch its state."""
        shape = self.today.shape
        assert shape is not None
        live = live_per_stage(shape, self.today.dead)
        moving = num_moving(live, workers // shape.shards, shape.stages)
        fetch = self.costs.fetch_s(
            StateSource.LIVE, self.curve.state_bytes, np.array(float(self.parts[self.cut_today]))
        )
        return np.where(moving > 0, fetch, 0.0)

    def _stay(self) -> Layer:
        """Stop; continue as today; continue without the failed workers."""
        today = self.today
        rows = [(0, 0, 0.0, self._stop_s(), OptionKind.STOP)]
        if today.workers and not today.damaged and today.throughput > 0:
            rows.append((self._units(today.workers), today.workers, today.throughput, 0.0, OptionKind.KEEP))
        live = today.live_workers
        if today.damaged and today.rerouted > 0 and live >= self.task.min_workers:
            seconds = self._broken_step_s()
            rows.append((self._units(live), live, today.rerouted, seconds, OptionKind.REROUTE))
        rows = [row for row in rows if row[0] <= self.top]
        units, workers, throughput, seconds_, kinds = zip(*rows, strict=True)
        layer = self._worth(
            np.array(units, dtype=np.int64),
            np.array(workers, dtype=np.int64),
            np.array(throughput),
            np.full(len(rows), self.cut_today),
            np.array(kinds, dtype=np.int8),
            np.array(seconds_, dtype=np.float64),
            np.zeros(len(rows), dtype=np.int64),
        )
        if self.task.must_run:
            most = self.task.weight * float(self.curve.throughput.max()) * self.horizon.running_s
            layer.worth[0] -= MUST_RUN * most
        return layer

    def _broken_step_s(self) -> float:
        """What a task that was hurt loses in any case."""
        today = self.today
        if not today.damaged:
            return 0.0
        if today.source is not StateSource.LIVE:
            return self.costs.lost_work_s(today.source, self.step_s)
        if today.shape is None:
            share = len(today.missing) / max(1, today.live_workers)
        else:
            per_stage = live_per_stage(today.shape, today.dead)
            share = max((today.shape.replicas - live) / live for live in per_stage)
        return self.costs.interrupted_s(self.step_s, share)

    def _stop_s(self) -> float:
        if not self.today.workers:
            return 0.0
        if self.fixed_s is not None:
            return self.fixed_s
        return 0.0 if self.today.damaged else self.costs.stop_s(self.curve.state_bytes)

    def _units(self, workers: int) -> int:
        return -(-workers // self.unit)

    def _worth(
        self,
        units: Ints,
        workers: Ints,
        throughput: Floats,
        cut: Ints,
        kind: npt.NDArray[np.int8],
        seconds: Floats,
        replicas: Ints,
    ) -> Layer:
        w, today, horizon = self.task.weight, self.today, self.horizon
        back = self._way_back(workers, throughput, cut, kind)
        after = horizon.target.throughput if horizon.target else 0.0
        worth = (
            w * throughput * horizon.running_s
            - self.hysteresis * w * today.throughput * seconds
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

    def _way_back(self, workers: Ints, throughput: Floats, cut: Ints, kind: npt.NDArray[np.int8]) -> Floats:
        """Seconds from each option to what the task will want after the repair."""
        target = self.horizon.target
        if target is None or not target.workers or not self.horizon.ends_by_repair:
            return np.zeros(len(workers))
        count = np.full(len(workers), float(target.workers))
        goal = self.curve.cut_index(target.shape)
        parts = np.full(len(workers), self.parts[max(goal, 0)])
        seconds = self.costs.reshape_s(StateSource.LIVE, self.curve.state_bytes, count, parts)
        if goal >= 0:
            same = cut == goal
            gain = _fraction(target.throughput - throughput, target.throughput)
            grown = self.costs.grow_s(self.curve.state_bytes, count, float(self.parts[goal]), gain)
            fewer = same & (workers > target.workers)
            seconds = np.where(same, np.where(fewer, self.costs.epoch(count), grown), seconds)
        restored = self.costs.reshape_s(StateSource.DISK, self.curve.state_bytes, count, parts)
        seconds = np.where(kind == OptionKind.STOP, restored, seconds)
        if self.fixed_s is not None:
            seconds = np.full(len(workers), self.fixed_s)
        return np.where((workers == target.workers) & (cut == goal) & (kind != OptionKind.STOP), 0.0, seconds)
