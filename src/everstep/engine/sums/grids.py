"""Sums that do not depend on their order: integers on a grid that is agreed on before the step begins.

A contribution is the gradient of one tensor from one microbatch. It is rounded to a multiple of the tensor's
grid, a power of two, and added as an integer. Integers add up to the same bits in any order and any grouping,
as long as no sum overflows. So the grid follows from a *limit*: a contribution is at most 2**limit, and with
the number of contributions known, so is the largest sum.

    |x| <= 2**limit          rounded to the grid of level 0
    |x| >  2**limit          *promoted*: to a sum of its own, whose limit and grid are 2**span times as large

The level of a contribution follows from its own largest element, its *peak*, and from the limit; nothing is
ever rounded twice, and no step is done again. Limits follow the peaks of the step before, a few bits above
them, so that promotion is rare; the peaks of a step are the largest of all its microbatches, which every
worker of the stage learns in the reduce. Limits are part of the state: they travel in checkpoints, copies and
feeds. docs/strict-sums.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MOST_SHORT = 63  # contributions of one worker whose sum 40 bits hold
StrictKind = Literal["strict", "strict40"]

NO_PEAK = -(1 << 15)  # no contribution, or only zeros
NOT_FINITE = 1 << 15  # an element was NaN or infinite: the sum of the tensor is NaN
NO_LIMIT = NO_PEAK  # nothing is known of the tensor yet
_LOWEST, _HIGHEST = -90, 128  # of a limit; what is below 2**-90 does not move any weight


@dataclass(frozen=True, slots=True, kw_only=True)
class SumGrid:
    """The arithmetic of one kind of sum, for a number of contributions."""

    first: int  # the limit of a tensor of which nothing is known
    headroom: int  # bits between a tensor's peak and the next step's limit
    span: int  # bits between two levels
    depth: int  # bits between a limit and its grid
    # Of a limit, bits per step: one wild step must not make the next ones much coarser.
    rise: int = 2
    fall: int = 2

    def level(self, limit: int, peak: int) -> int:
        """Where a contribution of this peak belongs."""
        return max(0, -(-(peak - self.known(limit)) // self.span))

    def unit(self, limit: int, level: int) -> int:
        """The grid of a level, as an exponent of two."""
        return self.known(limit) + level * self.span - self.depth

    def following(self, limit: int, peak: int) -> int:
        """The limit of the next step."""
        if peak in (NO_PEAK, NOT_FINITE):
            return limit
        wanted = peak + self.headroom
        if limit != NO_LIMIT:
            wanted = max(min(wanted, limit + self.rise), limit - self.fall)
        return max(_LOWEST, min(_HIGHEST, wanted))

    def known(self, limit: int) -> int:
        return self.first if limit == NO_LIMIT else limit


def grid(kind: StrictKind, contributions: int) -> SumGrid:
    """So that the sum of this many contributions is at most 2**50 units. Of `strict40` also the sum of
    MOST_SHORT contributions is below 2**39: what one worker has to send.
    """
    bits = max(contributions - 1, 1).bit_length()
    if kind == "strict":
        return SumGrid(first=2, headroom=5, span=12, depth=50 - bits)
    depth = min(39 - MOST_SHORT.bit_length(), 50 - bits)
    return SumGrid(first=2, headroom=4, span=10, depth=depth, rise=4, fall=1)


def exponent(peak: float) -> int:
    """The least e with |x| < 2**e for every element, from the largest |x|."""
    if not math.isfinite(peak):
        return NOT_FINITE
    return math.frexp(peak)[1] if peak else NO_PEAK


class Limits:
    """The limits of a stage's tensors, by step: of the step that is summed now, and of its neighbours."""

    def __init__(self, names: Sequence[str], grid: SumGrid) -> None:
        self.names, self.grid = tuple(names), grid
        self._known: dict[int, tuple[int, ...]] = {}

    def at(self, step: int) -> tuple[int, ...]:
        return self._known.get(step, (NO_LIMIT,) * len(self.names))

    def follow(self, step: int, peaks: Sequence[int]) -> None:
        """The peaks of a step are known, and so the limits of the next. Asked twice, the same answer."""
        pairs = zip(self.at(step), peaks, strict=True)
        self._known[step + 1] = tuple(self.grid.following(limit, peak) for limit, peak in pairs)
        self._known = {known: limits for known, limits in self._known.items() if known >= step - 1}

    def state(self, step: int) -> dict[str, int]:
        """What the state after a step holds: the limits of the step that comes next, where any are known."""
        return {n: limit for n, limit in zip(self.names, self.at(step + 1), strict=True) if limit != NO_LIMIT}

    def load(self, step: int, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self._known = {step + 1: tuple(state.get(name, NO_LIMIT) for name in self.names)}
