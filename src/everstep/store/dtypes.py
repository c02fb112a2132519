"""Element types by their safetensors names, and arrays of raw elements.

Bytes are moved, not numbers: an array here is of unsigned integers as wide as the element, so that bf16 and
fp8, which numpy does not know, travel like all others. torch is imported only where tensors are made or bf16
and fp8 values are looked at: converting, inspecting and verifying files start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from everstep.layout.tensor import ITEM_BYTES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = NDArray[Any]
IN_TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {f"torch.{word}": name for name, word in IN_TORCH.items()}
_NUMPY = {name: np.dtype(word) for name, word in IN_TORCH.items() if word in np.sctypeDict}
_RAW: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


def in_torch(dtype: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, IN_TORCH[dtype])
    return found


def name_of(dtype: torch.dtype) -> str | None:
    """None: a checkpoint does not hold such elements."""
    return _NAMES.get(str(dtype))


def is_trainable(dtype: str) -> bool:
    """Only floating-point and complex parameters have gradients."""
    return dtype[0] in "FBC" and dtype != "BOOL"


def number(array: Array, dtype: str) -> int | float:
    """The value of one raw element."""
    if dtype in _NUMPY and not dtype.startswith("C"):
        found: int | float = array.reshape(1).view(_NUMPY[dtype])[0].item()
        return found
    return float(tensor_of(array.reshape(1), dtype)[0])


def scalar(value: float, dtype: str) -> Array:
    """A number as an array without dimensions."""
    if dtype in _NUMPY:
        return np.array(value, _NUMPY[dtype]).view(raw(dtype))
    return cast(scalar(value, "F64"), "F64", dtype)


def raw(dtype: str) -> np.dtype[Any]:
    return _RAW[ITEM_BYTES[dtype]]


def array_of(tensor: Tensor) -> Array:
    """The raw elements of a tensor on the CPU; shares memory where the tensor is contiguous there."""
    import torch

    name = name_of(tensor.dtype)
    assert name is not None
    host = tensor.detach().to("cpu").contiguous()
    flat = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
    found: Array = flat.view(raw(name)).reshape(tuple(tensor.shape))
    return found


def tensor_of(array: Array, dtype: str) -> Tensor:
    """Shares memory."""
    import torch

    if array.size == 0:
        return torch.empty(array.shape, dtype=in_torch(dtype))
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(in_torch(dtype)).reshape(array.shape)


def bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array, to be read or filled."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def cast(array: Array, dtype: str, to: str) -> Array:
    return array if dtype == to else array_of(tensor_of(array, dtype).to(in_torch(to)))
