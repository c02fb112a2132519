"""The gradients of one worker's own microbatches, summed tensor by tensor in one flat buffer.

    fp32       4 bytes   plain sums; other bits in another order
    fp64       8 bytes   plain sums; the same bits in any order, practically always
    strict     8 bytes   exact sums on a grid (see `grids`); the same bits in any order, always
    strict32   4 bytes   the same with 31 bits: coarser, half the memory and half the bytes of a reduce

A strict sum is a whole number of units. On a GPU it is kept as an integer. On a CPU `strict` keeps it as the
difference of an fp64 from an offset of 1.5 x 2^52 units: there an addition rounds to whole units by itself,
in one pass over memory instead of four. An fp64 rounds ties to even, which would depend on the sum so far; so
a contribution is first made larger by 2^-52 of itself, and what was a tie is rounded away from zero.

Whether a contribution must be promoted is known when its largest element is. On a CPU that is before it is
added. A GPU is not waited for: its contribution is added at once, and taken back if the peak, read when the
next microbatch is added, says so. Integers allow it: what was added is subtracted, whatever it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from everstep.engine import device as devices
from everstep.engine import grids, kernels
from everstep.engine.device_sums import DeviceSums
from everstep.engine.model import Slot
from everstep.engine.sum_parts import SumPart
from everstep.schedule.footprint import CHUNK

Accumulate = Literal["strict", "strict32", "fp64", "fp32"]
Product = Callable[[], Tensor]  # makes a contribution; the same bits whenever it is called
Empty = Callable[..., Tensor]  # (shape, dtype=) -> a tensor

_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements converted at once: in a cache; in a little memory
_LARGER = 1 + 2.0**-52
_OFFSET = 1.5 * 2.0**52


class _Units(NamedTuple):
    """How a strict sum is kept: its type, what an empty one holds, how a contribution gets in."""

    dtype: torch.dtype
    offset: float  # in units
    add: Callable[[Tensor, Tensor, int, int], None]  # sum, contribution, exponent of the unit, +1 or -1


def _add_to_doubles(total: Tensor, contribution: Tensor, unit: int, sign: int) -> None:
    for block in _blocks(total, 8):
        total[block].add_(contribution[block], alpha=sign * _LARGER)


def _add_to_integers(total: Tensor, contribution: Tensor, unit: int, sign: int) -> None:
    wide = torch.float64 if total.dtype == torch.int64 else torch.float32
    for block in _blocks(total):
        units = torch.mul(contribution[block].to(wide), 2.0**-unit).round_().to(total.dtype)
        total[block].add_(units, alpha=sign)


def _blocks(tensor: Tensor, times: int = 1) -> list[slice]:
    size = times * _BLOCK[tensor.device.type]
    return [slice(start, start + size) for start in range(0, tensor.numel(), size)]


_DOUBLES = _Units(torch.float64, _OFFSET, _add_to_doubles)
_LONGS = _Units(torch.int64, 0.0, _add_to_integers)
_INTEGERS = _Units(torch.int32, 0.0, _add_to_integers)
_PLAIN = {"fp32": torch.float32, "fp64": torch.float64}


def _units(kind: Accumulate, *, late: bool) -> _Units | None:
    if kind == "strict":
        return _LONGS if late else _DOUBLES  # what is taken back must be an integer
    return _INTEGERS if kind == "strict32" else None


class _Late(NamedTuple):
    """Contributions of one microbatch on a GPU, added before their peaks were known here."""

    products: list[tuple[int, Product]]
    places: list[int]  # of each one's peak
    peaks: Tensor
    ready: Callable[[], None]  # waits for them


class GradientSums:
    """One worker's sums of one step. `contributions` is how many the whole step has of each tensor."""

    def __init__(
        self,
        slots: Mapping[str, Slot],
        size: int,
        *,
        kind: Accumulate,
        contributions: int,
        device: torch.device,
        empty: Empty | None = None,
        late: bool | None = None,
    ) -> None:
        """`empty`: where buffers come from, for peers read from them. `late`: contributions are checked
        after they were added, as a GPU needs it.
        """
        self._empty = empty or partial(torch.empty, device=device)
        self.slots, self.size, self.kind, self.device = tuple(slots.values()), size, kind, device
        self._is_late = device.type != "cpu" if late is None else late
        self._units = _units(kind, late=self._is_late)
        self.grid = grids.grid("strict32" if kind == "strict32" else "strict", contributions)
        dtype = self._units.dtype if self._units else _PLAIN[kind]
        self.flat = self._empty((size,), dtype=dtype)
        has_kernels = self._is_late and self._units is not None and kernels.usable(device, dtype)
        self._device_sums = DeviceSums(self.slots, size, device) if has_kernels else None
        self.flat.zero_()
        self.step: int | None = None
        self.begin(None, (grids.NO_LIMIT,) * len(self.slots))

    @property
    def is_strict(self) -> bool:
        return self._units is not None

    @property
    def has_kernels(self) -> bool:
        return self._device_sums is not None

    @property
    def num_promoted(self) -> int:
        """Sums of promoted contributions, each as large as its tensor."""
        return len(self._promoted)

    def begin(self, step: int | None, limits: Sequence[int], *, leave_buffer: bool = False) -> None:
        """Empty sums for a step. `leave_buffer`: a peer still reads the old one."""
        if leave_buffer:
            self.flat = self._empty((self.size,), dtype=self.flat.dtype).zero_()
        self.step, self.limits = step, list(limits)
        self.peaks = [grids.NO_PEAK] * len(self.slots)
        self._promoted: dict[tuple[int, int], Tensor] = {}
        self._late: _Late | None = None
        self._adding: list[tuple[int, Product, Tensor | None]] = []
        if self._device_sums is not None:
            self._device_sums.begin([self._unit(index, 0) for index in range(len(self.slots))])
            return
        self.flat.zero_()
        if self._units is not None and self._units.offset and self.slots:
            views = [self._view(index) for index in range(len(self.slots))]
            torch._foreach_add_(views, [self._offset(index, 0) for index in range(len(self.slots))])

    def restart(self, *, leave_buffer: bool = False) -> None:
        """Throw the sums of this step away."""
        self.begin(self.step, self.limits, leave_buffer=leave_buffer)

    # -------------------------------------------------------------- adding

    def add(self, index: int, product: Product) -> None:
        """The contribution of a microbatch to the sum of a slot: one per microbatch."""
        assert self._units is not None
        contribution = product().reshape(-1)
        if not contribution.numel():
            return
        if self._is_late:
            self._adding.append((index, product, self._add_late(index, contribution)))
            return
        peak = grids.exponent(max(float(contribution.max()), -float(contribution.min())))
        self._place(index, peak, contribution)

    def _add_late(self, index: int, contribution: Tensor) -> Tensor | None:
        """To the sum of level 0, whatever it is; its peak, on the device, where no kernel keeps it."""
        assert self._units is not None
        if self._device_sums is not None:
            self._device_sums.add(self.flat, index, contribution)
            return None
        self._units.add(self._view(index), contribution, self._unit(index, 0), 1)
        largest: Tensor = torch.linalg.vector_norm(contribution, math.inf, dtype=torch.float32)
        return largest.reshape(1)

    def _take_back(self, index: int, contribution: Tensor) -> None:
        assert self._units is not None
        if self._device_sums is not None:
            self._device_sums.subtract(self.flat, index, contribution)
        else:
            self._units.add(self._view(index), contribution, self._unit(index, 0), -1)

    def added(self) -> None:
        """All contributions of a microbatch are in. On a GPU, now those of the one before are checked."""
        adding, self._adding = self._adding, []
        self.settle()
        if adding:
            found = [peak for _, _, peak in adding if peak is not None]
            places = list(range(len(found)))
            if self._device_sums is not None:
                found, places = [self._device_sums.take_peaks()], [index for index, _, _ in adding]
            peaks, ready = devices.on_its_way(torch.cat(found))
            self._late = _Late([(index, product) for index, product, _ in adding], places, peaks, ready)

    def settle(self) -> None:
        """From now on the sums are what they should be, also on a GPU."""
        late, self._late = self._late, None
        if late is None:
            return
        assert self._units is not None
        late.ready()
        found = late.peaks.tolist()
        for (index, product), place in zip(late.products, late.places, strict=True):
            peak = grids.exponent(found[place])
            if self._fits(index, peak):
                self.peaks[index] = max(self.peaks[index], peak)
                continue
            contribution = product().reshape(-1)
            self._take_back(index, contribution)
            self._place(index, peak, contribution)

    def _fits(self, index: int, peak: int) -> bool:
        return peak != grids.NOT_FINITE and self.grid.level(self.limits[index], peak) == 0

    def _place(self, index: int, peak: int, contribution: Tensor) -> None:
        assert self._units is not None
        self.peaks[index] = max(self.peaks[index], peak)
        if peak == grids.NOT_FINITE:
            return
        level = self.grid.level(self.limits[index], peak)
        total = self._view(index)
        if level:
            if (index, level) not in self._promoted:
                empty = self._empty((total.numel(),), dtype=total.dtype)
                self._promoted[index, level] = empty.fill_(self._offset(index, level))
            total = self._promoted[index, level]
        self._units.add(total, contribution, self._unit(index, level), 1)

    # -------------------------------------------------------------- the reduce

    def part(self, where: slice) -> SumPart:
        """What this worker adds to a stretch of the whole stage's sum: views, not copies."""
        self.settle()
        if self._device_sums is not None:
            self._device_sums.empty_untouched(self.flat)
        if not self.is_strict:
            return SumPart((self.flat[where],))
        there = dict(self._pieces(where))
        promoted = [key for key in sorted(self._promoted) if key[0] in there]
        sums = [self._promoted[key][_shifted(there[key[0]], self.slots[key[0]].offset)] for key in promoted]
        return SumPart((self.flat[where], *sums), tuple(self.peaks), promoted)

    def means(
        self,
        stretch: slice,
        chunks: Sequence[slice],
        parts: Sequence[SumPart],
        weight: float,
        out: Tensor,
        *,
        origin: int = 0,
    ) -> None:
        """All workers' parts of a stretch, summed and divided by `weight`, chunk by chunk into `out`, which
        begins at `origin`.

        Plain sums are added in the order of the parts.
        """
        levels = self._levels(stretch, parts) if self.is_strict else {}
        if self._device_sums is not None:
            flats = [part.tensors[0] for part in parts]
            self._device_sums.means(stretch, flats, weight, out, origin)
            chunks = self._uncommon(stretch, levels, parts)
        for chunk in chunks:
            here = [part.tensors[0][_shifted(chunk, stretch.start)] for part in parts]
            total = self._total(chunk, here, levels, parts) if self.is_strict else _added(here)
            torch.div(total, weight, out=out[_shifted(chunk, origin)])

    def _total(
        self,
        chunk: slice,
        sums: Sequence[Tensor],
        levels: Mapping[tuple[int, int], list[tuple[int, Tensor]]],
        parts: Sequence[SumPart],
    ) -> Tensor:
        pieces = self._pieces(chunk)
        total = self._value(sums, [(index, 0, piece) for index, piece in pieces], chunk.start)
        for index, piece in pieces:
            here = total[_shifted(piece, chunk.start)]
            for level in sorted(level for i, level in levels if i == index):
                promoted = [one[_shifted(piece, start)] for start, one in levels[index, level]]
                here.add_(self._value(promoted, [(index, level, piece)], piece.start))
            if any(part.peaks[index] == grids.NOT_FINITE for part in parts):
                here.fill_(math.nan)
        return total

    def _uncommon(
        self, stretch: slice, levels: Mapping[tuple[int, int], object], parts: Sequence[SumPart]
    ) -> list[slice]:
        """Of a stretch the slots with promoted sums, or with something that is not finite: in pieces."""
        promoted = {index for index, _ in levels}
        return [
            slice(at, min(at + CHUNK, piece.stop))
            for index, piece in self._pieces(stretch)
            if index in promoted or any(part.peaks[index] == grids.NOT_FINITE for part in parts)
            for at in range(piece.start, piece.stop, CHUNK)
        ]

    def _levels(
        self, stretch: slice, parts: Sequence[SumPart]
    ) -> dict[tuple[int, int], list[tuple[int, Tensor]]]:
        """The promoted sums of all parts by slot and level, each with the place of its first element."""
        starts = {index: piece.start for index, piece in self._pieces(stretch)}
        found: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for part in parts:
            for key, one in zip(part.promoted, part.tensors[1:], strict=True):
                found.setdefault(key, []).append((starts[key[0]], one))
        return found

    def _value(self, sums: Sequence[Tensor], pieces: list[tuple[int, int, slice]], start: int) -> Tensor:
        """The exact total of some workers' sums, in fp64. What lies between the pieces is padding: zeros."""
        assert self._units is not None
        if not self._units.offset:
            total = _added(sums).to(torch.float64)
            self._each(
                total, pieces, start, torch._foreach_mul_, lambda i, level: 2.0 ** self._unit(i, level)
            )
            return total
        total = torch.zeros_like(sums[0])
        for one in sums:
            value = one.clone()
            self._each(value, pieces, start, torch._foreach_sub_, self._offset)
            total.add_(value)
        return total

    @staticmethod
    def _each(
        total: Tensor,
        pieces: list[tuple[int, int, slice]],
        start: int,
        change: Callable[[list[Tensor], list[float]], object],
        by: Callable[[int, int], float],
    ) -> None:
        if pieces:
            views = [total[_shifted(piece, start)] for _, _, piece in pieces]
            change(views, [by(index, level) for index, level, _ in pieces])

    # -------------------------------------------------------------- how

    def values(self) -> Tensor:
        """All sums as plain numbers, in fp64; fp32 as they are."""
        if self.kind == "fp32":
            return self.flat.clone()
        whole = slice(0, self.size)
        values = torch.empty(self.size, dtype=torch.float64, device=self.device)
        self.means(whole, [whole], [self.part(whole)], 1.0, values)
        return values

    def _view(self, index: int) -> Tensor:
        slot = self.slots[index]
        return self.flat[slot.offset : slot.offset + slot.size]

    def _unit(self, index: int, level: int) -> int:
        return self.grid.unit(self.limits[index], level)

    def _offset(self, index: int, level: int) -> float:
        assert self._units is not None
        return self._units.offset * 2.0 ** self._unit(index, level)

    def _pieces(self, where: slice) -> list[tuple[int, slice]]:
        """The slots in a stretch of the buffer, and what of them lies in it."""
        found = []
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.offset, where.start), min(slot.offset + slot.size, where.stop)
            if start < stop:
                found.append((index, slice(start, stop)))
        return found


def _added(sums: Sequence[Tensor]) -> Tensor:
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total


def _shifted(piece: slice, start: int) -> slice:
    return slice(piece.start - start, piece.stop - start)
