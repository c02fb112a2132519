"""Numbers and arrays of numpy inside a pickle, rebuilt from their bytes without numpy's own constructors.

Random states and schedulers hold them. An array of objects would be a pickle inside the pickle: it is kept
unread, and counts as something that cannot be held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from everstep.store import dtypes
from everstep.store.index import Refused
from everstep.store.stored import Held

_NAMES = {np.dtype(word): name for name, word in dtypes.IN_TORCH.items() if word in np.sctypeDict}


class _Dtype:
    """numpy.dtype(text, …), then its byte order."""

    def __init__(self, text: Any, *rest: Any) -> None:
        self.text, self.order = text if isinstance(text, str) else "", "="

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

    def known(self) -> np.dtype[Any] | None:
        """None: not a plain number."""
        try:
            found = np.dtype(self.text) if len(self.text) < 12 else None
        except TypeError:
            return None
        if found is None or found.kind not in "biufc" or self.order == ">":
            return None
        return found


@dataclass
class NumpyArray:
    """An array, which goes back as an array and not as a tensor; None: it is not of numbers."""

    stored: Held | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, column_major, data = state
        kind = dtype.known() if isinstance(dtype, _Dtype) else None
        if kind not in _NAMES or not isinstance(data, bytes) or len(data) > 1 << 30:
            return
        order: Any = "F" if column_major else "C"
        values = np.frombuffer(data, kind).reshape(shape, order=order)
        name = _NAMES[kind]
        self.stored = Held(name, np.ascontiguousarray(values).view(dtypes.raw(name)).reshape(values.shape))


def _reconstructed(kind: Any, shape: Any, letter: Any) -> NumpyArray:
    return NumpyArray()


def _scalar(dtype: Any, data: Any = b"") -> Any:
    kind = dtype.known() if isinstance(dtype, _Dtype) else None
    if kind is None or not isinstance(data, bytes) or len(data) != kind.itemsize:
        raise Refused("a numpy number of its pickle is not a plain number")
    return np.frombuffer(data, kind)[0].item()


CALLABLE: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    **{
        (f"numpy.{core}.multiarray", name): made
        for core in ("core", "_core")
        for name, made in (("_reconstruct", _reconstructed), ("scalar", _scalar))
    },
}
