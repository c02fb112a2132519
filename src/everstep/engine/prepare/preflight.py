"""Everything that can be known to be wrong before a worker is started, said in one sentence.

The model is built on the meta device, the data is asked for a few batches, and the layers are run on meta
tensors: shapes without memory or arithmetic, a 7B model in a second. An operation that has no meta form, or
a layer that looks at a value, ends the look at shapes, silently: it is not the user's mistake, and the
workers will find out.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everstep.engine import device
from everstep.engine.datasets.data import Dataset
from everstep.engine.layers.boundary import Value, described, mapped, tensors_in
from everstep.engine.layers.model import (
    Model,
    check_tied,
    evaluating,
    in_precision,
    in_short,
    in_training,
    one_after_the_other,
    parameter_count,
    partition,
    refuse_statistics,
    refusing_changed_buffers,
    skeleton,
    slots,
)
from everstep.engine.layers.shard_plan import Cut
from everstep.engine.layers.taken_over import largest_in_one, share_in_two
from everstep.engine.prepare.first_batch import batch_of, tried
from everstep.engine.prepare.fitting import memory_here, refuse_what_does_not_fit
from everstep.engine.prepare.resolve import (
    base_rate,
    data_of,
    evaluation_of,
    model_of,
    optimizer_of,
    parameters_of,
    refuse_untied,
    schedule_of,
    tried_optimizer,
)
from everstep.engine.prepare.shard_trial import refuse_mixed, with_summed
from everstep.engine.shards.layers import refuse_unsplittable
from everstep.engine.stage.attention_again import attention_in
from everstep.engine.stage.evaluation import Evaluation, refuse_as_score
from everstep.engine.stage.stage import DTYPES, changed_in_place
from everstep.engine.state.optimizer import OptimizerFactory, is_elementwise
from everstep.engine.state.optimizer_trial import TrialError, try_optimizer
from everstep.engine.state.schedules import Rate
from everstep.engine.state.sharded import refuse_unless_elementwise, tied_refused
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.job.presets import refuse_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A job whose words have been turned into things, and the things tried."""

    model: Model
    data: Dataset
    optimizer: OptimizerFactory
    parts: list[range]  # the layers of each stage
    parameters: int
    batch: tuple[Value, Value]  # what the first layer gets, and what the loss
    rate: Rate  # step, from 1 -> the learning rate of the optimizer's first group
    notes: tuple[str, ...] = ()  # sentences for the user, about nothing that is wrong


def preflight(
    job: Job,
    *,
    model: Model | None = None,
    data: Dataset | None = None,
    evaluation: Evaluation | None = None,
    optimizer: OptimizerFactory | None = None,
    schedule: Any = None,
) -> Checked:
    """Check a job. A script gives its own parts (`model`, `data`...) here; the job names the rest."""
    job.refuse_contradictions()
    device.pick(job.device)
    model = with_summed(model or model_of(job), job)
    parts = partition(model, job.stages)
    check_tied(model)
    built = _check_sharing(model)
    if job.shards > 1:
        refuse_shards(job.shards, model.assembly.shared_out)
        cut = Cut(model.shard_plan, 0, job.shards)
        for layer, module in built.items():
            refuse_unsplittable(layer, module, cut)
        slots(model, range(len(model.layers)), cut=cut)
    if job.recompute_part == "attention" and not any(attention_in(module) for module in built.values()):
        raise UserError(
            'recompute_part is "attention", and no layer has a module of the name attention, self_attn or '
            "alike; name it so, or leave recompute_part out."
        )
    parameters = parameter_count(model)
    if parameters == 0:
        raise UserError("the model has no parameter to train; is everything frozen?")
    data = data or data_of(job)
    batch = batch_of(job, data)
    model.assembly.check(*batch)
    if model.assembly.join is one_after_the_other:
        _run(job, model, batch)
    evaluation = evaluation or evaluation_of(job)
    if evaluation is not None:
        _try_evaluation(job, model, evaluation)
    if job.shards > 1:
        refuse_mixed(model, batch[0], job.shards)
    refuse_what_does_not_fit(job, model, batch, memory_here(job))
    ours = optimizer is None and job.optimizer.build is None and job.optimizer.name is None
    base, multiplier = base_rate(job, model, optimizer), schedule_of(job, model, schedule, optimizer)
    optimizer = optimizer or optimizer_of(job)
    if not ours or job.optimizer.shard:
        for layers in [part for part in parts if slots(model, part)]:  # a stage without parameters has none
            made = tried_optimizer(optimizer, model, layers)
            if job.optimizer.shard:
                refuse_unless_elementwise(made)
        _try_steps(job, model, optimizer)
        refuse_untied(model, parts, optimizer)
    if job.optimizer.shard and model.tied:
        raise UserError(tied_refused(model.tied[0][0]))
    checkpoints = None if job.checkpoint is None else job.checkpoint.folder
    for key, folder in (("checkpoint.folder", checkpoints), ("log", job.log)):
        if folder is not None and "://" not in folder:
            _refuse_unwritable(key, folder, job.path(folder))
    return Checked(
        model=model,
        data=data,
        optimizer=optimizer,
        parts=parts,
        parameters=parameters,
        batch=batch,
        rate=lambda step: base * (job.rate(step - 1) if multiplier is None else multiplier(step)),
        notes=_notes(built) if job.stages > 1 else (),
    )


def _refuse_unwritable(key: str, folder: str, path: Path) -> None:
    """Before the first step, not at the first save. What is not there yet is made in the folder above it."""
    there = next(each for each in (path, *path.parents, Path()) if os.path.lexists(each))
    try:
        is_folder = stat.S_ISDIR(there.stat().st_mode)
    except OSError as error:  # a link to itself, to nothing, to what may not be seen
        raise UserError(
            f"{key} {folder!r} cannot be used: {there}: {error.strerror}; name another."
        ) from None
    if not is_folder:
        which = "" if there == path else f": {there}"
        raise UserError(f"{key} {folder!r}{which} is there and is not a folder; name another.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key} {folder!r}: {there} is not writable for you; name another, or allow it.")
    try:
        tempfile.TemporaryFile(dir=there).close()  # permissions do not tell everything
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # room may come; training does not wait for it
            raise UserError(
                f"{key} {folder!r}: no file can be made in {there} ({error.strerror}); name another."
            ) from None


def _try_steps(job: Job, model: Model, optimizer: OptimizerFactory) -> None:
    """The optimizer of all parameters, in a few small steps."""
    everything = range(len(model.layers))
    named = parameters_of(model, everything)
    made = tried_optimizer(optimizer, model, everything, named)
    if is_elementwise(made):
        return
    try:
        here, tied = torch.device("cpu"), bool(model.tied)
        split = job.shards > 1
        try_optimizer(optimizer, made, named, device=here, several=job.stages > 1, tied=tied, split=split)
    except TrialError:
        if device.pick(job.device).type == "cpu":
            raise
        # It may need a GPU: workers try it on theirs, before the first update.


def _notes(built: dict[str, nn.Module]) -> tuple[str, ...]:
    """Where most of the backward is one op, schedules have less to move."""
    share, largest = share_in_two(built.values()), largest_in_one(built)
    if share >= 0.5 or largest is None:
        return ()
    return (
        f"the weight gradients of {1 - share:.0%} of the parameters, such as {largest}, cannot be computed "
        "later than the input's, so stages may wait for each other a little longer",
    )


def _try_evaluation(job: Job, model: Model, evaluation: Evaluation) -> None:
    """Its first batch may come hours after the start."""
    try:
        batch = tried(evaluation.data, (1, evaluation.batches - 1))
        model.assembly.check(*batch)
        if model.assembly.join is one_after_the_other:
            _evaluate(job, model, evaluation, batch)
    except UserError as error:
        raise UserError(f"in the evaluation, {error}") from error


def _shapes(batch: tuple[Value, Value], dtype: torch.dtype) -> tuple[Value, Value]:
    inputs, targets = (mapped(lambda t: t.to("meta"), part) for part in batch)
    return mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs), targets


@torch.no_grad()
def _evaluate(job: Job, model: Model, evaluation: Evaluation, batch: tuple[Value, Value]) -> None:
    dtype = DTYPES[job.precision]
    value, targets = _shapes(batch, dtype)
    before = "the data"
    for name in model.layers:
        module, given = in_precision(skeleton(model, name), dtype), value
        _refuse_whole_numbers(module)
        try:
            with evaluating([module]):
                value = module(value)
        except UserError:
            raise
        except Exception as error:  # the user's module
            if _needs_values(error):
                return
            raise _unfit(name, before, given, error) from error
        before = f"layer {name!r}"
    output = mapped(lambda t: t.float() if t.is_floating_point() else t, value)
    for name, metric in (("loss", model.loss), *evaluation.metrics.items()):
        try:
            refuse_as_score(name, metric(output, targets))
        except UserError:
            raise
        except Exception as error:  # the user's metric
            if not _needs_values(error):
                raise UserError(
                    f"the metric {name!r} cannot take what {before} gives, {described(output)}, and the "
                    f"targets, {described(targets)}: {in_short(error)}."
                ) from error


def _run(job: Job, model: Model, batch: tuple[Value, Value]) -> None:
    """The layers one after another, each as if it were the first of its stage."""
    dtype = DTYPES[job.precision]
    value, targets = _shapes(batch, dtype)
    value = mapped(lambda t: t.requires_grad_() if t.is_floating_point() else t, value)
    before = "the data"
    for name in model.layers:
        module = in_precision(in_training(skeleton(model, name)), dtype)
        _refuse_whole_numbers(module)
        given = value
        value = mapped(lambda t: t.detach().requires_grad_(t.requires_grad), value)
        entered = tensors_in(value)
        versions = [tensor._version for tensor in entered]
        try:
            with refusing_changed_buffers({name: module}):
                value = module(value)
        except UserError:
            raise
        except Exception as error:  # the user's module
            if _needs_values(error):
                return
            if "leaf Variable" in str(error):
                raise UserError(f"layer {name!r} changes its input in place; use inplace=False.") from error
            raise _unfit(name, before, given, error) from error
        if name != model.names[0] and [tensor._version for tensor in entered] != versions:
            raise UserError(changed_in_place(f"layer {name!r}"))
        try:
            tensors_in(value)
        except UserError:
            raise UserError(
                f"layer {name!r} gives {described(value)}; a layer gives a tensor, or tuples, lists and "
                "dicts of tensors."
            ) from None
        before = f"layer {name!r}"
    _try_loss(model, before, value, targets, batch[1])


def _needs_values(error: Exception) -> bool:
    """An op without a meta kernel, or one that looks at values: shapes show on the workers. torch names the
    meta device in many words, and not always by NotImplementedError.
    """
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _unfit(layer: str, before: str, given: Value, error: Exception) -> UserError:
    return UserError(
        f"layer {layer!r} cannot take what {before} gives, {described(given)}: {in_short(error)}; "
        f"{_fix(layer, given, error)}."
    )


def _fix(layer: str, value: Value, error: Exception) -> str:
    if "required positional argument" in str(error):
        return "a layer gets one argument, which is all that the layer before gives"
    if not isinstance(value, Tensor):
        return f"let {layer!r} take all of it as one argument, or let the layer before give one tensor"
    return "make the two fit, in shape and type"


def _refuse_whole_numbers(module: nn.Module) -> None:
    """Shapes alone would fit."""

    def look(part: nn.Module, given: Any) -> None:
        if (
            given
            and isinstance(given[0], Tensor)
            and not (given[0].is_floating_point() or given[0].is_complex())
        ):
            kind = str(given[0].dtype).removeprefix("torch.")
            raise TypeError(
                f"{type(part).__name__} is given {kind}, and multiplies; use .float(), or an nn.Embedding"
            )

    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
            part.register_forward_pre_hook(look)


def _try_loss(model: Model, last: str, output: Value, targets: Value, real_targets: Value) -> None:
    output = mapped(lambda t: t.float() if t.is_floating_point() else t, output)
    try:
        made = model.loss(output, targets)
    except Exception as error:  # the user's loss
        if _needs_values(error):
            return
        fix = "" if isinstance(output, Tensor) else "; return one tensor, or give a loss that takes them all"
        raise UserError(
            f"the loss cannot take what {last} gives, {described(output)}, and the targets, "
            f"{described(targets)}: {in_short(error)}{fix}."
        ) from error
    weighted = isinstance(made, tuple | list)
    loss = made[0] if weighted and len(made) == 2 else made
    if not isinstance(loss, Tensor) or loss.ndim:
        raise UserError(
            f"the loss gives {described(loss)}; it must be a tensor of one number, such as a mean, or "
            "(sum, weight)."
        )
    if not loss.requires_grad:
        raise UserError("no gradient comes back from the loss; is its argument detached?")
    masked = any(not t.is_floating_point() and bool((t == -100).any()) for t in tensors_in(real_targets))
    if masked and not weighted:
        raise UserError(
            "some targets are -100, which do not count, and the loss is a mean, which would count every "
            "microbatch alike; let the loss return (sum, weight), such as everstep.token_loss."
        )


def _check_sharing(model: Model) -> dict[str, nn.Module]:
    """Each layer has parameters of its own, under names of its own: two workers could not change one tensor.
    They are real numbers.
    """
    built = {name: skeleton(model, name) for name in model.layers}
    tied = {frozenset(pair) for pair in model.tied}
    seen: dict[int, tuple[str, str]] = {}
    names: dict[str, str] = {}  # of parameters, to their layers
    for name, module in built.items():
        refuse_statistics(name, in_training(module))
        twin = next((other for other in built if other != name and built[other] is module), None)
        if twin is not None:
            raise UserError(
                f"layers {name!r} and {twin!r} are one module; build a new one in each function, and name "
                "what they share in Model(tied=...)."
            )
        for key, parameter in module.named_parameters():
            owner = names.setdefault(f"{name}.{key}", name)
            if owner != name:
                raise UserError(
                    f"layers {owner!r} and {name!r} both have a parameter {name}.{key}; give one "
                    "of the layers another name."
                )
            if parameter.is_complex() and parameter.requires_grad:
                raise UserError(
                    f"parameter {name}.{key} is complex, and only real numbers are trained; keep it as a "
                    "real tensor with a last dimension of 2, and use torch.view_as_complex in the forward."
                )
            other, its = seen.setdefault(id(parameter), (name, key))
            if other != name and frozenset((f"{other}.{its}", f"{name}.{key}")) not in tied:
                raise UserError(
                    f"layers {other!r} and {name!r} share the parameter {key!r}, and may be on two workers; "
                    f'give each its own, and Model(tied=(("{other}.{its}", "{name}.{key}"),)) to keep them '
                    "equal."
                )
    return built
