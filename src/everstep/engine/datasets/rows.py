"""`everstep.rows`: a map-style data set, with `len` and `[index]`, in shuffled epochs.

Random draws inside the data set (`random`, numpy, torch) are seeded by (seed, epoch, index), so augmentations
repeat where a batch is asked for again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from everstep.engine import keys
from everstep.engine.datasets.data import named_arguments
from everstep.engine.datasets.documents import PackedDocuments, stacked_documents
from everstep.engine.datasets.order import RowOrder
from everstep.engine.layers.boundary import Value, described
from everstep.errors import UserError
from everstep.log import say

if TYPE_CHECKING:
    from everstep.job.job import Job

Collate = Callable[[list[Any]], Any]
_FILL = {"labels": -100}  # what a short row is filled up with; 0 elsewhere
_TOKENS = "input_ids"


@named_arguments
def rows(
    dataset: Any,
    *,
    rows: int = 4,
    pack: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    collate: Collate | None = None,
) -> Rows:
    """A data set with `len` and `[index]`, such as one of torch or of Hugging Face `datasets`.

    rows      in a microbatch
    pack      tokens in a row: rows of the data set, dicts with `input_ids`, are documents, and several are
              put into one row (`everstep.engine.datasets.documents`)
    shuffle   a new order in every epoch, by (seed, epoch); each row comes exactly once in each
    seed      the job's, if not given
    collate   makes a batch of a list of rows; else rows are stacked, and rows that are dicts with `input_ids`
              of different lengths are filled up (labels with -100, attention_mask with 0)
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"everstep.rows was given a {type(dataset).__name__}, which has no len and [index]; "
            "give it to everstep.stream if it can only be iterated."
        )
    if len(dataset) == 0:
        raise UserError("everstep.rows was given a data set without rows.")
    if rows < 1:
        raise UserError(f"everstep.rows has rows={rows}; it must be at least 1.")
    if pack is not None:
        if pack < 2 or collate is not None:
            raise UserError(
                f"everstep.rows has pack={pack}; it is the tokens of a row, at least 2, and rows that are "
                "packed need no collate."
            )
        dataset, collate = PackedDocuments(dataset, pack), stacked_documents
        say(f"data: {len(dataset)} rows of {pack} tokens, {dataset.filled:.1%} of them used")
    return Rows(dataset=dataset, rows=rows, shuffle=shuffle, seed=seed, collate=collate or stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    dataset: Any
    rows: int
    shuffle: bool
    seed: int | None
    collate: Collate
    order: RowOrder | None = None  # once the job is known

    def for_job(self, job: Job) -> Self:
        return replace(self, order=self.order_in(job.microbatches_in_step, job.seed))

    def order_in(self, microbatches: int, seed: int) -> RowOrder:
        return RowOrder(
            size=len(self.dataset),
            rows=self.rows,
            microbatches=microbatches,
            seed=seed if self.seed is None else self.seed,
            shuffle=self.shuffle,
        )

    def batch(self, step: int, microbatch: int) -> Any:
        order = self.order or self.order_in(1, 0)
        return self.collate([self._row(order.seed, *place) for place in order.places(step, microbatch)])

    def _row(self, seed: int, epoch: int, index: int) -> Any:
        with seeded(keys.key(seed, keys.DATA, epoch, index)):
            return self.dataset[index]


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Every usual source of randomness starts here, and afterwards goes on from where it was."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.manual_seed(key & (1 << 63) - 1)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def stacked(given: list[Any]) -> Value:
    """Rows of one form, one upon the other."""
    first = given[0]
    if isinstance(first, Mapping):
        return _dicts(given)
    if isinstance(first, tuple | list) and len(first) == 2 and not _is_numbers(first):
        return tuple(_column([row[part] for row in given], f"part {part}") for part in range(2))
    raise UserError(
        f"the data set's row is {described(first)}; a row is (input, target), or a dict such as "
        '{"input_ids": ..., "labels": ...}; else give collate=.'
    )


def _dicts(given: list[Mapping[str, Any]]) -> dict[str, Any]:
    columns = {
        key: [_tensor(row[key], key) for row in given] for key in given[0] if _is_numeric(given[0][key])
    }
    if not columns:
        raise UserError(
            f"the data set's row has the keys {', '.join(map(str, given[0]))}, none of which is numbers; "
            "turn text into tokens first, or give collate=."
        )
    tokens = columns.get(_TOKENS)
    if tokens is None or len({len(row) for row in tokens}) == 1:
        return {key: _column(column, repr(key)) for key, column in columns.items()}
    columns.setdefault("attention_mask", [torch.ones_like(row) for row in tokens])
    longest = max(len(row) for row in tokens)
    return {key: _filled(column, longest, _FILL.get(key, 0), key) for key, column in columns.items()}


def _filled(column: list[Tensor], longest: int, fill: int, key: str) -> Tensor:
    if any(row.ndim != 1 or len(row) > longest for row in column):
        return _column(column, repr(key))
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=fill) for row in column])


def _column(column: list[Any], name: str) -> Tensor:
    tensors = [_tensor(value, name) for value in column]
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise UserError(
            f"{name} of the data set's rows has different shapes, such as {shapes[0]} and {shapes[1]}; give "
            "collate= a function that fills them up, with a loss that counts tokens (everstep.token_loss)."
        )
    return torch.stack(tensors)


def _tensor(value: Any, name: str) -> Tensor:
    try:
        return value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name} of a row is {described(value)}; it must be numbers.") from None


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return len(value) == 0 or _is_numeric(value[0])
    return isinstance(value, Tensor | np.ndarray | np.generic | int | float)


def _is_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values) and not isinstance(values, tuple)
