"""Own kernels for strict sums on a GPU: one pass over memory where torch's operations need six.

    add     contributions are rounded, each added to its sum, and their peaks taken. Of sums of 40 bits
            32 are read and written; the other 8 only where they change, and that is noted
    mean    all workers' sums of a stretch are added up, and scaled

The same integers and means as `sums` makes with torch's own operations, which remain the reference and the
fallback. Kernels are used after they have given the reference's bits on a sample (`trusted`); where Triton or
its compiler is missing, or anything goes wrong, the reference is used, and the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.engine.layers.trusted import trusted
from everstep.engine.sums.sum_parts import joined
from everstep.errors import PeerError
from everstep.net import host_memory

KERNELS = "kernels for strict sums"
OFFSET = 1.5 * 2.0**52  # where an fp64's last bit is 1: added to x / unit, it rounds
BLOCK = 2048  # elements
MOST = 32  # contributions that are added at once
_SAMPLE = 100_003
_ALIGNED = 16  # bytes

# How numbers are kept, as tables say it: kernels branch on it. A kernel that is compiled for each kind would
# be so in the midst of training, half a second when the first sum needs more than 32 bits.
_CONTRIBUTIONS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_SUMS = {(torch.int32, None): 0, (torch.int32, torch.int8): 1, (torch.int32, torch.int32): 2}
_SUMS |= {(torch.int64, None): 3}


@cache
def _compiled() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def loaded(place, at, here, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
        x_at = tl.multiple_of(place.to(tl.pointer_type(KIND)) + at, [16])
        return tl.load(x_at, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)

    @triton.jit
    def contributions(place, at, here, kind):  # type: ignore[no-untyped-def]
        if kind == 0:
            x = loaded(place, at, here, tl.float32)
        elif kind == 1:
            x = loaded(place, at, here, tl.bfloat16)
        elif kind == 2:
            x = loaded(place, at, here, tl.float16)
        else:
            x = loaded(place, at, here, tl.float64)
        return x

    # Backwards: what a product has written last is still in the cache, and sums are not to displace it. The
    # table has a row of each: where the contributions are, their first blocks, where their sums begin, how
    # many elements they have, their slots, whether nothing was added to those before, and their kinds.
    @triton.jit(do_not_specialize=["num", "sign"], do_not_specialize_on_alignment=["wide_at"])  # type: ignore[untyped-decorator]
    def add(  # type: ignore[no-untyped-def]
        totals_at,
        high_at,
        table_at,
        offsets_at,
        peaks_at,
        wide_at,
        num,
        sign,
        HIGH: tl.constexpr,
        EVEN: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        which = 0
        for other in range(1, num):
            which += (tl.load(table_at + num + other) <= block).to(tl.int32)
        row = table_at + which
        at = (block - tl.load(row + num)) * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(row + 3 * num)
        if EVEN:
            count = tl.multiple_of(count, 16)
        here = at < count
        place = tl.multiple_of(tl.load(row + 2 * num), 16) + at
        total_at = totals_at + place
        slot = tl.load(row + 4 * num)
        is_first = tl.load(row + 5 * num) != 0
        x = contributions(tl.load(row), at, here, tl.load(row + 6 * num))
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
        offset = tl.load(offsets_at + slot)
        placed = x.to(tl.float64) + offset
        units = placed.to(tl.int64, bitcast=True) - offset.to(tl.int64, bitcast=True)
        kind = totals_at.dtype.element_ty
        if HIGH:
            if is_first:
                low = units.to(kind)
                over = (units - low.to(tl.int64)) >> 32
                tl.store(total_at, low, mask=here, eviction_policy="evict_first")
                tl.store(high_at + place, over.to(high_at.dtype.element_ty), mask=here)
                if tl.max((here & (over != 0)).to(tl.int32), axis=0) > 0:
                    tl.store(wide_at + slot, 1.0)
            elif most > 0:  # rows of a table that no token asked for are all zeros
                before = tl.load(total_at, mask=here, other=0, eviction_policy="evict_first")
                total = before.to(tl.int64) + sign * units
                low = total.to(kind)
                over = (total - low.to(tl.int64)) >> 32
                tl.store(total_at, low, mask=here, eviction_policy="evict_first")
                changed = here & (over != 0)
                if tl.max(changed.to(tl.int32), axis=0) > 0:
                    high = tl.load(high_at + place, mask=changed, other=0)
                    tl.store(high_at + place, high + over.to(high_at.dtype.element_ty), mask=changed)
                    tl.store(wide_at + slot, 1.0)
        elif is_first:
            tl.store(total_at, units.to(kind), mask=here, eviction_policy="evict_first")
        elif most > 0:
            total = tl.load(total_at, mask=here, other=0, eviction_policy="evict_first")
            tl.store(total_at, total + (sign * units).to(kind), mask=here, eviction_policy="evict_first")
        if most > tl.load(peaks_at + slot):
            tl.atomic_max(peaks_at + slot, most)

    @triton.jit  # type: ignore[untyped-decorator]
    def integers(place, at, mask, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
        x_at = place.to(tl.pointer_type(KIND)) + at
        if ALIGNED:
            x_at = tl.multiple_of(x_at, [16])
        return tl.load(x_at, mask=mask).to(tl.int64)

    @triton.jit  # type: ignore[untyped-decorator]
    def numbers(row, num, at, mask, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
        place, lacking, kind = tl.load(row), tl.load(row + num), tl.load(row + 2 * num)
        if kind == 3:
            total = integers(place, at, mask, tl.int64, ALIGNED)
        else:
            total = integers(place, at, mask, tl.int32, ALIGNED)
            if kind == 1:
                total += integers(lacking, at, mask, tl.int8, ALIGNED) << 32
            elif kind == 2:
                total += integers(lacking, at, mask, tl.int32, ALIGNED) << 32
        return total

    # Places are those of the whole buffer: of a part, where its element 0 would be. The table has a row of
    # each part: where its numbers are, what those lack, and how they are kept. Not pipelined: most have one
    # part, and no need of shared memory.
    @triton.jit(do_not_specialize=["out", "first_block", "start", "stop", "num_parts", "num_slots"])  # type: ignore[untyped-decorator]
    def mean(  # type: ignore[no-untyped-def]
        out,
        parts_at,
        slots_at,
        starts_at,
        ends_at,
        rooms_at,
        scales_at,
        first_block,
        start,
        stop,
        num_parts,
        num_slots,
        KIND: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        block = tl.program_id(0) + first_block
        slot = tl.load(slots_at + block)
        begin, end = tl.load(starts_at + block), tl.load(ends_at + slot)
        at = tl.multiple_of(begin, 16) + tl.arange(0, BLOCK)
        unit, factor = tl.load(scales_at + slot), tl.load(scales_at + num_slots)
        out_at = out.to(tl.pointer_type(KIND)) + at
        if ALIGNED:
            out_at = tl.multiple_of(out_at, [16])
        total = tl.zeros([BLOCK], tl.int64)
        if (begin >= start) & (begin + BLOCK <= stop) & (begin + BLOCK <= end):
            for part in range(num_parts):  # of what is whole a thread moves four at once
                total += numbers(parts_at + part, num_parts, at, None, ALIGNED)
            tl.store(out_at, (total.to(tl.float64) * unit * factor).to(KIND))
        else:
            here = (at >= start) & (at < stop) & (at < tl.load(rooms_at + slot))
            real = here & (at < end)
            for part in range(num_parts):
                total += numbers(parts_at + part, num_parts, at, real, ALIGNED)
            total = tl.where(real, total, 0)
            tl.store(out_at, (total.to(tl.float64) * unit * factor).to(KIND), mask=here)

    return add, mean, {torch.float32: tl.float32, torch.float64: tl.float64}


class Addend(NamedTuple):
    x: Tensor  # contiguous
    slot: int
    start: int  # of its sum, in the buffer: a multiple of 16
    is_first: bool = False  # whatever the sum was before


def add_units(
    totals: Tensor,
    high: Tensor | None,
    addends: Sequence[Addend],
    offsets: Tensor,
    peaks: Tensor,
    *,
    sign: int = 1,
) -> None:
    """Each sum += sign x its contribution in units: at most MOST, each of a slot of its own.

    `high`: what 32 bits of `totals` lack (`sum_parts.joined`). `offsets`: by slot, 1.5 x 2^52 units, in fp64.
    `peaks`: by slot, the largest |x| so far; then, by slot, 1 if one of its sums has needed `high`.
    """
    add, _, _ = _compiled()
    xs = [one.x if one.x.data_ptr() % _ALIGNED == 0 else one.x.clone() for one in addends]
    counts = [x.numel() for x in xs]
    first_blocks = list(accumulate((-(-count // BLOCK) for count in counts), initial=0))
    num_blocks = first_blocks.pop()
    table = torch.tensor(
        [
            [x.data_ptr() for x in xs],
            first_blocks,
            [one.start for one in addends],
            counts,
            [one.slot for one in addends],
            [one.is_first for one in addends],
            [_CONTRIBUTIONS[x.dtype] for x in xs],
        ],
        dtype=torch.int64,
    )
    there = host_memory.to_device(table, totals.device)
    bits, wide = peaks.view(torch.int32), peaks[peaks.numel() // 2 :]
    args = totals, totals if high is None else high, there, offsets, bits, wide, len(xs), sign
    is_even = all(count % 16 == 0 for count in counts)
    add[(num_blocks,)](*args, HIGH=high is not None, EVEN=is_even, BLOCK=BLOCK, num_warps=4)


def mean_of(
    out: Tensor,
    parts: Sequence[tuple[Tensor, Tensor | None]],
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    scales: Tensor,
    blocks: range,
    where: slice,
    *,
    start: int,
    origin: int,
) -> None:
    """Integers of workers, each with what 32 bits lack (`joined`), added up and times the scales.

    Parts begin at `start` of the buffer, `out` at `origin`; of both, `where` is read and written. `tables`:
    by block its slot and first element; by slot the end of its numbers, and of its padding. `scales`: by slot
    its unit, and last what all are multiplied with.
    """
    _, mean, kinds = _compiled()
    place = out.data_ptr() - out.element_size() * origin
    rows, aligned = [], [place]
    lows = [
        low if low.data_ptr() % _ALIGNED == 0 else low.clone() for low, _ in parts
    ]  # all until the launch
    for low, (_, high) in zip(lows, parts, strict=True):
        kind = _SUMS.get((low.dtype, None if high is None else high.dtype))
        if kind is None:
            raise PeerError("a peer sent sums that are no integers")
        both = [one.data_ptr() - one.element_size() * start for one in (low, high) if one is not None]
        aligned += both
        rows.append((both[0], both[-1], kind))
    there = host_memory.to_device(torch.tensor(rows, dtype=torch.int64).T.contiguous(), out.device)
    args = place, there, *tables, scales
    counts = blocks.start, where.start, where.stop, len(rows), scales.numel() - 1
    settings = {
        "KIND": kinds[out.dtype],
        "ALIGNED": all(at % _ALIGNED == 0 for at in aligned),
        "BLOCK": BLOCK,
    }
    if len(blocks):
        mean[(len(blocks),)](*args, *counts, **settings, num_warps=4, num_stages=1)


def usable(device: torch.device, dtype: torch.dtype, high: torch.dtype | None = None) -> bool:
    """Have the kernels given the bits of the reference on this device?"""
    if device.type != "cuda":
        return False
    return trusted(KERNELS, device, partial(agree, device, dtype, high), rounds=False, of=(dtype, high))


def agree(device: torch.device, dtype: torch.dtype, high: torch.dtype | None = None) -> bool:
    """On a sample with ties and zeros: two tensors added twice, one taken back, and the mean taken."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(_SAMPLE, device=device, generator=generator)
    x[::7] = torch.round(x[::7] * 8) * 2.0**-21  # ties
    x[3 * BLOCK : 5 * BLOCK] = 0
    x[-2], x[-1] = -3 * 2.0**12, 2.0**12  # in units more than 32 bits
    unit = -20
    expected = torch.mul(x.double(), 2.0**-unit).round_().long()
    room = -(-_SAMPLE // 16) * 16
    totals = torch.full((2 * room,), 77, dtype=dtype, device=device)
    lacking = None if high is None else torch.full((2 * room,), 5, dtype=high, device=device)
    offsets = torch.tensor([0.0, OFFSET * 2.0**unit, OFFSET * 2.0**unit], dtype=torch.float64, device=device)
    peaks = torch.zeros(2 * 3, device=device)
    half = x[: 16 * (_SAMPLE // 32)]

    def is_so(factor: int) -> bool:
        sums = totals if lacking is None else joined(totals, lacking)
        one, other, rest = sums[:_SAMPLE], sums[room:][: len(half)], sums[room + len(half) :]
        untouched = 77 if lacking is None else 77 + (5 << 32)
        is_right = torch.equal(one, factor * expected) and bool((rest == untouched).all())
        return is_right and torch.equal(other, factor * expected[: len(half)])

    first = [Addend(x, 1, 0, True), Addend(half, 2, room, True)]
    add_units(totals, lacking, first, offsets, peaks)
    once = is_so(1)
    for addend in (Addend(half, 2, room), Addend(x, 1, 0)):
        add_units(totals, lacking, [addend], offsets, peaks)
    twice = is_so(2)
    for addend in (Addend(half, 2, room), Addend(x, 1, 0)):
        add_units(totals, lacking, [addend], offsets, peaks, sign=-1)
    none = torch.zeros_like(x[0])
    wide = torch.full_like(none, high is not None)
    found = torch.equal(peaks, torch.stack([none, x.abs().max(), half.abs().max(), none, wide, none]))
    return once and twice and is_so(1) and found and _means_agree(totals, lacking, unit)


def _means_agree(totals: Tensor, high: Tensor | None, unit: int) -> bool:
    """Of all ways in which numbers are kept, also where the means are written over the first of them."""
    start, stop, weight = 16, _SAMPLE - 9, 3.0
    part, lacking = totals[start:stop], None if high is None else high[start:stop]
    whole = part.long() if lacking is None else joined(part, lacking)
    parts: list[tuple[Tensor, Tensor | None]] = [(part.clone(), lacking), (whole, None)]
    out = torch.full((stop - start,), -1.0, device=totals.device)
    exact = (len(parts) * whole).to(torch.float64).mul_(2.0**unit)
    made = torch.mul(exact, 1 / weight, out=torch.empty_like(out))
    starts = torch.arange(0, _SAMPLE, BLOCK, device=totals.device)
    ends = torch.tensor([_SAMPLE], device=totals.device)
    scales = torch.tensor([2.0**unit, 1 / weight], dtype=torch.float64, device=totals.device)
    tables = (torch.zeros_like(starts, dtype=torch.int32), starts, ends, ends)
    own = parts[0][0]
    outs = [out, own.view(torch.float32)] if own.element_size() == out.element_size() else [out]
    for one in outs:
        where = range(len(starts)), slice(start, stop)
        mean_of(one, parts, tables, scales, *where, start=start, origin=start)
    return all(torch.equal(one, made) for one in outs)
