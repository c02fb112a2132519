"""Everything that can be known to be wrong before a worker is started, said in one sentence.

The model is built on the meta device, the data is asked for a few batches, and the layers are run on meta
tensors: shapes without memory or arithmetic, a 7B model in a second. An operation that has no meta form ends
the look at shapes, silently: it is not the user's mistake, and the workers will find out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from everstep.engine import device
from everstep.engine.data import Dataset
from everstep.engine.job import Job
from everstep.engine.model import Model, check_tied, parameter_count, partition, skeleton, slots, told
from everstep.engine.optimizer import OptimizerFactory
from everstep.engine.resolve import data_of, model_of, optimizer_of
from everstep.engine.stage import DTYPES
from everstep.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A job whose words have been turned into things, and the things tried."""

    model: Model
    data: Dataset
    optimizer: OptimizerFactory
    parts: list[range]  # the layers of each stage
    parameters: int
    batch: tuple[Tensor, Tensor]


def preflight(
    job: Job,
    *,
    model: Model | None = None,
    data: Dataset | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Checked:
    """Check a job. A script gives its own `model`, `data` or `optimizer` here; the job names the rest."""
    device.pick(job.device)
    model = model or model_of(job)
    parts = partition(model, job.stages)
    check_tied(model)
    parameters = parameter_count(model)
    if parameters == 0:
        raise UserError("the model has no parameter to train; is everything frozen?")
    data = data or data_of(job)
    batch = _batch(job, data)
    _vocabulary(job, batch)
    _run(job, model, batch)
    ours = optimizer is None and job.optimizer.build is None
    optimizer = optimizer or optimizer_of(job)
    if not ours:
        _optimizer(optimizer, model, parts[0])
    checkpoints = None if job.checkpoint is None else job.checkpoint.folder
    for key, folder in (("checkpoint.folder", checkpoints), ("log", job.log)):
        if folder is not None and job.path(folder).exists() and not job.path(folder).is_dir():
            raise UserError(f"{key} {folder!r} is there and is not a folder; name another.")
    return Checked(
        model=model, data=data, optimizer=optimizer, parts=parts, parameters=parameters, batch=batch
    )


def _batch(job: Job, data: Dataset) -> tuple[Tensor, Tensor]:
    def ask(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        call = f"data batch({step}, {microbatch})"
        try:
            made = data.batch(step, microbatch)
        except UserError:
            raise
        except Exception as error:  # the user's function
            raise UserError(f"{call} raised {told(error)}.") from error
        pair = isinstance(made, tuple | list) and len(made) == 2
        if not pair or not all(isinstance(t, Tensor) for t in made):
            raise UserError(f"{call} gave a {type(made).__name__}; give two tensors, inputs and targets.")
        return made[0], made[1]

    first, again = ask(1, 0), ask(1, 0)
    if not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, again, strict=True)):
        raise UserError(
            "data batch(1, 0) gave two different answers to two calls; make it a function of its "
            "arguments and the seed alone, or a healed run cannot repeat it."
        )
    last = ask(job.steps, job.microbatches_in_step - 1)
    for a, b, what in zip(first, last, ("inputs", "targets"), strict=True):
        if a.dtype != b.dtype or a.ndim != b.ndim:
            raise UserError(
                f"data gives {what} of {a.ndim} dimensions of {a.dtype}, then of {b.ndim} of "
                f"{b.dtype}; make every batch alike."
            )
    return first


def _vocabulary(job: Job, batch: tuple[Tensor, Tensor]) -> None:
    form = job.model.gpt()
    if form is None:
        return
    for tokens, what in zip(batch, ("inputs", "targets"), strict=True):
        if tokens.is_floating_point() or tokens.ndim != 2:
            raise UserError(
                f"data gives {what} of shape {tuple(tokens.shape)} and {tokens.dtype}; "
                "a GPT takes token numbers in rows x length."
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < form.vocab:
            raise UserError(
                f"data gives tokens {int(tokens.min())} to {int(tokens.max())} and the model "
                f"knows 0 to {form.vocab - 1}; raise model.vocab."
            )


def _run(job: Job, model: Model, batch: tuple[Tensor, Tensor]) -> None:
    """The layers one after another, each as if it were the first of its stage."""
    x, targets = (t.to("meta") for t in batch)
    dtype = DTYPES[job.precision]
    before = "the data"
    for name in model.layers:
        module = _layer(model, name).to(dtype)
        shape = tuple(x.shape)
        if x.is_floating_point():
            x = x.detach().to(dtype).requires_grad_()
        try:
            x = module(x)
        except NotImplementedError:  # an op without a meta kernel: its shapes show on the workers
            return
        except Exception as error:  # the user's module
            if "leaf Variable" in str(error):
                raise UserError(f"layer {name!r} changes its input in place; use inplace=False.") from error
            raise UserError(
                f"layer {name!r} cannot take what {before} gives, shape {shape}: {told(error)}."
            ) from error
        if not isinstance(x, Tensor):
            raise UserError(f"layer {name!r} gives a {type(x).__name__}; a layer gives one tensor.")
        before = f"layer {name!r}"
    try:
        loss = model.loss(x.float(), targets)
    except NotImplementedError:  # as above
        return
    except Exception as error:  # the user's loss
        raise UserError(
            f"the loss cannot take an output of shape {tuple(x.shape)} and targets of shape "
            f"{tuple(targets.shape)}: {told(error)}."
        ) from error
    if not isinstance(loss, Tensor) or loss.ndim:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise UserError(f"the loss is of {given}; it must be one number, such as a mean.")
    if not loss.requires_grad:
        raise UserError("no gradient comes back from the loss; is its argument detached?")


def _layer(model: Model, name: str) -> nn.Module:
    module = skeleton(model, name)
    for part in module.modules():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            raise UserError(
                f"layer {name!r} keeps running statistics, which no two workers would share; "
                "use LayerNorm, RMSNorm or track_running_stats=False."
            )
    return module


def _optimizer(build: OptimizerFactory, model: Model, layers: range) -> None:
    """Tried on the first stage's parameters, each one zero seen through its shape."""
    named = [
        (name, nn.Parameter(torch.zeros(()).expand(slot.shape)))
        for name, slot in slots(model, layers).items()
    ]
    made = build(named)
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"optimizer.build gave a {type(made).__name__}; return a torch.optim.Optimizer.")
