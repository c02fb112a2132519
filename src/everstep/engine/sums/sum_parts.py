"""Who adds up which stretch of a stage's gradient sums, and what each worker gives to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.errors import PeerError
from everstep.schedule.footprint import CHUNK

SHORT = torch.uint8  # the type of sums of 40 bits on their way
_BYTES = 5


class SumPart(NamedTuple):
    """What one worker adds to a stretch of the whole stage's sum."""

    tensors: tuple[Tensor, ...]  # the stretch of its buffer, then the promoted sums in it, or all as one
    peaks: Sequence[int] = ()  # of its contributions, by slot; for plain sums none
    promoted: Sequence[tuple[int, int]] = ()  # slot and level of each promoted sum
    high: Tensor | None = None  # of the worker's own stretch: what 32 bits of it lack (`joined`)

    @property
    def facts(self) -> list[object]:
        """All but the tensors, in JSON's terms."""
        return [list(self.peaks), [list(key) for key in self.promoted]]

    @staticmethod
    def arrived(tensors: tuple[Tensor, ...], facts: Any) -> SumPart:
        peaks, promoted = facts
        return SumPart(tensors, peaks, [(int(slot), int(level)) for slot, level in promoted])


def joined(low: Tensor, high: Tensor) -> Tensor:
    """The integers that 32 bits with their sign and what those lack, in units of 2**32, stand for."""
    return (high.long() << 32).add_(low)


def parted(sums: Tensor, low: Tensor, high: Tensor) -> None:
    """The inverse of `joined`. What is too long is cut; taken from the sum again, it leaves no trace."""
    low.copy_(sums)
    high.copy_((sums - low) >> 32)


def shortened(low: Tensor, high: Tensor) -> Tensor:
    """Integers of 40 bits in as many: the low 32 of all of them, then the high 8."""
    count = low.numel()
    made = torch.empty(_BYTES * count, dtype=SHORT, device=low.device)
    made[: 4 * count].view(torch.int32).copy_(low)
    torch.add(high, low >> 31, out=made[4 * count :].view(torch.int8))
    return made


def restored(sums: Tensor, where: slice) -> Tensor:
    """Some of them, as they were; of sums that were not shortened a view."""
    count, some = length_of(sums), where.stop - where.start
    if not 0 <= where.start <= where.stop <= count:
        raise PeerError("a peer sent sums that are too short")
    if sums.dtype != SHORT:
        return sums[where]
    low, high = sums[4 * where.start : 4 * where.stop], sums[4 * count :][where]
    found = torch.empty(some, dtype=torch.int64, device=sums.device)
    halves = found.view(torch.int32)
    halves[::2].copy_((low if low.storage_offset() % 4 == 0 else low.clone()).view(torch.int32))
    halves[1::2].copy_(high.view(torch.int8))  # with their sign
    return found


def length_of(sums: Tensor) -> int:
    return sums.numel() // _BYTES if sums.dtype == SHORT else sums.numel()


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


def peaks_of(parts: Sequence[SumPart]) -> list[int]:
    """Of all microbatches of a step, from the parts of all workers; for plain sums none."""
    return [max(column) for column in zip(*(part.peaks for part in parts), strict=True)]
