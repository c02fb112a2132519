"""Copies between a device and the host that do not hold up the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory to receive into: pinned when it is bound for a GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, contiguous, its bytes ready to be sent. A CPU tensor is not copied."""
    if tensor.device.type == "cpu":
        return tensor.detach().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def for_queue(tensor: Tensor) -> Tensor:
    """What a queue may keep for long while the tensor itself is written to. A GPU's tensor goes to the host
    when it is queued (`plane`), which is copy enough.
    """
    return tensor.detach() if tensor.is_cuda else tensor.detach().clone()


def on_its_way(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """As `to_host`, but not waited for: the bytes are there when the function that comes with it returns."""
    if tensor.device.type == "cpu":
        return tensor.detach().contiguous(), lambda: None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))
    return host, copied.synchronize


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; from pinned memory the copy runs in the stream's order, without waiting.

    The host memory may be dropped at once (the pinned allocator waits for the copy) but not written to. What
    is not pinned is copied to pinned memory first: a copy from other memory would wait for the device.
    """
    if tensor.device == device:
        return tensor
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In host memory that the device can read by itself, if it is a GPU."""
    on_the_way = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory() if on_the_way and not tensor.is_pinned() else tensor
