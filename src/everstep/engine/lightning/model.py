"""A LightningModule as a `Model`: its parts, with the values that the launcher's module had."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from everstep.engine.layers.model import Model, ModelAssembly, Through, built, evaluating, partition
from everstep.engine.lightning.cut import WHOLE, ModuleParts, StepOfStage, WholeStep, tied_in
from everstep.engine.lightning.hooks import StepCalls, loss_of
from everstep.engine.lightning.module_optimizers import empty_copy, optimizer_here, rate_from
from everstep.engine.state.schedules import Rate
from everstep.errors import UserError

CARD = "lightning"  # in a job's card of the model: where the values are, and how it is cut


class LightningProgram:
    """What launcher and workers make of a module: a model, an optimizer and a rate."""

    def __init__(self, module: Any, start: Path, parts: ModuleParts | None, steps: int) -> None:
        """`start`: a file of its first values. `parts`: None, if it is not cut."""
        self.start, self.parts, self.steps = start, parts, steps
        self.bare = empty_copy(module)
        self._tied = tied_in(module, parts) if parts is not None else ()
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def model(self) -> Model:
        card: dict[str, Any] = {"start": str(self.start), "parts": None}
        if self.parts is None:
            assembly = ModelAssembly(join=self._join, card={CARD: card})
            return Model(layers={WHOLE: partial(self._part, "")}, loss=loss_of, assembly=assembly)
        card["parts"] = {key: list(getattr(self.parts, key)) for key in ("before", "layers", "after")}
        edges = tuple(group for group in (self.parts.before, self.parts.after) if len(group) > 1)
        return Model(
            layers={name: partial(self._part, name) for name in self.parts.names},
            loss=loss_of,
            tied=self._tied,
            assembly=ModelAssembly(
                join=self._join, together=edges, recomputed=frozenset(self.parts.layers), card={CARD: card}
            ),
        )

    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        cut = f"{WHOLE}." if self.parts is None else ""
        return optimizer_here(self.bare, [(name.removeprefix(cut), p) for name, p in named], self.steps)

    def rate(self, steps_in_epoch: int | None) -> Rate | None:
        return rate_from(self.bare, self.steps, steps_in_epoch)

    def check_cut(self, module: Any, batch: Any) -> None:
        """Run the step in as many stages as it can have: does the loss come out as that of the whole?"""
        if self.parts is None:
            return
        model = self.model()
        most = len(self.parts.layers) + bool(self.parts.before) + bool(self.parts.after)
        value: Any = {"batch": batch}
        with evaluating([module]):
            whole = StepCalls(module, self.steps).train(batch)["loss"]
        for layers in partition(model, most):
            modules = [built(model, model.names[index]) for index in layers]
            stage = self._join(layers, modules, torch.device("cpu"))
            stage.dropout = False  # type: ignore[attr-defined]
            value = stage(value, lambda index, function, *args, **kwargs: function(*args, **kwargs))
        if not torch.allclose(value["loss"], whole, rtol=1e-5, atol=0.0, equal_nan=True):
            row = self.parts.layers[0].rpartition(".")[0]
            raise UserError(
                f"{type(module).__name__} cut between the layers of {row} has the loss {value['loss']:.6g} "
                f"and uncut {whole:.6g}: more than the output of a layer goes on to the next, such as a "
                "residual that is added outside of it; move that into the layers, or train with stages=1."
            )

    def _part(self, name: str) -> nn.Module:
        """On the meta device its shapes, else its values."""
        part: nn.Module = self.bare.get_submodule(name)
        if torch.empty(0).is_meta:
            return copy.deepcopy(part)
        prefix = f"{name}." if name else ""
        seen: dict[int, Tensor] = {}
        with safe_open(self.start, framework="pt") as file:
            there = set(file.keys())
            names = {id(p): key for key, p in self.bare.named_parameters()}  # of two names the first
            for parameter in part.parameters():
                value = file.get_tensor(names[id(parameter)])
                seen[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            for key, buffer in part.named_buffers():
                full = prefix + key
                seen[id(buffer)] = file.get_tensor(full) if full in there else self._buffers[full].clone()
        return copy.deepcopy(part, seen)

    def _join(self, layers: range, modules: list[nn.Module], device: torch.device) -> Through:
        if self.parts is None:
            return WholeStep(modules[0], device, self.steps)
        frame = copy.deepcopy(self.bare)
        for name, buffer in self._buffers.items():
            path, _, key = name.rpartition(".")
            frame.get_submodule(path)._buffers[key] = buffer.clone()
        return StepOfStage(frame, self.parts, layers, modules, device, self.steps)


def parts_from(card: Mapping[str, Any]) -> ModuleParts | None:
    parts = card["parts"]
    return None if parts is None else ModuleParts(**{key: tuple(names) for key, names in parts.items()})


def write_values(module: nn.Module, path: Path) -> None:
    """What training starts from: the launcher's values, whatever the workers' scripts have drawn."""
    values = {name: p.detach().cpu().clone().contiguous() for name, p in module.named_parameters()}
    values |= {name: b.detach().cpu().clone().contiguous() for name, b in module.named_buffers()}
    save_file(values, path)


def give_up_values(module: nn.Module) -> None:
    """On a worker: the module that the script has built is not needed any more, a part of it is."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
