"""Stacked experts: each token goes through some of them, and the tokens of each are multiplied at once.

    tokens ──► sorted by expert ──► product by group ──► gate ──► product by group ──► back in order, added up

How many rows an expert gets stays on the device, where torch has a product of groups for it: then nothing
waits for the host, and the op can be compiled and recorded. Elsewhere a loop over the experts asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from everstep.engine.layers.linear import RECEIVER, GroupedGrad, Queue

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # of rows, stacked matrices and where rows end


def product_of_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end times the matrix (inputs x outputs) of their expert; at once, where torch can."""
    if x.is_meta:
        return x.new_empty(len(x), weight.shape[2])
    even = all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])  # what its kernels ask for
    fitting = x.is_cpu or (x.is_cuda and x.dtype == torch.bfloat16)
    if even and fitting and hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    stops = ends.tolist()
    parts = zip(pairwise((0, *stops)), weight, strict=True)
    return torch.cat([x[start:stop] @ matrix for (start, stop), matrix in parts])


def _forward(x: Tensor, weight: Tensor, ends: Tensor, across: bool) -> Tensor:
    return product_of_groups(x, weight if across else weight.transpose(1, 2), ends)


def _input_grad(grad: Tensor, weight: Tensor, ends: Tensor, across: bool) -> Tensor:
    return product_of_groups(grad, weight.transpose(1, 2) if across else weight, ends)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, across: bool, queue: Queue) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight, ends)
        ctx.weight, ctx.across, ctx.queue = weight, across, queue
        return _forward(x, weight, ends, across)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (grad,), (x, weight, ends) = grads, ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.queue.append(GroupedGrad(ctx.weight, x.detach(), grad, ends, ctx.across))
        back = _input_grad(grad, weight, ends, ctx.across) if ctx.needs_input_grad[0] else None
        return back, None, None, None, None


class _Moved(torch.autograd.Function):
    """Rows in another order, each of them `each` times. Torch adds up what comes back by index, for which it
    sorts; here it is known where each row went.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.each = each
        return x.index_select(0, order.div(each, rounding_mode="floor") if each > 1 else order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        found = grads[0].index_select(0, back)
        return found.view(-1, ctx.each, found.shape[-1]).sum(1) if ctx.each > 1 else found, None, None, None


def _moved(x: Tensor, order: Tensor, back: Tensor, each: int = 1) -> Tensor:
    made: Tensor = _Moved.apply(x, order, back, each)  # type: ignore[no-untyped-call]
    return made


def through_experts(part: Any, x: Tensor, chosen: Tensor, weights: Tensor, product: Product) -> Tensor:
    """Experts in the form that transformers gives them (`use_experts_implementation`)."""
    numbers, order = chosen.reshape(-1).sort(stable=True)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
    up, down = part.gate_up_proj if part.has_gate else part.up_proj, part.down_proj
    every = torch.arange(down.shape[0], device=x.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    rows = _moved(x, order, back, chosen.shape[-1]).to(up.dtype)
    inside = product(rows, up, ends)
    if part.has_bias:
        inside = inside + (part.gate_up_proj_bias if part.has_gate else part.up_proj_bias)[numbers]
    gated = part._apply_gate(inside) if part.has_gate else part.act_fn(inside)
    made = product(gated.to(down.dtype), down, ends)
    if part.has_bias:
        made = made + part.down_proj_bias[numbers]
    if getattr(part, "has_post_expert_norm", False):
        made = part.post_expert_norm(made)
    made = _moved(made, back, order).view(*chosen.shape, -1) * weights.reshape(chosen.shape).unsqueeze(-1)
    return made.sum(-2).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedExperts:
    """What stacked experts run as their forward, once they are taken over."""

    module: Any
    queue: Queue

    def __call__(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
            made: Tensor = _Grouped.apply(x, weight, ends, self.module.is_transposed, self.queue)  # type: ignore[no-untyped-call]
            return made

        return through_experts(self.module, hidden_states, chosen, weights, product)


# ------------------------------------------------------------------
# In a layer that torch.compile fuses: as `linear` has it.


def fused_experts(self: Any, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if x.requires_grad and weight.requires_grad and torch.is_grad_enabled():
            made: Tensor = torch.ops.everstep.grouped(x, weight, ends, self.is_transposed)
            return made
        return _forward(x, weight, ends, self.is_transposed)

    return through_experts(self, hidden_states, chosen, weights, product)


@torch.library.custom_op(
    "everstep::grouped",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor ends, bool across) -> Tensor",
)
def _grouped_op(x: Tensor, weight: Tensor, ends: Tensor, across: bool) -> Tensor:
    return _forward(x, weight, ends, across)


@torch.library.custom_op(
    "everstep::grouped_back",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor ends, bool across) -> Tensor",
)
def _grouped_back_op(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, across: bool) -> Tensor:
    ours = RECEIVER.at[weight.data_ptr()]
    RECEIVER.queue.append(GroupedGrad(ours, x.detach(), grad.detach(), ends.detach(), across))
    return _input_grad(grad, weight, ends, across)


@_grouped_op.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, across: bool) -> Tensor:
    return x.new_empty(len(x), weight.shape[2 if across else 1])


@_grouped_back_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, across: bool) -> Tensor:
    return grad.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.across = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    x, weight, ends = ctx.saved_tensors
    return torch.ops.everstep.grouped_back(grad, x, weight, ends, ctx.across), None, None, None


_grouped_op.register_autograd(_back, setup_context=_keep)
