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
both; the bound is the least T at which the workers of the stage together can run all of them. Rejected: the
busiest worker alone, whichever it is (it forgets that the others have limits too).

Where workers of a stage differ, those of the stages below wait for each other's microbatches, too: what comes
from a slow worker comes late, what comes from a fast one comes in a burst. For two stages a < s let h(k) be
the earliest moment, counted from the first F at a, at which k microbatches have come to s, and q(k) the least
time from the start of the k-th last I above s to the end of a. Two workers of s begin with different
microbatches and end with different ones, so the m workers of s, of which i takes p(i) for an F and an I, need

    queue   a window T at stage a with  sum over i of (T - h(i) - q(i)) / p(i) >= jobs

Where a stage has fewer workers than the one below it, microbatches come one after the other: once the first
has come, worker i of the stage above sends at most one more every F(i). So k of them have not come before
g(k), the k-th smallest of all n F(i), n = 0, 1, 2, ... Two workers below begin with different microbatches.
If the first F below starts a time d after the first microbatch has come, then in a step of length T

    start   the one that begins as number k has T - max(0, g(k) - d) for its span, and for its last I, in time
            for all stages above, T - max(g(k), d): waiting makes up for the others and is lost above

A staggered period is at least every span plus the stage's reduce and update. A makespan adds the way from
stage 0. The simple bounds of the literature (work, or work plus idle) are the first line alone; with a
tight stash they are up to a tenth too low, and would blame the schedule for it.

A fused backward is the same algebra with I := I + W and W := 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import NamedTuple

from everstep.protocol.ops import Worker
from everstep.schedule.compact import UNLIMITED, stash_limit
from everstep.schedule.hosts import least_busiest, work_time
from everstep.schedule.instance import Instance
from everstep.schedule.modes import MODES

MOST_DIVISIONS = 256  # of losses among the workers of a stage that are looked at
WAITS = 8  # intervals of a wait that are looked at
MOST_STARTING = 8  # replicas: beyond, a stage's workers have begun long before most of their work is done
MOST_QUEUED = 16  # replicas: beyond, a slow worker's queue is lost among the others, and looking takes long


class _Sort(NamedTuple):
    """Workers of a stage that nothing tells apart."""

    forward: float
    backward: float
    weight: float
    early: float  # most microbatches held before their I
    late: float  # most microbatches held between I and W

    @property
    def work(self) -> float:
        return self.forward + self.backward + self.weight

    def spans(self, jobs: int, trip: float) -> tuple[float, float]:
        """For one worker with so many jobs: first F to last op, and first F to the end of the last I. Both
        grow with `jobs`."""
        after = self.backward + self.weight
        early, late = min(self.early, jobs), min(self.late, jobs)
        held = max(early, late)
        idle = max(0.0, trip - (early - 1) * self.forward)
        work = jobs * (self.forward + after)
        rounds, rest = divmod(jobs - 1, int(held))
        span = max(work + idle, rest * self.forward + (rounds + 1) * (self.forward + trip + after))
        turn = jobs * self.forward + trip + after
        if jobs > held:
            turn = max(turn, work + idle - (held - 1) * after + trip)
        return max(span, turn), max(span - late * self.weight, turn - self.weight)

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

    def done(self, times: dict[_Sort, float], come: list[float]) -> list[float]:
        """The earliest moments at which one, two, three, ... microbatches have passed, which come at these
        moments: no worker starts before the first, and the last of k comes when k have come."""
        most, fastest = len(come), min(times.values())
        in_turn = sorted(
            number * times[sort]
            for sort, count in self.sorts.items()
            for number in range(1, -(-most // count) + 1)
            for _ in range(count)
        )
        return [max(at + fastest, come[0] + in_turn[k]) for k, at in enumerate(come)]

    def window(self, heads: list[float], tails: list[float], known: float) -> float:
        """The least time in which its workers together fit F and I of all jobs, if each of them loses a head
        and a tail of its own: in fractions of jobs first, the fastest losing least, then in whole ones, which
        takes at most one job of the slowest longer. Of interest only above `known`."""
        sorts = [(sort.forward + sort.backward, count) for sort, count in self.sorts.items()]
        paces = sorted(max(pace, 1e-12) for pace, count in sorts for _ in range(count))
        heads, tails = heads[: len(paces)], tails[: len(paces)]
        best, speed, lost = math.inf, 0.0, 0.0
        for pace, head, tail in zip(paces, heads, tails, strict=True):
            speed += 1.0 / pace
            lost += (head + tail) / pace
            best = min(best, (self.jobs + lost) / speed)
        divisions, slowest = math.prod(count + 1 for _, count in sorts), paces[-1]
        if best + slowest <= known or divisions > MOST_DIVISIONS or paces[0] == 1e-12:
            return best
        # Of k workers one loses at least so much: the smallest head goes with the largest tail.
        losses = [
            max(head + tail for head, tail in zip(heads[: k + 1], tails[k::-1], strict=True))
            for k in range(len(paces))
        ]
        ends = {
            loss + n * pace
            for loss in losses
            for pace, _ in sorts
            for n in range(int((best - loss) / pace), int((best + slowest - loss) / pace) + 2)
        }
        times = [best, *sorted(end for end in ends if end > best)]

        def fit(time: float) -> bool:
            more = [[max(0, int((time - loss) / pace + 1e-9)) for pace, _ in sorts] for loss in losses]
            return self._most_jobs(more) >= self.jobs

        return times[bisect_left(times, True, key=fit)]

    def starting(self, gaps: list[float], trip: float, ends: float, inputs: float, known: float) -> float:
        """`least`, if its workers' first microbatches come in these gaps, and at least `known`: for every
        wait in some interval, the shortest of which the span and the longest of which the last I is spared.
        """
        divisions = math.prod(count + 1 for count in self.sorts.values())
        if divisions > MOST_DIVISIONS or any(sort.work <= 0.0 for sort in self.sorts):
            return known
        waits = sorted({*gaps, *(gaps[-1] * part / WAITS for part in range(WAITS))})
        best = math.inf
        for low, high in [*pairwise(waits), (gaps[-1], gaps[-1])]:
            limits = [(ends + max(0.0, gap - high), inputs + max(gap, low)) for gap in gaps]
            time = self._starting(limits, trip, known, known + gaps[-1])
            if time <= known:
                return known
            best = min(best, time)
        return best

    def _starting(self, limits: list[tuple[float, float]], trip: float, known: float, most: float) -> float:
        """The least time in which all jobs fit, if each of the workers has other limits; at least `known`,
        and in `most` they do."""

        def fit(time: float) -> bool:
            more = [[_jobs_within(sort, time, trip, *limit) for sort in self.sorts] for limit in limits]
            return self._most_jobs(more) >= self.jobs

        if fit(known):
            return known
        times = sorted(
            time
            for limit in limits
            for sort in self.sorts
            for n in range(
                _jobs_within(sort, known, trip, *limit) + 1, _jobs_within(sort, most, trip, *limit) + 1
            )
            if (time := sort.cost(n, trip, *limit)) > known
        )
        return [*times, most][bisect_left(times, True, key=fit)]

    def _most_jobs(self, more: list[list[int]]) -> int:
        """Whole jobs that fit, with the best division of the losses among the workers: of each loss, by sort,
        what a worker that has it fits."""
        best = {tuple(self.sorts.values()): 0}  # by the workers of each sort that are left
        for jobs_of in more:
            after: dict[tuple[int, ...], int] = {}
            for left, jobs in best.items():
                for at, here in enumerate(left):
                    if here:
                        rest = (*left[:at], here - 1, *left[at + 1 :])
                        after[rest] = max(after.get(rest, 0), jobs + jobs_of[at])
            best = after
        return max(best.values())


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


def lower_bound(instance: Instance, mode: str, caps: list[int] | None = None) -> float:
    """No schedule of this mode is shorter. `caps` tightens the stash per stage, as 1F1B does."""
    if instance.done:
        return _bound_of_the_rest(instance)
    if instance.virtual > 1:
        return max(_folded_bound(instance, mode, caps), lower_bound(_apart(instance), mode))
    stages = _stages(instance, mode, caps)
    best = _slowest(instance, stages, mode)
    if instance.replicas > MOST_QUEUED:
        return best
    if instance.replicas <= MOST_STARTING:
        best = _starting(instance, stages, mode, best)
    differ = any(len(stage.sorts) > 1 for stage in stages)
    return _queued(instance, stages, mode, best) if differ else best


def _starting(instance: Instance, stages: list[_Stage], mode: str, best: float) -> float:
    """The bound that stages with more workers than the one above them give, if it is better."""
    for above, (below, trip, ends, inputs) in zip(stages, _limits(instance, stages, mode)[1:], strict=False):
        workers = sum(below.sorts.values())
        if sum(above.sorts.values()) < workers:
            gaps = [
                n * sort.forward
                for sort, count in above.sorts.items()
                for n in range(workers)
                for _ in range(count)
            ]
            best = max(best, below.starting(sorted(gaps)[:workers], trip, ends, inputs, best))
    return best


def _queued(instance: Instance, stages: list[_Stage], mode: str, best: float) -> float:
    """The bound that the queues below uneven workers give, if it is better."""
    most = max(sum(stage.sorts.values()) for stage in stages)
    staggered, hop = MODES[mode].staggered, instance.hop
    come = [0.0] * most  # to stage a: with a barrier counted from the first F of all
    for a, above in enumerate(stages):
        heads = [0.0] * most if staggered else come
        tails = [0.0] * most
        for s in range(a + 1, len(stages)):
            over = stages[s - 1]
            last = s == a + 1  # each I of a is followed by its W, on the same worker
            heads = [x + hop for x in over.done({sort: sort.forward for sort in over.sorts}, heads)]
            back = {sort: sort.backward + (sort.weight if last else 0.0) for sort in over.sorts}
            tails = [x + hop for x in over.done(back, tails)]
            best = max(best, stages[s].window(heads, tails, best - above.closing) + above.closing)
        come = [x + hop for x in above.done({sort: sort.forward for sort in above.sorts}, come)]
    return best


def balanced_bound(instance: Instance, mode: str, workers: int) -> float:
    """`lower_bound` with so many workers, evenly spread over the stages; of each the first replicas live."""
    each, more = divmod(workers, instance.stages)
    fused, alike = MODES[mode].fused, _are_alike(instance)
    live = [range(each + (s < more)) for s in range(instance.stages)]
    stages = [_stage(instance, s, here, fused, None, alike=alike) for s, here in enumerate(live)]
    return _slowest(instance, stages, mode)


def stage_costs(instance: Instance, mode: str, most: int) -> list[list[float]]:
    """[s][j]: the bound if only stage s had losses, the first j replicas, up to `most`.

    A stage enters the bound by its jobs alone, so the bound with losses in many stages is the greatest of
    these, where replicas are alike.
    """
    caps = stash_of_mode(instance, mode)
    healthy = _stages(instance.fault_free(), mode, caps)
    costs = []
    for s in range(instance.stages):
        row = []
        for j in range(min(most + 1, instance.replicas)):
            hit = _stage(instance, s, range(j, instance.replicas), MODES[mode].fused, caps)
            row.append(_slowest(instance, [*healthy[:s], hit, *healthy[s + 1 :]], mode))
        costs.append(row + [math.inf] * (most + 1 - len(row)))
    return costs


def _stages(instance: Instance, mode: str, caps: list[int] | None) -> list[_Stage]:
    fused, alike = MODES[mode].fused, _are_alike(instance)
    return [_stage(instance, s, instance.live(s), fused, caps, alike=alike) for s in range(instance.stages)]


def _are_alike(instance: Instance) -> bool:
    """Thousands of replicas often share their times."""
    grids = instance.forward, instance.input_grad, instance.weight_grad
    free = instance.stash_cap is None and instance.memory is None
    return free and all(len(set(map(id, grid))) == 1 for grid in grids)


def _slowest(instance: Instance, stages: list[_Stage], mode: str) -> float:
    return max(
        below.least(trip, ends, inputs) for below, trip, ends, inputs in _limits(instance, stages, mode)
    )


def _limits(instance: Instance, stages: list[_Stage], mode: str) -> list[tuple[_Stage, float, float, float]]:
    """Of each stage: the round trip below, and how long before the end its last op and its last I must be."""
    staggered = MODES[mode].staggered
    found = []
    for j, below in enumerate(stages):
        trip = sum(x.forward + x.backward + 2 * instance.hop for x in stages[j + 1 :])
        from_the_top = 0.0 if staggered else sum(x.forward + instance.hop for x in stages[:j])
        around = -math.inf  # the most that a stage above needs before this one's first F and after its last I
        down = up = 0.0
        for above in reversed(stages[:j]):
            down += above.forward + instance.hop
            up += above.backward + instance.hop
            before = down if staggered else from_the_top
            around = max(around, before + up + above.weight + above.closing)
        found.append((below, trip, from_the_top + below.closing, around))
    return found


def stash_of_mode(instance: Instance, mode: str) -> list[int] | None:
    """A mode with a tight stash holds `stages - s` microbatches at stage s; others what fits."""
    return [instance.stages - s for s in range(instance.stages)] if MODES[mode].tight_stash else None


def _stage(
    instance: Instance,
    stage: int,
    live: Sequence[int],
    fused: bool,
    caps: list[int] | None,
    *,
    alike: bool = False,
) -> _Stage:
    sorts: dict[_Sort, int] = {}
    counts: Counter[float] = Counter()
    for (forward, input_grad, weight, early, late), count in _sorts(instance, stage, live, alike).items():
        if caps is not None:
            early, late = min(early, caps[stage]), min(late, caps[stage])
        sort = _Sort(
            forward=forward,
            backward=input_grad + weight if fused else input_grad,
            weight=0.0 if fused else weight,
            early=max(1.0, early),
            late=max(1.0, late),
        )
        sorts[sort] = sorts.get(sort, 0) + count
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


def _sorts(
    instance: Instance, stage: int, live: Sequence[int], alike: bool
) -> Counter[tuple[float, float, float, float, float]]:
    """The live workers of a stage by what tells them apart: F, I, W, and the two limits of their stash."""
    unlimited = (UNLIMITED, UNLIMITED)
    free = instance.stash_cap is None and instance.memory is None
    found: Counter[tuple[float, float, float, float, float]] = Counter()
    if alike:
        times = instance.forward[0][stage], instance.input_grad[0][stage], instance.weight_grad[0][stage]
        found[*times, *unlimited] = len(live)
        return found
    for k in live:
        limits = unlimited if free else stash_limit(instance, Worker(k, stage))
        times = instance.forward[k][stage], instance.input_grad[k][stage], instance.weight_grad[k][stage]
        found[*times, *limits] += 1
    return found


def _bound_of_the_rest(instance: Instance) -> float:
    """The rest of a broken step: what is left at a stage spread evenly, and what is pinned to one worker."""
    best = 0.0
    for at in range(instance.fold.stages):
        parts = instance.fold.parts_of(at)
        live = instance.live(parts[0])
        pinned = dict.fromkeys(live, 0.0)
        loose = 0.0
        for part in parts:
            fastest = min(work_time(instance, Worker(k, part)) for k in live)
            for microbatch in instance.homes():
                done = instance.done.get((microbatch, part))
                if done is None:
                    loose += fastest
                elif done.host in pinned:
                    pinned[done.host] += work_time(instance, Worker(done.host, part), done.kinds)
        level = max((sum(pinned.values()) + loose) / len(live), max(pinned.values()))
        best = max(best, level + instance.closing(at))
    return best


def _folded_bound(instance: Instance, mode: str, caps: list[int] | None) -> float:
    """Where workers run several parts. A stage's window opens with an F of its first part: every F of its
    later ones is of a microbatch that has passed there. Until a gradient is back from the end of the pipeline
    its workers run nothing but F, and no more of them than their stashes hold; the rest of that time they
    are idle, whatever is hosted where. Beside that time all the work of the stage must fit:

        window >= idle + the least that the busiest worker has of all (microbatch, part)
    """
    staggered, fused = MODES[mode].staggered, MODES[mode].fused
    parts = range(instance.stages)
    live = [instance.live(part) for part in parts]
    least = [  # F and I of each part, by its fastest worker
        (
            min(instance.forward[k][p] for k in live[p]),
            min(instance.input_grad[k][p] + (instance.weight_grad[k][p] if fused else 0.0) for k in live[p]),
        )
        for p in parts
    ]
    at = [instance.fold.stage(part) for part in parts]
    hops = [instance.hop if at[p] != at[p + 1] else 0.0 for p in parts[:-1]]
    best = 0.0
    for stage in range(instance.fold.stages):
        mine = instance.fold.parts_of(stage)
        first, last = mine[0], mine[-1]
        back = sum(f for f, _ in least[first:]) + sum(hops[first:])
        back += sum(b for _, b in least[last + 1 :]) + sum(hops[last:])
        idle = min(max(0.0, back - _forwards_before(instance, k, mine, caps)) for k in live[first])
        window = idle + _folded_level(instance, mine, live[first])
        ends = instance.closing(stage)  # after its window
        if not staggered:
            window += sum(f for f, _ in least[:first]) + sum(hops[:first])
        if fused and not staggered:  # its last op is followed by one of each part above, and those updates
            up = 0.0
            for above in reversed(parts[:first]):
                up += least[above][1] + hops[above]
                ends = max(ends, up + instance.closing(at[above]))
        best = max(best, window + ends)
    if not staggered:  # the way of one microbatch
        once = sum(f + b for f, b in least) + 2 * sum(hops)
        weight = 0.0 if fused else min(instance.weight_grad[k][0] for k in live[0])
        best = max(best, once + weight + instance.closing(at[0]))
    return best


def _apart(instance: Instance) -> Instance:
    """Every part on workers of its own, which share neither time nor a stash, and no hops, as parts of one
    worker have none: no order of the fold is shorter. It sees how long a microbatch is under way, which
    counts where there are few of them.
    """
    return replace(
        instance,
        virtual=1,
        hop=0.0,
        reduce=(),
        update=(),
        stash_cap=None,
        memory=None,
        dead=frozenset(
            Worker(worker.replica, part)
            for worker in instance.dead
            for part in instance.fold.parts_of(worker.stage)
        ),
    )


def _forwards_before(instance: Instance, replica: int, parts: Sequence[int], caps: list[int] | None) -> float:
    """The most F, in seconds, that a worker can run before its first I, however its parts share a stash."""
    worker, jobs = Worker(replica, instance.fold.stage(parts[0])), instance.replicas * instance.microbatches
    most = {part: jobs if caps is None else min(jobs, caps[part]) for part in parts}
    times = {part: instance.forward[replica][part] for part in parts}
    found = sum(most[part] * times[part] for part in parts)
    if instance.stash_cap is not None and worker in instance.stash_cap:
        room = max(len(parts), instance.stash_cap[worker])
        found = min(found, _most_in(room, [(1.0, times[part], most[part]) for part in parts]))
    if instance.memory is not None and worker in instance.memory and instance.held_forward:
        size = max(instance.memory[worker], sum(map(instance.bytes_per_microbatch, parts)))
        held = [(instance.held_forward[part], times[part], most[part]) for part in parts]
        found = min(found, _most_in(size, held))
    return found


def _most_in(room: float, sorts: list[tuple[float, float, int]]) -> float:
    """The most seconds that fit, of things that each take some room for some seconds, and are so many; a last
    one in part.
    """
    found = 0.0
    for size, seconds, most in sorted(sorts, key=lambda each: each[1] / max(each[0], 1e-12), reverse=True):
        number = most if size <= 0 else min(most, room / size)
        found += number * seconds
        room -= number * size
    return found


def _folded_level(instance: Instance, parts: Sequence[int], live: Sequence[int]) -> float:
    """The least time of the busiest worker, by work alone: linear programming's dual, with workers weighed by
    their speed. Where all ops are alike it is rounded up to whole microbatches.
    """
    jobs = instance.replicas * instance.microbatches
    work = {k: [work_time(instance, Worker(k, part)) for part in parts] for k in live}
    kinds = {seconds for row in work.values() for seconds in row}
    if len(kinds) == 1:
        return -(-jobs * len(parts) // len(live)) * kinds.pop()
    speeds = {k: 1.0 / max(sum(row), 1e-12) for k, row in work.items()}
    total = sum(speeds.values())
    return jobs * sum(min(speeds[k] / total * work[k][p] for k in live) for p in range(len(parts)))
