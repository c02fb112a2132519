"""Tensors between two processes on one GPU: a handle travels, and the receiver copies on the device.

Who asks names the GPU that it uses. Who answers shares what is on that very GPU, and keeps it until the
connection ends. Where handles cannot be opened (containers without a common /dev/shm, allocators that share
nothing), the same is asked for again as bytes.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from everstep.errors import PeerError
from everstep.protocol.table import Json


class NotOpenedError(PeerError):
    """A handle is of no use here."""


def name() -> str:
    """Of the GPU of this thread; empty: there is none, or it is not used."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    return str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))


def shared(tensor: torch.Tensor, gpu: str) -> list[Json] | None:
    """A handle for a process that uses this GPU; None: its bytes have to be sent."""
    if not gpu or not tensor.is_cuda or not tensor.numel():
        return None
    if gpu != str(getattr(torch.cuda.get_device_properties(tensor.device), "uuid", None)):
        return None
    try:
        storage: Any = tensor.untyped_storage()
        parts = storage._share_cuda_()
    except RuntimeError:
        return None
    layout: list[Json] = [tensor.storage_offset(), list(tensor.stride())]
    return [*layout, *(_encoded(each) for each in parts)]


def opened(handle: list[Json], dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A copy of what it stands for."""
    from torch.multiprocessing import reductions

    rebuild: Any = reductions.rebuild_cuda_tensor
    offset, stride, _, *parts = (_decoded(each) for each in handle)
    memory, size, start, counter, number, event, waits = parts
    device = torch.cuda.current_device()  # the same GPU, whatever its number is there
    layout = (torch.Tensor, torch.Size(shape), tuple(stride), offset, torch.storage.TypedStorage, dtype)
    try:
        found: torch.Tensor = rebuild(
            *layout, device, memory, size, start, False, counter, number, event, waits
        )
        return found.clone()
    except RuntimeError as error:
        raise NotOpenedError(f"{error}") from error


def _encoded(value: Any) -> Json:
    return {"x": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _decoded(value: Any) -> Any:
    return base64.b64decode(value["x"]) if isinstance(value, dict) else value
