"""A LightningModule as a `Model` of one layer, with the values that the launcher's module had."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from everstep.engine.layers.boundary import Value
from everstep.engine.layers.model import Model, ModelAssembly, Through
from everstep.engine.lightning.hooks import StepCalls, loss_of
from everstep.engine.lightning.module_optimizers import empty_copy, optimizer_here, rate_from
from everstep.engine.state.schedules import Rate

CARD = "lightning"  # in a job's card of the model: where the values are
WHOLE = "module"  # the name of the one layer


class LightningProgram:
    """What launcher and workers make of a module: a model, an optimizer and a rate."""

    def __init__(self, module: Any, start: Path, steps: int) -> None:
        """`start`: a file of its first values."""
        self.start, self.steps = start, steps
        self.bare = empty_copy(module)
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def model(self) -> Model:
        assembly = ModelAssembly(join=self._join, card={CARD: {"start": str(self.start)}})
        return Model(layers={WHOLE: self._module}, loss=loss_of, assembly=assembly)

    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        own = [(name.removeprefix(f"{WHOLE}."), parameter) for name, parameter in named]
        return optimizer_here(self.bare, own, self.steps)

    def rate(self, steps_in_epoch: int | None) -> Rate | None:
        return rate_from(self.bare, self.steps, steps_in_epoch)

    def _module(self) -> nn.Module:
        """On the meta device its shapes, else its values."""
        whole: nn.Module = self.bare
        if torch.empty(0).is_meta:
            return copy.deepcopy(whole)
        seen: dict[int, Tensor] = {}
        with safe_open(self.start, framework="pt") as file:
            there = set(file.keys())
            for name, parameter in whole.named_parameters():  # of two names the first
                seen[id(parameter)] = nn.Parameter(
                    file.get_tensor(name), requires_grad=parameter.requires_grad
                )
            for name, buffer in whole.named_buffers():
                seen[id(buffer)] = file.get_tensor(name) if name in there else self._buffers[name].clone()
        return copy.deepcopy(whole, seen)

    def _join(self, layers: range, modules: list[nn.Module], device: torch.device) -> Through:
        return WholeStep(modules[0], device, self.steps)


class WholeStep:
    """Called with a batch, runs the module's own step."""

    def __init__(self, module: Any, device: torch.device, steps: int) -> None:
        self._calls = StepCalls(module.to(device), steps)

    def __call__(self, value: Value, run: Callable[..., Any]) -> Value:
        if torch.is_grad_enabled():
            return run(0, self._calls.train, value["batch"])
        return self._calls.evaluate(value["batch"])


def write_values(module: nn.Module, path: Path) -> None:
    """What training starts from: the launcher's values, whatever the workers' scripts have drawn."""
    values = {name: p.detach().cpu().clone().contiguous() for name, p in module.named_parameters()}
    values |= {name: b.detach().cpu().clone().contiguous() for name, b in module.named_buffers()}
    save_file(values, path)


def give_up_values(module: nn.Module) -> None:
    """On a worker: the values of the module that the script has built are not needed any more."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
