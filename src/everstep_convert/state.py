"""A training state between formats: logical names, tensors that stay where they are until they are written.

    model/<parameter>               the weights, as precise as the source has them (fp32 masters, if any)
    buffer/<name>                   what a model keeps besides parameters
    optimizer/<parameter>/<key>     any optimizer's state, under its own key; <key>#int and the like: a number
    extra/<name>                    any other tensor: of the client's state, of a scheduler

`groups` are the optimizer's parameter groups, each with its names and its own numbers. `meta` and the groups'
numbers are encoded values (see `values`). What a reader could not take is named in `lost`; a conversion is
refused for it, unless the user accepts that name. `notes` are sentences for the user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everstep.store import dtypes
from everstep.store.stored import Held, Stored, num_bytes, read_all, read_both
from everstep_convert.values import Encoder, decode, is_stored


@dataclass(slots=True, kw_only=True)
class TrainingState:
    step: int = 0
    tensors: dict[str, Stored] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)  # another name of a parameter -> the parameter
    frozen: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def parameters(self) -> dict[str, Stored]:
        return {name[6:]: stored for name, stored in self.tensors.items() if name.startswith("model/")}

    def buffers(self) -> dict[str, Stored]:
        return {name[7:]: stored for name, stored in self.tensors.items() if name.startswith("buffer/")}

    def optimizer(self) -> Mapping[str, dict[str, Stored]]:
        """Every parameter's optimizer state by key; empty for a parameter that has none."""
        found: defaultdict[str, dict[str, Stored]] = defaultdict(dict)
        for name, stored in self.tensors.items():
            if name.startswith("optimizer/"):
                parameter, _, key = name[10:].rpartition("/")
                found[parameter][key] = stored
        return found

    def others(self) -> dict[str, Stored]:
        """What is neither weight nor buffer nor optimizer state, by full name."""
        kinds = ("model/", "buffer/", "optimizer/")
        return {name: stored for name, stored in self.tensors.items() if not name.startswith(kinds)}

    def num_bytes(self) -> int:
        return sum(num_bytes(stored) for stored in self.tensors.values())

    def take(self, encoder: Encoder) -> None:
        """What an encoder found besides JSON."""
        self.lost += encoder.lost
        self.tensors |= encoder.tensors


def encoded_group(
    encoder: Encoder, names: Iterable[str], numbers: Mapping[str, Any], path: str
) -> dict[str, Any]:
    """An optimizer group; a tuple (betas) is a list among its numbers."""
    found: dict[str, Any] = {"params": list(names)}
    for key, value in numbers.items():
        if key != "params":
            one = list(value) if isinstance(value, tuple) else value
            found[str(key)] = encoder.encode(one, f"{path}.{key}")
    return found


def group_numbers(group: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """The other way round, without the names."""
    found = {key: decode(value, tensors) for key, value in group.items() if key != "params"}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}


def scalar(value: float, dtype: str = "F32") -> Held:
    return Held(dtype, dtypes.scalar(value, dtype))


def number_of(stored: Stored) -> int | float:
    return dtypes.number(read_all(stored), stored.dtype)


_PYTHON: dict[str, tuple[type, str]] = {  # numbers of an optimizer that are no tensors: kind, type, dtype
    "bool": (bool, "BOOL"),
    "int": (int, "I64"),
    "float": (float, "F64"),
    "none": (type(None), "U8"),
}


def keyed_value(key: str, value: Any) -> tuple[str, Stored] | None:
    """An optimizer's value with the key that says what it was; None if it is neither tensor nor number."""
    if is_stored(value):
        return key, value
    for kind, (python, dtype) in _PYTHON.items():
        if type(value) is python:
            number: Any = 0 if value is None else value
            return f"{key}#{kind}", scalar(number, dtype)
    return None


def value_of_key(name: str, stored: Stored) -> Any:
    """The other way round: the tensor, or the number it stands for."""
    kind = name.rpartition("/")[2].partition("#")[2]
    if kind not in _PYTHON:
        return stored
    return None if kind == "none" else _PYTHON[kind][0](number_of(stored))


def equal(a: Stored, b: Stored) -> bool:
    """Are they the same bytes? Block by block."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(np.array_equal(x, y) for x, y in read_both(a, b))
