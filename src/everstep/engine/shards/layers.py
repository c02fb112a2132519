"""Layers of one shard: where values are split and where they are added up.

    column    x ──► copied ──► x Wᵢᵀ               backward: the shards' dx are added up
    row       x Wᵢᵀ ──► added up ──► + b           backward: each shard has dy already
    row of whole    x ──► its part ──► as row      backward: the parts of dx are gathered
    vocab     rows of this shard, else 0 ──► added up
    experts   x, weights ──► copied ──► the experts of this shard, else 0 ──► added up

Every shard has all tokens and routes them alike, so no token has to be sent to a shard, and the order in
which gradients are added up does not depend on the routing. Of outputs one sum is exchanged per layer (of
experts in a list one per expert that is called).

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

import copy
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


class _OwnColumns(torch.autograd.Function):
    """Of what all shards have, this shard's columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return x.chunk(collectives.count, dim=-1)[collectives.index].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(ctx.collectives.gather(grads[0].contiguous()), dim=-1), None


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
    refuse_uneven(x, -2, collectives.count)
    return collectives.sum_of_part(torch.stack(x.chunk(collectives.count, dim=-2)))


def refuse_uneven(x: Tensor, dim: int, shards: int) -> None:
    if x.ndim < 2 or x.shape[dim] % shards:
        raise UserError(
            f"sequence_parallel splits every sequence over {shards} shards, and a value of shape "
            f"{list(x.shape)} cannot be split evenly; give a data.sequence that {shards} divides."
        )


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
    of_whole: bool

    def __call__(self, input: Tensor) -> Tensor:
        self.run.leave()
        if self.of_whole:
            input = _OwnColumns.apply(input, self.run.collectives)  # type: ignore[no-untyped-call]
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


# Layers of models that are not ours: inside of their blocks every shard has all of a row, as it has without
# `splits_sequence`; around them each shard has its part.


class _Whole(torch.autograd.Function):
    """Of what each shard has a part of, what all have; gradients of it are alike on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return torch.cat(collectives.gather(x), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.collectives.count, dim=1)[ctx.collectives.index].contiguous(), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        refuse_uneven(x, 1, collectives.count)
        return x.chunk(collectives.count, dim=1)[collectives.index].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(ctx.collectives.gather(grads[0]), dim=1), None


@dataclass(frozen=True, slots=True, eq=False)
class WholeInside:
    """The forward of a block: given parts of rows, it works on the rows and gives its part of the result."""

    name: str
    forward: Callable[..., Any]
    shards: Collectives

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(value for value in (*args, *kwargs.values()) if _is_hidden(value))
        part, rows = hidden.shape, (hidden.shape[0], hidden.shape[1] * self.shards.count, hidden.shape[2])

        def whole(value: Any) -> Any:
            alike = _is_hidden(value) and value.shape == part
            return _Whole.apply(value, self.shards) if alike else value  # type: ignore[no-untyped-call]

        def cut(value: Any) -> Any:
            alike = _is_hidden(value) and value.shape == rows
            return _Part.apply(value, self.shards) if alike else value  # type: ignore[no-untyped-call]

        made = self.forward(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})
        first, rest = (made[0], made[1:]) if isinstance(made, tuple) else (made, None)
        is_flat = first.shape == (rows[0] * rows[1], rows[2])  # one token after the other
        first = first.view(rows) if is_flat else first
        if first.shape != rows:
            raise UserError(
                f"sequence_parallel = true gives each shard a part of every row, and {self.name} gives "
                f"{list(first.shape)}, not hidden states of {list(rows)}; leave sequence_parallel out."
            )
        own = cut(first).flatten(0, 1) if is_flat else cut(first)
        return own if rest is None else (own, *map(cut, rest))


@dataclass(frozen=True, slots=True, eq=False)
class _LayerOfParts:
    """The forward of the first layer of a row of them, which is given whole rows, or of the last."""

    forward: Callable[..., Any]
    shards: Collectives
    is_first: bool
    is_last: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first and args:
            args = (_Part.apply(args[0], self.shards), *args[1:])  # type: ignore[no-untyped-call]
        elif self.is_first:
            kwargs["hidden_states"] = _Part.apply(kwargs["hidden_states"], self.shards)  # type: ignore[no-untyped-call]
        made = self.forward(*args, **kwargs)
        if not self.is_last:
            return made
        first, rest = (made[0], made[1:]) if isinstance(made, tuple) else (made, None)
        whole = _Whole.apply(first, self.shards)  # type: ignore[no-untyped-call]
        return whole if rest is None else (whole, *rest)


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point()


def without_parts(collectives: Collectives) -> Collectives:
    """The same shards, of which each has all of a row."""
    made = copy.copy(collectives)
    made.splits_sequence = False
    return made


def join_blocks(
    module: nn.Module, blocks: tuple[str, ...], collectives: Collectives, ends: tuple[bool, bool]
) -> list[nn.Parameter]:
    """Around its blocks a layer works on this shard's part of each row. `ends`: is it the first of all
    layers, and the last? Returns the parameters around them, whose gradients must be added up over shards.
    """
    summed = list(module.parameters(recurse=False))
    for name, child in module.named_children():
        if name in blocks:
            child.forward = WholeInside(name, child.forward, collectives)
            continue
        summed += child.parameters()
        for part in child.modules():
            if isinstance(part, nn.Dropout):
                part.forward = PartDropout(module=part, collectives=collectives)  # type: ignore[method-assign]
    module.forward = _LayerOfParts(module.forward, collectives, *ends)
    return summed


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseExperts:
    """Stacked experts that are given as many rows for each, those of one expert after the other's."""

    name: str
    module: nn.Module
    forward: Callable[[Tensor], Tensor]
    run: LayerRun
    size: int  # experts of one shard

    def __call__(self, states: Tensor) -> Tensor:
        shards = self.run.collectives
        if states.shape[0] % (self.size * shards.count):
            raise UserError(
                f"{self.name} is given {states.shape[0]} rows, not as many for each of its "
                f"{self.size * shards.count} experts; leave it out of shard_plan."
            )
        entered = _copied_together([states], shards)
        rows = states.shape[0] // shards.count
        if self.module.training:
            self.run.enter(states.device)
        found = self.forward(entered[0].narrow(0, shards.index * rows, rows))
        self.run.leave()
        found = found.reshape(rows, *states.shape[1:]).to(states.dtype)
        before, after = shards.index * rows, (shards.count - shards.index - 1) * rows
        made = torch.cat(
            (found.new_zeros(before, *found.shape[1:]), found, found.new_zeros(after, *found.shape[1:]))
        )
        trains = any(parameter.requires_grad for parameter in self.module.parameters())
        return _of_all_experts(made, entered, shards, trains=trains)


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


class Elsewhere(nn.Module):
    """In the place of an expert of a list that another shard has."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing; in the form in which every expert of a list gives its output, that of its input."""
        return torch.zeros_like(next(value for value in (*args, *kwargs.values()) if _is_float(value)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListedExpert:
    """One expert of a list. Its shard runs it, and all get what it has made."""

    name: str
    module: nn.Module
    forward: Callable[..., Tensor]
    run: LayerRun
    trains: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        shards = self.run.collectives
        values = [value for value in (*args, *kwargs.values()) if _is_float(value)]
        if not values or not values[0].numel():
            return self.forward(*args, **kwargs)  # called for no token: on every shard
        copies = iter(entered := _copied_together(values, shards))
        given = [next(copies) if _is_float(value) else value for value in args]
        named = {key: next(copies) if _is_float(value) else value for key, value in kwargs.items()}
        if self.module.training:
            self.run.enter(values[0].device)
        made = self.forward(*given, **named)
        self.run.leave()
        if not isinstance(made, Tensor) or made.shape != values[0].shape or made.dtype != values[0].dtype:
            raise UserError(
                f"{self.name} does not give a tensor of the shape and type of its input, as experts that are "
                "spread over shards must; leave it out of shard_plan."
            )
        return _of_all_experts(made, entered, shards, trains=self.trains)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _join_experts(name: str, part: nn.Module, plan: Cut, run: LayerRun) -> list[nn.Parameter]:
    """Returns the parameters that the experts of all shards share, such as those of a norm behind them."""
    if isinstance(part, nn.ModuleList):
        trains = any(parameter.requires_grad for parameter in part.parameters())
        for number, one in enumerate(part):
            one.forward = ListedExpert(
                name=f"{name}.{number}", module=one, forward=one.forward, run=run, trains=trains
            )
        return []
    size = next(part.parameters(recurse=False)).shape[0]
    for key, value in list(vars(part).items()):
        if "expert" in key and type(value) is int and value == size * plan.count:
            setattr(part, key, size)  # its number of experts
    inside = [one for one in part.modules() if one is not part]
    for one in inside:
        _by_autograd(one)
    shared = [parameter for one in inside for parameter in one.parameters(recurse=False)]
    takes = inspect.signature(part.forward)
    common: dict[str, Any] = {"name": name, "module": part, "forward": part.forward, "run": run, "size": size}
    if len(takes.parameters) == 1:
        part.forward = DenseExperts(**common)
    else:
        part.forward = StackedExperts(**common, takes=takes, shared=shared)
    return shared


# What a part must be for `join` to split it in this style.
_KINDS: Mapping[str, type[QueuedEmbedding] | type[QueuedLinear]] = {
    style: QueuedEmbedding if style == "vocab" else QueuedLinear
    for style in STYLES
    if style not in ("whole", "whole_summed", "sequence", "own_parameters", "experts")
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
        if isinstance(part, nn.ModuleList):
            forms = {
                tuple((key, tuple(p.shape), p.requires_grad) for key, p in one.named_parameters())
                for one in part
            }
            if len(part) % plan.count or len(forms) != 1:
                raise UserError(
                    f"shards is {plan.count}, and {name} has {len(part)} experts of {len(forms)} forms; "
                    "give a number of shards that divides them, and experts of one form."
                )
        elif len({p.shape[0] if p.ndim else 0 for p in part.parameters(recurse=False)}) != 1:
            raise UserError(
                f"shard_plan names {name} as experts; it is a {type(part).__name__}, neither a ModuleList of "
                "experts nor a module whose own parameters all have a row for each expert."
            )


def cut(layer: str, module: nn.Module, plan: Cut) -> None:
    """Keep only this shard's part of every parameter of a whole layer. Frozen ones too."""
    for path, part in list(module.named_modules()):
        name = ".".join(filter(None, (layer, path)))
        if isinstance(part, nn.ModuleList) and plan.style(name) == "experts":
            for number in range(len(part)):
                if not plan.has(f"{name}.{number}.any"):
                    part[number] = Elsewhere()
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
        if style == "whole_summed" or (style == "sequence" and collectives.splits_sequence):
            _by_autograd(part)
            summed += part.parameters(recurse=False)
            if isinstance(part, nn.Dropout) and style == "sequence":
                part.forward = PartDropout(module=part, collectives=collectives)  # type: ignore[method-assign]
        elif style == "experts":
            summed += _join_experts(name, part, plan, run)
        elif style == "vocab":
            queue = _queue_of(part, name, style)
            part.forward = VocabEmbedding(module=part, queue=queue, collectives=collectives)
        elif style in ("row", "row_of_whole"):
            queue = _queue_of(part, name, style)
            part.forward = RowLinear(module=part, queue=queue, run=run, of_whole=style == "row_of_whole")
            if collectives.splits_sequence and isinstance(part.bias, nn.Parameter):
                summed.append(part.bias)
        elif style not in ("whole", "sequence", "own_parameters"):
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


def refuse_unequal(gradients: Mapping[str, Tensor], collectives: Collectives) -> None:
    """Of parameters that every shard has whole and uses alike, so that their gradients are the same. What is
    within rounding of the largest of them is not compared.
    """
    norms = {name: float(grad.norm()) for name, grad in gradients.items()}
    for name, grad in gradients.items():
        off = float((collectives.sum(grad.clone()) / collectives.count - grad).norm())
        if off > 0.05 * norms[name] and off > 1e-4 * max(norms.values()):
            raise UserError(not_equal(name))


def not_equal(name: str) -> str:
    return (
        f"{name} is whole on every shard, and its gradient differs from shard to shard, because its "
        'module works on split values; name the module in shard_plan: "sequence" if it works on each '
        'token alone between split layers, "whole_summed" if it works inside of them.'
    )
