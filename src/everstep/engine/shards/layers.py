"""Layers of one shard: where values are split and where they are added up.

    column    x ──► copied ──► x Wᵢᵀ               backward: the shards' dx are added up
    row       x Wᵢᵀ ──► added up ──► + b           backward: each shard has dy already
    vocab     rows of this shard, else 0 ──► added up
    experts   x, weights ──► copied ──► the experts of this shard, else 0 ──► added up

Every shard has all tokens and routes them alike, so no token has to be sent to a shard, and the order in
which gradients are added up does not depend on the routing. Of outputs one sum is exchanged per layer.

The backward of `copied` is an all-reduce, that of `added_up` is none, and the other way round. Several column
matrices that read the same tensor (query, key, value) share one copy of it, so its gradients are added up
once. A copy leads to the tensor it is made of and to the graph behind it; so a layer keeps its copies while
its forward runs and no longer.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine import keys
from everstep.engine.layers.linear import Queue, QueuedLinear, queued_embedding, queued_linear
from everstep.engine.layers.shard_plan import STYLES, Cut
from everstep.engine.layers.taken_over import QueuedConv1D, QueuedEmbedding, queued_forward
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
        """One copy for all that read this tensor."""
        if not x.requires_grad:
            return x
        if id(x) not in self._copies:
            self._copies[id(x)] = x, _Copied.apply(x, self.collectives)  # type: ignore[no-untyped-call]
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
    made: Tensor = _AddedUp.apply(x, collectives)  # type: ignore[no-untyped-call]
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


# Experts.


class _CopiedTogether(torch.autograd.Function):
    """Values that all shards have, for experts that are on some: their gradients are added up in one order,
    also on a shard whose experts got nothing.
    """

    @staticmethod
    def forward(ctx: Any, collectives: Collectives, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.collectives = collectives
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        shards = ctx.collectives
        return None, *(
            shards.sum(grad.contiguous().clone()) if wants else None
            for grad, wants in zip(grads, wanted, strict=True)
        )


class _OfAllExperts(torch.autograd.Function):
    """What the experts of all shards have made. `entered`, the copies that went into them, get a gradient
    (of 0 where nothing was made of them), so that every shard takes part in adding theirs up.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, collectives: Collectives, *entered: Tensor) -> Tensor:
        ctx.entered = [(value.shape, value.dtype) for value in entered]
        # A recompute begins where a saved tensor is needed and ends with the last that is saved: by this one
        # on all shards in the same place, behind this sum.
        ctx.save_for_backward(made.new_empty(0))
        return collectives.sum(made.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        zeros = (grads[0].new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.entered)
        return grads[0], None, *zeros


def _copied_together(values: list[Tensor], collectives: Collectives) -> list[Tensor]:
    made: tuple[Tensor, ...] = _CopiedTogether.apply(collectives, *values)  # type: ignore[no-untyped-call]
    return list(made)


def _of_all_experts(made: Tensor, entered: list[Tensor], collectives: Collectives, *, trains: bool) -> Tensor:
    """`trains`: there are experts that are trained, if not on this shard; then all shards' values want a
    gradient, whatever went in.
    """
    graded = [value for value in entered if value.requires_grad]
    if trains and not graded:
        graded = [torch.zeros((), device=made.device, requires_grad=True)]
    found: Tensor = _OfAllExperts.apply(made, collectives, *graded)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackedExperts:
    """Experts whose parameters have a row for each, of which this shard has some: its forward is given the
    pairs of a token and an expert that are here, as tokens with one expert each, numbered from 0.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Tensor]  # of hidden states, the experts of each token, and their weights
    takes: inspect.Signature
    run: LayerRun
    size: int  # experts of one shard
    shared: list[nn.Parameter]  # by all experts, such as those of a norm behind them

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        shards = self.run.collectives
        given = self.takes.bind(*args, **kwargs).arguments
        hidden, index, weights = _routed(self.name, given)
        states = given[hidden].reshape(-1, given[hidden].shape[-1])
        tokens, each = given[index].reshape(-1, given[index].shape[-1]), given[index].shape[-1]
        entered = _copied_together([states, given[weights].reshape(-1)], shards)
        local = tokens.reshape(-1) - shards.index * self.size
        here = local >= 0
        if shards.index < shards.count - 1:  # numbers above all experts have a meaning to the module alone
            here &= local < self.size
        pairs = here.nonzero().squeeze(-1)
        made = torch.zeros_like(states)
        if len(pairs):
            if self.module.training:
                self.run.enter(states.device)
            rows = pairs.div(each, rounding_mode="floor")
            here_alone = {
                hidden: entered[0].index_select(0, rows),
                index: local.index_select(0, pairs).unsqueeze(-1),
                weights: entered[1].index_select(0, pairs).unsqueeze(-1),
            }
            found = self.forward(*(here_alone[key] for key in given))
            self.run.leave()
            made = made.index_add(0, rows, found.reshape(-1, found.shape[-1]).to(made.dtype))
        trains = any(parameter.requires_grad for parameter in self.module.parameters())
        summed = [*entered, *self.shared]  # their gradients are added up, so every shard must have one
        return _of_all_experts(made, summed, shards, trains=trains).view(given[hidden].shape)


def _routed(name: str, given: Mapping[str, Any]) -> tuple[str, str, str]:
    """Which arguments of stacked experts are hidden states, the experts of each token, and their weights."""
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    whole = [key for key, value in tensors.items() if not value.is_floating_point()]
    floats = [key for key, value in tensors.items() if value.is_floating_point()]
    if len(given) == 3 and len(whole) == 1 and len(floats) == 2:
        states, index, weights = (tensors[key] for key in (floats[0], whole[0], floats[1]))
        tokens = index.numel() // max(1, index.shape[-1])
        if index.shape == weights.shape and states.numel() == tokens * states.shape[-1]:
            return floats[0], whole[0], floats[1]
    raise UserError(
        f"{name} is given {', '.join(given)}; stacked experts that are spread over shards take hidden "
        "states, the experts of each token and as many weights; leave them out of shard_plan."
    )


def _join_experts(name: str, part: nn.Module, plan: Cut, run: LayerRun) -> list[nn.Parameter]:
    """Returns the parameters that the experts of all shards share, such as those of a norm behind them."""
    size = next(part.parameters(recurse=False)).shape[0]
    for key, value in list(vars(part).items()):
        if "expert" in key and type(value) is int and value == size * plan.count:
            setattr(part, key, size)  # its number of experts
    inside = [one for one in part.modules() if one is not part]
    for one in inside:
        _by_autograd(one)
    shared = [parameter for one in inside for parameter in one.parameters(recurse=False)]
    takes = inspect.signature(part.forward)
    part.forward = StackedExperts(
        name=name, module=part, forward=part.forward, run=run, size=size, takes=takes, shared=shared
    )
    return shared


# What a part must be for `join` to split it in this style.
_KINDS: Mapping[str, type[QueuedEmbedding] | type[QueuedLinear]] = {
    style: QueuedEmbedding if style == "vocab" else QueuedLinear
    for style in STYLES
    if style not in ("whole", "whole_summed", "experts")
}


def refuse_unsplittable(layer: str, module: nn.Module, plan: Cut) -> None:
    """Before the start: what the plan names and `join` could not split, and experts that cannot be spread
    over this many shards.
    """
    for path, part in module.named_modules():
        name = ".".join(filter(None, (layer, path)))
        style = plan.style(name)
        if style != "experts":
            if style in _KINDS and plan.expert(name) is None and queued_forward(part) is not _KINDS[style]:
                raise _not_splittable(part, name, style)
            continue
        if len({p.shape[0] if p.ndim else 0 for p in part.parameters(recurse=False)}) != 1:
            raise UserError(
                f"shard_plan names {name} as experts; it is a {type(part).__name__}, not a module whose own "
                "parameters all have a row for each expert."
            )


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
        if plan.expert(name) is not None:
            continue  # inside of experts nothing is split
        style = plan.style(name)
        if style == "whole_summed":
            _by_autograd(part)
            summed += part.parameters(recurse=False)
        elif style == "experts":
            summed += _join_experts(name, part, plan, run)
        elif style == "vocab":
            queue = _queue_of(part, name, style)
            part.forward = VocabEmbedding(module=part, queue=queue, collectives=collectives)
        elif style == "row":
            queue = _queue_of(part, name, style)
            part.forward = RowLinear(module=part, queue=queue, run=run)
        elif style != "whole":
            queue = _queue_of(part, name, style)
            gathers = style == "column_gather"
            part.forward = ColumnLinear(module=part, queue=queue, run=run, gathers=gathers)
    module.forward = _LayerForward(module.forward, run)
    return summed


def _by_autograd(part: nn.Module) -> None:
    """A gradient that is added up before W must be there before W."""
    if isinstance(part.forward, QueuedLinear | QueuedConv1D | QueuedEmbedding):
        del part.forward


def _queue_of(part: nn.Module, name: str, style: str) -> Queue:
    if isinstance(part.forward, _KINDS[style]):
        return part.forward.queue
    raise _not_splittable(part, name, style)


def _not_splittable(part: nn.Module, name: str, style: str) -> UserError:
    kind = "an nn.Embedding" if _KINDS[style] is QueuedEmbedding else "an nn.Linear"
    return UserError(
        f"shard_plan splits {name} as {style!r}; it is a {type(part).__name__}, not {kind}. Name what is to "
        "be split in a shard_plan of your own, or leave shards out."
    )


def sum_whole(parameters: list[nn.Parameter], collectives: Collectives | None) -> None:
    """Add up the gradients of whole parameters that every shard has used on a part, in one collective."""
    grads = [one.grad for one in parameters if one.grad is not None]
    if collectives is None or not grads:
        return
    ends = list(itertools.accumulate(grad.numel() for grad in grads[:-1]))
    flat = collectives.sum(torch.cat([grad.reshape(-1) for grad in grads]))
    for grad, summed in zip(grads, flat.tensor_split(ends), strict=True):
        grad.copy_(summed.view_as(grad))


# Of a norm: several times what rounding makes. Heads with nearly equal gradients differ by a few per cent.
SAME_WITHIN = {torch.float64: 1e-5, torch.float32: 1e-4}


def refuse_unequal(gradients: Mapping[str, Tensor], collectives: Collectives) -> None:
    """Of parameters that every shard has whole and uses alike, so that their gradients are the same but for
    rounding. What is within rounding of the largest of them is not compared.
    """
    norms = {name: float(grad.norm()) for name, grad in gradients.items()}
    for name, grad in gradients.items():
        off = float((collectives.sum(grad.clone()) / collectives.count - grad).norm())
        if off > SAME_WITHIN.get(grad.dtype, 1e-2) * norms[name] and off > 1e-4 * max(norms.values()):
            raise UserError(not_equal(name))


def not_equal(name: str) -> str:
    return (
        f"{name} is whole on every shard, and its gradient differs from shard to shard, because its "
        'module works on split values; name the module in shard_plan: "whole_summed".'
    )
