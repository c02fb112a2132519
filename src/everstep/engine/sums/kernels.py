"""Own kernels for strict sums on a GPU: one pass over memory where torch's operations need six.

    add     a contribution is rounded, added to a sum, and its peak taken
    mean    all workers' sums of a stretch are added up, and scaled

The same integers and means as `sums` makes with torch's own operations, which remain the reference and the
fallback. Kernels are used after they have given the reference's bits on a sample, once per process and
device; where Triton or its compiler is missing, or anything goes wrong, the reference is used and nothing
else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from everstep.log import warn
from everstep.net import host_memory

OFFSET = 1.5 * 2.0**52  # where an fp64's last bit is 1: added to x / unit, it rounds
BLOCK = 2048  # elements
_SAMPLE = 100_003


@cache
def _compiled() -> Any:
    import triton
    import triton.language as tl

    # Backwards: what the product has written last is still in the cache, and sums are not to displace it.
    @triton.jit(do_not_specialize=["index"])  # type: ignore[untyped-decorator]
    def add(  # type: ignore[no-untyped-def]
        total_at,
        x_at,
        offsets_at,
        peaks_at,
        index,
        count,
        SIGN: tl.constexpr,
        FIRST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < count
        x = tl.load(x_at + at, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
        offset = tl.load(offsets_at + index)
        placed = x.to(tl.float64) + offset
        units = placed.to(tl.int64, bitcast=True) - offset.to(tl.int64, bitcast=True)
        if FIRST:
            made = units.to(total_at.dtype.element_ty)
            tl.store(total_at + at, made, mask=here, eviction_policy="evict_first")
        elif most > 0:  # rows of a table that no token asked for are all zeros
            total = tl.load(total_at + at, mask=here, other=0, eviction_policy="evict_first")
            total += SIGN * units.to(total.dtype)
            tl.store(total_at + at, total, mask=here, eviction_policy="evict_first")
        if most > tl.load(peaks_at + index):
            tl.atomic_max(peaks_at + index, most)

    # All places are multiples of 16. Not pipelined: most have one part, and no need of shared memory.
    @triton.jit(do_not_specialize=["first_block", "stop", "num_others"])  # type: ignore[untyped-decorator]
    def mean(  # type: ignore[no-untyped-def]
        out_at,
        first_at,
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
        KIND: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        block = tl.program_id(0) + first_block
        slot = tl.load(slots_at + block)
        at = tl.multiple_of(tl.load(starts_at + block), 16) + tl.arange(0, BLOCK)
        here = (at >= start) & (at < stop) & (at < tl.load(rooms_at + slot))
        real = here & (at < tl.load(ends_at + slot))
        total = tl.load(first_at + (at - start), mask=real, other=0)
        for other in range(num_others):
            other_at = tl.load(others_at + other).to(tl.pointer_type(KIND))
            total += tl.load(other_at + (at - start), mask=real, other=0)
        value = total.to(tl.float64) * tl.load(scales_at + slot) * tl.load(scales_at + num_slots)
        tl.store(out_at + (at - origin), value.to(out_at.dtype.element_ty), mask=here)

    return triton, add, mean, {torch.int64: tl.int64, torch.int32: tl.int32}


def add_units(
    total: Tensor,
    contribution: Tensor,
    offsets: Tensor,
    peaks: Tensor,
    index: int,
    *,
    sign: int = 1,
    first: bool = False,
) -> None:
    """total += sign x contribution in units; `first`: whatever the total was before.

    `offsets`: by slot, 1.5 x 2^52 units, in fp64. `peaks`: by slot, the largest |x| so far, as the bits of an
    fp32.
    """
    triton, add, *_ = _compiled()
    count = contribution.numel()
    grid = (triton.cdiv(count, BLOCK),)
    add[grid](
        total, contribution, offsets, peaks, index, count, SIGN=sign, FIRST=first, BLOCK=BLOCK, num_warps=4
    )


def mean_of(
    out: Tensor,
    parts: Sequence[Tensor],
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    scales: Tensor,
    blocks: range,
    stretch: slice,
    origin: int,
) -> None:
    """`parts`, integers, each of them the `stretch` of a worker's buffer: added up, and times the scales.

    `tables`: by block its slot and first element; by slot the end of its numbers, and of its padding.
    `scales`: by slot its unit, and last what all are multiplied with.
    """
    _, _, mean, kinds = _compiled()
    first, *others = parts
    places = torch.tensor([other.data_ptr() for other in others] or [0], dtype=torch.int64)
    there = host_memory.to_device(places, out.device)
    counts = blocks.start, stretch.start, stretch.stop, origin, len(others), scales.numel() - 1
    if len(blocks):
        kind = kinds[first.dtype]
        mean[(len(blocks),)](
            out, first, there, *tables, scales, *counts, KIND=kind, BLOCK=BLOCK, num_warps=4, num_stages=1
        )


@cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Have the kernels given the bits of the reference on this device?"""
    if device.type != "cuda":
        return False
    try:
        return agree(device, dtype)
    except Exception as error:
        warn(f"strict sums without their kernels: {error}")
        return False


def agree(device: torch.device, dtype: torch.dtype) -> bool:
    """On a sample with ties and zeros: added twice, taken back once, and the mean taken."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(_SAMPLE, device=device, generator=generator)
    x[::7] = torch.round(x[::7] * 8) * 2.0**-21  # ties
    x[3 * BLOCK : 5 * BLOCK] = 0
    unit = -20
    wide = torch.float64 if dtype == torch.int64 else torch.float32
    expected = torch.mul(x.to(wide), 2.0**-unit).round_().to(dtype)
    total = torch.full((_SAMPLE,), 77, dtype=dtype, device=device)
    offsets = torch.tensor([0.0, OFFSET * 2.0**unit], dtype=torch.float64, device=device)
    peaks = torch.zeros(2, dtype=torch.int32, device=device)
    add_units(total, x, offsets, peaks, 1, first=True)
    once = torch.equal(total, expected)
    add_units(total, x, offsets, peaks, 1)
    twice = torch.equal(total, 2 * expected)
    add_units(total, x, offsets, peaks, 1, sign=-1)
    found = bool(peaks.view(torch.float32)[1] == x.abs().max())
    return once and twice and torch.equal(total, expected) and found and _means_agree(total, unit)


def _means_agree(total: Tensor, unit: int) -> bool:
    start, stop, weight = 5, _SAMPLE - 9, 3.0
    part = total[start:stop]
    out = torch.full((stop - start,), -1.0, device=total.device)
    made = torch.mul((part + part).to(torch.float64).mul_(2.0**unit), 1 / weight, out=torch.empty_like(out))
    starts = torch.arange(0, _SAMPLE, BLOCK, device=total.device)
    ends = torch.tensor([_SAMPLE], device=total.device)
    scales = torch.tensor([2.0**unit, 1 / weight], dtype=torch.float64, device=total.device)
    tables = (torch.zeros_like(starts, dtype=torch.int32), starts, ends, ends)
    mean_of(out, [part, part], tables, scales, range(len(starts)), slice(start, stop), start)
    return torch.equal(out, made)
