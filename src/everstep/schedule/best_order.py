"""The best order found of a compact step: one dispatch for each of a few habits, until the bound is met."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from everstep.errors import InternalError
from everstep.schedule.compact import Compact
from everstep.schedule.dispatch import HABITS, dispatch
from everstep.schedule.folded import FOLDED_HABITS, dispatch_folded
from everstep.schedule.modes import MODES
from everstep.schedule.timing import Timing, run, steady

ONLINE_EFFORT = 13_000  # ops dispatched, over all habits tried: about 40 ms
THOROUGH_EFFORT = 10_000_000
GOOD_ENOUGH = 1e-3


def best_order(problem: Compact, mode: str, bound: float, effort: int) -> tuple[list[list[int]], Timing]:
    """The best of a few habits; one at least, and no more once the bound is met."""
    best: tuple[float, list[list[int]], Timing] | None = None
    cost = max(1, problem.num_ops())
    tries: list[Callable[[], list[list[int]]]] = (
        [partial(dispatch_folded, problem, habit) for habit in FOLDED_HABITS]
        if problem.is_folded
        else [partial(dispatch, problem, habit, bound) for habit in HABITS]
    )
    for tried, make in enumerate(tries):
        if best is not None and (cost * (tried + 1) > effort or best[0] <= bound * (1 + GOOD_ENOUGH)):
            break
        order = make()
        timing, value = judged(problem, order, mode)
        if best is None or value < best[0] - 1e-12:
            best = value, order, timing
    assert best is not None
    if math.isinf(best[0]):
        raise InternalError(f"no order of all {cost} ops was found in mode {mode}")
    return best[1], best[2]


def time_order(problem: Compact, order: list[list[int]], mode: str) -> Timing:
    first = run(problem, order, [0.0] * len(problem.closing))
    return steady(problem, order, first) if MODES[mode].staggered else first


def judged(problem: Compact, order: list[list[int]], mode: str) -> tuple[Timing, float]:
    """Its times and its value. An order that could not be completed would be the shortest of all."""
    timing = time_order(problem, order, mode)
    is_whole = sum(map(len, order)) == problem.num_ops()
    return timing, value_of(timing, mode) if is_whole else math.inf


def value_of(timing: Timing, mode: str) -> float:
    """What the mode minimises."""
    return timing.period() if MODES[mode].staggered else max(timing.ends)
