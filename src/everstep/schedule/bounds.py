"""How fast a step can possibly be: lower bounds that every schedule obeys, whatever its hosts and order.

For one stage s, take its busiest worker. It runs at least `jobs` microbatches, `work` seconds of ops. Below
it lies a round trip R: from the end of an F to the earliest gradient for it. Its stash holds at most A
microbatches. Then

    span    first F to last op >= work + idle, where idle = R - (A - 1) F: until the first gradient is back
    the worker
            can only run F, and only A of them.
    cycle   F number i + A waits for the end of W number i, which is a round trip later: every A
    microbatches cost
            at least one round trip.
    turn    when the last F starts, all but A - 1 others have left the stash, so all their I and W are
    behind us;
            then the last microbatch still has its own round trip, I and W ahead.

    to_last_input   first F to the end of the last I. W may be left over, but no more than the stash holds:
    A of them.

For two stages s <= j, the first F at j comes after one at s and the last I at j is followed by one at s,
hence

    span(s) >= F and hops down from s to j  +  to_last_input(j)  +  I and hops up  +  W(s)

A staggered period is at least every span plus the stage's reduce and update. A makespan adds the way from
stage 0. The simple bounds of the literature (work, or work plus idle) are the first line alone; with a
tight stash they are up to a tenth too low, and would blame the schedule for it.

A fused backward is the same algebra with I := I + W and W := 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.core.ops import Kind, Worker
from everstep.schedule.compact import stash_limit
from everstep.schedule.hosts import stage_quotas, work_time
from everstep.schedule.instance import Instance
from everstep.schedule.schedule import FUSED_MODES, STAGGERED_MODES


@dataclass(frozen=True, slots=True)
class _Stage:
    """The least (or most) of each quantity over a stage's live workers: what any of them must obey."""

    forward: float
    backward: float
    weight: float
    most_forward: float
    most_after: float  # I + W of the slowest worker
    most_weight: float
    work: float  # of the busiest worker, in the best assignment
    jobs: int  # at least so many microbatches on the busiest worker
    alike: bool  # all workers have the same times
    early: float  # most microbatches held before their I
    late: float  # most microbatches held between I and W
    closing: float


def lower_bound(instance: Instance, mode: str, caps: list[int] | None = None) -> float:
    """No schedule of this mode is shorter. `caps` tightens the stash per stage, as 1F1B does."""
    fused = mode in FUSED_MODES
    if instance.done:
        return _bound_of_the_rest(instance)
    stages = [_stage(instance, s, fused, caps) for s in range(instance.stages)]
    spans, last_inputs = _spans(stages, instance.hop)
    best = 0.0
    for j in range(instance.stages):
        down = sum(x.forward + instance.hop for x in stages[:j])
        up = 0.0
        for s in range(j, -1, -1):
            if s < j:
                up += stages[s].backward + instance.hop
                down_here = sum(x.forward + instance.hop for x in stages[s:j])
                span = down_here + last_inputs[j] + up + stages[s].weight
            else:
                down_here, span = 0.0, spans[j]
            staggered = mode in STAGGERED_MODES
            best = max(best, span + stages[s].closing + (0.0 if staggered else down - down_here))
    return best


def _spans(stages: list[_Stage], hop: float) -> tuple[list[float], list[float]]:
    """Per stage: first F to last op, and first F to the end of the last I."""
    spans, last_inputs = [], []
    for s, x in enumerate(stages):
        trip = sum(below.forward + below.backward + 2 * hop for below in stages[s + 1:])
        after = x.backward + x.weight
        early, late, held = min(x.early, x.jobs), min(x.late, x.jobs), min(max(x.early, x.late), x.jobs)
        idle = max(0.0, trip - (early - 1) * x.most_forward)
        span = x.work + idle
        if x.alike:
            rounds, rest = divmod(x.jobs - 1, int(held))
            span = max(span, rest * x.forward + (rounds + 1) * (x.forward + trip + after))
        turn = x.jobs * x.forward + trip + after
        if x.jobs > held:
            turn = max(turn, x.work + idle - (held - 1) * x.most_after + trip)
        spans.append(max(span, turn))
        last_inputs.append(max(span - late * x.most_weight, turn - x.weight))
    return spans, last_inputs


def _stage(instance: Instance, stage: int, fused: bool, caps: list[int] | None) -> _Stage:
    workers = [Worker(k, stage) for k in instance.live(stage)]
    forward = [instance.time(Kind.F, w) for w in workers]
    backward = [instance.time(Kind.B if fused else Kind.I, w) for w in workers]
    weight = [0.0 if fused else instance.time(Kind.W, w) for w in workers]
    work, quota = stage_quotas(instance, stage)
    times = {f + b + w for f, b, w in zip(forward, backward, weight, strict=True)}
    alike = len(set(zip(forward, backward, weight, strict=True))) == 1
    jobs = max(quota.values()) if alike else math.ceil(work / max(times) - 1e-9)
    limits = [stash_limit(instance, w) for w in workers]
    early, late = (max(x[i] for x in limits) for i in (0, 1))
    if caps is not None:
        early, late = min(early, caps[stage]), min(late, caps[stage])
    return _Stage(
        forward=min(forward), backward=min(backward), weight=min(weight), most_forward=max(forward),
        most_after=max(b + w for b, w in zip(backward, weight, strict=True)), most_weight=max(weight),
        work=work, jobs=jobs, alike=alike, early=max(1.0, early), late=max(1.0, late),
        closing=instance.closing(stage))


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
