"""Data as a function of (step, microbatch): any worker can ask for any batch, and asks again after a death.

A dataset has one method, `batch(step, microbatch)`. It gives (inputs, targets), for the first layer and for
the loss, or one dict, such as {"input_ids", "attention_mask", "labels"}, which both of them get whole. It
must be pure: the same arguments give the same tensors, on every worker, at any time. `microbatch` counts
through the whole step, over all replicas, so the batch does not depend on who runs it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from everstep.engine import keys
from everstep.engine.layers.boundary import Value
from everstep.errors import UserError
from everstep.job.presets import closest_key

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NAMES_IN_LOADERS = {
    "batch_size": "rows",
    "collate_fn": "collate",
    "block_size": "sequence",
    "num_workers": "load_ahead, an argument of everstep.train",
}


@runtime_checkable
class Dataset(Protocol):
    """What gives training its data: a function of (step, microbatch) in the form of an object."""

    def batch(self, step: int, microbatch: int) -> tuple[Value, Value] | Mapping[str, Value]:
        """Inputs and targets, or a dict. `step` counts from 1, `microbatch` from 0 through the whole step,
        over all replicas. The same arguments give the same tensors, in every process, however often.
        """
        ...


def named_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A call with an argument that `function` does not have, or without one that it needs, is a UserError."""
    signature = inspect.signature(function)
    known, name = list(signature.parameters), f"everstep.{function.__name__}"
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        key for key, one in signature.parameters.items() if one.default is one.empty and one.kind not in free
    ]

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for key in kwargs:
            if key not in known:
                usual = _NAMES_IN_LOADERS.get(key)
                here = usual is not None and (usual in known or "everstep." in usual)
                hint = f"here it is called {usual}." if here else closest_key(key, known)
                raise UserError(f"{key} is not an argument of {name}; {hint}")
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            raise UserError(
                f"{name} takes one argument without a name; name the others: {', '.join(known[1:])}."
            ) from None
        missing = [key for key in needed if key not in given]
        if missing:
            raise UserError(f"{name} needs {' and '.join(missing)}; its arguments: {', '.join(known)}.")
        return function(*args, **kwargs)

    return checked


class FunctionData:
    """A data function in the form of a dataset."""

    def __init__(self, function: Any) -> None:
        self.batch = function


def dataset_of(given: Any, name: str = "data") -> Any:
    """What a user gives as data, as a dataset; `name`: the argument."""
    kind = type(given).__name__
    foreign = type(given).__module__.partition(".")[0] in (
        "datasets",
        "torch",
    )  # theirs may have a `batch`, too
    if callable(getattr(given, "batch", None)) and not foreign:
        return given
    if isinstance(given, str | Path):
        raise UserError(
            f"{name} is {str(given)!r}; give everstep.tokens({str(given)!r}) for a file of tokens, or "
            "everstep.table(...) for parquet or Arrow."
        )
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        raise UserError(
            f"{name} is a {kind}; give everstep.rows({name}, rows=...), which shuffles it by epoch."
        )
    if hasattr(given, "__iter__"):
        raise UserError(
            f"{name} is a {kind}, which can only be iterated; give everstep.rows(DATASET, rows=...) with the "
            f"data set behind it, or everstep.stream({name})."
        )
    if not callable(given):
        raise UserError(
            f"{name} is a {kind}; give a function of (step, microbatch), an object with "
            "batch(step, microbatch), or everstep.rows, tokens, table or stream."
        )
    return FunctionData(given)


def of_job(data: Any, job: Any) -> Any:
    """A data set that must know its job (microbatches per step, seed, folders) gets to know it."""
    bind = getattr(data, "for_job", None)
    return data if bind is None else bind(job)


START = "start"  # in a job's data options: of its order of rows, where the batch has changed (RowOrder.start)


def trained_on(data: Any, job: Any) -> Any:
    """Data of a job that is trained on, not evaluated: its rows continue behind those of earlier starts."""
    known = of_job(data, job)
    start = job.data.options.get(START, 0)
    return replace(known, order=replace(known.order, start=start)) if start else known


def evaluated_on(data: Any, job: Any, batches: int) -> Any:
    """Data of a job that is evaluated on: its first batches, after this step and after that."""
    bind = getattr(data, "for_evaluation", None)
    return of_job(data, job) if bind is None else bind(job, batches)


def split(batch: Any) -> tuple[Value, Value]:
    """What of a batch the first layer gets, and what the loss."""
    if isinstance(batch, Mapping):
        return dict(batch), dict(batch)
    inputs, targets = batch
    return inputs, targets


def uneven(before: list[tuple[int, ...]], now: list[tuple[int, ...]]) -> str:
    """Why microbatches of different sizes are refused where the loss is a mean."""
    return (
        f"the targets of one microbatch have shape {_shapes(before)}, of another {_shapes(now)}, and the "
        "loss is a mean, which would count a small microbatch as much as a large one; let the loss return "
        "(sum, weight), such as everstep.token_loss."
    )


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes))


class Synthetic:
    """Text of a made-up language in which a token nearly tells the next one, so that the loss really falls.

    A walk on a ring of symbols: from each symbol eight others can follow, the k-th with probability about
    2^-k. A model starts near ln(vocab), soon knows which symbols are used, then which follow which; no model
    can go below `floor` nats.
    """

    _ODDS = np.cumsum([2.0**-k for k in range(1, 8)])
    floor = 1.3756
    in_a_thread = True

    def __init__(self, *, vocab: int, sequence: int, rows: int, seed: int = 0) -> None:
        self.vocab, self.sequence, self.rows, self.seed = vocab, sequence, rows, seed
        symbols = min(vocab, 256)
        self._alphabet = np.argsort(keys.draws(keys.key(seed, keys.DATA, 1), vocab))[:symbols]
        self._strides = 1 + np.argsort(keys.draws(keys.key(seed, keys.DATA, 2), max(symbols, 8)))[:8]

    def batch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        count = self.rows * (self.sequence + 1)
        draw = keys.uniform(keys.key(self.seed, keys.DATA, step, microbatch), count).reshape(self.rows, -1)
        moves = self._strides[np.searchsorted(self._ODDS, draw, side="right")]
        moves[:, 0] = (draw[:, 0] * len(self._alphabet)).astype(np.int64)
        tokens = self._alphabet[np.cumsum(moves, axis=1) % len(self._alphabet)]
        inputs, targets = (np.ascontiguousarray(part) for part in (tokens[:, :-1], tokens[:, 1:]))
        return torch.from_numpy(inputs), torch.from_numpy(targets)
