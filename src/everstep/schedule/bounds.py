"""How fast a step can possibly be: lower bounds that every schedule obeys, whatever its hosts and order.

Take one worker of stage s that runs `jobs` microbatches, `work` seconds of ops. Below it lies a round trip R:
from the end of an F to the earliest gradient for it. Its stash holds at most A microbatches. Then

    span    first F to last op >= work + idle, where idle = R - (A - 1) F: until the first gradient is back
            the worker can only run F, and only A of them.
    cycle   F number i + A waits for the end of W number i, which is a round trip later: every A
            microbatches cost at least one round trip.
    turn    when the last F starts, all but A - 1 others have left the stash, so all their I and W are
            behind us; then the last microbatch still has its own round trip, I and W ahead.

    to_last_input   first F to the end of the last I. W may be left over, but no more than A of them.

Both grow with `jobs`. For two stages s <= j, the first F at j comes after one at s and the last I at j is
followed by one at s, hence

    span(s) >= F and hops down from s to j  +  to_last_input(j)  +  I and hops up  +  W(s)

So in a step of length T every worker of stage j has two limits: its span, and its last I in time for all
stages above. Each worker alone, with its own speed and stash, says how many microbatches it can run within
both; the bound is the least T at which the workers of the stage together can run all of them.

A staggered period is at least every span plus the stage's reduce and update. A makespan adds the way from
stage 0. Rejected: the simple bounds of the literature (work, or work plus idle), which are up to a tenth too
low with a tight stash; and bounds on what workers wait for each other, which are tighter by some per cent
where a worker is slow, and took longer to look at than the orders they would have spared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

from everstep.protocol.ops import Worker
from everstep.schedule.compact import UNLIMITED, stash_limit
from everstep.schedule.hosts import least_busiest, work_time
from everstep.schedule.instance import Instance
from everstep.schedule.modes import STAGGERED


class _Sort(NamedTuple):
    """Workers of a stage that nothing tells apart."""

    forward: float
    backward: float
    weight: float
    most: float  # microbatches held from F to W

    @property
    def work(self) -> float:
        return self.forward + self.backward + self.weight

    def spans(self, jobs: int, trip: float) -> tuple[float, float]:
        """For one worker with so many jobs: first F to last op, and first F to the end of the last I. Both
        grow with `jobs`."""
        after = self.backward + self.weight
        held = min(self.most, jobs)
        idle = max(0.0, trip - (held - 1) * self.forward)
        work = jobs * (self.forward + after)
        rounds, rest = divmod(jobs - 1, int(held))
        span = max(work + idle, rest * self.forward + (rounds + 1) * (self.forward + trip + after))
        turn = jobs * self.forward + trip + after
        if jobs > held:
            turn = max(turn, work + idle - (held - 1) * after + trip)
        return max(span, turn), max(span - held * self.weight, turn - self.weight)

    def cost(self, jobs: int, trip: float, ends: float, inputs: float) -> float:
        span, last_input = self.spans(jobs, trip)
        return max(span + ends, last_input + inputs)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage's live workers by sort, and the least time of each kind over them."""

    sorts: dict[_Sort, int]  # with how many there are
    jobs: int
    level: float  # the least time of the busiest worker, by work alone
    forward: float
    backward: float
    weight: float
    closing: float

    def least(self, trip: float, ends: float, inputs: float) -> float:
        """The least T for which the jobs can be divided so that every worker's last op ends by T - `ends` and
        its last I by T - `inputs`, counted from the stage's first F."""
        if len(self.sorts) == 1:
            ((sort, count),) = self.sorts.items()
            return sort.cost(-(-self.jobs // count), trip, ends, inputs)
        time = self.level + ends
        fits = [_jobs_within(sort, time, trip, ends, inputs) for sort in self.sorts]
        left = self.jobs - sum(count * n for count, n in zip(self.sorts.values(), fits, strict=True))
        nexts = [
            (sort.cost(n + 1, trip, ends, inputs), at)
            for at, (sort, n) in enumerate(zip(self.sorts, fits, strict=True))
        ]
        heapify(nexts)
        sorts = list(self.sorts.items())
        while left > 0:
            time, at = nexts[0]
            sort, count = sorts[at]
            fits[at] += 1
            left -= count
            heapreplace(nexts, (sort.cost(fits[at] + 1, trip, ends, inputs), at))
        return time


def _jobs_within(sort: _Sort, time: float, trip: float, ends: float, inputs: float) -> int:
    """How many jobs one worker fits into a time."""
    low, high = 0, max(0, int((time - ends) / sort.work + 1e-9)) if sort.work > 0 else 0
    while low < high:
        middle = (low + high + 1) // 2
        if sort.cost(middle, trip, ends, inputs) <= time + 1e-9:
            low = middle
        else:
            high = middle - 1
    return low


def lower_bound(instance: Instance, mode: str) -> float:
    """No schedule of this mode is shorter."""
    if instance.done:
        return _bound_of_the_rest(instance)
    alike = _are_alike(instance)
    stages = [_stage(instance, s, instance.live(s), alike=alike) for s in range(instance.stages)]
    return _slowest(instance, stages, mode)


def balanced_bound(instance: Instance, mode: str, workers: int) -> float:
    """`lower_bound` with so many workers, evenly spread over the stages; of each the first replicas live."""
    each, more = divmod(workers, instance.stages)
    live = [range(each + (s < more)) for s in range(instance.stages)]
    alike = _are_alike(instance)
    stages = [_stage(instance, s, here, alike=alike) for s, here in enumerate(live)]
    return _slowest(instance, stages, mode)


def _are_alike(instance: Instance) -> bool:
    """Thousands of replicas often share their times."""
    grids = instance.forward, instance.input_grad, instance.weight_grad
    return instance.stash_cap is None and all(len(set(map(id, grid))) == 1 for grid in grids)


def _slowest(instance: Instance, stages: list[_Stage], mode: str) -> float:
    """The longest that a stage needs: with the round trip below it, and those around it that must wait for
    its last op or its last I."""
    best = 0.0
    for j, below in enumerate(stages):
        trip = sum(x.forward + x.backward + 2 * instance.hop for x in stages[j + 1 :])
        from_the_top = 0.0 if mode == STAGGERED else sum(x.forward + instance.hop for x in stages[:j])
        around = -math.inf  # the most that a stage above needs before this one's first F and after its last I
        down = up = 0.0
        for above in reversed(stages[:j]):
            down += above.forward + instance.hop
            up += above.backward + instance.hop
            before = down if mode == STAGGERED else from_the_top
            around = max(around, before + up + above.weight + above.closing)
        best = max(best, below.least(trip, from_the_top + below.closing, around))
    return best


def _stage(instance: Instance, stage: int, live: Sequence[int], *, alike: bool) -> _Stage:
    sorts: Counter[_Sort] = Counter()
    if alike:
        times = instance.forward[0][stage], instance.input_grad[0][stage], instance.weight_grad[0][stage]
        sorts[_Sort(*times, UNLIMITED)] = len(live)
    else:
        for k in live:
            times = instance.forward[k][stage], instance.input_grad[k][stage], instance.weight_grad[k][stage]
            sorts[_Sort(*times, stash_limit(instance, Worker(k, stage)))] += 1
    counts: Counter[float] = Counter()
    for sort, count in sorts.items():
        counts[sort.work] += count
    jobs = instance.replicas * instance.microbatches
    return _Stage(
        sorts=sorts,
        jobs=jobs,
        level=least_busiest(counts, jobs),
        forward=min(x.forward for x in sorts),
        backward=min(x.backward for x in sorts),
        weight=min(x.weight for x in sorts),
        closing=instance.closing(stage),
    )


def _bound_of_the_rest(instance: Instance) -> float:
    """The rest of a broken step: what is left at a stage spread evenly, and what is pinned to one worker."""
    best = 0.0
    for stage in range(instance.stages):
        live = instance.live(stage)
        pinned = dict.fromkeys(live, 0.0)
        loose = 0.0
        fastest = min(work_time(instance, Worker(k, stage)) for k in live)
        for microbatch in instance.homes():
            done = instance.done.get((microbatch, stage))
            if done is None:
                loose += fastest
            elif done.host in pinned:
                pinned[done.host] += work_time(instance, Worker(done.host, stage), done.kinds)
        level = max((sum(pinned.values()) + loose) / len(live), max(pinned.values()))
        best = max(best, level + instance.closing(stage))
    return best
