"""What a run without faults would compute: the storm's yardstick.

Payloads are symbols. A gradient is a sorted list of (microbatch, was it computed from the right weights); a
state is a chain of numbers, one link per update. So a wrong sum or a state of another history is seen at
once, and nothing is ever computed in floating point that could hide it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from everstep.core.worker.rules import TaskRules
from everstep.protocol.ops import Microbatch
from everstep_lab.draw import Draw

Bag = tuple[tuple[tuple[int, ...], bool], ...]
_MASK = (1 << 61) - 1


class VirtualState(NamedTuple):
    step: int
    chain: int


class Cell:
    """A buffer: what it holds can change while others refer to it."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value


class VirtualSum(NamedTuple):
    """A stage's sum. `combined`: with the other half of a tied tensor."""

    bag: Bag
    combined: bool = False


def applied(state: VirtualState, step: int, scale: float | None) -> VirtualState:
    """The state after one more update. Deterministic on every Python, unlike `hash`."""
    mark = 0 if scale is None else 1 + int(scale * 1e9)
    return VirtualState(step, ((state.chain ^ (step * 1_000_003 + mark)) * 0x9E3779B97F4A7C15 + 1) & _MASK)


def spoiled(state: VirtualState, step: int) -> VirtualState:
    """The same with a wrong contribution in it, on every replica that has used the sum."""
    return VirtualState(state.step, (state.chain * 31 + step) & _MASK)


def weight(step: int, microbatch: Microbatch) -> float:
    """What a microbatch counts: of no two steps alike, often 0, in tenths that no order of summing hides."""
    return ((7 * step + 5 * microbatch.home + 3 * microbatch.number) % 11) / 10


class Truth:
    """Norms per step and stage are drawn: some near the clip, some beyond it, some not finite."""

    def __init__(self, seed: int, rules: TaskRules) -> None:
        draw = Draw(seed, "norms")
        values = (0.01, 0.05, 0.6, 3.0, math.nan) if rules.clip is not None else (0.01,)
        self.norms = [[draw.choice(values) for _ in range(rules.stages)] for _ in range(rules.steps + 1)]
        if not any(all(map(math.isfinite, norms)) for norms in self.norms[1:]):
            self.norms[-1] = [0.01] * rules.stages  # a run that trains nothing fails, and rightly
        self.states = [VirtualState(0, 0)]
        for step in range(1, rules.steps + 1):
            self.states.append(applied(self.states[-1], step, self._scale(rules, step)))
        microbatches = [Microbatch(k, m) for k in range(rules.replicas) for m in range(rules.microbatches)]
        self.whole_sum: Bag = tuple(sorted((m, True) for m in microbatches))
        self._microbatches = microbatches

    def weight(self, step: int) -> float:
        """Of all microbatches of a step."""
        return math.fsum(weight(step, microbatch) for microbatch in self._microbatches)

    def squares(self, step: int, stage: int) -> float:
        norm = self.norms[step][stage]
        return norm * norm

    def _scale(self, rules: TaskRules, step: int) -> float | None:
        squares = [norm * norm for norm in self.norms[step]]
        finite = all(map(math.isfinite, squares))
        return rules.scale(math.sqrt(math.fsum(squares)) if finite else math.nan)
