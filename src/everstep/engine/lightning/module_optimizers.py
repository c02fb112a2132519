"""`configure_optimizers` of a LightningModule, called by each stage with its own parameters.

The module that is asked is a copy in which the parameters of the stage are the ones to be optimized and those
of other stages are None, so `self.parameters()` and `self.named_parameters()` give what is here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from everstep.engine.layers.model import in_short
from everstep.engine.lightning.hooks import StepCalls
from everstep.engine.state.schedules import Rate
from everstep.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    by_epoch: bool = False
    frequency: int = 1


def empty_copy(module: Any) -> Any:
    """The module on the meta device: its shapes without its memory."""
    seen: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    seen |= {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    return copy.deepcopy(module, seen)


def configured(module: Any, named: Sequence[tuple[str, nn.Parameter]] | None, steps: int) -> Configured:
    """`module`: on the meta device. `named`: the parameters to optimize; None: those of the module."""
    given = dict(module.named_parameters() if named is None else named)
    asked = copy.deepcopy(module)
    for path, part in asked.named_modules():  # by name: of a tied pair each stage has its own half
        for key in part._parameters:
            part._parameters[key] = given.get(f"{path}.{key}".lstrip("."))
    StepCalls(asked, steps)
    try:
        return _read(asked.configure_optimizers())
    except UserError:
        raise
    except Exception as error:  # the user's hook
        raise UserError(f"configure_optimizers raised {in_short(error)}.") from error


def _read(made: Any) -> Configured:
    """The forms that Lightning knows."""
    if isinstance(made, Optimizer):
        return Configured(optimizer=made)
    if isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], tuple | list):
        optimizers, schedulers = list(made[0]), list(made[1])
        if len(optimizers) == 1 and len(schedulers) <= 1:
            return _with(optimizers[0], schedulers[0] if schedulers else None)
        raise UserError(_SEVERAL)
    if isinstance(made, tuple | list):
        if len(made) == 1:
            return _read(made[0])
        raise UserError(_SEVERAL)
    if isinstance(made, dict) and isinstance(made.get("optimizer"), Optimizer):
        return _with(made["optimizer"], made.get("lr_scheduler"))
    raise UserError(
        f"configure_optimizers gave a {type(made).__name__}; give an optimizer, or a dict with "
        '"optimizer" and "lr_scheduler".'
    )


_SEVERAL = "configure_optimizers gives several optimizers or schedulers; everstep.fit takes one of each."


def _with(optimizer: Any, scheduler: Any) -> Configured:
    config = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
    kind = config.get("scheduler")
    if isinstance(kind, ReduceLROnPlateau):
        raise UserError(
            "configure_optimizers gives ReduceLROnPlateau, which follows a metric and not the step; give a "
            "scheduler of the step, such as CosineAnnealingLR."
        )
    return Configured(
        optimizer=optimizer,
        scheduler=kind,
        by_epoch=config.get("interval", "epoch") == "epoch",
        frequency=int(config.get("frequency", 1)),
    )


def optimizer_here(module: Any, named: Sequence[tuple[str, nn.Parameter]], steps: int) -> Optimizer:
    """One stage's, with its rates as they are before any schedule."""
    made = configured(module, named, steps).optimizer
    for group in made.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
    return made


def rate_from(module: Any, steps: int, steps_in_epoch: int | None) -> Rate | None:
    """The schedule as a function of the step; None without one."""
    made = configured(module, None, steps)
    if made.scheduler is None:
        return None
    if made.by_epoch and steps_in_epoch is None:
        raise UserError(
            "the scheduler steps by epoch, and the data is a stream without epochs; give "
            '"interval": "step" in configure_optimizers.'
        )
    each = made.frequency * (steps_in_epoch or 1 if made.by_epoch else 1)
    rates = []
    others = _other_numbers(made.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(-(-steps // each)):
            shares = [group["lr"] / group["initial_lr"] for group in made.optimizer.param_groups]
            if max(shares) - min(shares) > 1e-12 * max(1.0, max(shares)):
                raise UserError(
                    "the scheduler changes parameter groups differently; everstep.fit multiplies all rates "
                    "with one number per step: give one schedule for all groups."
                )
            rates.append(shares[0])
            made.scheduler.step()
            changed = {key for key, value in _other_numbers(made.optimizer) - others}
            if changed:
                kind = type(made.scheduler).__name__
                fix = (
                    "give it cycle_momentum=False"
                    if hasattr(made.scheduler, "cycle_momentum")
                    else "remove it"
                )
                raise UserError(
                    f"the scheduler {kind} changes {min(changed)} of the optimizer, and everstep.fit follows "
                    f"the rate alone; {fix}."
                )
    return lambda step: rates[min(max(step - 1, 0) // each, len(rates) - 1)]


def _other_numbers(optimizer: Optimizer) -> set[tuple[str, Any]]:
    """What the groups hold besides parameters and rates."""
    return {
        (key, value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in ("params", "lr", "initial_lr") and isinstance(value, int | float | tuple)
    }
