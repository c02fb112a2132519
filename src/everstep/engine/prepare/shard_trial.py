"""Before the start: where the shards of a worker have the same values and where each has its own, followed
through all layers on the meta device.

    split     each shard has other values: behind a column matrix, up to the next row matrix
    whole     all have the same: behind a row matrix, and between layers

A parameter that every shard has whole gets the same gradient on all of them if it is used on whole values.
Used on split ones, as a norm of heads is, its gradients must be added up ("whole_summed"). A plan need not
say so: it is tried here. A whole value that meets a split one would get a part of its gradient on each
shard; that is refused, and so is a layer that cannot run with its parts of the matrices.

A model that looks at values, or has an op without a meta form, cannot be followed. There the shards compare
the gradients of what is whole in the first step (`shards.layers.refuse_unequal`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everstep.engine.layers.boundary import Value, mapped
from everstep.engine.layers.model import Model, every_parameter, in_short, one_after_the_other, skeleton
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.shards.layers import cut as keep_part
from everstep.engine.shards.layers import not_equal
from everstep.errors import UserError
from everstep.job.job import Job

META = torch.device("meta")
TOKENS = 8  # of the row that a language model is tried with


def with_summed(model: Model, job: Job) -> Model:
    """A Hugging Face model whose plan names all parameters that work on split values. Those of transformers
    name norms of heads, and not, for example, the parameters of an activation.
    """
    shards = job.shards
    if shards == 1 or model.assembly.join is one_after_the_other or not _may_lack(model, shards):
        return model
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    found = followed(model, {"input_ids": tokens}, shards)
    names = () if found is None else sorted(found.on_split - found.on_whole)
    plan = Cut(model.shard_plan, 0, shards)
    modules = [
        re.sub(r"\.\d+(?=\.)", ".*", name.rpartition(".")[0]) for name in names if not plan.is_split(name)
    ]
    return replace(model, shard_plan=dict.fromkeys(modules, "whole_summed") | dict(model.shard_plan))


def _may_lack(model: Model, shards: int) -> bool:
    """Has a parameter that no pattern names a column matrix beside it, or beside what it is in?"""
    plan = Cut(model.shard_plan, 0, shards)
    for layer in model.names:
        modules = {
            f"{layer}.{path}".rstrip("."): part for path, part in skeleton(model, layer).named_modules()
        }
        around = {name.rpartition(".")[0] for name in modules if plan.style(name) == "column"}
        for name, part in modules.items():
            inside = name.startswith(tuple(f"{one}." for one in around)) or name in around
            own = any(one.requires_grad for one in part.parameters(recurse=False))
            if own and inside and plan.style(name) == "whole" and plan.expert(f"{name}.any") is None:
                return True
    return False


def refuse_mixed(model: Model, inputs: Value, shards: int) -> None:
    """What the plan of shards would compute wrongly, or not at all."""
    found = followed(model, inputs, shards)
    if found is None:
        return
    plan = Cut(model.shard_plan, 0, shards)
    for name in sorted(found.on_split | found.on_whole):
        summed = plan.style(name.rpartition(".")[0]) == "whole_summed"
        if plan.is_split(name) or summed == (name in found.on_split) != (name in found.on_whole):
            continue
        if name in found.on_split:
            raise UserError(not_equal(name))
        raise UserError(
            f"shard_plan sums the gradients of {name} over shards, which all use it on the same values; "
            "leave it out of shard_plan."
        )


@dataclass(frozen=True, slots=True)
class Uses:
    """Of parameters that every shard has whole: which have met split values, which whole ones."""

    on_split: frozenset[str]
    on_whole: frozenset[str]


def followed(model: Model, inputs: Value, shards: int) -> Uses | None:
    """None: it cannot be followed."""
    plan = Cut(model.shard_plan, 0, shards)
    try:
        _run(model, inputs, plan, _Values(), is_cut=False)
    except Exception:  # the model's own: with all of its layers whole it cannot be run here either
        return None
    values = _Values()
    try:
        _run(model, inputs, plan, values, is_cut=True)
    except UserError:
        raise
    except Exception as error:  # the model's own: it can be run whole
        raise UserError(
            f"shards is {shards}, and {values.layer} cannot run with its parts of the matrices "
            f"({in_short(error)}); give a shard_plan of your own (everstep.Model), or leave shards out."
        ) from error
    return Uses(frozenset(values.on_split), frozenset(values.on_whole))


def _run(model: Model, inputs: Value, plan: Cut, values: _Values, *, is_cut: bool) -> None:
    """All layers in a row, with one shard's parts of their matrices, or whole."""
    modules = []
    for layer in model.names:
        module = skeleton(model, layer)
        if is_cut:
            keep_part(layer, module, plan)
        for name, parameter in every_parameter(layer, module).items() if is_cut else ():
            if not plan.is_split(name):
                values.mark_made_of(name, parameter)
        for path, part in module.named_modules():
            name = f"{layer}.{path}".rstrip(".")
            style = plan.style(name)
            if style == "experts":
                part.forward = _Experts(values)
            elif is_cut and style in _AS and plan.expert(name) is None:
                part.forward = _Matrix(name, style, part, plan.count, values)
        modules.append(module.train())
    through = model.assembly.join(range(len(modules)), modules, META)

    def run(index: int, layer: Any, *args: Any, **kwargs: Any) -> Any:
        values.layer = f"layer {model.names[index]!r}"
        values.mark_whole(one for one in _tensors((args, kwargs)) if one.requires_grad)
        made = layer(*args, **kwargs)
        if any(values.is_split(one) for one in _tensors(made)):
            raise UserError(
                f"{values.layer} gives values that are split over shards, because nothing puts them together "
                'behind its last "column" matrix; name a "row" or "column_gather" matrix in shard_plan.'
            )
        values.mark_whole(one for one in _tensors(made) if one.requires_grad)
        return made

    given = mapped(lambda t: t.to(META), inputs)
    given = mapped(lambda t: t.requires_grad_() if t.is_floating_point() else t, given)
    with _Yes(), values:
        through(given, run)


class _Yes(TorchFunctionMode):
    """A question to a mask, which has no values here, is answered with yes: models ask whether all tokens
    count.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


class _Values(TorchDispatchMode):
    """What is known of the memory behind tensors. Constants, masks and tokens are not known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = "the model"  # that runs
        self.on_split, self.on_whole = set[str](), set[str]()  # parameters that have met such values
        self._split: dict[int, Tensor] = {}
        self._whole: dict[int, Tensor] = {}
        self._made_of: dict[int, tuple[Tensor, frozenset[str]]] = {}  # of whole parameters alone
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self._follow(str(func), _tensors((args, kwargs)), _tensors(made))
        return made

    def _follow(self, op: str, given: list[Tensor], made: list[Tensor]) -> None:
        known = [self._made_of[at][1] for one in given if (at := _at(one)) in self._made_of]
        names = frozenset[str]().union(*known)
        if any(self.is_split(one) for one in given):
            self.on_split |= names
            lost = next((one for one in given if _at(one) in self._whole and one.requires_grad), None)
            if lost is not None:
                raise UserError(
                    f"in {self.layer} a value of {list(lost.shape)} that is whole on every shard meets split "
                    f"ones in {op}, so each shard would have a part of its gradient; leave what is split "
                    "around it out of shard_plan, or leave shards out."
                )
            self.mark_split(made)
        elif any(_at(one) in self._whole for one in given):
            self.on_whole |= names
            self.mark_whole(made)
        elif names:
            self._made_of |= {_at(one): (one, names) for one in made}

    def is_split(self, tensor: Tensor) -> bool:
        return _at(tensor) in self._split

    def mark_split(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            self._whole.pop(_at(one), None)
            self._split[_at(one)] = one

    def mark_whole(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            self._split.pop(_at(one), None)
            self._made_of.pop(_at(one), None)
            self._whole[_at(one)] = one

    def mark_made_of(self, name: str, parameter: Tensor) -> None:
        self._made_of[_at(parameter)] = parameter, frozenset({name})

    def apart(self, function: Callable[[], Tensor]) -> Tensor:
        """What happens inside is not followed."""
        self._is_paused = True
        try:
            return function()
        finally:
            self._is_paused = False


# style -> are its inputs split, are its outputs split; None: either
_AS: Mapping[str, tuple[bool | None, bool]] = {
    "column": (False, True),
    "column_gather": (False, False),
    "logits": (False, False),
    "row": (True, False),
    "vocab": (None, False),
}


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    name: str
    style: str
    module: nn.Module
    count: int
    values: _Values

    def __call__(self, input: Tensor) -> Tensor:
        takes_split, gives_split = _AS[self.style]
        is_split = self.values.is_split(input)
        if takes_split is not None and is_split != takes_split:
            raise UserError(
                f"shard_plan splits {self.name} as {self.style!r}, and what it is given is "
                f"{'split already' if is_split else 'whole on every shard'}; name another style, such as "
                f"{'row' if is_split else 'column'!r}."
            )
        made = self.values.apart(lambda: self._made(input))
        (self.values.mark_split if gives_split else self.values.mark_whole)([made])
        return made

    def _made(self, input: Tensor) -> Tensor:
        module: Any = self.module
        if self.style == "vocab":
            return input.new_empty(
                *input.shape, module.weight.shape[1], dtype=module.weight.dtype
            ).requires_grad_()
        made = nn.functional.linear(input, module.weight, module.bias)
        return torch.cat([made] * self.count, dim=-1) if self.style in ("column_gather", "logits") else made


@dataclass(frozen=True, slots=True, eq=False)
class _Experts:
    """Each shard has some, and all get the sum of what they make of hidden states."""

    values: _Values

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = next(one for one in _tensors((args, kwargs)) if one.is_floating_point())
        made = self.values.apart(lambda: torch.empty_like(hidden).requires_grad_())
        self.values.mark_whole([made])
        return made


def _at(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
