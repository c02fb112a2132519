"""Element types by their safetensors names, and arrays of raw elements.

Bytes are moved, not numbers: an array here is of unsigned integers as wide as the element, so that bf16 and
fp8, which numpy does not know, travel like all others. Only `cast` looks at values, and uses torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everstep.layout.layout import ITEM_BYTES

Array = NDArray[Any]
TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in TORCH.items()}
_RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


def raw(dtype: str) -> np.dtype[Any]:
    return _RAW[ITEM_BYTES[dtype]]


def array_of(tensor: Tensor) -> Array:
    """The raw elements of a tensor on the CPU; shares memory where the tensor is contiguous there."""
    host = tensor.detach().to("cpu").contiguous()
    flat = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
    found: Array = flat.view(raw(NAMES[tensor.dtype])).reshape(tuple(tensor.shape))
    return found


def tensor_of(array: Array, dtype: str) -> Tensor:
    """Shares memory."""
    if array.size == 0:
        return torch.empty(array.shape, dtype=TORCH[dtype])
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(TORCH[dtype]).reshape(array.shape)


def bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array, to be read or filled."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def cast(array: Array, dtype: str, to: str) -> Array:
    return array if dtype == to else array_of(tensor_of(array, dtype).to(TORCH[to]))
