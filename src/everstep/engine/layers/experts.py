"""Stacked experts: each token goes through some of them, and the tokens of each are multiplied at once.

    tokens ──► sorted by expert ──► product by group ──► gate ──► product by group ──► back in order, added up

A token that an expert does not take (`within_capacity`) lies behind the tokens of all experts, is multiplied
with nothing and adds 0.

How many rows an expert gets stays on the device, where torch has a product of groups for it: then nothing
waits for the host, and the op can be compiled and recorded. Elsewhere a loop over the experts asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.layers.linear import RECEIVER, GroupedGrad, Queue

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # of rows, stacked matrices and where rows end


def product_of_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end times the matrix (inputs x outputs) of their expert; at once, where torch can. What
    is made of rows behind the last end has no meaning.
    """
    if x.is_meta:
        return x.new_empty(len(x), weight.shape[2])
    even = all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])  # what its kernels ask for
    fitting = x.is_cpu or (x.is_cuda and x.dtype == torch.bfloat16)
    if even and fitting and hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    stops = ends.tolist()
    parts = zip(pairwise((0, *stops)), weight, strict=True)
    rest = x.new_zeros(len(x) - stops[-1], weight.shape[2])
    return torch.cat([*(x[start:stop] @ matrix for (start, stop), matrix in parts), rest])


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


NO_EXPERT = -1


def within_capacity(chosen: Tensor, capacity: int) -> Tensor:
    """`chosen` (tokens x experts of each, likeliest first) with `NO_EXPERT` in the place of an expert that
    has `capacity` tokens already. First choices come before second ones, then tokens in their order.
    """
    numbers, order = chosen.t().reshape(-1).sort(stable=True)
    before = torch.arange(len(order), device=chosen.device) - torch.searchsorted(numbers, numbers)
    dropped = torch.empty_like(order, dtype=torch.bool).index_copy_(0, order, before >= capacity)
    return chosen.masked_fill(dropped.view(chosen.shape[1], -1).t(), NO_EXPERT)


class DropCount(nn.Module):
    """Pairs of a token and an expert that a layer has made: how many are beyond a capacity, and all."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def add(self, taken: Tensor) -> None:
        self.counts[0] += (taken == NO_EXPERT).sum()
        self.counts[1] += taken.numel()


class DroppedShare:
    """Of the pairs that layers make, the share that is dropped. A layer that is run again counts again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._counts = [
            part for module in modules for part in module.modules() if isinstance(part, DropCount)
        ]
        self._copy: tuple[Tensor, Any] | None = None  # on the host; the event behind the copy
        self._before = (0, 0)

    def since_last(self) -> float | None:
        """Of those up to the last call and behind the one before, so that nothing waits for a GPU."""
        found = None
        if self._copy is not None and (self._copy[1] is None or self._copy[1].query()):
            dropped, total = map(int, self._copy[0])
            made = total - self._before[1]
            found = (dropped - self._before[0]) / made if made else None
            self._before, self._copy = (dropped, total), None
        if self._counts and self._copy is None:
            now = torch.stack([one.counts for one in self._counts]).sum(0)
            host = torch.empty_like(now, device="cpu", pin_memory=now.is_cuda).copy_(now, non_blocking=True)
            done = torch.cuda.Event() if now.is_cuda else None  # type: ignore[no-untyped-call]
            if done is not None:
                done.record()
            self._copy = host, done
        return found


def through_experts(part: Any, x: Tensor, chosen: Tensor, weights: Tensor, product: Product) -> Tensor:
    """Experts in the form that transformers gives them (`use_experts_implementation`), and ours."""
    flat, drops = chosen.reshape(-1), getattr(part, "drops", False)
    if drops:
        flat = flat.masked_fill(flat == NO_EXPERT, part.down_proj.shape[0])  # behind all
    numbers, order = flat.sort(stable=True)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
    up, down = part.gate_up_proj if part.has_gate else part.up_proj, part.down_proj
    every = torch.arange(down.shape[0], device=x.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    rows = _moved(x, order, back, chosen.shape[-1]).to(up.dtype)
    if drops:  # in the backward, for what the product gives those rows has no meaning
        none = (numbers == len(every)).unsqueeze(-1)
        rows = rows.masked_fill(none, 0)
    inside = product(rows, up, ends)
    if part.has_bias:
        inside = inside + (part.gate_up_proj_bias if part.has_gate else part.up_proj_bias)[numbers]
    gated = part._apply_gate(inside) if part.has_gate else part.act_fn(inside)
    made = product(gated.to(down.dtype), down, ends)
    if part.has_bias:
        made = made + part.down_proj_bias[numbers]
    if getattr(part, "has_post_expert_norm", False):
        made = part.post_expert_norm(made)
    if drops:
        made = made.masked_fill(none, 0)
    made = _moved(made, back, order).view(*chosen.shape, -1) * weights.reshape(chosen.shape).unsqueeze(-1)
    return made.sum(-2).to(x.dtype)


def plain_experts(part: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Their weight gradients are autograd's."""
    return through_experts(
        part, x, chosen, weights, lambda x, weight, ends: _forward(x, weight, ends, part.is_transposed)
    )


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
