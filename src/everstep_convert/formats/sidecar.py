"""What another format has no place for, kept beside its own files so that nothing is lost on the way back.

Every writer stores natively what its format knows, and this table for the rest: which names are buffers, the
optimizer's groups, tied names, the meta values. Readers take it where it is; a checkpoint of others has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np

from everstep.store import dtypes
from everstep.store.dtypes import Array
from everstep.store.index import Refused, digest
from everstep.store.stored import Stored, read_range
from everstep_convert.formats.format import Reading
from everstep_convert.state import TrainingState, equal

_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


def table_of(state: TrainingState, without: Iterable[str] = ()) -> dict[str, Any]:
    """As JSON; `without`: keys of `meta` that the format holds itself."""
    return {
        "step": state.step,
        "groups": state.groups,
        "tied": state.tied,
        "frozen": state.frozen,
        "buffers": list(state.buffers()),
        "meta": {key: value for key, value in state.meta.items() if key not in set(without)},
    }


def apply(state: TrainingState, table: Any) -> None:
    """What the table says; `meta` is added to what the reader found itself."""
    try:
        state.step, state.groups, state.tied = table["step"], list(table["groups"]), dict(table["tied"])
        state.frozen = list(table["frozen"])
        state.meta = {**table["meta"], **state.meta}
        rename_buffers(state, set(table.get("buffers", ())))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"its Everstep table is damaged: {error!r}") from error


def rename_buffers(state: TrainingState, names: set[str]) -> None:
    """Tensors that were read as weights are buffers."""
    state.tensors = {
        f"buffer/{name[6:]}" if name.startswith("model/") and name[6:] in names else name: stored
        for name, stored in state.tensors.items()
    }


def guess_roles(state: TrainingState, reading: Reading) -> None:
    """Buffers and frozen parameters of a checkpoint that holds only names and tensors.

    Integers and batch norm's statistics are buffers. With optimizer groups, any other tensor that is in none
    of them is a frozen parameter. `reading` overrules both.
    """
    names = state.parameters()
    trained = {name for group in state.groups for name in group["params"]}
    given_frozen = {name for name in names if _matches(name, reading.frozen)}
    buffers = {
        name
        for name, stored in names.items()
        if name not in trained | given_frozen
        and (
            _matches(name, reading.buffers)
            or not dtypes.is_trainable(stored.dtype)
            or name.rpartition(".")[2] in _BATCH_NORM
        )
    }
    rename_buffers(state, buffers)
    known = trained | buffers | set(state.tied)
    state.frozen = [n for n in names if n in given_frozen or (state.groups and n not in known)]


def find_ties(state: TrainingState, reading: Reading) -> None:
    """A matrix outside of all optimizer groups with the bytes of one inside is another name of that one.

    torch saves a tied parameter under each of its names, and its optimizer knows one of them. A frozen copy
    would differ after the first step; `reading` says where it does not. Constants say nothing.
    """
    names = state.parameters()
    trained = [name for group in state.groups for name in group["params"] if name in names]
    known = set(trained)
    untrained = [name for name in names if name not in known and _can_be_tied(name, names[name], reading)]
    kinds = {(names[name].dtype, names[name].shape) for name in untrained}
    alike: dict[tuple[Any, ...], list[str]] = {}  # only what begins alike is compared as a whole
    for name in trained:
        if (names[name].dtype, names[name].shape) in kinds:
            alike.setdefault(_beginning(names[name]), []).append(name)
    for name in untrained:
        others = alike.get(_beginning(names[name]), [])
        same = next((other for other in others if equal(names[name], names[other])), None)
        if same is not None:
            state.tied[name] = same
            del state.tensors[f"model/{name}"]


def _can_be_tied(name: str, stored: Stored, reading: Reading) -> bool:
    if len(stored.shape) < 2 or not all(stored.shape) or not dtypes.is_trainable(stored.dtype):
        return False
    if _matches(name, (*reading.frozen, *reading.buffers)):
        return False
    first = _first_elements(stored)
    return bool((first != first[0]).any())


def begins_alike(a: Stored, b: Stored) -> bool:
    return _beginning(a) == _beginning(b)


def _beginning(stored: Stored) -> tuple[Any, ...]:
    return (stored.dtype, stored.shape, digest(_first_elements(stored).tobytes()))


def _first_elements(stored: Stored) -> Array:
    first: Array = np.empty(min(prod(stored.shape), 1 << 16), dtypes.raw(stored.dtype))
    read_range(stored, 0, len(first), first)
    return first


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
