"""The gradients of one worker's own microbatches, summed tensor by tensor in one flat buffer.

    fp32       4 bytes   plain sums; other bits in another order
    strict     8 bytes   exact sums on a grid (see `grids`); the same bits in any order, always
    strict40   5 bytes   the same on a coarser grid, for products of bf16 (on a CPU 8 bytes)

How a strict sum is kept is in `sum_units`. Of `strict40` on a GPU 32 bits with their sign are in `flat`, and
what those lack is in a second buffer, which is hardly ever read or written. 4 bytes are sent, and of tensors
of which some sums lack something a fifth, afterwards: what was sent before it was known is not sent again. A
worker that computes more microbatches in a step than 40 bits are enough for has 8 bytes from then on.

Whether a contribution must be promoted is known when its largest element is. On a CPU that is before it is
added. Contributions are put together in groups, because for most tensors the calls would cost more than the
sums; and what several microbatches add to a stretch of the sums is added while that stretch is in a cache. A
GPU is not waited for: its contribution is added at once, and taken back if the peak, read when the next ones
have been added, says so. Integers allow it: what was added is subtracted, whatever it was.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everstep.engine.layers.model import Slot
from everstep.engine.sums import grids, kernels
from everstep.engine.sums.device_sums import DeviceSums, Planes, reciprocal
from everstep.engine.sums.sum_parts import SumPart, joined, parted, peaks_of
from everstep.engine.sums.sum_units import (
    CHUNK,
    CPU_BLOCK,
    SUM_BLOCK,
    Accumulate,
    Addition,
    kept_as,
    units_of,
)
from everstep.errors import PeerError
from everstep.net import host_memory

Product = Callable[[], Tensor]  # makes a contribution; the same bits whenever it is called
Empty = Callable[..., Tensor]  # (shape, dtype=) -> a tensor

MOST_PROMOTED = 1024  # sums in a part that are sent one by one: a message has a limit
_GROUP = {"cpu": 1 << 20, "cuda": 1 << 22}  # elements that are held until they are put together: in a cache
_LAYOUTS = 64
HIGH = (torch.int8, torch.int32)
_GATHERED = 1 << 22  # elements that wait on a CPU until they are added


class _Late(NamedTuple):
    """Contributions on a GPU that were added before their peaks were known here."""

    products: list[tuple[int, Product]]
    places: list[tuple[int, int]]  # of each one's peak, and of whether its sum needed more than 32 bits
    peaks: Tensor
    ready: Callable[[], None]  # waits for them


class _Layout(NamedTuple):
    """Contributions of some slots, one after the other."""

    starts: list[int]
    ends: list[int]
    # In blocks that stay in a cache: the place of each in the buffer, its slot, its size, and its sums.
    places: list[int]
    slots: list[int]
    sizes: list[int]
    sums: list[Tensor]


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
        self._sizes = [slot.size for slot in self.slots]
        self._ends = [slot.offset + slot.size for slot in self.slots]
        self._most_held = _GROUP[device.type]
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self.is_late = device.type != "cpu" if late is None else late
        self._units = units_of(kind, late=self.is_late)
        self.grid = grids.grid("strict" if kind == "fp32" else kind, contributions)
        self._dtype = torch.float32 if self._units is None else self._units.dtype
        dtype, high = kept_as(kind, late=self.is_late) or (self._dtype, None)
        self.flat = self._empty((size,), dtype=dtype).zero_()
        self._high = None if high is None else torch.zeros(size, dtype=high, device=device)
        has_kernels = self.is_late and self._units is not None and kernels.usable(device, dtype, high)
        self._device_sums = DeviceSums(self.slots, size, device) if has_kernels else None
        self._cut()
        self.step: int | None = None
        self._num_added = 0  # microbatches
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
            self._cut()
        self._wide: set[int] = set()  # slots of whose sums some need more than 32 bits
        self.step, self.limits = step, list(limits)
        self._known = [self.grid.known(limit) for limit in limits]
        self._lowest = [self.grid.unit(limit, 0) for limit in limits]
        self.peaks = [grids.NO_PEAK] * len(self.slots)
        self._num_added = 0
        self.are_means = False  # what the buffer holds (`own_means`)
        self._promoted: dict[tuple[int, int], Tensor] = {}
        self._most: dict[tuple[int, int], int] = {}  # units that any element of each can have
        self._packed: list[Tensor] = []  # peers may read them until the step is over
        self._late: _Late | None = None
        self._adding: list[tuple[int, Product, Tensor | None]] = []
        self._group: list[tuple[int, Tensor]] = []
        self._group_size = 0
        self._gathered: list[tuple[_Layout, Tensor]] = []
        self._gathered_size = 0
        if self._device_sums is not None:
            self._device_sums.begin([self._unit(index, 0) for index in range(len(self.slots))])
            return
        if self._units is None or not self._units.offset:
            self.flat.zero_()
            if self._high is not None:
                self._high.zero_()
            return
        for index, view in enumerate(self._views):  # what lies between them stays zero
            view.fill_(self._offset(index, 0))

    def restart(self, *, leave_buffer: bool = False) -> None:
        """Throw the sums of this step away."""
        self.begin(self.step, self.limits, leave_buffer=leave_buffer)

    # -------------------------------------------------------------- adding

    def add(self, index: int, product: Product) -> None:
        """The contribution of a microbatch to the sum of a slot: one per microbatch."""
        assert self._units is not None
        assert not self.are_means
        contribution = product()
        if not self._sizes[index]:
            return
        if self.is_late:
            self._adding.append((index, product, self._add_late(index, contribution.reshape(-1))))
        else:
            self.hold(index, contribution)

    def hold(self, index: int, contribution: Tensor) -> None:
        """On a CPU: the same, once it is made."""
        size = self._sizes[index]
        if size >= self._most_held and self._device_sums is None:
            self._gather()  # what is large is not copied
        self._group.append((index, contribution))
        self._group_size += size
        if self._group_size >= self._most_held:
            self._gather()

    def flush(self) -> None:
        """Add the contributions that are held."""
        self._gather()
        gathered, self._gathered, self._gathered_size = self._gathered, [], 0
        pieces: list[tuple[int, int, Tensor, Tensor]] = []
        for layout, one in gathered:
            pieces += zip(
                layout.places, layout.slots, layout.sums, torch.split(one, layout.sizes), strict=True
            )
        if pieces:
            assert self._units is not None
            pieces.sort(key=itemgetter(0))  # a stretch of the sums stays in a cache
            self._units.add([Addition(total, one, self._unit(i, 0)) for _, i, total, one in pieces], 1)

    def _gather(self) -> None:
        """Put the contributions of a group together, and those aside that do not fit."""
        group, self._group, self._group_size = self._group, [], 0
        if self._device_sums is not None and group:
            self._device_sums.add(self._planes, group)
            return
        group = [(index, contribution) for index, contribution in group if self._sizes[index]]
        if not group:
            return
        slots, made = zip(*group, strict=True)
        layout = self._layout(slots)
        together = torch._utils._flatten_dense_tensors(made).float()  # type: ignore[no-untyped-call]
        known, peaks, unfit = self._known, self.peaks, []
        for at, (index, peak) in enumerate(zip(slots, _peaks(together, layout.starts), strict=True)):
            if peak > known[index]:
                unfit.append((at, index, peak))
            elif peak > peaks[index]:
                peaks[index] = peak
        if unfit:
            together = together.clone()
        for at, index, peak in unfit:
            contribution = together[layout.starts[at] : layout.ends[at]]
            self._place(index, peak, contribution)
            contribution.zero_()
        self._gathered.append((layout, together))
        self._gathered_size += together.numel()
        if len(made) == 1 or self._gathered_size >= _GATHERED:
            self.flush()  # what is alone was not copied

    def _layout(self, slots: tuple[int, ...]) -> _Layout:
        if slots not in self._layouts:
            assert self._units is not None
            ends = list(accumulate(self._sizes[index] for index in slots))
            starts = [0, *ends[:-1]]
            runs: list[tuple[int, int, int, int]] = []  # side by side in the buffer too
            for index, start, end in zip(slots, starts, ends, strict=True):
                at = self.slots[index].offset
                if runs and self._units.offset and runs[-1][0] - runs[-1][2] == at - start:
                    runs[-1] = (*runs[-1][:3], end)
                else:
                    runs.append((at, index, start, end))
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            places, firsts, sizes = zip(*(block for run in runs for block in _cut(*run)), strict=True)
            sums = [self.flat[at : at + size] for at, size in zip(places, sizes, strict=True)]
            self._layouts[slots] = _Layout(starts, ends, list(places), list(firsts), list(sizes), sums)
        return self._layouts[slots]

    def _add_late(self, index: int, contribution: Tensor) -> Tensor | None:
        """To the sum of level 0, whatever it is; its peak, on the device, where no kernel takes it."""
        assert self._units is not None
        if self._device_sums is not None:
            self.hold(index, contribution)
            return None
        self._add_whole(index, contribution, 1)
        largest = torch.linalg.vector_norm(contribution, math.inf, dtype=torch.float32)
        wide = torch.zeros_like(largest) if self._high is None else self._high[self._where(index)].any()
        return torch.stack([largest, wide.float()])

    def _add_whole(self, index: int, contribution: Tensor, sign: int) -> None:
        assert self._units is not None
        total = self._views[index]
        if self._high is None:
            self._units.add([Addition(total, contribution, self._unit(index, 0))], sign)
            return
        high = self._high[self._where(index)]
        whole = joined(total, high)
        self._units.add([Addition(whole, contribution, self._unit(index, 0))], sign)
        parted(whole, total, high)

    def _take_back(self, index: int, contribution: Tensor) -> None:
        assert self._units is not None
        self._wide.add(index)  # it was not to be seen while something was in them that did not belong there
        if self._device_sums is not None:
            self._device_sums.subtract(self._planes, index, contribution)
        else:
            self._add_whole(index, contribution, -1)

    def added(self) -> None:
        """All contributions of a microbatch are in."""
        self._num_added += 1
        if self.is_late:
            self.check()
        else:
            self._gather()
        if self._num_added == grids.MOST_SHORT and self._high is not None and self._high.dtype == torch.int8:
            self.settle()  # what does not fit, 40 bits must take back
            self._high = self._high.to(torch.int32)

    def check(self) -> None:
        """On a GPU: what was added before the last call is checked now, and let go; the rest is so next time,
        when its peaks have long been on their way.
        """
        adding, self._adding = self._adding, []
        self.settle()
        if adding:
            found = [peak for _, _, peak in adding if peak is not None]
            places = [(2 * at, 2 * at + 1) for at in range(len(found))]
            if self._device_sums is not None:
                found = [self._device_sums.take_peaks()]
                places = [(index, len(self.slots) + index) for index, _, _ in adding]
            peaks, ready = host_memory.on_its_way(torch.cat(found))
            self._late = _Late([(index, product) for index, product, _ in adding], places, peaks, ready)

    def settle(self) -> None:
        """From now on the sums are what they should be, also on a GPU."""
        self.flush()
        late, self._late = self._late, None
        if late is None:
            return
        assert self._units is not None
        late.ready()
        found = late.peaks.tolist()
        for (index, product), (place, width) in zip(late.products, late.places, strict=True):
            peak = grids.exponent(found[place])
            if found[width]:
                self._wide.add(index)
            if self._fits(index, peak):
                self.peaks[index] = max(self.peaks[index], peak)
                continue
            contribution = product().reshape(-1)
            self._take_back(index, contribution)
            self._place(index, peak, contribution)

    @property
    def is_settled(self) -> bool:
        """Nothing of what was given is read again."""
        return self._late is None and not self._group

    def _fits(self, index: int, peak: int) -> bool:
        return peak <= self._known[index]  # else it is promoted, or not finite

    def _place(self, index: int, peak: int, contribution: Tensor) -> None:
        assert self._units is not None
        self.peaks[index] = max(self.peaks[index], peak)
        if peak == grids.NOT_FINITE:
            return
        level = self.grid.level(self.limits[index], peak)
        total = self._views[index]
        if level:
            if (index, level) not in self._promoted:
                empty = self._empty((total.numel(),), dtype=self._dtype)
                self._promoted[index, level] = empty.fill_(self._offset(index, level))
                self._most[index, level] = 0
            total = self._promoted[index, level]
            self._most[index, level] += 1 << max(0, peak - self._unit(index, level))
        self._units.add([Addition(total, contribution, self._unit(index, level))], 1)

    # -------------------------------------------------------------- the reduce

    def part(self, where: slice) -> SumPart:
        """What this worker adds to a stretch of the whole stage's sum: views, not copies."""
        assert not self.are_means
        self.settle()
        if self._device_sums is not None:
            self._device_sums.empty_untouched(self._planes)
        if not self.is_strict:
            return SumPart((self.flat[where],))
        there = dict(self.pieces(where))
        promoted = [key for key in sorted(self._promoted) if key[0] in there]
        sums = [self._promoted[key][_shifted(there[key[0]], self.slots[key[0]].offset)] for key in promoted]
        wide = sorted(self._wide.intersection(there)) if self._high is not None else []
        high = self._high[where] if self._high is not None and wide else None
        is_short = self._dtype == torch.int64 and all(self._most[key] < 1 << 31 for key in promoted)
        return SumPart((self.flat[where], *sums), tuple(self.peaks), promoted, high, wide, is_short)

    def together(self, where: slice, parts: Sequence[SumPart]) -> SumPart:
        """Several workers' parts of a stretch as one: their exact sum, kept as theirs are. Copies. Plain sums
        are added in this order.
        """
        if not self.is_strict:
            return SumPart((_added([part.tensors[0] for part in parts]),))
        pieces = self.pieces(where)
        there, levels = dict(pieces), self._levels(where, parts)
        promoted = {
            key: self._united([one for _, one in levels[key]], [(*key, there[key[0]])], there[key[0]].start)
            for key in sorted(levels)
        }
        if self._high is not None:
            stretch, high, wide = self._united_planes(where, parts)
            return SumPart((stretch, *promoted.values()), peaks_of(parts), list(promoted), high, wide)
        slots = [(index, 0, piece) for index, piece in pieces]
        stretch = self._united([part.tensors[0] for part in parts], slots, where.start)
        return SumPart((stretch, *promoted.values()), peaks_of(parts), list(promoted))

    def _united(self, sums: Sequence[Tensor], pieces: list[tuple[int, int, slice]], start: int) -> Tensor:
        """Their sum with one offset, not one for each."""
        assert self._units is not None
        total = sums[0].to(self._dtype, copy=True)
        for one in sums[1:]:
            if self._units.offset:
                self._each(total, pieces, start, torch._foreach_sub_, self._offset)
            total.add_(one)
        return total

    def _united_planes(
        self, where: slice, parts: Sequence[SumPart]
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        low = torch.empty(where.stop - where.start, dtype=torch.int32, device=self.device)
        high = torch.empty_like(low)  # of many microbatches 8 bits may not be enough
        for start in range(0, low.numel(), CHUNK):
            here = slice(start, start + CHUNK)
            parted(_added([self._whole(part, here) for part in parts]), low[here], high[here])
        pieces = self.pieces(where)
        found = [high[_shifted(piece, where.start)].any() for _, piece in pieces]
        is_wide = torch.stack(found).tolist() if found else []
        wide = [index for (index, _), lacks in zip(pieces, is_wide, strict=True) if lacks]
        return low, high if wide else None, wide

    def sent(
        self, where: slice, part: SumPart, most: int = MOST_PROMOTED
    ) -> tuple[tuple[Tensor, ...], list[object]]:
        """A part for its receiver, and all that is to be said of it but its peaks, in JSON's terms. Promoted
        sums are copied into one tensor: of 4 bytes each, if that is enough for all of them, or else because
        they are more than so many.
        """
        stretch, *promoted = part.tensors
        told: list[object] = [[list(key) for key in part.promoted]]
        tensors = [stretch]
        if part.high is not None:
            there = dict(self.pieces(where))
            lacking = [part.high[_shifted(there[i], where.start)] for i in part.wide]
            tensors.append(self.packed(lacking, part.high.dtype))
            told.append(list(part.wide))
        if promoted and (part.is_short or len(promoted) > most):
            promoted = [self.packed(promoted, torch.int32 if part.is_short else self._dtype)]
        return (*tensors, *promoted), told

    def sent_all(
        self, stretches: Sequence[slice], parts: Sequence[SumPart], peaks: Sequence[int]
    ) -> tuple[tuple[Tensor, ...], list[object]]:
        """Parts of several stretches in one message, with all that is to be said of them."""
        most = MOST_PROMOTED // max(1, len(stretches))
        tensors: list[Tensor] = []
        facts = []
        for where, part in zip(stretches, parts, strict=True):
            sent, told = self.sent(where, part, most)
            tensors += sent
            facts.append([len(sent), *told])
        return tuple(tensors), [list(peaks), facts]

    def arrived_all(
        self,
        stretches: Mapping[int, slice],
        tensors: tuple[Tensor, ...],
        facts: Any,
        to_device: Callable[[Tensor], Tensor],
    ) -> list[SumPart]:
        """Of what a peer has `sent_all`, these stretches, by their place among all of them."""
        peaks, counts = facts
        ends = list(accumulate(int(count) for count, *_ in counts))
        if not all(place < len(ends) for place in stretches) or (ends or [0])[-1] != len(tensors):
            raise PeerError("a peer sent sums that do not belong to its part")
        found = []
        for place, where in stretches.items():
            count, *told = counts[place]
            came = tuple(to_device(one) for one in tensors[ends[place] - count : ends[place]])
            found.append(self.arrived(where, came, peaks, told))
        return found

    def packed(self, tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
        """In one tensor."""
        total = self._empty((sum(one.numel() for one in tensors),), dtype=dtype)
        self._packed.append(torch.cat(tensors, out=total))
        return total

    def arrived(
        self, where: slice, tensors: tuple[Tensor, ...], peaks: Sequence[int], told: Sequence[Any]
    ) -> SumPart:
        """What a peer has `sent` of a stretch."""
        stretch, *promoted = tensors
        keys, *wide = told
        high = None
        there = dict(self.pieces(where))
        if wide:
            sent, *promoted = promoted
            sizes = [there[i].stop - there[i].start for i in wide[0] if i in there]
            if len(sizes) < len(wide[0]) or sent.numel() != sum(sizes) or sent.dtype not in HIGH:
                raise PeerError("a peer sent sums that do not belong to its part")
            high = torch.zeros(where.stop - where.start, dtype=sent.dtype, device=sent.device)
            for i, piece in zip(wide[0], torch.split(sent, sizes), strict=True):
                high[_shifted(there[i], where.start)] = piece
        if stretch.numel() != where.stop - where.start:
            raise PeerError("a peer sent sums that are too short")
        return SumPart((stretch, *promoted), peaks, [(int(slot), int(level)) for slot, level in keys], high)

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

        Plain sums are added in the order of the parts. Where `out` is `own_means`, they are no sums any more.
        """
        self.are_means = self.size > 0 and out.data_ptr() == self.flat.data_ptr()
        levels = self._levels(stretch, parts) if self.is_strict else {}
        uncommon = {index for index, _ in levels}  # slots with promoted sums, or with what is not finite
        for part in parts if self.is_strict else ():
            uncommon.update(index for index, peak in enumerate(part.peaks) if peak == grids.NOT_FINITE)
        if self._units is not None and self._units.offset:
            into = out[_shifted(stretch, origin)]
            self._means_of_doubles(stretch, parts, weight, into, levels, uncommon)
            return
        if self._device_sums is not None:
            pieces = [piece for index, piece in self.pieces(stretch) if index in uncommon]
            sums = [(part.tensors[0], part.high) for part in parts]
            for where in _between(stretch, pieces):
                self._device_sums.means(where, sums, weight, out, start=stretch.start, origin=origin)
            chunks = [
                slice(at, min(at + CHUNK, piece.stop))
                for piece in pieces
                for at in range(piece.start, piece.stop, CHUNK)
            ]
        for chunk in chunks if self.is_late else _in_a_cache(chunks):
            here = [self._whole(part, _shifted(chunk, stretch.start)) for part in parts]
            if self.is_strict:  # as the kernels do it, so that it does not matter who has them
                total = self._total(chunk, here, levels, uncommon, parts)
                torch.mul(total, reciprocal(weight), out=out[_shifted(chunk, origin)])
            else:
                torch.div(_added(here), weight, out=out[_shifted(chunk, origin)])

    def _means_of_doubles(
        self,
        stretch: slice,
        parts: Sequence[SumPart],
        weight: float,
        out: Tensor,
        levels: Mapping[tuple[int, int], list[tuple[int, Tensor]]],
        uncommon: set[int],
    ) -> None:
        """Piece by piece in a buffer that stays in a cache, with numpy, whose calls take less time."""
        first, *others = [part.tensors[0].to(self._dtype).numpy() for part in parts]
        means, by, buffer, pieces = out.numpy(), reciprocal(weight), np.empty(CPU_BLOCK), self.pieces(stretch)
        for gap in _between(stretch, (piece for _, piece in pieces)):
            means[_shifted(gap, stretch.start)] = 0.0 * by
        for index, piece in pieces:
            offset = self._offset(index, 0)
            for block in _in_a_cache([piece]):
                here = _shifted(block, stretch.start)
                total = np.subtract(first[here], offset, out=buffer[: block.stop - block.start])
                for other in others:  # two offsets in one number would take a bit of its grid
                    np.subtract(np.add(total, other[here], out=total), offset, out=total)
                if index in uncommon:
                    self._add_promoted(torch.from_numpy(total), index, block, levels, parts)
                with np.errstate(all="ignore"):
                    means[here] = np.multiply(total, by, out=total)

    def _whole(self, part: SumPart, where: slice) -> Tensor:
        sums = part.tensors[0][where]
        return sums.to(self._dtype) if part.high is None else joined(sums, part.high[where])

    def _total(
        self,
        chunk: slice,
        sums: Sequence[Tensor],
        levels: Mapping[tuple[int, int], list[tuple[int, Tensor]]],
        uncommon: set[int],
        parts: Sequence[SumPart],
    ) -> Tensor:
        pieces = self.pieces(chunk)
        total = self._value(sums, [(index, 0, piece) for index, piece in pieces], chunk.start)
        for index, piece in pieces if uncommon else ():
            if index in uncommon:
                self._add_promoted(total[_shifted(piece, chunk.start)], index, piece, levels, parts)
        return total

    def _add_promoted(
        self,
        total: Tensor,
        index: int,
        piece: slice,
        levels: Mapping[tuple[int, int], list[tuple[int, Tensor]]],
        parts: Sequence[SumPart],
    ) -> None:
        """To the total of a piece of a slot: its promoted sums, or NaN."""
        for level in sorted(level for i, level in levels if i == index):
            there = [one[_shifted(piece, start)] for start, one in levels[index, level]]
            promoted = [one.to(self._dtype) for one in there]
            total.add_(self._value(promoted, [(index, level, piece)], piece.start))
        if any(part.peaks[index] == grids.NOT_FINITE for part in parts):
            total.fill_(math.nan)

    def _levels(
        self, stretch: slice, parts: Sequence[SumPart]
    ) -> dict[tuple[int, int], list[tuple[int, Tensor]]]:
        """The promoted sums of all parts by slot and level, each with the place of its first element."""
        pieces = dict(self.pieces(stretch))
        found: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for part in parts:
            promoted: Sequence[Tensor] = part.tensors[1:]
            if len(promoted) < len(part.promoted):
                sizes = [pieces[slot].stop - pieces[slot].start for slot, _ in part.promoted]
                promoted = torch.split(promoted[0], sizes)
            for key, one in zip(part.promoted, promoted, strict=True):
                found.setdefault(key, []).append((pieces[key[0]].start, one))
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
        total = sums[0].clone()
        self._each(total, pieces, start, torch._foreach_sub_, self._offset)
        for one in sums[1:]:  # two offsets in one number would take a bit of its grid
            total.add_(one)
            self._each(total, pieces, start, torch._foreach_sub_, self._offset)
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

    @property
    def own_means(self) -> Tensor | None:
        """The buffer, for the means of one who has no peers to send its sums to; None: means do not fit."""
        return self.flat.view(torch.float32) if self.flat.element_size() == 4 else None

    # -------------------------------------------------------------- how

    def values(self) -> Tensor:
        """All sums as plain numbers, in fp64; fp32 as they are."""
        if self.kind == "fp32":
            return self.flat.clone()
        whole = slice(0, self.size)
        values = torch.empty(self.size, dtype=torch.float64, device=self.device)
        self.means(whole, [whole], [self.part(whole)], 1.0, values)
        return values

    @property
    def _planes(self) -> Planes:
        return Planes(self.flat, self._high)

    def _where(self, index: int) -> slice:
        return slice(self.slots[index].offset, self._ends[index])

    def _cut(self) -> None:
        """The sums of each tensor, in its shape and flat."""
        self.shaped = [slot.of(self.flat) for slot in self.slots]
        self._views = [view.view(-1) for view in self.shaped]
        self._layouts.clear()

    def _unit(self, index: int, level: int) -> int:
        return self.grid.unit(self.limits[index], level) if level else self._lowest[index]

    def _offset(self, index: int, level: int) -> float:
        assert self._units is not None
        return self._units.offset * 2.0 ** self._unit(index, level)

    def pieces(self, where: slice) -> list[tuple[int, slice]]:
        """The slots in a stretch of the buffer, and what of them lies in it."""
        found = []
        for index in range(bisect_right(self._ends, where.start), len(self._ends)):
            start, stop = max(self.slots[index].offset, where.start), min(self._ends[index], where.stop)
            if start < stop:
                found.append((index, slice(start, stop)))
            elif start >= where.stop:
                break
        return found


def _cut(at: int, index: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """In blocks, at the same places of the buffer whatever begins where."""
    while start < end:
        stop = min(end, start + SUM_BLOCK - at % SUM_BLOCK)
        yield at, index, stop - start
        at, start = at + stop - start, stop


def _peaks(together: Tensor, starts: list[int]) -> list[int]:
    """Of contributions that lie one after the other: the exponents of their largest numbers. Without its sign
    the larger number has the larger bits; a NaN is the largest of all.
    """
    bits = together.numpy().view(np.int32)
    negative = np.maximum.reduceat(bits.view(np.uint32), starts) & 0x7FFFFFFF  # if there is any
    largest = np.maximum(np.maximum.reduceat(bits, starts), negative.view(np.int32))
    return [grids.exponent(peak) for peak in largest.view(np.float32).tolist()]


def _added(sums: Sequence[Tensor]) -> Tensor:
    """Not to be written to: of a single worker it is that worker's."""
    if len(sums) == 1:
        return sums[0]
    total = sums[0] + sums[1]
    for one in sums[2:]:
        total.add_(one)
    return total


def _between(stretch: slice, pieces: Iterable[slice]) -> Iterator[slice]:
    """What of a stretch is in none of the pieces, which are in order."""
    at = stretch.start
    for piece in pieces:
        if at < piece.start:
            yield slice(at, piece.start)
        at = piece.stop
    if at < stretch.stop:
        yield slice(at, stretch.stop)


def _in_a_cache(chunks: Sequence[slice]) -> Iterator[slice]:
    """On a CPU: what several passes go over at once."""
    for chunk in chunks:
        for start in range(chunk.start, chunk.stop, CPU_BLOCK):
            yield slice(start, min(start + CPU_BLOCK, chunk.stop))


def _shifted(piece: slice, start: int) -> slice:
    return slice(piece.start - start, piece.stop - start)
