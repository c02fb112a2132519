"""The data, asked for a few batches: are they batches, alike, and the same when they are asked for again?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from everstep.engine.datasets.data import Dataset, split
from everstep.engine.layers.boundary import Value, advice, described, take_apart, tensors_in
from everstep.engine.layers.model import in_short
from everstep.errors import UserError
from everstep.job.job import Job


def batch_of(job: Job, data: Dataset) -> tuple[Value, Value]:
    """The first microbatch, once the data has been tried."""
    return tried(data, (job.steps, job.microbatches_in_step - 1))


def tried(data: Dataset, last: tuple[int, int]) -> tuple[Value, Value]:
    """The batch at (1, 0). `last`: the other end of what will be asked for."""
    if hasattr(data, "preview"):  # a stream cannot be asked for its last batch
        return _form("the stream's first batch", data.preview())
    first, again = _ask(data, 1, 0), _ask(data, 1, 0)
    if not _alike(first, again, lambda a, b: a.shape == b.shape and torch.equal(a, b)):
        raise UserError(
            "data batch(1, 0) gave two different answers to two calls; make it a function of its "
            "arguments and the seed alone, or a healed run cannot repeat it."
        )
    other = _ask(data, *last)
    if not _alike(first, other, lambda a, b: a.dtype == b.dtype and a.ndim == b.ndim):
        raise UserError(
            f"data gives {_forms(first)} at first and {_forms(other)} at last; make every batch alike, in "
            "keys, types and number of dimensions."
        )
    return first


def _ask(data: Dataset, step: int, microbatch: int) -> tuple[Value, Value]:
    call = f"data batch({step}, {microbatch})"
    try:
        made = data.batch(step, microbatch)
    except UserError:
        raise
    except Exception as error:  # the user's function
        takes = "; it is called with (step, microbatch)" if isinstance(error, TypeError) else ""
        raise UserError(f"{call} raised {in_short(error)}{takes}.") from error
    return _form(call, made)


def _form(call: str, made: Any) -> tuple[Value, Value]:
    pair = isinstance(made, tuple | list) and len(made) == 2
    if not pair and not isinstance(made, Mapping):
        raise UserError(
            f"{call} gave {described(made)}; return (inputs, targets), or a dict such as "
            '{"input_ids": ..., "labels": ...}.'
        )
    try:
        if tensors_in(made):
            return split(made)
    except UserError:
        odd = next(part for part in (made.values() if isinstance(made, Mapping) else made) if _is_odd(part))
        raise UserError(f"{call} gave {described(odd)} where a tensor belongs; {advice(odd)}.") from None
    raise UserError(f"{call} gave {described(made)} without a tensor; {advice(made)}.")


def _is_odd(part: Any) -> bool:
    try:
        return not tensors_in(part) and part is not None
    except UserError:
        return True


def _alike(one: Value, other: Value, same: Callable[[Tensor, Tensor], bool]) -> bool:
    (a, tree_a), (b, tree_b) = take_apart(one), take_apart(other)
    return tree_a == tree_b and all(same(x, y) for x, y in zip(a, b, strict=True))


def _forms(batch: tuple[Value, Value]) -> str:
    return ", ".join(f"{t.ndim}-D {str(t.dtype).removeprefix('torch.')}" for t in tensors_in(batch))
