"""Two states compared: names, shapes, bytes, and where bytes differ, by how much."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from everstep.store import dtypes
from everstep.store.dtypes import Array
from everstep.store.parts import Progress
from everstep.store.stored import Stored, num_bytes, read_both
from everstep_convert.state import TrainingState


def compare(a: TrainingState, b: TrainingState, progress: Progress = lambda count: None) -> dict[str, Any]:
    """As a JSON document; `same` means the same names, types, shapes, bytes and groups."""
    different = []
    equal = 0
    both = [name for name in a.tensors if name in b.tensors]
    for name in both:
        because = _difference(a.tensors[name], b.tensors[name], progress)
        if because is None:
            equal += 1
        else:
            different.append({"tensor": name, **because})
    elsewhere = []
    if a.step != b.step:
        elsewhere.append(f"step {a.step} and step {b.step}")
    if a.groups != b.groups:
        elsewhere.append("the optimizer's groups differ")
    if a.tied != b.tied:
        elsewhere.append("the tied names differ")
    only_a = [name for name in a.tensors if name not in b.tensors]
    only_b = [name for name in b.tensors if name not in a.tensors]
    return {
        "same": not (different or elsewhere or only_a or only_b),
        "equal": equal,
        "bytes": sum(num_bytes(a.tensors[name]) for name in both),
        "only_in_a": only_a,
        "only_in_b": only_b,
        "different": different,
        "elsewhere": elsewhere,
    }


def _difference(a: Stored, b: Stored, progress: Progress) -> dict[str, Any] | None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        kinds = f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        return {"because": f"it is {kinds}", "max_abs": None, "elements": None}
    elements, largest = 0, 0.0
    for x, y in read_both(a, b):
        progress(x.nbytes)
        unequal = int((x != y).sum())
        if unequal:
            elements += unequal
            gap = _values(x, a.dtype) - _values(y, a.dtype)
            largest = max(largest, float(np.abs(gap).max()))
    if not elements:
        return None
    sentence = f"{elements} of {prod(a.shape)} elements differ, by {largest:.3g} at most"
    return {"because": sentence, "max_abs": largest, "elements": elements}


def _values(array: Array, dtype: str) -> Array:
    """As fp64 numbers."""
    return dtypes.cast(array, dtype, "F64").view(np.float64)
