"""A LightningModule cut between the layers of one of its rows, such as `self.blocks`.

Every stage runs the module's own training_step, with stand-ins for what other stages hold, as stages of
Hugging Face models do (`engine/hf/anatomy.py`):

    batch, hidden ──► training_step ──► stand-ins ──► own layers ──► hidden, by leaving the step
                                                                └──► the loss, on the last stage

A stand-in ahead of the layers that are here gives what has arrived from the stage before; the first layer
that is here gets exactly that, whatever was done to it in between. The batch travels along, for the loss and
for what the step computes of it. What runs before the row and what behind it is seen in one run of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine.hf.anatomy import StandIn, with_stand_ins
from everstep.engine.layers.boundary import Value, tensors_in
from everstep.engine.layers.model import evaluating
from everstep.engine.lightning.hooks import StepCalls
from everstep.errors import UserError

WHOLE = "module"  # the one layer of a module that is not cut


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleParts:
    """The parts of a module that have parameters, in the order in which a step calls them."""

    before: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.before, *self.layers, *self.after)


def parts_of(module: Any, row: str, step: Callable[[], Any]) -> ModuleParts:
    """`row`: the path of a ModuleList or Sequential. `step`: runs the module's step once."""
    kind = type(module).__name__
    try:
        layers = module.get_submodule(row)
    except AttributeError:
        layers = None
    if not isinstance(layers, nn.ModuleList | nn.Sequential) or not len(layers):
        rows = [
            name for name, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)
        ]
        hint = f"it has {', '.join(rows)}" if rows else "put them into an nn.ModuleList"
        raise UserError(f"layers is {row!r}, and {kind} has no row of layers under this name; {hint}.")
    names = tuple(f"{row}.{number}" for number in range(len(layers)))
    others = _others(module, row)
    called = _called(module, (*others, *names), step)
    if [name for name in called if name in names] != list(names):
        raise UserError(f"{kind} does not call {row} one after the other, each once; it cannot be cut there.")
    first, last = called.index(names[0]), called.index(names[-1])
    before = tuple(dict.fromkeys(name for name in called[:first] if name in others))
    after = tuple(
        dict.fromkeys(name for name in [*called[last:], *others] if name in others and name not in before)
    )
    between = [name for name in called[first:last] if name in others]
    again = [name for name in called[last:] if name in before]
    if between or again:
        raise UserError(
            f"{kind} calls {(between or again)[0]} {'between' if between else 'before and after'} the layers "
            f"of {row}, so two stages would need it; put it into the layers, or train with stages=1."
        )
    return ModuleParts(before=before, layers=names, after=after)


def _others(module: nn.Module, row: str) -> list[str]:
    """The largest modules with parameters that are neither the row nor around it."""
    around = {"", *(row[:i] for i, c in enumerate(row) if c == ".")}
    found = []
    for path in sorted(around, key=len):
        part = module.get_submodule(path) if path else module
        for name, _ in part.named_parameters(recurse=False):
            raise UserError(
                f"{type(module).__name__} has the parameter {f'{path}.{name}'.lstrip('.')!r} outside of all "
                "modules with layers; put it into a module of its own, or train with stages=1."
            )
        for name, child in part.named_children():
            full = f"{path}.{name}" if path else name
            if full not in around and full != row and next(child.parameters(), None) is not None:
                found.append(full)
    return found


def _called(module: nn.Module, names: tuple[str, ...], step: Callable[[], Any]) -> list[str]:
    called: list[str] = []
    with ExitStack() as hooks:
        for name in names:
            part = module.get_submodule(name)
            handle = part.register_forward_pre_hook(lambda *_, name=name: called.append(name))
            hooks.callback(handle.remove)
        step()
    return called


def tied_in(module: nn.Module, parts: ModuleParts) -> tuple[tuple[str, str], ...]:
    """Parameters that two parts share, such as those of an embedding and a head."""
    seen: dict[int, str] = {}
    pairs = []
    for part in parts.names:
        for name, parameter in module.get_submodule(part).named_parameters():
            other = seen.setdefault(id(parameter), f"{part}.{name}")
            if not other.startswith(f"{part}."):
                pairs.append((other, f"{part}.{name}"))
    return tuple(pairs)


# ------------------------------------------------------------------ on a worker


class WholeStep:
    """The one stage of a module that is not cut."""

    def __init__(self, module: Any, device: torch.device, steps: int) -> None:
        self._calls = StepCalls(module.to(device), steps)

    def __call__(self, value: Value, run: Callable[..., Any]) -> Value:
        if torch.is_grad_enabled():
            return run(0, self._calls.train, value["batch"])
        return self._calls.evaluate(value["batch"])


class _Reached(Exception):
    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class StepOfStage:
    """Called with a batch, or with what the stage before has sent; gives what the next one gets."""

    def __init__(
        self,
        module: Any,
        parts: ModuleParts,
        layers: range,
        modules: list[nn.Module],
        device: torch.device,
        steps: int,
    ) -> None:
        self.layers = layers
        names = parts.names
        self.is_first, self.is_last = layers.start == 0, layers.stop == len(names)
        self._row = range(len(parts.before), len(parts.before) + len(parts.layers))
        self.dropout = True
        self._hidden: Any = None
        self._run: Callable[..., Any] = _plain
        self.frame = with_stand_ins(module, {name: self._foreign(i) for i, name in enumerate(names)})
        for index, own in zip(layers, modules, strict=True):
            own.forward = self._own(index, own.forward)
            path, _, last = names[index].rpartition(".")
            parent = self.frame.get_submodule(path)
            assert isinstance(parent._modules[last], StandIn)
            parent._modules[last] = own
        self.frame.to(device)
        self._calls = StepCalls(self.frame, steps)

    def __call__(self, value: Value, run: Callable[..., Any]) -> Value:
        training = torch.is_grad_enabled()
        batch, self._hidden, self._run = value["batch"], value.get("hidden"), run
        try:
            with nullcontext() if training and self.dropout else evaluating([self.frame]):
                return self._calls.train(batch) if training else self._calls.evaluate(batch)
        except _Reached as reached:
            return {"batch": batch, "hidden": reached.hidden}
        finally:
            self._run = _plain

    def _foreign(self, index: int) -> Callable[..., Any]:
        """In the place of a part of another stage: before ours, it gives what has arrived; behind, it is the
        end.
        """

        def act(*args: Any, **kwargs: Any) -> Any:
            if index >= self.layers.stop:
                raise _Reached(_first(args, kwargs))
            if index == self.layers.start - 1:
                return self._hidden
            first = tensors_in(self._hidden)[0]
            return first.detach() if isinstance(self._hidden, Tensor) else self._hidden

        return act

    def _own(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            if not self.is_first and index == self.layers.start == self._row.start:
                args, kwargs = _with_first(args, kwargs, self._hidden)
            output = self._run(index, forward, *args, **kwargs)
            if not self.is_last and index == self.layers.stop - 1 == self._row.stop - 1:
                raise _Reached(output)
            return output

        return act


def _plain(index: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Outside a forward of ours: a recompute in the backward calls `function` itself."""
    return function(*args, **kwargs)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (value, *args[1:]), kwargs
    return (), {**kwargs, next(iter(kwargs)): value}
