"""A training state between formats: logical names, tensors that stay where they are until they are written.

    model/<parameter>               the weights, as precise as the source has them (fp32 masters, if any)
    buffer/<name>                   what a model keeps besides parameters
    optimizer/<parameter>/<key>     any optimizer's state, under its own key

`groups` are the optimizer's parameter groups, each with its names and its own numbers. What a format holds
and another cannot is not dropped in silence: readers and writers add a sentence to `notes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everstep.checkpoint import dtypes
from everstep.checkpoint.dtypes import Array
from everstep.checkpoint.stored import Held, Stored, num_bytes, read_range
from everstep.layout.box import Box, Shape
from everstep.layout.layout import ITEM_BYTES


@dataclass(slots=True, kw_only=True)
class State:
    step: int = 0
    tensors: dict[str, Stored] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)  # another name of a parameter -> the parameter
    frozen: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def parameters(self) -> dict[str, Stored]:
        return {name[6:]: stored for name, stored in self.tensors.items() if name.startswith("model/")}

    def buffers(self) -> dict[str, Stored]:
        return {name[7:]: stored for name, stored in self.tensors.items() if name.startswith("buffer/")}

    def optimizer(self, parameter: str) -> dict[str, Stored]:
        """One parameter's optimizer state by key."""
        prefix = f"optimizer/{parameter}/"
        return {
            name[len(prefix) :]: stored for name, stored in self.tensors.items() if name.startswith(prefix)
        }

    def optimizer_of_all(self) -> dict[str, dict[str, Stored]]:
        found: dict[str, dict[str, Stored]] = {}
        for name, stored in self.tensors.items():
            if name.startswith("optimizer/"):
                parameter, _, key = name[10:].rpartition("/")
                found.setdefault(parameter, {})[key] = stored
        return found

    def num_bytes(self) -> int:
        return sum(num_bytes(stored) for stored in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Flat:
    """Ranges of stored tensors one after the other, and zeros: a rank's flat buffer.

    `ranges`: (tensor or None for zeros, its first element, how many).
    """

    dtype: str
    ranges: tuple[tuple[Stored | None, int, int], ...]

    @property
    def shape(self) -> Shape:
        return (sum(count for _, _, count in self.ranges),)

    def read(self, box: Box, out: Array) -> None:
        at, low, high = 0, box.start[0], box.start[0] + box.size[0]
        for stored, first, count in self.ranges:
            begin, end = max(low, at), min(high, at + count)
            if begin < end:
                place = out[begin - low : end - low]
                if stored is None:
                    place[...] = 0
                else:
                    read_range(stored, first + begin - at, first + end - at, place)
            at += count


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of tensors that should be one: Universal Checkpointing's params_to_average."""

    sources: tuple[Stored, ...]

    @property
    def dtype(self) -> str:
        return self.sources[0].dtype

    @property
    def shape(self) -> Shape:
        return self.sources[0].shape

    def read(self, box: Box, out: Array) -> None:
        held: Array = np.empty(box.size, out.dtype)
        import torch

        total = torch.zeros(box.size, dtype=torch.float64)
        for source in self.sources:
            source.read(box, held)
            total += dtypes.tensor_of(held, self.dtype).to(torch.float64)
        out[...] = dtypes.array_of((total / len(self.sources)).to(dtypes.in_torch(self.dtype)))


def scalar(value: float, dtype: str = "F32") -> Held:
    return Held(dtype, dtypes.scalar(value, dtype))


def equal(a: Stored, b: Stored, block_bytes: int = 4 << 20) -> bool:
    """Are they the same bytes? Block by block."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = block_bytes // ITEM_BYTES[a.dtype]
    total = num_bytes(a) // ITEM_BYTES[a.dtype]
    for start in range(0, total, step):
        stop = min(total, start + step)
        x: Array = np.empty(stop - start, dtypes.raw(a.dtype))
        y = np.empty_like(x)
        read_range(a, start, stop, x)
        read_range(b, start, stop, y)
        if not np.array_equal(x, y):
            return False
    return True


def plain(value: Any, lost: list[str], where: str = "") -> Any:
    """A value as JSON has it; what JSON cannot hold is named in `lost`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else repr(value)
    if isinstance(value, dict):
        return {str(key): plain(item, lost, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, lost, f"{where}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "as_table"):
        return {key: plain(item, lost, f"{where}.{key}") for key, item in value.as_table().items()}
    lost.append(where.lstrip("."))
    return None


def number_of(stored: Stored) -> float:
    out: Array = np.empty((), dtypes.raw(stored.dtype))
    stored.read(Box((), ()), out)
    return float(dtypes.tensor_of(out.reshape(1), stored.dtype)[0])
