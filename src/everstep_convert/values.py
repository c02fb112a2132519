"""Values that are not tensors (schedulers, client state, group numbers) as JSON, and back to what they were.

Frameworks pickle them; a universal checkpoint holds JSON. What JSON has no word for gets a tag:

    {"$float": "inf"}                a number that JSON cannot write
    {"$dict": [[30, 1]]}             keys that are not strings; {"$counter": …} is a collections.Counter
    {"$tuple": […]}  {"$set": […]}  {"$complex": [re, im]}  {"$dtype": "BF16"}
    {"$bytes": "base64"}  {"$bytesio": "base64"}
    {"$scalar": ["F32", 0.001]}      a tensor without dimensions
    {"$tensor": "extra/rng"}         a tensor, kept among the tensors under that name; {"$array": …}: of numpy

What cannot be held at all, an object of some class, is named in `lost`: the caller
decides whether that is acceptable.
"""

from __future__ import annotations

import base64
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everstep.store import dtypes
from everstep.store.index import Refused
from everstep.store.stored import Held, Stored, read_all
from everstep_convert.numpy_pickles import NumpyArray

MAX_BYTES = 16 << 20  # of a byte string kept as text
MOST_VALUES, MOST_DEPTH = 1 << 22, 64


class DtypeName(str):
    """A dtype or a storage class of torch by its safetensors name; a pickle may name it and not call it."""


@dataclass(slots=True)
class Encoder:
    """`lost`: what could not be held, by its path. `tensors`: what goes among the state's tensors. `opened`:
    what is kept of an object. A file can say the same list a million times in a few bytes, so values are
    counted.
    """

    lost: list[str] = field(default_factory=list)
    tensors: dict[str, Stored] = field(default_factory=dict)
    opened: Callable[[Any], Any] = lambda value: value
    _left: int = MOST_VALUES
    _depth: int = 0

    def encode(self, value: Any, path: str) -> Any:
        self._left -= 1
        if self._left < 0 or self._depth >= MOST_DEPTH:
            raise Refused(f"its values beside tensors are more than {MOST_VALUES}, or nested without end")
        self._depth += 1
        try:
            return self._encoded(self.opened(value), path)
        finally:
            self._depth -= 1

    def _encoded(self, value: Any, path: str) -> Any:
        if isinstance(value, DtypeName):
            return {"$dtype": str(value)}
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, complex):
            return {"$complex": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, set | frozenset):
            return {"$set": [self.encode(item, path) for item in sorted(value, key=repr)]}
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, bytes | bytearray) and len(value) <= MAX_BYTES:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, io.BytesIO) and value.getbuffer().nbytes <= MAX_BYTES:
            return {"$bytesio": base64.b64encode(value.getvalue()).decode()}
        if isinstance(value, NumpyArray) and value.stored is not None:
            return {"$array": self._kept(value.stored, path)}
        if is_stored(value):
            return self._tensor(value, path)
        self.lost.append(path)
        return None

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        plain = all(isinstance(key, str) for key in value) and not any(key.startswith("$") for key in value)
        if plain and not isinstance(value, Counter):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [[self.encode(k, path), self.encode(v, f"{path}.{k}")] for k, v in value.items()]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}

    def _tensor(self, stored: Stored, path: str) -> Any:
        if not stored.shape and stored.dtype != "C64":
            number = dtypes.number(read_all(stored), stored.dtype)
            return {"$scalar": [stored.dtype, self.encode(number, path)]}
        return {"$tensor": self._kept(stored, path)}

    def _kept(self, stored: Stored, path: str) -> str:
        self.tensors[f"extra/{path}"] = stored
        return f"extra/{path}"


def decode(value: Any, tensors: Mapping[str, Stored]) -> Any:
    """What `encode` was given; tensors are found among the state's."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, held), *_ = value.items()
        if tag in _TAGS:
            return _TAGS[tag](held, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def is_stored(value: Any) -> bool:
    return hasattr(value, "read") and hasattr(value, "dtype") and hasattr(value, "shape")


def tensors_in(value: Any) -> set[str]:
    """The names of tensors that an encoded value refers to."""
    if isinstance(value, list):
        return {name for item in value for name in tensors_in(item)}
    if not isinstance(value, dict):
        return set()
    found = {held for tag, held in value.items() if tag in ("$tensor", "$array") and isinstance(held, str)}
    return found | {name for item in value.values() for name in tensors_in(item)}


def _pairs(held: Any, tensors: Mapping[str, Stored]) -> dict[Any, Any]:
    return {decode(key, tensors): decode(item, tensors) for key, item in held}


def _scalar(held: Any, tensors: Mapping[str, Stored]) -> Held:
    dtype, number = held
    return Held(dtype, dtypes.scalar(decode(number, tensors), dtype))


def _array(held: str, tensors: Mapping[str, Stored]) -> Any:
    stored = tensors[held]
    return read_all(stored).view(np.dtype(dtypes.IN_TORCH[stored.dtype]))


_TAGS = {
    "$tuple": lambda held, tensors: tuple(decode(held, tensors)),
    "$float": lambda held, _: float(held),
    "$complex": lambda held, tensors: complex(*decode(held, tensors)),
    "$set": lambda held, tensors: {decode(item, tensors) for item in held},
    "$dict": _pairs,
    "$counter": lambda held, tensors: Counter(_pairs(held, tensors)),
    "$bytes": lambda held, _: base64.b64decode(held),
    "$bytesio": lambda held, _: io.BytesIO(base64.b64decode(held)),
    "$dtype": lambda held, _: DtypeName(held),
    "$scalar": _scalar,
    "$tensor": lambda held, tensors: tensors[held],
    "$array": _array,
}
