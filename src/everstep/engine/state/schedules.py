"""Learning-rate schedules as functions of the step: of a user, or of torch.

A scheduler of torch has a state; here it is asked once for all its steps, with an optimizer that trains
nothing, and the answers are kept. So the rate of a step does not depend on who asks, or on
where a run was resumed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from everstep.errors import UserError

Rate = Callable[[int], float]  # step, from 1 -> what every learning rate is multiplied with
MOST_TRIED = 1000  # steps of a function of the step, before anything starts
_FEEDBACK = "ReduceLROnPlateau"


def rate_of(schedule: Any, *, lr: float, steps: int, options: dict[str, Any] | None = None) -> Rate:
    """`schedule`: the name of one of torch's schedulers, a function that makes one of an optimizer, or a
    function of the step.
    """
    if isinstance(schedule, str):
        return _table(_named(schedule, options or {}), lr, steps)
    if isinstance(schedule, lr_scheduler.LRScheduler):
        kind = type(schedule).__name__
        raise UserError(
            f"schedule is a {kind} already built; give a function: "
            f"schedule=lambda optimizer: {kind}(optimizer, ...)."
        )
    if not callable(schedule):
        raise UserError(
            f"schedule is a {type(schedule).__name__}; give a function of the step (from 1) that returns "
            "what the rate is multiplied with, or the name of one of torch's schedulers."
        )
    try:
        made = schedule(_dummy(lr))
    except Exception:  # it wants a step, not an optimizer
        made = None
    if isinstance(made, lr_scheduler.LRScheduler):
        return _table(schedule, lr, steps)
    for step in [*range(1, min(steps, MOST_TRIED) + 1), steps]:
        _check(schedule, step)
    return lambda step: float(schedule(step))


def _check(schedule: Any, step: int) -> None:
    try:
        value = float(schedule(step))
    except Exception as error:  # the user's function
        raise UserError(
            f"schedule({step}) raised {type(error).__name__}: {error}; it gets the step, from 1."
        ) from error
    if not math.isfinite(value) or value < 0:
        raise UserError(f"schedule({step}) is {value}; the rate is multiplied with it: give a number from 0.")


def _named(name: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    kinds = [
        kind for kind in lr_scheduler.__all__ if kind not in (_FEEDBACK, "LRScheduler", "ChainedScheduler")
    ]
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"torch has {', '.join(kinds)}."
        why = " follows a metric and not the step" if name == _FEEDBACK else ""
        raise UserError(f"schedule is {name!r}, which{why or ' torch does not have'}; {hint}")

    def make(optimizer: Any) -> Any:
        try:
            return getattr(lr_scheduler, name)(optimizer, **options)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"schedule {name} cannot be made: {error}; its arguments are schedule_options."
            ) from None

    return make


def _dummy(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


def _table(make: Callable[[Any], Any], lr: float, steps: int) -> Rate:
    optimizer = _dummy(lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"] / lr)
        optimizer.step()
        scheduler.step() if len(rates) < steps else None
    return lambda step: rates[min(max(step, 1), steps) - 1]
