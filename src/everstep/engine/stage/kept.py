"""What a layer keeps from F to I, where it is not all of it and not on the device.

    run again    attention keeps its arguments alone, and its forward is run again in I
    offload      what autograd saves waits in host memory: copied there in F, and back in I

A whole layer that is run again is `Stage._layer`'s. Either way I has the numbers that F had: the bits are the
same as without.

Memory is moved by storage: a tensor that several ops keep, or of which they keep views, is copied once, and
comes back with the strides it had, so the same kernels run. On a GPU it goes to the host on a stream of its
own, beside the computation; on the way back the computation waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

LEAST = 1 << 16  # bytes; what is smaller stays on the device
_ATTENTION = re.compile(r"(.*_)?(attn|attention)")  # names of modules


def attention_in(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that are called attention: their matrices are part of them."""
    named = {
        path: part for path, part in layer.named_modules() if _ATTENTION.fullmatch(path.rpartition(".")[2])
    }
    return [part for path, part in named.items() if not any(path.startswith(f"{one}.") for one in named)]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionAgain:
    """The forward of a module that keeps its arguments, and is run again in the backward."""

    forward: Callable[..., Any]
    keep: Callable[..., None]  # is told what is kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self.keep(args, kwargs)
        # Its draws are in the middle of the layer's, so they begin where the generators are.
        return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)


@dataclass(slots=True, eq=False)
class _Moved:
    """The memory behind tensors, on the host."""

    host: Tensor
    device: torch.device
    arrived: torch.cuda.Event | None
    _back: Tensor | None = None  # until the last op that kept it has run

    def back(self) -> Tensor:
        if self._back is None:
            if self.arrived is not None:
                self.arrived.wait()
            self._back = torch.empty_like(self.host, device=self.device)
            self._back.copy_(self.host, non_blocking=True)
        return self._back


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    of: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def back(self) -> Tensor:
        return self.of.back().view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Offload:
    """Of one stage."""

    def __init__(self, device: torch.device, weights: Callable[[], Tensor]) -> None:
        """`weights`: the buffer of the stage's weights, which stays where it is."""
        self._device, self._weights = device, weights
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def of_a_layer(self, stays: Iterable[Tensor]) -> Iterator[None]:
        """Around its forward. `stays`: what is held by others too, such as frozen parameters."""
        staying = {_address(tensor) for tensor in (self._weights(), *stays)}
        # With the tensors: memory that is free again would have the address of another one's.
        here: dict[int, tuple[_Moved, Tensor]] = {}

        def pack(tensor: Tensor) -> Tensor | _View:
            address = _address(tensor)
            is_small = tensor.untyped_storage().nbytes() < LEAST
            if is_small or tensor.device != self._device or address in staying:
                return tensor
            if address not in here:
                here[address] = self._moved(tensor), tensor
            moved, _ = here[address]
            return _View(moved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, _unpacked):
            yield
        here.clear()

    def _moved(self, tensor: Tensor) -> _Moved:
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        if self._stream is None:
            return _Moved(memory.clone(), self._device, None)
        host = torch.empty_like(memory, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(memory, non_blocking=True)
        memory.record_stream(self._stream)
        return _Moved(host, self._device, self._stream.record_event())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpacked(kept: Tensor | _View) -> Tensor:
    return kept.back() if isinstance(kept, _View) else kept
