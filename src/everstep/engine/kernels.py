"""One pass over memory instead of six: a contribution is rounded, added to a strict sum, and its peak taken.

The same integers as `sums` makes with torch's own operations, which remain the reference and the fallback. A
kernel is used after it has given their bits on a sample, once per process and device; where Triton or its
compiler is missing, or anything goes wrong, the reference is used and nothing else changes.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

_OFFSET = 1.5 * 2.0**52  # where an fp64's last bit is 1: added to x / unit, it rounds
_ELEMENTS = 1024  # of a block
_SAMPLE = 100_003


@cache
def _compiled() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def add(total_at, x_at, offset_at, peak_at, count, SIGN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < count
        x = tl.load(x_at + at, mask=here, other=0.0).to(tl.float32)
        offset = tl.load(offset_at)
        placed = x.to(tl.float64) + offset
        units = placed.to(tl.int64, bitcast=True) - offset.to(tl.int64, bitcast=True)
        total = tl.load(total_at + at, mask=here, other=0)
        tl.store(total_at + at, total + SIGN * units.to(total.dtype), mask=here)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(peak_at, tl.max(bits, axis=0))

    return triton, add


def add_units(total: Tensor, contribution: Tensor, offset: Tensor, peak: Tensor, sign: int = 1) -> None:
    """total += sign x contribution in units; `peak` becomes the largest |x| so far, as the bits of an fp32.

    `offset`: 1.5 x 2^52 units, an fp64 on the device.
    """
    triton, add = _compiled()
    count = contribution.numel()
    grid = (triton.cdiv(count, _ELEMENTS),)
    add[grid](total, contribution, offset, peak, count, SIGN=sign, BLOCK=_ELEMENTS)


@cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Has the kernel given the bits of the reference on this device?"""
    if device.type != "cuda":
        return False
    try:
        generator = torch.Generator(device).manual_seed(1)
        x = torch.randn(_SAMPLE, device=device, generator=generator)
        x[::7] = torch.round(x[::7] * 8) * 2.0**-21  # ties
        unit = -20
        wide = torch.float64 if dtype == torch.int64 else torch.float32
        expected = torch.mul(x.to(wide), 2.0**-unit).round_().to(dtype)
        total, peak = torch.zeros(_SAMPLE, dtype=dtype, device=device), _no_peak(device)
        add_units(total, x, _offset(unit, device), peak)
        once = torch.equal(total, expected)
        add_units(total, x, _offset(unit, device), peak, -1)
        found = peak.view(torch.float32)[0] == x.abs().max()
        return once and not bool(total.any()) and bool(found)
    except Exception as error:
        print(f"strict sums without their kernel: {error}", file=sys.stderr, flush=True)
        return False


def _no_peak(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _offset(unit: int, device: torch.device) -> Tensor:
    return torch.tensor([_OFFSET * 2.0**unit], dtype=torch.float64, device=device)
