"""A logical tensor: a name, a shape and a dtype, whatever the parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from everstep.errors import UserError
from everstep.layout.box import Shape

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """`combine` says how the values of several holders become one: they are the same, or their mean."""

    name: str
    shape: Shape
    dtype: str = "F32"
    combine: Literal["same", "mean"] = "same"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise UserError(f"tensor {self.name!r} is of {self.dtype}; known are {', '.join(ITEM_BYTES)}.")
        if any(n < 0 for n in self.shape):
            raise UserError(f"tensor {self.name!r} has shape {self.shape}; sizes are 0 or more.")

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]
