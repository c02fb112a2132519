"""How fast a step can possibly be: lower bounds that every schedule obeys, whatever its hosts and order.

For one stage s, take its busiest worker. It runs at least `jobs` microbatches, `work` seconds of ops. Below
it lies a round trip R: from the end of an F to the earliest gradient for it. Its stash holds at most A
microbatches. Then

    span    first F to last op >= work + idle, where idle = R - (A - 1) F: until the first gradient is back
            the worker can only run F, and only A of them.
    cycle   F number i + A waits for the end of W number i, which is a round trip later: every A
            microbatches cost at least one round trip.
    turn    when the last F starts, all but A - 1 others have left the stash, so all their I and W are
            behind us; then the last microbatch still has its own round trip, I and W ahead.

    to_last_input   first F to the end of the last I. W may be left over, but no more than A of them.

Where workers differ in speed, nobody knows who is the busiest: the bound is the least over all candidates,
each with the jobs that would make it so. For two stages s <= j, the first F at j comes after one at s and the
last I at j is followed by one at s, hence

    span(s) >= F and hops down from s to j  +  to_last_input(j)  +  I and hops up  +  W(s)

A staggered period is at least every span plus the stage's reduce and update. A makespan adds the way from
stage 0. The simple bounds of the literature (work, or work plus idle) are the first line alone; with a
tight stash they are up to a tenth too low, and would blame the schedule for it.

A fused backward is the same algebra with I := I + W and W := 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.core.words.ops import Worker
from everstep.schedule.compact import UNLIMITED, stash_limit
from everstep.schedule.hosts import least_busiest, work_time
from everstep.schedule.instance import Instance
from everstep.schedule.schedule import FUSED_MODES, STAGGERED_MODES


@dataclass(frozen=True, slots=True)
class _Busiest:
    """One worker, if it were its stage's busiest: in any assignment some worker has at least its jobs."""

    forward: float
    backward: float
    weight: float
    jobs: int
    early: float  # most microbatches held before their I
    late: float  # most microbatches held between I and W

    def spans(self, trip: float) -> tuple[float, float]:
        """First F to last op, and first F to the end of the last I. Both grow with `jobs`."""
        after = self.backward + self.weight
        early, late = min(self.early, self.jobs), min(self.late, self.jobs)
        held = max(early, late)
        idle = max(0.0, trip - (early - 1) * self.forward)
        work = self.jobs * (self.forward + after)
        rounds, rest = divmod(self.jobs - 1, int(held))
        span = max(work + idle, rest * self.forward + (rounds + 1) * (self.forward + trip + after))
        turn = self.jobs * self.forward + trip + after
        if self.jobs > held:
            turn = max(turn, work + idle - (held - 1) * after + trip)
        return max(span, turn), max(span - late * self.weight, turn - self.weight)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The least time of each kind over a stage's live workers, and who could be the busiest."""

    forward: float
    backward: float
    weight: float
    busiest: tuple[_Busiest, ...]
    closing: float


def lower_bound(instance: Instance, mode: str, caps: list[int] | None = None) -> float:
    """No schedule of this mode is shorter. `caps` tightens the stash per stage, as 1F1B does."""
    if instance.done:
        return _bound_of_the_rest(instance)
    return _slowest(instance, _stages(instance, mode, caps), mode)


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
            hit = _stage(instance, s, range(j, instance.replicas), mode in FUSED_MODES, caps)
            row.append(_slowest(instance, [*healthy[:s], hit, *healthy[s + 1 :]], mode))
        costs.append(row + [math.inf] * (most + 1 - len(row)))
    return costs


def _stages(instance: Instance, mode: str, caps: list[int] | None) -> list[_Stage]:
    fused = mode in FUSED_MODES
    return [_stage(instance, s, instance.live(s), fused, caps) for s in range(instance.stages)]


def _slowest(instance: Instance, stages: list[_Stage], mode: str) -> float:
    staggered = mode in STAGGERED_MODES
    best = 0.0
    for j, below in enumerate(stages):
        trip = sum(x.forward + x.backward + 2 * instance.hop for x in stages[j + 1 :])
        spans = [worker.spans(trip) for worker in below.busiest]
        from_the_top = 0.0 if staggered else sum(x.forward + instance.hop for x in stages[:j])
        best = max(best, from_the_top + min(span for span, _ in spans) + below.closing)
        last_input = min(last for _, last in spans)
        down = up = 0.0
        for above in reversed(stages[:j]):
            down += above.forward + instance.hop
            up += above.backward + instance.hop
            span = (down if staggered else from_the_top) + last_input + up + above.weight
            best = max(best, span + above.closing)
    return best


def relative_throughput(instance: Instance, mode: str) -> float:
    """Steps per second with the instance's dead, over steps per second with nobody dead: 1.0 loses nothing.

    From bounds alone, no schedule is built: about a millisecond for a thousand workers, for planners and
    simulators that ask it of many shapes. Both sides are lower bounds of the same mode, so what the answer
    is off by is the difference of their gaps (see docs/schedules.md). It is about steady steps: what is
    `done` of a broken one is ignored. Build the question with `replace(healthy, dead=...)`; a stage without
    a live worker is no instance and raises there.
    """
    return steady_bound(instance.fault_free(), mode) / steady_bound(replace(instance, done={}), mode)


def steady_bound(instance: Instance, mode: str) -> float:
    """`lower_bound` with the stash that the mode itself prescribes."""
    return lower_bound(instance, mode, stash_of_mode(instance, mode))


def stash_of_mode(instance: Instance, mode: str) -> list[int] | None:
    """1F1B holds `stages - s` microbatches at stage s; other modes hold what the instance allows."""
    return [instance.stages - s for s in range(instance.stages)] if mode == "1f1b" else None


def _stage(
    instance: Instance, stage: int, live: Sequence[int], fused: bool, caps: list[int] | None
) -> _Stage:
    sorts = _sorts(instance, stage, live)
    counts: Counter[float] = Counter()
    for (forward, input_grad, weight, _, _), count in sorts.items():
        counts[forward + input_grad + weight] += count
    level = least_busiest(counts, instance.replicas * instance.microbatches)
    busiest: dict[_Busiest, None] = {}
    for forward, input_grad, weight, early, late in sorts:
        if caps is not None:
            early, late = min(early, caps[stage]), min(late, caps[stage])
        work = forward + input_grad + weight
        busiest[
            _Busiest(
                forward=forward,
                backward=input_grad + weight if fused else input_grad,
                weight=0.0 if fused else weight,
                jobs=max(1, math.ceil(level / work - 1e-9)) if work > 0 else 1,
                early=max(1.0, early),
                late=max(1.0, late),
            )
        ] = None
    return _Stage(
        forward=min(x.forward for x in busiest),
        backward=min(x.backward for x in busiest),
        weight=min(x.weight for x in busiest),
        busiest=tuple(busiest),
        closing=instance.closing(stage),
    )


def _sorts(
    instance: Instance, stage: int, live: Sequence[int]
) -> Counter[tuple[float, float, float, float, float]]:
    """The live workers of a stage by what tells them apart: F, I, W, and the two limits of their stash."""
    unlimited = (UNLIMITED, UNLIMITED)
    free = instance.stash_cap is None and instance.memory is None
    found: Counter[tuple[float, float, float, float, float]] = Counter()
    for k in live:
        limits = unlimited if free else stash_limit(instance, Worker(k, stage))
        times = instance.forward[k][stage], instance.input_grad[k][stage], instance.weight_grad[k][stage]
        found[*times, *limits] += 1
    return found


def _bound_of_the_rest(instance: Instance) -> float:
    """The rest of a broken step: what is left at a stage spread evenly, and what is pinned to one worker."""
    best = 0.0
    for stage in range(instance.stages):
        live = instance.live(stage)
        pinned = dict.fromkeys(live, 0.0)
        fastest = min(work_time(instance, Worker(k, stage)) for k in live)
        loose = 0.0
        for microbatch in instance.homes():
            done = instance.done.get((microbatch, stage))
            if done is None:
                loose += fastest
            elif done.host in pinned:
                pinned[done.host] += work_time(instance, Worker(done.host, stage), done.kinds)
        level = max((sum(pinned.values()) + loose) / len(live), max(pinned.values()))
        best = max(best, level + instance.closing(stage))
    return best
