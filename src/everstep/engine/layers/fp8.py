"""Linears whose products are of 8-bit numbers: F and I in e4m3 with a scale per row, W as in bf16.

    F   y  = x Wᵀ     rows of x and rows of W, each with its own scale
    I   dx = dy W     rows of dy and columns of W
    W   dW = dyᵀ x    of the bf16 numbers, summed in fp32: what strict sums add up keeps its bits

A scale is the power of two that brings the largest number of its row just below the largest that e4m3 has. It
follows from the row alone: there is no history that would have to travel, and any worker that computes the op
makes the same bits. Multiplying with it rounds nothing, so an 8-bit number is rounded once. What is made of a
weight is kept until the weight changes.

On a GPU the product is `torch._scaled_mm`, which takes scales by row and gives bf16. Elsewhere, for tests,
the same 8-bit numbers are multiplied in fp32 and rounded once to bf16: the same up to the order of addition.

Rejected: W in fp8 as well. `_scaled_mm` with scales by row gives bf16, so every contribution to a sum would
be rounded to 8 bits, and both of its operands would have to be scaled again along their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from everstep.engine.layers.linear import LinearGrad, Queue
from everstep.log import warn

LEAST, MULTIPLE = 64, 16  # of inputs and outputs: smaller Linears gain nothing, and kernels ask for the other
_TOP, _PART = 8, 0x600000  # the largest e4m3 is 448 = 0.875 x 2^9: an exponent, and the bits of 0.875
_RANGE = 126  # of a scale's exponent: it and its inverse are plain numbers
_BLOCK = 4096  # elements of a row at once


class ScaledRows(NamedTuple):
    """A matrix in e4m3, and what each of its rows is to be multiplied with."""

    values: Tensor
    scales: Tensor  # fp32, one per row


def in_rows(x: Tensor) -> ScaledRows:
    if x.is_cuda and _kernel_agrees(x.device):
        return _by_kernel(x.contiguous())
    return _by_torch(x)


def _by_torch(x: Tensor) -> ScaledRows:
    most = x.abs().amax(1, keepdim=True).float()
    bits = most.view(torch.int32)
    up = (_TOP + 126 - (bits >> 23) + (bits & 0x7FFFFF <= _PART)).clamp(-_RANGE, _RANGE)
    values = (x.float() * _power(up)).to(torch.float8_e4m3fn)
    return ScaledRows(values, torch.where(most.isfinite(), _power(-up), torch.nan))


def _power(exponent: Tensor) -> Tensor:
    """Of two, exactly."""
    return (exponent + 127 << 23).to(torch.int32).view(torch.float32)


@cache
def _compiled() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def scale_rows(  # type: ignore[no-untyped-def]
        x_at,
        values_at,
        scales_at,
        width,
        TOP: tl.constexpr,
        PART: tl.constexpr,
        RANGE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        most = 0
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_at + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))
        up = TOP + 126 - (most >> 23) + tl.where((most & 0x7FFFFF) <= PART, 1, 0)
        up = tl.minimum(tl.maximum(up, -RANGE), RANGE)
        factor = ((up + 127) << 23).to(tl.float32, bitcast=True)
        back = ((127 - up) << 23).to(tl.float32, bitcast=True)
        tl.store(scales_at + row, tl.where(most < 0x7F800000, back, float("nan")))
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_at + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            tl.store(values_at + row * width + at, (x * factor).to(tl.float8e4nv), mask=at < width)

    return triton, scale_rows


def _by_kernel(x: Tensor) -> ScaledRows:
    """In one pass over memory, and one over a cache."""
    triton, scale_rows = _compiled()
    rows, width = x.shape
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    if rows:
        scale_rows[(rows,)](
            x, values, scales, width, TOP=_TOP, PART=_PART, RANGE=_RANGE, BLOCK=block, num_warps=8
        )
    return ScaledRows(values, scales)


@cache
def _kernel_agrees(device: torch.device) -> bool:
    """Has the kernel given the bits of torch's operations on this device?"""
    draw = torch.Generator(device).manual_seed(1)
    try:
        for width in (64, 3072, 5120):
            x = torch.randn(300, width, generator=draw, device=device)
            x *= torch.randn(300, 1, generator=draw, device=device).mul_(20).exp2_()
            x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan
            ours, theirs = _by_kernel(x.bfloat16()), _by_torch(x.bfloat16())
            same = ours.values[3:].view(torch.uint8).equal(theirs.values[3:].view(torch.uint8))
            if not same or not ours.scales[3:].equal(theirs.scales[3:]) or not ours.scales[1:3].isnan().all():
                warn("fp8 without its kernel, which gives other bits here")
                return False
    except Exception as error:
        warn(f"fp8 without its kernel: {error}")
        return False
    return True


def product(a: ScaledRows, b: ScaledRows, *, fast: bool = True) -> Tensor:
    """a bᵀ in bf16. `fast`: sums with the few bits that a GPU's tensor cores keep by themselves. Numbers of 8
    bits round more than that, and without it torch's kernel for scales by row is slow.
    """
    if a.values.is_meta:
        return a.scales.new_empty(len(a.values), len(b.values), dtype=torch.bfloat16)
    if a.values.is_cuda:
        return torch._scaled_mm(
            a.values,
            b.values.t(),
            scale_a=a.scales,
            scale_b=b.scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
    sums = a.values.float() @ b.values.float().t()
    return (sums * a.scales * b.scales.t()).bfloat16()


class ScaledLinear:
    """What a Linear in fp8 runs as its forward, once it is taken over. Its weight is scaled when it has
    changed, not in every op, and always into the same memory: a recorded op reads it there.
    """

    def __init__(self, module: Any, queue: Queue) -> None:
        """`module`: with a weight and a bias, read at every call."""
        self.module, self.queue = module, queue
        self._both: tuple[ScaledRows, ScaledRows] | None = None

    def __call__(self, input: Tensor) -> Tensor:
        return self.together(input, self)[0]

    def together(self, x: Tensor, *linears: ScaledLinear) -> tuple[Tensor, ...]:
        """What these Linears make of one input."""
        parameters = [one.module.weight for one in linears] + [one.module.bias for one in linears]
        made: tuple[Tensor, ...] = _Scaled.apply(x, linears, *parameters)  # type: ignore[no-untyped-call]
        return made

    @property
    def rows(self) -> ScaledRows:
        return self._scaled()[0]

    @property
    def columns(self) -> ScaledRows:
        return self._scaled()[1]

    @torch.no_grad()
    def rescale(self) -> None:
        """The weight has changed."""
        new = in_rows(self.module.weight), in_rows(self.module.weight.t())
        if self._both is None:
            self._both = new
        for before, after in zip(self._both, new, strict=True):
            before.values.copy_(after.values)
            before.scales.copy_(after.scales)

    def _scaled(self) -> tuple[ScaledRows, ScaledRows]:
        if self._both is None:
            self.rescale()
        assert self._both is not None
        return self._both


class _Scaled(torch.autograd.Function):
    """Several Linears of one input: it is scaled once. `parameters`: their weights, then their biases."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linears: tuple[ScaledLinear, ...], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(linears)], parameters[len(linears) :]
        ctx.save_for_backward(x if any(w.requires_grad for w in weights if w is not None) else None)
        ctx.parameters, ctx.linears, ctx.shape = parameters, linears, x.shape
        rows = in_rows(x.reshape(-1, x.shape[-1]))
        found = []
        for linear, bias in zip(linears, biases, strict=True):
            made = product(rows, linear.rows)
            found.append((made if bias is None else made + bias).view(*x.shape[:-1], -1))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        wanted = [p if p is not None and p.requires_grad else None for p in ctx.parameters]
        total: Tensor | None = None
        for number, (linear, grad) in enumerate(zip(ctx.linears, grads, strict=True)):
            weight, bias = wanted[number], wanted[number + len(grads)]
            if weight is not None or bias is not None:
                held = None if weight is None else x.detach()
                linear.queue.append(LinearGrad(weight=weight, bias=bias, input=held, grad=grad))
            if ctx.needs_input_grad[0]:
                made = product(in_rows(grad.reshape(-1, grad.shape[-1])), linear.columns)
                total = made if total is None else total + made
        back = None if total is None else total.view(ctx.shape)
        return back, None, *(None for _ in ctx.parameters)


def linears_in_fp8(module: nn.Module) -> Iterator[nn.Module]:
    """Linears of a size that gains from it; routers, the neighbours of experts, decide by small differences,
    and stay in bf16.
    """
    routers = {
        id(child)
        for part in module.modules()
        if "experts" in dict(part.named_children())
        for child in part.children()
    }
    for part in module.modules():
        weight = part._parameters.get("weight")
        if weight is None or weight.ndim != 2 or id(part) in routers:
            continue
        if all(size >= LEAST and size % MULTIPLE == 0 for size in weight.shape):
            yield part
