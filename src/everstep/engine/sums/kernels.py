"""Own kernels for strict sums on a GPU: one pass over memory where torch's operations need six.

    add     contributions are rounded, each added to its sum, and their peaks taken. Of sums of 40 bits
            32 are read and written; the other 8 only where they change, and that is noted
    mean    all workers' sums of a stretch are added up, and scaled

The same integers and means as `sums` makes with torch's own operations, which remain the reference and the
fallback. Kernels are used after they have given the reference's bits on a sample, once per process and
device; where Triton or its compiler is missing, or anything goes wrong, the reference is used and nothing
else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.engine.sums.sum_parts import joined
from everstep.log import warn
from everstep.net import host_memory

OFFSET = 1.5 * 2.0**52  # where an fp64's last bit is 1: added to x / unit, it rounds
BLOCK = 2048  # elements
MOST = 32  # contributions that are added at once
_SAMPLE = 100_003
_ALIGNED = 16  # bytes


@cache
def _compiled() -> Any:
    import triton
    import triton.language as tl

    # Backwards: what a product has written last is still in the cache, and sums are not to displace it. The
    # table has a row of each: where the contributions are, their first blocks, where their sums begin, how
    # many elements they have, their slots, and whether nothing was added to those before.
    @triton.jit(do_not_specialize=["num"])  # type: ignore[untyped-decorator]
    def add(  # type: ignore[no-untyped-def]
        totals_at,
        high_at,
        table_at,
        offsets_at,
        peaks_at,
        wide_at,
        num,
        SIGN: tl.constexpr,
        HIGH: tl.constexpr,
        KIND: tl.constexpr,
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
        x_at = tl.multiple_of(tl.load(row).to(tl.pointer_type(KIND)) + at, [16])
        place = tl.multiple_of(tl.load(row + 2 * num), 16) + at
        total_at = totals_at + place
        slot = tl.load(row + 4 * num)
        is_first = tl.load(row + 5 * num) != 0
        x = tl.load(x_at, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
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
                total = before.to(tl.int64) + SIGN * units
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
            tl.store(total_at, total + SIGN * units.to(kind), mask=here, eviction_policy="evict_first")
        if most > tl.load(peaks_at + slot):
            tl.atomic_max(peaks_at + slot, most)

    # All places are multiples of 16. Not pipelined: most have one part, and no need of shared memory.
    @triton.jit(do_not_specialize=["first_block", "stop", "num_others"])  # type: ignore[untyped-decorator]
    def mean(  # type: ignore[no-untyped-def]
        out_at,
        first_at,
        high_at,
        others_at,
        slots_at,
        starts_at,
        ends_at,
        rooms_at,
        scales_at,
        first_block,
        start,
        stop,
        origin,
        num_others,
        num_slots,
        HIGH: tl.constexpr,
        ALIGNED: tl.constexpr,
        KIND: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        block = tl.program_id(0) + first_block
        slot = tl.load(slots_at + block)
        begin, end = tl.load(starts_at + block), tl.load(ends_at + slot)
        at = tl.multiple_of(begin, 16) + tl.arange(0, BLOCK)
        unit, factor = tl.load(scales_at + slot), tl.load(scales_at + num_slots)
        if (begin >= start) & (begin + BLOCK <= stop) & (begin + BLOCK <= end):
            # As below; of what is whole a thread moves four at once.
            total = tl.load(first_at + (at - start)).to(tl.int64)
            if HIGH:
                total += tl.load(high_at + (at - start)).to(tl.int64) << 32
            for other in range(num_others):
                other_at = tl.load(others_at + other)
                if ALIGNED:
                    other_at = tl.multiple_of(other_at, 16)
                total += tl.load(other_at.to(tl.pointer_type(KIND)) + (at - start)).to(tl.int64)
            value = total.to(tl.float64) * unit * factor
            tl.store(out_at + (at - origin), value.to(out_at.dtype.element_ty))
        else:
            here = (at >= start) & (at < stop) & (at < tl.load(rooms_at + slot))
            real = here & (at < end)
            total = tl.load(first_at + (at - start), mask=real, other=0).to(tl.int64)
            if HIGH:
                total += tl.load(high_at + (at - start), mask=real, other=0).to(tl.int64) << 32
            for other in range(num_others):
                other_at = tl.load(others_at + other).to(tl.pointer_type(KIND))
                total += tl.load(other_at + (at - start), mask=real, other=0).to(tl.int64)
            value = total.to(tl.float64) * unit * factor
            tl.store(out_at + (at - origin), value.to(out_at.dtype.element_ty), mask=here)

    kinds = {torch.int64: tl.int64, torch.int32: tl.int32}
    kinds |= {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    kinds |= {torch.float32: tl.float32, torch.float64: tl.float64}
    return add, mean, kinds


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
    """Each sum += sign x its contribution in units: at most MOST of one type, each of a slot of its own.

    `high`: what 32 bits of `totals` lack (`sum_parts.joined`). `offsets`: by slot, 1.5 x 2^52 units, in fp64.
    `peaks`: by slot, the largest |x| so far; then, by slot, 1 if one of its sums has needed `high`.
    """
    add, _, kinds = _compiled()
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
        ],
        dtype=torch.int64,
    )
    there = host_memory.to_device(table, totals.device)
    settings = {"SIGN": sign, "KIND": kinds[xs[0].dtype], "EVEN": all(count % 16 == 0 for count in counts)}
    bits, wide = peaks.view(torch.int32), peaks[peaks.numel() // 2 :]
    args = totals, totals if high is None else high, there, offsets, bits, wide, len(xs)
    add[(num_blocks,)](*args, **settings, HIGH=high is not None, BLOCK=BLOCK, num_warps=4)


def mean_of(
    out: Tensor,
    parts: Sequence[Tensor],
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    scales: Tensor,
    blocks: range,
    stretch: slice,
    origin: int,
    high: Tensor | None = None,
) -> None:
    """`parts`, integers, each of them the `stretch` of a worker's buffer: added up, and times the scales.
    `high`: what those of the first part lack.

    `tables`: by block its slot and first element; by slot the end of its numbers, and of its padding.
    `scales`: by slot its unit, and last what all are multiplied with.
    """
    _, mean, kinds = _compiled()
    first, *others = parts
    places = torch.tensor([other.data_ptr() for other in others] or [0], dtype=torch.int64)
    there = host_memory.to_device(places, out.device)
    counts = blocks.start, stretch.start, stretch.stop, origin, len(others), scales.numel() - 1
    if len(blocks):
        kind = kinds[first.dtype]
        args = out, first, first if high is None else high, there, *tables, scales, *counts
        aligned = all(other.data_ptr() % _ALIGNED == 0 for other in others)
        settings = {"HIGH": high is not None, "ALIGNED": aligned, "KIND": kind, "BLOCK": BLOCK}
        mean[(len(blocks),)](*args, **settings, num_warps=4, num_stages=1)


@cache
def usable(device: torch.device, dtype: torch.dtype, high: torch.dtype | None = None) -> bool:
    """Have the kernels given the bits of the reference on this device?"""
    if device.type != "cuda":
        return False
    try:
        if agree(device, dtype, high):
            return True
        warn("strict sums without their kernels: on this GPU they give other bits than torch's operations")
        return False
    except Exception as error:
        warn(f"strict sums without their kernels: {error}")
        return False


def agree(device: torch.device, dtype: torch.dtype, high: torch.dtype | None = None) -> bool:
    """On a sample with ties and zeros: two tensors added twice, one taken back, and the mean taken."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(_SAMPLE, device=device, generator=generator)
    x[::7] = torch.round(x[::7] * 8) * 2.0**-21  # ties
    x[3 * BLOCK : 5 * BLOCK] = 0
    is_long = dtype == torch.int64 or high is not None
    x[-2], x[-1] = (-3 * 2.0**12, 2.0**12) if is_long else (-0.5, 1.0)  # in units more than 32 bits
    unit = -20
    exact, whole = (torch.float64, torch.int64) if is_long else (torch.float32, dtype)
    expected = torch.mul(x.to(exact), 2.0**-unit).round_().to(whole)
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
    start, stop, weight = 5, _SAMPLE - 9, 3.0
    part, lacking = totals[start:stop], None if high is None else high[start:stop]
    out = torch.full((stop - start,), -1.0, device=totals.device)
    both = part.long() + (part if lacking is None else joined(part, lacking))
    made = torch.mul(both.to(torch.float64).mul_(2.0**unit), 1 / weight, out=torch.empty_like(out))
    starts = torch.arange(0, _SAMPLE, BLOCK, device=totals.device)
    ends = torch.tensor([_SAMPLE], device=totals.device)
    scales = torch.tensor([2.0**unit, 1 / weight], dtype=torch.float64, device=totals.device)
    tables = (torch.zeros_like(starts, dtype=torch.int32), starts, ends, ends)
    where = range(len(starts)), slice(start, stop), start
    mean_of(out, [part, part], tables, scales, *where, lacking)
    if not torch.equal(out, made) or part.element_size() != out.element_size():
        return torch.equal(out, made)
    place = part.clone()  # means may be written where the first part is
    mean_of(place.view(torch.float32), [place, part], tables, scales, *where, lacking)
    return torch.equal(place.view(torch.float32), made)
