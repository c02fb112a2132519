"""Layers of one shard: where values are split and where they are added up.

    column    x ──► copied ──► x Wᵢᵀ               backward: the shards' dx are added up
    row       x Wᵢᵀ ──► added up ──► + b           backward: each shard has dy already
    vocab     rows of this shard, else 0 ──► added up

With `splits_sequence` the values between a row and the next column matrix are split along the sequence, so
norms, dropout and residual sums are computed once and not by every shard:

    column    part of x ──► gathered ──► x Wᵢᵀ     backward: the shards' dx are added up, each keeps its part
    row       x Wᵢᵀ ──► added up, each keeps its part     backward: the parts of dy are gathered

The backward of `copied` is an all-reduce, that of `added_up` is none, and the other way round. Several column
matrices that read the same tensor (query, key, value) share one copy of it, so its gradients are added up
once.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.layers.linear import QueuedEmbedding, QueuedLinear, queued_embedding, queued_linear
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.shards.collectives import Collectives
from everstep.errors import UserError


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.collectives.sum(grads[0].contiguous().clone()), None


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        return collectives.sum(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives, ctx.width = collectives, x.shape[-1]
        return torch.cat(collectives.gather(x), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        own = grads[0].narrow(-1, ctx.collectives.index * ctx.width, ctx.width)
        return own.contiguous(), None


class _GatheredSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return torch.cat(collectives.gather(x), dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _own_part(grads[0], ctx.collectives), None


class _AddedUpInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return _own_part(x, collectives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(ctx.collectives.gather(grads[0]), dim=-2), None


def _own_part(x: Tensor, collectives: Collectives) -> Tensor:
    """The sum over the shards, of this shard's part of the sequence."""
    if x.ndim < 2 or x.shape[-2] % collectives.count:
        raise UserError(
            f"sequence_parallel splits every sequence over {collectives.count} shards, and a value of shape "
            f"{list(x.shape)} cannot be split evenly; give a data.sequence that {collectives.count} divides."
        )
    return collectives.sum_of_part(torch.stack(x.chunk(collectives.count, dim=-2)))


def copied(x: Tensor, collectives: Collectives) -> Tensor:
    """One copy for all that read this tensor; of the whole sequence, where each shard has a part."""
    if not x.requires_grad and not collectives.splits_sequence:
        return x
    found = getattr(x, "_everstep_copied", None)
    if found is None:
        function = _GatheredSequence if collectives.splits_sequence else _Copied
        found = function.apply(x, collectives)  # type: ignore[no-untyped-call]
        x._everstep_copied = found  # type: ignore[attr-defined]
    made: Tensor = found
    return made


def added_up(x: Tensor, collectives: Collectives) -> Tensor:
    function = _AddedUpInParts if collectives.splits_sequence else _AddedUp
    made: Tensor = function.apply(x, collectives)  # type: ignore[no-untyped-call]
    return made


def gathered(x: Tensor, collectives: Collectives) -> Tensor:
    made: Tensor = _Gathered.apply(x, collectives)  # type: ignore[no-untyped-call]
    return made


class ColumnLinear(QueuedLinear):
    collectives: Collectives
    gathers: bool

    def forward(self, input: Tensor) -> Tensor:
        made = queued_linear(copied(input, self.collectives), self.weight, self.bias, self.queue)
        return gathered(made, self.collectives) if self.gathers else made


class RowLinear(QueuedLinear):
    collectives: Collectives

    def forward(self, input: Tensor) -> Tensor:
        made = added_up(queued_linear(input, self.weight, None, self.queue), self.collectives)
        return made if self.bias is None else made + self.bias


class VocabEmbedding(QueuedEmbedding):
    collectives: Collectives

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = input - self.collectives.index * rows
        elsewhere = (local < 0) | (local >= rows)
        found = queued_embedding(local.masked_fill(elsewhere, 0), self.weight, None, self.queue)
        return added_up(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.collectives)


class PartDropout(nn.Dropout):
    """Of this shard's part of the sequence: drawn for the whole, so that it does not depend on the shards."""

    collectives: Collectives

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        size, shards = input.shape[-2], self.collectives
        whole = (*input.shape[:-2], size * shards.count, input.shape[-1])
        drawn = nn.functional.dropout(input.new_ones(whole), self.p)
        return input * drawn.narrow(-2, shards.index * size, size)


def cut(layer: str, module: nn.Module, plan: Cut) -> None:
    """Keep only this shard's part of every parameter of a whole layer. Frozen ones too."""
    for path, part in module.named_modules():
        for key, parameter in part.named_parameters(recurse=False):
            name = ".".join(filter(None, (layer, path, key)))
            split = plan.split(name, tuple(parameter.shape))
            if split is not None:
                parameter.data = split.of(parameter.data).clone()


def join(layer: str, module: nn.Module, plan: Cut, collectives: Collectives) -> list[nn.Parameter]:
    """Make the layers work together with those of the other shards. Returns the parameters whose gradients
    must be added up over the shards.
    """
    summed: list[nn.Parameter] = []
    for path, part in module.named_modules():
        name = ".".join(filter(None, (layer, path)))
        style = plan.style(name)
        if style == "whole_summed" or (style == "sequence" and collectives.splits_sequence):
            summed += part.parameters(recurse=False)
            if isinstance(part, nn.Dropout) and style == "sequence":
                _become(part, nn.Dropout, PartDropout, name, style, collectives)
        elif style == "vocab":
            _become(part, QueuedEmbedding, VocabEmbedding, name, style, collectives)
        elif style == "row":
            _become(part, QueuedLinear, RowLinear, name, style, collectives)
            if collectives.splits_sequence and isinstance(part.bias, nn.Parameter):
                summed.append(part.bias)
        elif style not in ("whole", "sequence"):
            _become(part, QueuedLinear, ColumnLinear, name, style, collectives)
            part.gathers = style == "column_gather"
    return summed


def _become(
    part: nn.Module,
    was: type[nn.Module],
    becomes: type[nn.Module],
    name: str,
    style: str,
    collectives: Collectives,
) -> None:
    if not isinstance(part, was):
        kind = "an nn.Embedding" if was is QueuedEmbedding else "an nn.Linear"
        raise UserError(f"shard_plan splits {name} as {style!r}; it is a {type(part).__name__}, not {kind}.")
    original = type(part)
    part.__class__ = becomes if original is was else type(original.__name__, (becomes, original), {})
    part.collectives = collectives  # type: ignore[assignment]


def sum_whole(parameters: list[nn.Parameter], collectives: Collectives | None) -> None:
    """Add up the gradients of whole parameters that every shard has used on a part, in one collective."""
    grads = [one.grad for one in parameters if one.grad is not None]
    if collectives is None or not grads:
        return
    ends = list(itertools.accumulate(grad.numel() for grad in grads[:-1]))
    flat = collectives.sum(torch.cat([grad.reshape(-1) for grad in grads]))
    for grad, summed in zip(grads, flat.tensor_split(ends), strict=True):
        grad.copy_(summed.view_as(grad))
