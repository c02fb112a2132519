"""When each op of a fixed order runs, and how fast the order repeats.

Every op starts as early as its worker, its input and its stage's release allow. With a barrier, all stages
are released at 0 and the answer is the makespan. Without one, a stage is released when its own update of
the step before is done: run the order again with the ends of the last run as releases, and the ends move on
by the period. That is the power iteration of max-plus algebra: any round's largest advance is a period the
order can keep. So is the largest advance over several rounds, divided by their number: with x(n) the ends of
round n and T that period, the releases max over n of x(n) - n T are followed by ends that are T later, unless
a longer wait shows in the round after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.schedule.compact import Compact

ROUNDS = 6  # of a repeating order that are looked at


@dataclass(slots=True)
class Timing:
    starts: list[list[float]]  # aligned with the order
    ends: list[float]  # per stage: end of its last op, reduce and update included
    released: list[float]  # per stage

    def period(self) -> float:
        return max(end - released for end, released in zip(self.ends, self.released, strict=True))

    def opens(self) -> list[float]:
        """Per stage: its first start. A stage whose ops are all done opens with its reduce, then."""
        stages = len(self.released)
        return [
            min((s[0] for s in self.starts[stage::stages] if s), default=released)
            for stage, released in enumerate(self.released)
        ]

    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(self.ends) - min(self.opens())


def steady(problem: Compact, order: Sequence[Sequence[int]], first: Timing) -> Timing:
    """The best round found of a repeating order."""
    # The first round knows no earlier one: a stage's window opens with its first op.
    best = Timing(first.starts, first.ends, first.opens())
    # Everything began with stage 0's first op: if stage 0 is the slowest, its window cannot shrink.
    if best.period() <= best.ends[0] - best.released[0] + 1e-9:
        return best
    rounds = [first]
    for _ in range(ROUNDS):
        rounds.append(run(problem, order, rounds[-1].ends))
    period = min(
        max(b - a for a, b in zip(one.ends, other.ends, strict=True)) / (number - before)
        for number, other in enumerate(rounds)
        for before, one in enumerate(rounds[:number])
    )
    balanced = [
        max(ends)
        for ends in zip(*([end - n * period for end in r.ends] for n, r in enumerate(rounds)), strict=True)
    ]
    return min(best, *rounds[1:], run(problem, order, balanced), key=Timing.period)


def run(problem: Compact, order: Sequence[Sequence[int]], released: Sequence[float]) -> Timing:
    """Start times of a fixed order. The order must be free of deadlock, as every generator's is."""
    stages, hop, last_stage, num_workers = problem.stages, problem.hop, problem.stages - 1, len(order)
    host, forward, backward, weight = problem.host, problem.forward, problem.backward, problem.weight
    past = min(released)
    # An end of +inf means "not yet"; what was done before we started ended long ago.
    never, long_ago = float("inf"), past - hop
    forward_end = [long_ago if have else never for have in problem.have_forward]
    input_end = [long_ago if have else never for have in problem.have_input]
    at = [0] * num_workers
    clock = [released[w % stages] for w in range(num_workers)]
    starts: list[list[float]] = [[] for _ in range(num_workers)]
    waits_f: dict[int, int] = {}
    waits_i: dict[int, int] = {}
    ready = list(range(num_workers))
    while ready:
        worker = ready.pop()
        codes, position, now, mine = order[worker], at[worker], clock[worker], starts[worker]
        num_codes = len(order[worker])
        while position < num_codes:
            unit, kind = divmod(codes[position], 3)
            cell, stage = host[unit], unit % stages
            if kind == 0:
                if stage:
                    came = forward_end[unit - 1] + hop
                    if came > now:
                        if came == never:
                            waits_f[unit - 1] = worker
                            break
                        now = came
                mine.append(now)
                now += forward[cell]
                forward_end[unit] = now
                if unit in waits_f:
                    ready.append(waits_f.pop(unit))
            elif kind == 1:
                if stage != last_stage:
                    came = input_end[unit + 1] + hop
                    if came > now:
                        if came == never:
                            waits_i[unit + 1] = worker
                            break
                        now = came
                mine.append(now)
                now += backward[cell]
                input_end[unit] = now
                if unit in waits_i:
                    ready.append(waits_i.pop(unit))
            else:
                mine.append(now)
                now += weight[cell]
            position += 1
        at[worker] = position
        clock[worker] = now
    assert all(len(s) == len(o) for s, o in zip(starts, order, strict=True)), "the order deadlocks"
    ends = [
        max((clock[w] for w in range(stage, num_workers, stages) if order[w]), default=released[stage])
        + problem.closing[stage]
        for stage in range(stages)
    ]
    return Timing(starts, ends, list(released))
