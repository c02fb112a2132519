"""What of a LightningModule is called, and what is refused.

Lightning itself is not imported: whatever has `LightningModule` among its base classes is one, be it of
`lightning` or of `pytorch_lightning`. A hook that changes what a step computes is refused; of one that only
looks on, a note says that it is not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everstep.errors import UserError

CHANGES_A_STEP = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
LOOKS_ON = (
    "configure_callbacks",
    "on_fit_end",
    "on_fit_start",
    "on_load_checkpoint",
    "on_save_checkpoint",
    "on_train_batch_end",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_end",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "on_validation_start",
)


def check(module: Any) -> tuple[str, ...]:
    """Refuse what cannot be trained; give the names of the hooks that will not be called."""
    base = _base(module)
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise UserError(
            f"{kind} has automatic_optimization = False, and its optimizer steps would run outside of what "
            "recovers; return the loss from training_step and leave the steps to everstep.fit."
        )
    for needed in ("training_step", "configure_optimizers"):
        if not _is_own(module, base, needed):
            raise UserError(f"{kind} has no {needed}; everstep.fit needs it.")
    for hook in CHANGES_A_STEP:
        if _is_own(module, base, hook):
            raise UserError(
                f"{kind} has the hook {hook}, which would change a step on one worker and not on another; "
                f"remove it{_INSTEAD.get(hook, '')}."
            )
    return tuple(hook for hook in LOOKS_ON if _is_own(module, base, hook))


_INSTEAD = {
    "configure_gradient_clipping": ", and give everstep.fit clip=1.0",
    "lr_scheduler_step": ", and let configure_optimizers give a scheduler of the step",
    "on_after_batch_transfer": ", and do its work in the data set or at the start of training_step",
    "on_before_batch_transfer": ", and do its work in the data set or at the start of training_step",
}


def _base(module: Any) -> type:
    if isinstance(module, type):
        raise UserError(
            f"everstep.fit was given the class {module.__name__}; give a module: {module.__name__}(...)."
        )
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule":
            return kind
    raise UserError(
        f"everstep.fit was given a {type(module).__name__}; it takes a LightningModule. For layers of your "
        "own there is everstep.train(model=..., data=...)."
    )


def _is_own(module: Any, base: type, hook: str) -> bool:
    return getattr(type(module), hook, None) is not getattr(base, hook, None)


# ------------------------------------------------------------------ a step


class TrainerStandIn:
    """What `self.trainer` is on a worker: it knows the length of the run and refuses every other question."""

    training = True
    sanity_checking = False

    def __init__(self, steps: int) -> None:
        self.max_steps = self.estimated_stepping_batches = steps

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            f"the LightningModule asks its trainer for {name!r}, and there is no trainer on a worker: it "
            "knows max_steps and estimated_stepping_batches. Compute it from the batch, or in a callback."
        )


class StepCalls:
    """`training_step` and `validation_step` of one module, and what they log."""

    def __init__(self, module: Any, steps: int) -> None:
        self.module, self.logged = module, dict[str, Tensor]()
        trainer = TrainerStandIn(steps)
        for part in module.modules():
            if hasattr(part, "_trainer"):
                part.__dict__["_trainer"] = trainer
                part.__dict__["log"], part.__dict__["log_dict"] = self._log, self._log_all

    def train(self, batch: Any) -> dict[str, Any]:
        made = self._call(self.module.training_step, batch)
        loss = made.get("loss") if isinstance(made, Mapping) else made
        if not isinstance(loss, Tensor) or loss.ndim:
            raise UserError(
                f"training_step returned {_named(made)}; it must return the loss, one number, or a dict with "
                '"loss".'
            )
        weight = made.get("weight") if isinstance(made, Mapping) else None
        return {"loss": loss} if weight is None else {"loss": loss * weight, "weight": weight}

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """The loss is what validation_step returns, else what it logs under a name with "loss"; of weight 0
        where it logs other metrics only.
        """
        made = self._call(self.module.validation_step, batch)
        loss = made.get("loss") if isinstance(made, Mapping) else made
        if loss is None:
            loss = next((self.logged[name] for name in self.logged if "loss" in name), None)
        if loss is None and self.logged:
            none = torch.zeros((), device=next(iter(self.logged.values())).device)
            return {"loss": none, "weight": none, "logged": dict(self.logged)}
        if not isinstance(loss, Tensor) or loss.ndim:
            raise UserError(
                f"validation_step returned {_named(made)} and logged {', '.join(self.logged) or 'nothing'}; "
                'it must return the loss, one number, or log something: self.log("val_loss", loss).'
            )
        return {"loss": loss, "logged": dict(self.logged)}

    def _call(self, method: Any, batch: Any) -> Any:
        self.logged.clear()
        takes = inspect.signature(method).parameters
        return method(batch, 0) if len(takes) > 1 else method(batch)

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, Tensor):
            self.logged[name] = value.detach()
        elif isinstance(value, int | float):
            self.logged[name] = Tensor([value])[0]
        else:
            raise UserError(
                f"self.log({name!r}, ...) was given a {type(value).__name__}, which would keep a state of "
                "its own on every worker; log a number, such as a mean of the batch."
            )

    def _log_all(self, values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in values.items():
            self._log(name, value)


def loss_of(output: Mapping[str, Any], targets: Any) -> Any:
    """The loss of a program made of a LightningModule: its step has computed it."""
    return (output["loss"], output["weight"]) if "weight" in output else output["loss"]


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    return "nothing" if value is None else f"a {type(value).__name__}"
