"""Who adds up which stretch of a stage's gradient sums, and what each worker gives to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from everstep.engine.sums.sum_units import CHUNK


class SumPart(NamedTuple):
    """What one worker adds to a stretch of the whole stage's sum."""

    tensors: tuple[Tensor, ...]  # the stretch of its buffer, then the promoted sums in it, or all as one
    peaks: Sequence[int] = ()  # of its contributions, by slot; for plain sums none
    promoted: Sequence[tuple[int, int]] = ()  # slot and level of each promoted sum
    high: Tensor | None = None  # what 32 bits of the stretch lack (`joined`); None: nothing
    wide: Sequence[int] = ()  # the slots of which it says anything
    is_short: bool = False  # 31 bits hold each of the promoted sums


class PartsOfOne(NamedTuple):
    """What one worker, or one node, adds to several stretches."""

    parts: Sequence[SumPart]
    peaks: Sequence[int]  # of all its contributions, whatever the stretches


def joined(low: Tensor, high: Tensor) -> Tensor:
    """The integers that 32 bits with their sign and what those lack, in units of 2**32, stand for."""
    return (high.long() << 32).add_(low)


def parted(sums: Tensor, low: Tensor, high: Tensor) -> None:
    """The inverse of `joined`. What is too long is cut; taken from the sum again, it leaves no trace."""
    low.copy_(sums)
    high.copy_((sums - low) >> 32)


def virtual_chunks(size: int, replicas: int, align: int = 64) -> list[slice]:
    """Fixed stretches of a stage's buffer, whichever workers live: what is summed at once, and by one worker.

    The sum of squares of a stretch is one number, however many stretches its owner has; so the norm's bits do
    not depend on the membership either.
    """
    count = replicas * max(2, -(-size // (replicas * CHUNK)))
    blocks = -(-size // align)
    edges = [min(size, align * (blocks * i // count)) for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def owned(chunks: Sequence[slice], members: Sequence[int], owner: int) -> Sequence[slice]:
    """The stretches that one of the live peers sums."""
    at, count = members.index(owner), len(chunks)
    return chunks[count * at // len(members) : count * (at + 1) // len(members)]


def peaks_of(parts: Sequence[SumPart] | Sequence[PartsOfOne]) -> list[int]:
    """Of all microbatches of a step, from the parts of all workers; for plain sums none."""
    return [max(column) for column in zip(*(part.peaks for part in parts), strict=True)]
