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
once. A copy leads to the tensor it is made of and to the graph behind it; so a layer keeps its copies while
its forward runs and no longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine import keys
from everstep.engine.layers.linear import (
    Queue,
    QueuedConv1D,
    QueuedEmbedding,
    QueuedLinear,
    queued_embedding,
    queued_linear,
)
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


@dataclass(slots=True, eq=False)
class LayerRun:
    """What the split matrices of a layer have in common while its forward runs, and no longer.

    Between a column and a row matrix each shard has other values, such as its own heads, and draws other
    random numbers for them; before and after, all draw the same.
    """

    collectives: Collectives
    _copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by identity: itself, its copy
    _outside: tuple[torch.Generator, Tensor] | None = None  # the generator's state where values are whole
    _entered: int = 0

    def copied(self, x: Tensor) -> Tensor:
        """One copy for all that read this tensor; of the whole sequence, where each shard has a part."""
        shards = self.collectives
        if not x.requires_grad and not shards.splits_sequence:
            return x
        if id(x) not in self._copies:
            function = _GatheredSequence if shards.splits_sequence else _Copied
            self._copies[id(x)] = x, function.apply(x, shards)  # type: ignore[no-untyped-call]
        return self._copies[id(x)][1]

    def enter(self, device: torch.device) -> None:
        if self._outside is None:
            draws = torch.default_generator
            if device.type == "cuda":
                draws = torch.cuda.default_generators[device.index]
            self._outside = draws, draws.get_state()
            self._entered += 1
            draws.manual_seed(keys.key(draws.initial_seed(), self.collectives.index, self._entered))

    def leave(self) -> None:
        if self._outside is not None:
            draws, state = self._outside
            draws.set_state(state)
            self._outside = None

    def end(self) -> None:
        self.leave()
        self._copies.clear()
        self._entered = 0


@dataclass(frozen=True, slots=True, eq=False)
class _LayerForward:
    forward: Callable[..., Any]
    run: LayerRun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.forward(*args, **kwargs)
        finally:  # a recompute leaves a forward by an exception, too
            self.run.end()


def added_up(x: Tensor, collectives: Collectives) -> Tensor:
    function = _AddedUpInParts if collectives.splits_sequence else _AddedUp
    made: Tensor = function.apply(x, collectives)  # type: ignore[no-untyped-call]
    return made


def gathered(x: Tensor, collectives: Collectives) -> Tensor:
    made: Tensor = _Gathered.apply(x, collectives)  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnLinear:
    module: nn.Linear
    queue: Queue
    run: LayerRun
    gathers: bool

    def __call__(self, input: Tensor) -> Tensor:
        whole = self.run.copied(input)
        made = queued_linear(whole, self.module.weight, self.module.bias, self.queue)
        if self.gathers:
            return gathered(made, self.run.collectives)
        if self.module.training:
            self.run.enter(made.device)
        return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLinear:
    module: nn.Linear
    queue: Queue
    run: LayerRun

    def __call__(self, input: Tensor) -> Tensor:
        self.run.leave()
        made = added_up(queued_linear(input, self.module.weight, None, self.queue), self.run.collectives)
        return made if self.module.bias is None else made + self.module.bias


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabEmbedding:
    module: nn.Embedding
    queue: Queue
    collectives: Collectives

    def __call__(self, input: Tensor) -> Tensor:
        weight = self.module.weight
        first = self.collectives.index * weight.shape[0]
        local = input - first
        elsewhere = (local < 0) | (local >= weight.shape[0])
        padding = -1 if self.module.padding_idx is None else self.module.padding_idx - first
        here = padding if 0 <= padding < weight.shape[0] else None  # its row is not trained
        found = queued_embedding(local.masked_fill(elsewhere, 0), weight, here, self.queue)
        return added_up(found.masked_fill(elsewhere.unsqueeze(-1), 0), self.collectives)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartDropout:
    """Of this shard's part of the sequence: drawn for the whole, so that it does not depend on the shards."""

    module: nn.Dropout
    collectives: Collectives

    def __call__(self, input: Tensor) -> Tensor:
        if not self.module.training or self.module.p == 0:
            return input
        size, shards = input.shape[-2], self.collectives
        whole = (*input.shape[:-2], size * shards.count, input.shape[-1])
        drawn = nn.functional.dropout(input.new_ones(whole), self.module.p)
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
    run = LayerRun(collectives)
    for path, part in module.named_modules():
        name = ".".join(filter(None, (layer, path)))
        style = plan.style(name)
        if style == "whole_summed" or (style == "sequence" and collectives.splits_sequence):
            if isinstance(part.forward, QueuedLinear | QueuedConv1D | QueuedEmbedding):
                del part.forward  # a gradient that is added up before W must be there before W: autograd's
            summed += part.parameters(recurse=False)
            if isinstance(part, nn.Dropout) and style == "sequence":
                part.forward = PartDropout(module=part, collectives=collectives)  # type: ignore[method-assign]
        elif style == "vocab":
            queue = _queue_of(part, QueuedEmbedding, name, style)
            part.forward = VocabEmbedding(module=part, queue=queue, collectives=collectives)
        elif style == "row":
            queue = _queue_of(part, QueuedLinear, name, style)
            part.forward = RowLinear(module=part, queue=queue, run=run)
            if collectives.splits_sequence and isinstance(part.bias, nn.Parameter):
                summed.append(part.bias)
        elif style not in ("whole", "sequence"):
            queue = _queue_of(part, QueuedLinear, name, style)
            gathers = style == "column_gather"
            part.forward = ColumnLinear(module=part, queue=queue, run=run, gathers=gathers)
    module.forward = _LayerForward(module.forward, run)
    return summed


def _queue_of(
    part: nn.Module, wanted: type[QueuedLinear] | type[QueuedEmbedding], name: str, style: str
) -> Queue:
    if isinstance(part.forward, wanted):
        return part.forward.queue
    kind = "an nn.Embedding" if wanted is QueuedEmbedding else "an nn.Linear"
    raise UserError(f"shard_plan splits {name} as {style!r}; it is a {type(part).__name__}, not {kind}.")


def sum_whole(parameters: list[nn.Parameter], collectives: Collectives | None) -> None:
    """Add up the gradients of whole parameters that every shard has used on a part, in one collective."""
    grads = [one.grad for one in parameters if one.grad is not None]
    if collectives is None or not grads:
        return
    ends = list(itertools.accumulate(grad.numel() for grad in grads[:-1]))
    flat = collectives.sum(torch.cat([grad.reshape(-1) for grad in grads]))
    for grad, summed in zip(grads, flat.tensor_split(ends), strict=True):
        grad.copy_(summed.view_as(grad))


def refuse_unequal(gradients: Mapping[str, Tensor], collectives: Collectives) -> None:
    """Of parameters that every shard has whole and uses alike, so that their gradients are the same. What is
    within rounding of the largest of them is not compared.
    """
    norms = {name: float(grad.norm()) for name, grad in gradients.items()}
    for name, grad in gradients.items():
        off = float((collectives.sum(grad.clone()) / collectives.count - grad).norm())
        if off > 0.05 * norms[name] and off > 1e-4 * max(norms.values()):
            raise UserError(
                f"{name} is whole on every shard, and its gradient differs from shard to shard, because its "
                'module works on split values; name the module in shard_plan: "sequence" if it works on each '
                'token alone between split layers, "whole_summed" if it works inside of them.'
            )
