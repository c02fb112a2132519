"""How a strict sum is kept, and how a contribution gets into it.

A strict sum is a whole number of units. On a GPU it is kept as an integer. On a CPU `strict` keeps it as the
difference of an fp64 from an offset of 1.5 x 2^52 units: there an addition rounds to whole units by itself,
in one pass over memory instead of four. An fp64 rounds ties to even, which would depend on the sum so far; so
a contribution is first made larger by 2^-52 of itself, and what was a tie is rounded away from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Accumulate = Literal["strict", "strict40", "fp32"]

CPU_BLOCK = 1 << 16  # elements that several passes go over: they stay in a cache
CHUNK = 4 << 20  # elements of the reduce that are summed at once
SUM_BLOCK = 1 << 15  # elements of a CPU's sums that several contributions are added to at once
_BLOCK = {"cpu": CPU_BLOCK, "cuda": 1 << 24}  # elements converted at once: in a cache; in a little memory
_LARGER = 1 + 2.0**-52
_OFFSET = 1.5 * 2.0**52


class Addition(NamedTuple):
    total: Tensor
    contribution: Tensor  # flat
    unit: int  # its exponent


class SumUnits(NamedTuple):
    """A sum's type, what an empty one holds, how contributions get in."""

    dtype: torch.dtype
    offset: float  # in units
    add: Callable[[Sequence[Addition], int], None]  # +1 or -1


def units_of(kind: Accumulate, *, late: bool) -> SumUnits | None:
    """None: plain sums. `late`: what was added may have to be taken back, so it must be an integer."""
    if kind == "fp32":
        return None
    return _LONGS if late else _DOUBLES


def kept_as(kind: Accumulate, *, late: bool) -> tuple[torch.dtype, torch.dtype | None] | None:
    """The types of the buffer, and of one for what that lacks (`sum_parts.joined`); None: plain sums."""
    units = units_of(kind, late=late)
    if units is None:
        return None
    return (torch.int32, torch.int8) if kind == "strict40" and late else (units.dtype, None)


def _add_to_doubles(additions: Sequence[Addition], sign: int) -> None:
    totals, contributions = [], []
    for total, contribution, _ in additions:
        if total.numel() <= CPU_BLOCK:
            totals.append(total)
            contributions.append(contribution)
        else:
            totals += torch.split(total, CPU_BLOCK)
            contributions += torch.split(contribution, CPU_BLOCK)
    if totals:
        torch._foreach_add_(totals, contributions, alpha=sign * _LARGER)


def _add_to_integers(additions: Sequence[Addition], sign: int) -> None:
    for total, contribution, unit in additions:
        size = _BLOCK[total.device.type]
        for start in range(0, total.numel(), size):
            block = slice(start, start + size)
            units = torch.mul(contribution[block].double(), 2.0**-unit).round_().to(total.dtype)
            total[block].add_(units, alpha=sign)


_DOUBLES = SumUnits(torch.float64, _OFFSET, _add_to_doubles)
_LONGS = SumUnits(torch.int64, 0.0, _add_to_integers)
