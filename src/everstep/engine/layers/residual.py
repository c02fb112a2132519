"""Where a residual branch begins: the norm of the branch, and what goes around it, in one backward pass.

    x ─┬─► norm ──► the branch ──► +
       └──────────────────────────►┘

Two gradients come back to x, one around the branch and one through its norm. Autograd computes the second,
and then adds them up in a pass of its own over memory. Here the backward of the norm is given both. Used
where regions are compiled (`regions`); it rounds once where autograd rounds twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everstep.engine.layers.regions import region


def branched(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x as it is, to go around the branch, and its RMS norm."""
    around, normed = _Branched.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return around, normed


class _Branched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, rates = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, rates)
        return x.view_as(x), normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        around, through = grads
        found, of_weight = _grads(around, through, *ctx.saved_tensors)
        return found, of_weight, None


@region
def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    rates = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rates * weight).to(x.dtype), rates


@region
def _grads(
    around: Tensor, through: Tensor, x: Tensor, weight: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    scaled = _wide(x) * rates
    wanted = _wide(through) * weight
    back = rates * (wanted - scaled * (wanted * scaled).mean(-1, keepdim=True))
    of_weight = (_wide(through) * scaled).flatten(0, -2).sum(0)
    return (_wide(around) + back).to(x.dtype), of_weight.to(weight.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
