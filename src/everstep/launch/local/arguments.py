"""From the arguments of `everstep.train` to a job: what is given wrongly is said in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from everstep.engine.datasets.stream import Stream
from everstep.engine.layers.model import Factory, Loss, Model
from everstep.errors import UserError
from everstep.job.job import CheckpointSpec, Job, NetSpec, OptimizerSpec, VerifySpec
from everstep.job.presets import closest_key

Layers = Model | Mapping[str, Factory] | Sequence[Factory]
_OPTIMIZER_KEYS = frozenset(f.name for f in fields(OptimizerSpec)) - {"build", "options"}
_IN_THE_SCRIPT = "in-the:script"  # what a job says of a model, data or optimizer that no job file names
_USUAL_NAMES = {  # of other trainers
    "learning_rate": "lr",
    "batch_size": "rows, an argument of the data: everstep.rows(dataset, rows=8)",
    "per_device_train_batch_size": "rows, an argument of the data: everstep.rows(dataset, rows=8)",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "gradient_accumulation_steps": "microbatches",
    "accumulate_grad_batches": "microbatches",
    "gradient_clip_val": "clip",
    "max_grad_norm": "clip",
    "grad_clip": "clip",
    "gradient_checkpointing": "recompute",
    "warmup_steps": "warmup",
    "num_workers": "load_ahead",
    "output_dir": "checkpoint",
    "bf16": 'precision="bf16"',
    "fp16": 'precision="bf16"',
    "dtype": 'precision="bf16"',
    "torch_dtype": 'precision="bf16"',
    "gpus": 'replicas and stages, with device="cuda"',
    "devices": "replicas and stages",
    "num_gpus": 'replicas and stages, with device="cuda"',
    "num_processes": "replicas and stages",
    "strategy": "replicas, stages and shards",
    "tied": "tied, an argument of the model: everstep.Model(layers={...}, tied=...)",
    "log_every": "everstep run --every N, or a callback",
    "logging_steps": "everstep run --every N, or a callback",
    **dict.fromkeys(
        ("save_every", "save_steps", "save_interval", "checkpoint_every", "checkpoint_steps"),
        'checkpoint={"folder": "checkpoints", "interval": 100}',
    ),
    "eval_steps": "eval_every",
    "collate_fn": "collate, an argument of the data: everstep.rows(dataset, collate=...)",
    "shuffle": "shuffle, an argument of the data: everstep.rows(dataset, shuffle=...)",
    "loss_fn": "loss",
    "criterion": "loss",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "dataset": "data",
    "train_dataset": "data",
    "eval_dataset": "eval_data",
}


def model_given(given: Layers, loss: Loss | None) -> Model:
    if isinstance(given, nn.Module):
        kind = type(given).__name__
        fix = (
            "everstep.hf(FOLDER) after save_pretrained(FOLDER)"
            if hasattr(given, "save_pretrained")
            else ("its layers in order, each as a function that builds it: [lambda: Embed(...), ...]")
        )
        raise UserError(f"model is a {kind} already built, and every worker builds its own part; give {fix}.")
    if callable(given):
        raise UserError(
            f"model is {_named(given)}; give its layers in order, as a list of functions that each build "
            "one: [lambda: Embed(...), Block, Head]."
        )
    if isinstance(loss, type):
        raise UserError(f"loss is the class {loss.__name__}; give an object: {loss.__name__}(...).")
    if loss is not None and not callable(loss):
        raise UserError(
            f"loss is a {type(loss).__name__}; give a function of (output, targets), such as "
            "torch.nn.functional.mse_loss."
        )
    model = given if isinstance(given, Model) else Model(layers=given)  # type: ignore[arg-type]
    return model if loss is None else replace(model, loss=loss)


def named_optimizer(given: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        return {"name": given}
    ignored = [key for key in ("lr", "betas", "eps", "weight_decay") if key in settings]
    if given is not None and ignored:
        raise UserError(
            f"{ignored[0]} is given beside an optimizer of your own, which would not see it; set it there: "
            f"optimizer=lambda named: torch.optim.AdamW(named, {ignored[0]}=...)."
        )
    if "optimizer_options" in settings:
        raise UserError('optimizer_options goes with the name of an optimizer, such as optimizer="SGD".')
    return {}


def shape_of_call(given: Mapping[str, int], overrides: Mapping[str, int]) -> dict[str, int]:
    """The script's shape and what `everstep run` changes of it. Another number of replicas keeps the batch
    of a step, as `everstep resize` does; `batch`, in microbatches per step, changes it.
    """
    shape = {**given, **{key: value for key, value in overrides.items() if key != "batch"}}
    if "batch" not in overrides and shape["replicas"] == given["replicas"]:
        return shape
    total = overrides.get("batch", given["replicas"] * given["microbatches"])
    replicas = shape["replicas"]
    if replicas < 1 or total < 1 or total % replicas:
        fits = max(1, round(total / max(1, replicas))) * max(1, replicas)
        raise UserError(
            f"a step has {total} microbatches, which {replicas} replicas cannot share evenly; give "
            f"--replicas a divisor of {total}, or another batch: --batch {fits}."
        )
    return {**shape, "microbatches": total // replicas}


def evaluation_table(
    data: Any, every: int | None, batches: int | None, metrics: Any, shape: Mapping[str, int]
) -> dict[str, Any]:
    """The job's table of an evaluation that a script gives."""
    if not isinstance(metrics, Mapping) or not all(callable(metric) for metric in metrics.values()):
        raise UserError(
            'metrics must be a dict of functions, such as {"accuracy": lambda output, targets: ...}.'
        )
    if batches is None:
        whole = data.order_in(1, 0) if hasattr(data, "order_in") else None
        if whole is not None and whole.size < whole.rows:
            raise UserError(
                f"eval_data has {whole.size} rows, and a batch of it {whole.rows}, so some would count "
                f"twice; give it rows={whole.size} or fewer."
            )
        batches = 8 if whole is None else max(1, whole.size // whole.rows)
        if isinstance(data, Stream):
            batches = data.length()
            if batches is None:
                raise UserError("eval_data is a stream without a length; give eval_batches.")
    usual = max(1, shape["steps"] // 10)
    return {
        "every": usual if every is None else every,
        "batches": batches,
        "data": {"build": _IN_THE_SCRIPT},
        "metrics": list(metrics),
    }


def _named(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else "a function"


def _plain(value: Any) -> Any:
    """A number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def check_optimizer(given: Any) -> None:
    if isinstance(given, str):
        return
    if isinstance(given, torch.optim.Optimizer):
        kind = type(given).__name__
        raise UserError(
            f"optimizer is a {kind} already built, and every stage makes its own; give a function: "
            f"optimizer=lambda named: torch.optim.{kind}(named, lr=...)."
        )
    if given is not None and not callable(given):
        raise UserError(
            f"optimizer is a {type(given).__name__}; give a function of named parameters, such as "
            "lambda named: torch.optim.SGD(named, lr=0.1)."
        )


def refuse_unknown(
    settings: Mapping[str, Any], also: Sequence[str] = (), call: str = "everstep.train"
) -> None:
    """`also`: arguments of `call` that are no keys of a job."""
    known = {*(f.name for f in fields(Job)), *_OPTIMIZER_KEYS, "optimizer_options", "epochs", *also}
    offered = sorted(known - {"base", "positional", "settings"})
    for key in settings:
        if key not in known:
            usual = _USUAL_NAMES.get(key)
            hint = f"here it is called {usual}." if usual else _in_a_table(key) or closest_key(key, offered)
            raise UserError(f"{key} is not an argument of {call}; {hint}")


def _in_a_table(key: str) -> str:
    """`checkpoint_interval` is the key `interval` of the table `checkpoint`. Empty: it is near none."""
    tables = {"checkpoint": CheckpointSpec, "verify": VerifySpec, "net": NetSpec}
    known = {f"{table}_{f.name}": (table, f.name) for table, spec in tables.items() for f in fields(spec)}
    if not (near := get_close_matches(key, list(known), n=1, cutoff=0.85)):
        return ""
    table, name = known[near[0]]
    folder = '"folder": "checkpoints", ' if table == "checkpoint" and name != "folder" else ""
    return f'write it as a key of {table}: {table}={{{folder}"{name}": ...}}.'


def job_of_call(shape: Mapping[str, int], settings: Mapping[str, Any], card: Mapping[str, Any]) -> Job:
    shape, settings = ({key: _plain(value) for key, value in given.items()} for given in (shape, settings))
    refuse_unknown(settings)
    optimizer = {key: settings.pop(key) for key in list(settings) if key in _OPTIMIZER_KEYS}
    if "optimizer_options" in settings:
        optimizer["options"] = settings.pop("optimizer_options")
    where = settings.get("checkpoint")
    if where == "" or not isinstance(where, str | Path | Mapping | None):
        raise UserError(f'checkpoint is {where!r}; give a folder, such as checkpoint="checkpoints".')
    if isinstance(where, str | Path):
        settings["checkpoint"] = {"folder": str(settings["checkpoint"])}
    return Job.from_dict(
        {
            "base": str(Path.cwd()),
            "model": {"build": _IN_THE_SCRIPT, "card": dict(card)},
            "optimizer": optimizer,
            "data": {"build": _IN_THE_SCRIPT},
            **shape,
            **settings,
        }
    )
