"""The strict sums of a GPU with kernels of their own (`kernels`): what those need beside the sums.

Sums are not emptied when a step begins: the first contribution to a slot overwrites what was there, and what
has had none is emptied before anyone reads it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from everstep.engine.layers.model import Slot
from everstep.engine.sums import kernels
from everstep.net import host_memory


class Planes(NamedTuple):
    """Of a buffer of sums."""

    low: Tensor
    high: Tensor | None = None  # what these lack, where they have 32 bits of 40


class DeviceSums:
    def __init__(self, slots: Sequence[Slot], size: int, device: torch.device) -> None:
        assert all(slot.offset % 16 == 0 for slot in slots)
        assert all(a.offset + a.size <= b.offset for a, b in pairwise(slots))
        self._slots, self._device = slots, device
        self._rooms = [*(slot.offset for slot in slots[1:]), size][: len(slots)]
        self._starts: list[int] = []  # of the blocks of the reduce
        self._tables: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def begin(self, units: Sequence[int]) -> None:
        """The exponents of the units, by slot."""
        offsets = torch.tensor([kernels.OFFSET * 2.0**unit for unit in units], dtype=torch.float64)
        self._offsets = host_memory.to_device(offsets, self._device)
        self._units = [2.0**unit for unit in units]
        self._peaks = torch.zeros(2 * len(units), device=self._device)
        self._untouched = {index for index, slot in enumerate(self._slots) if slot.size}

    def add(self, sums: Planes, contributions: Sequence[tuple[int, Tensor]]) -> None:
        """As few launches as can be: the host needs longer for each than the device for a small tensor."""
        held: dict[int, Tensor] = {}
        for index, contribution in contributions:
            if index in held or len(held) == kernels.MOST:
                self._add_at_once(sums, held)
                held = {}
            held[index] = contribution
        self._add_at_once(sums, held)

    def _add_at_once(self, sums: Planes, held: Mapping[int, Tensor]) -> None:
        addends = [
            kernels.Addend(x.contiguous(), index, self._slots[index].offset, index in self._untouched)
            for index, x in held.items()
        ]
        self._untouched.difference_update(held)
        kernels.add_units(*sums, addends, self._offsets, self._peaks)

    def subtract(self, sums: Planes, index: int, contribution: Tensor) -> None:
        peaks = torch.zeros_like(self._peaks)
        addend = kernels.Addend(contribution.contiguous(), index, self._slots[index].offset)
        kernels.add_units(*sums, [addend], self._offsets, peaks, sign=-1)

    def take_peaks(self) -> Tensor:
        """By slot, since they were last taken; then, by slot, 1 if its sums needed more than 32 bits."""
        peaks, self._peaks = self._peaks, torch.zeros_like(self._peaks)
        return peaks

    def empty_untouched(self, sums: Planes) -> None:
        for index in self._untouched:
            slot = self._slots[index]
            for plane in sums:
                if plane is not None:
                    plane[slot.offset : slot.offset + slot.size].zero_()
        self._untouched.clear()

    def means(
        self,
        where: slice,
        parts: Sequence[tuple[Tensor, Tensor | None]],
        weight: float,
        out: Tensor,
        *,
        start: int,
        origin: int,
    ) -> None:
        """As `GradientSums.means`, of sums that were not promoted; parts as for `kernels.mean_of`."""
        if self._tables is None:
            self._tables = self._make_tables()
        blocks = range(bisect_right(self._starts, where.start) - 1, bisect_left(self._starts, where.stop))
        scales = torch.tensor([*self._units, reciprocal(weight)], dtype=torch.float64)
        there = host_memory.to_device(scales, self._device)
        kernels.mean_of(out, parts, self._tables, there, blocks, where, start=start, origin=origin)

    def _make_tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots: list[int] = []
        for index, (slot, room) in enumerate(zip(self._slots, self._rooms, strict=True)):
            starts = range(slot.offset if index else 0, room, kernels.BLOCK)
            self._starts += starts
            slots += [index] * len(starts)
        ends = [slot.offset + slot.size for slot in self._slots]
        tables = (slots, self._starts, ends, self._rooms)
        kinds = (torch.int32, torch.int64, torch.int64, torch.int64)
        a, b, c, d = (
            host_memory.to_device(torch.tensor(table, dtype=kind), self._device)
            for table, kind in zip(tables, kinds, strict=True)
        )
        return a, b, c, d


def reciprocal(weight: float) -> float:
    """NaN where nothing counts, as tensors divide: the update of such a step is skipped."""
    return 1.0 / weight if weight else math.nan
