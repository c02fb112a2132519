"""The throughput of a task in every shape it may take, with any number of workers.

In the work of one slot: a step's work, in seconds of ops, over the time of the step. The time is a bound that
every schedule obeys (`schedule.bounds`, for workers that are alike): the busiest worker of each stage, with
the round trip below it and the stages above that wait for it; times what the bound was off by when the task
was last in that shape with so many workers. In a shape that was never tried it is taken to be off by as much
as in the worst one that was: what machines did not keep once they are not believed again.

Empty places are where they cost least (`core.cluster.stages`), as the coordinator fills and empties them.

Another shape is taken to be slower by as much as steps of one shape differ from each other: what is smaller
than the noise of the machine is no reason to move, and no reason to move back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everstep.plan.measured import TaskMeasurements
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.schedule.hosts import least_busiest
from everstep.schedule.profile import StageTimes

Floats = npt.NDArray[np.float64]
MOST_SHAPES = 24  # that are looked at closely; of more, those that are best by work alone
DIGITS = 9
LOOKED_AT = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)  # of the slots, to find those


@dataclass(frozen=True, slots=True)
class Way:
    """A shape, and its throughput by number of workers, from 0; 0: a stage would have none."""

    shape: Shape
    throughput: Floats


def alike(stages: int) -> StageTimes:
    """Before anything is measured."""
    ones = (1.0,) * stages
    return StageTimes(ones, ones, ones, (0.0,) * stages, 0.0)


class TaskSpeed:
    """What one task does in the shape that it has, and would do in others."""

    def __init__(self, shape: Shape, known: TaskMeasurements, slow: Mapping[Worker, float]) -> None:
        self.shape, self._known, self._slow = shape, known, slow
        measured = known.times is not None and len(known.times.forward) == shape.stages
        self._times = known.times if measured and known.times is not None else alike(shape.stages)
        self._jobs = shape.replicas * shape.microbatches
        self._work = self._jobs * shape.shards * sum(self.costs)

    @property
    def costs(self) -> tuple[float, ...]:
        """Of a microbatch at each stage."""
        times = self._times
        return tuple(map(sum, zip(times.forward, times.backward, times.weight, strict=True)))

    def learn(self, live: Sequence[int]) -> None:
        """What the bound is off by where the task is now."""
        known, placed = self._known, self._known.last
        if known.times is None or placed != (self.shape.replicas, self.shape.stages, sum(live)):
            return
        if (measured := known.step_s(placed)) and min(live) > 0:
            known.off_by[placed] = max(1.0, measured / self._bound(live, self._slow))

    def now(self, live: Sequence[int], slow: Mapping[Worker, float] | None = None) -> float:
        """With so many workers at each stage, of which these are slow; 0: a stage has none."""
        if min(live) < 1:
            return 0.0
        bound = self._bound(live, self._slow if slow is None else slow)
        return float(self._work / (self._off_by(self.shape, sum(live) + 1)[-1] * bound))

    def own(self, live: Sequence[int], *, evened: bool = False) -> Way:
        """The shape it has, with slow workers where they are. Workers that are `live` stay at their stage as
        others come or some of them go; `evened`: all go where they do most.
        """
        slower = self._bound(live, self._slow) / self._bound(live, {}) if self._slow and min(live) else 1.0
        fixed = None if evened else live
        periods = periods_of(self._times, self.shape.replicas, self._jobs, self._known.is_staggered, fixed)
        return Way(self.shape, self._rates(self.shape, self._work / slower, periods))

    def others(self, stages: range | None, shards: Sequence[int], slots: int) -> list[Way]:
        """Shapes that it could have on so many slots. `stages`: how many it may be cut into; None: no other
        shape. `shards`: how many a worker may have, beside as many as now. Ops take longer as there are
        fewer, and their collectives shorter.
        """
        if stages is None:
            return []
        found: list[Way] = []
        for count in (self.shape.shards, *(c for c in shards if c != self.shape.shards)):
            longer = self._known.longer(self.shape.shards, count)
            for cut in self._cuts(stages, slots // count, count):
                times = self._recut(cut.stages, stages, longer)
                periods = periods_of(times, cut.replicas, self._jobs, self._known.is_staggered)
                rates = self._rates(cut, self._work / (1.0 + self._known.spread()), periods)
                found.append(Way(cut, rates * self._slowed(cut, len(rates))))
        return found

    # -------------------------------------------------------------- one shape

    def _rates(self, shape: Shape, work: float, periods: Floats) -> Floats:
        rates = work / (self._off_by(shape, len(periods)) * periods)
        return np.round(rates, DIGITS)  # two shapes that are as good are no matter of the last bit

    def _off_by(self, shape: Shape, size: int) -> Floats:
        """By number of workers."""
        known = self._known.off_by
        cut = (shape.replicas, shape.stages) if shape.shards == self.shape.shards else ()
        here = {placed[2]: off for placed, off in known.items() if placed[:2] == cut}
        found = np.full(size, here[max(here)] if here else max(known.values(), default=1.0))
        for workers, off in here.items():
            found[workers : workers + 1] = off
        return found

    def _bound(self, live: Sequence[int], slow: Mapping[Worker, float]) -> float:
        """The step with so many workers at each stage, some of them slow."""
        factors = [Counter({1.0: n}) for n in live]
        for worker, factor in slow.items():
            if factors[worker.stage][1.0]:
                factors[worker.stage] += Counter({factor: 1})
                factors[worker.stage][1.0] -= 1
        jobs = [least_busiest(+of, self._jobs) for of in factors]
        staggered = self._known.is_staggered
        return max(float(stage_bound(self._times, s, np.array(j), staggered)) for s, j in enumerate(jobs))

    def _slowed(self, shape: Shape, size: int) -> Floats | float:
        """Another shape does not make a slow machine fast: its slow workers are somewhere in it, at worst all
        in one stage, whose peers share the work.
        """
        if not self._slow:
            return 1.0
        worst = sorted(self._slow.values(), reverse=True)
        peers = np.maximum(1, np.arange(size) // shape.stages)
        lost = np.concatenate(([0.0], np.cumsum([1 - 1 / factor for factor in worst])))
        return np.asarray((peers - lost[np.minimum(peers, len(worst))]) / peers)

    # -------------------------------------------------------------- other shapes

    def _cuts(self, stages: range, most: int, shards: int) -> list[Shape]:
        """Every cut with every number of replicas that divides the batch and fits, and the next one above: a
        shape larger than the cluster runs with places empty, and divides the batch more finely.
        """
        divisors = [r for r in range(1, math.isqrt(self._jobs) + 1) if self._jobs % r == 0]
        divisors = sorted({*divisors, *(self._jobs // r for r in divisors)})
        found = [
            self.shape.cut(replicas, count, shards)
            for count in sorted({*stages, self.shape.stages}, key=lambda s: (abs(s - self.shape.stages), s))
            if count <= most
            for below, replicas in zip((0, *divisors), divisors, strict=False)
            if below * count < most
        ]
        found = [cut for cut in found if cut != self.shape]
        if len(found) <= MOST_SHAPES:
            return found
        recut = {count: self._recut(count, stages, 1.0) for count in {cut.stages for cut in found}}
        each = np.array([sum(t[0] for t in recut[c.stages][:3]) for c in found])
        closing = np.array([recut[c.stages].closing[0] for c in found])
        sizes = np.array([(c.replicas, c.stages) for c in found])
        best: dict[int, None] = {}
        for share in LOOKED_AT:
            peers = np.minimum(sizes[:, 0], int(share * most) // sizes[:, 1])
            step_s = np.where(peers > 0, -(-self._jobs // np.maximum(peers, 1)) * each + closing, np.inf)
            best.update(dict.fromkeys(np.argsort(step_s, kind="stable")[: MOST_SHAPES // 4].tolist()))
        return [found[i] for i in sorted(list(best)[:MOST_SHAPES])]

    def _recut(self, count: int, stages: range, longer: float) -> StageTimes:
        """Layers are not cut: the largest stage has its share rounded up."""
        times, layers = self._times, max(stages.stop - 1, self.shape.stages, count)
        uneven = _largest(count, layers) / _largest(self.shape.stages, layers)
        f, i, w = ((sum(t) / count * uneven * longer,) * count for t in times[:3])
        return StageTimes(f, i, w, (sum(times.closing) / count,) * count, times.hop)


def _largest(stages: int, layers: int) -> float:
    """The largest stage over the mean one."""
    return stages * -(-layers // stages) / layers


def periods_of(
    times: StageTimes, replicas: int, jobs: int, is_staggered: bool, live: Sequence[int] | None = None
) -> Floats:
    """The least time of a step by number of workers, from 0: each further worker goes to the stage that is
    the busiest then, and of those that are `live` the one leaves that its stage can best do without.
    """
    stages, peers = len(times.forward), np.arange(1.0, replicas + 1)
    costs = [sum(of) for of in zip(times.forward, times.backward, times.weight, strict=True)]
    shares = -(-jobs // peers)
    bounds = np.array([stage_bound(times, s, shares, is_staggered) for s in range(stages)])
    loads = np.array([shares[:-1] * cost for cost in costs]).ravel()
    stage, before = np.repeat(np.arange(stages), replicas - 1), np.tile(peers[:-1], stages)
    comes = before >= np.array(live or (0,) * stages)[stage]
    order = stage[np.lexsort((stage, before, -loads, comes))]
    more = np.zeros((len(order) + 1, stages), dtype=np.int64)
    np.cumsum(order[:, None] == np.arange(stages), axis=0, out=more[1:])
    found = np.max([bounds[s][more[:, s]] for s in range(stages)], axis=0)
    return np.concatenate((np.full(stages, np.inf), found))


def stage_bound(times: StageTimes, stage: int, jobs: Floats, is_staggered: bool) -> Floats:
    """The step is no shorter because of this stage, whose busiest worker has so many microbatches."""
    forward, backward, weight, closing, hop = times
    f, i, w = forward[stage], backward[stage], weight[stage]
    trip = sum(forward[stage + 1 :]) + sum(backward[stage + 1 :]) + 2 * hop * (len(forward) - 1 - stage)
    from_the_top = 0.0 if is_staggered else sum(forward[:stage]) + hop * stage
    turn = jobs * f + trip + i
    span = np.maximum(jobs * (f + i + w) + np.maximum(0.0, trip - (jobs - 1) * f), turn + w)
    around, down, up = -math.inf, 0.0, 0.0
    for above in reversed(range(stage)):
        down, up = down + forward[above] + hop, up + backward[above] + hop
        before = down if is_staggered else from_the_top
        around = max(around, before + up + weight[above] + closing[above])
    inputs = np.maximum(span - jobs * w, turn)
    return np.asarray(np.maximum(span + from_the_top + closing[stage], inputs + around))
