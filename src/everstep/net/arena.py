"""Memory that other processes of the machine can read: boundary tensors and gradients live in it.

A worker's arena is a few large slabs, each exported once. A tensor in it is named by its slab and its place
there; who gets the name maps the slab, once, and reads the bytes where they are: no copy through the host.

    owner    block(nbytes) ──► tensor          location(tensor) ──► (handle, offset)   to a peer, over a link
    reader   mapped(handle, offset, …) ──► tensor over the owner's memory

Lifetimes. A block returns to its arena when the last tensor over it is gone; a mapping is closed when the
last tensor over it is gone and its owner is no peer any more. CUDA keeps the memory of a dead owner until the
last mapping of it is closed (measured), so what a dead worker had finished can still be read.

The memory is a GPU's, by CUDA's IPC handles; what a test needs in its place is `SharedMemory`.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from everstep.errors import InternalError, PeerError

SLAB = 64 << 20  # bytes; a larger block gets a slab of its own
ALIGN = 256
MAX_HANDLE = 512


class UnmappableError(PeerError):
    """A peer's memory cannot be mapped here, be it that the peer has died."""


class Location(NamedTuple):
    """Where a tensor is, for a process that can map the slab."""

    handle: str
    slab_bytes: int
    offset: int


class SharedMemory(Protocol):
    """A kind of memory that can be shared between processes."""

    def allocate(self, nbytes: int) -> tuple[int, str]:
        """Its address and its handle."""
        ...

    def view(self, address: int, nbytes: int, owner: object) -> Tensor:
        """Bytes as a tensor that keeps `owner` alive."""
        ...

    def open(self, handle: str, nbytes: int) -> int:
        """The address of another process's slab."""
        ...

    def close(self, address: int, nbytes: int) -> None: ...


class _Lease:
    """Alive as long as a tensor over its memory is."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Slab:
    address: int
    nbytes: int
    handle: str
    used: int = 0


class Arena:
    """What this worker shows to others."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._slabs: list[_Slab] = []
        self._free: dict[int, list[tuple[_Slab, int]]] = {}  # by size
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = max(ALIGN, -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN)
        slab, offset = self._block(nbytes)
        lease = _Lease()
        weakref.finalize(lease, self._return, nbytes, slab, offset).atexit = False
        raw = self._memory.view(slab.address + offset, nbytes, lease)
        return raw[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Of all slabs: they are never given back."""
        return sum(slab.nbytes for slab in self._slabs)

    def copy(self, tensor: Tensor) -> Tensor:
        """The same values in this arena; a tensor that is here already stays where it is."""
        if self.location(tensor) is not None:
            return tensor
        there = self.empty(tuple(tensor.shape), tensor.dtype)
        return there.copy_(tensor.detach())

    def location(self, tensor: Tensor) -> Location | None:
        """None: it is not in this arena, or not in one piece."""
        if not tensor.is_contiguous():
            return None
        for slab in self._slabs:
            offset = tensor.data_ptr() - slab.address
            if offset >= 0 and offset + tensor.nbytes <= slab.nbytes:
                return Location(slab.handle, slab.nbytes, offset)
        return None

    def _block(self, nbytes: int) -> tuple[_Slab, int]:
        with self._lock:
            if self._free.get(nbytes):
                return self._free[nbytes].pop()
            slab = next((s for s in self._slabs if s.used + nbytes <= s.nbytes), None)
            if slab is None:
                size = max(SLAB, nbytes)
                slab = _Slab(*self._new(size))
                self._slabs.append(slab)
            offset, slab.used = slab.used, slab.used + nbytes
            return slab, offset

    def _new(self, size: int) -> tuple[int, int, str]:
        address, handle = self._memory.allocate(size)
        return address, size, handle

    def _return(self, nbytes: int, slab: _Slab, offset: int) -> None:
        self._free.setdefault(nbytes, []).append((slab, offset))  # atomic: it can run in any thread


@dataclass(slots=True)
class _Mapping:
    handle: str
    address: int
    nbytes: int
    owner: object
    leases: int = 0
    closing: bool = False  # its owner is gone: when nothing uses it


@dataclass(slots=True)
class Mappings:
    """What this worker sees of others."""

    memory: SharedMemory
    _open: dict[str, _Mapping] = field(default_factory=dict)

    def tensor(self, owner: object, at: Location, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over memory of `owner`, a peer's address."""
        nbytes = math.prod(shape) * dtype.itemsize
        if (
            len(at.handle) > MAX_HANDLE
            or not 0 <= at.offset <= at.slab_bytes - nbytes
            or min(shape, default=0) < 0
        ):
            raise PeerError("a peer named memory outside of what it has")
        mapping = self._open.get(at.handle)
        if mapping is None:
            mapping = _Mapping(at.handle, self.memory.open(at.handle, at.slab_bytes), at.slab_bytes, owner)
            self._open[at.handle] = mapping
        if mapping.nbytes != at.slab_bytes:
            raise PeerError("a peer named one piece of memory in two sizes")
        lease = _Lease()
        mapping.leases += 1
        weakref.finalize(lease, self._released, mapping).atexit = False
        raw = self.memory.view(mapping.address + at.offset, max(nbytes, 1), lease)
        return raw[:nbytes].view(dtype).view(shape)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def keep(self, owners: set[Any]) -> None:
        """Close the mappings of everyone else, as soon as nothing uses them."""
        for mapping in list(self._open.values()):
            mapping.closing = mapping.owner not in owners
            self._close_unused(mapping)

    def _released(self, mapping: _Mapping) -> None:
        mapping.leases -= 1
        self._close_unused(mapping)

    def _close_unused(self, mapping: _Mapping) -> None:
        if mapping.closing and mapping.leases == 0 and self._open.pop(mapping.handle, None) is not None:
            self.memory.close(mapping.address, mapping.nbytes)


class CudaMemory:
    """Memory of a GPU, shared by CUDA's own handles with processes that use the same GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # makes the context
        self._runtime = cuda_runtime()

    def allocate(self, nbytes: int) -> tuple[int, str]:
        pointer, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(self._device):
            self._check(self._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), nbytes)
            self._check(self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), pointer), nbytes)
        assert pointer.value is not None
        return pointer.value, bytes(handle.bytes).hex()

    def open(self, handle: str, nbytes: int) -> int:
        pointer, named = ctypes.c_void_p(), _Handle()
        raw = bytes.fromhex(handle)
        if len(raw) != ctypes.sizeof(named):
            raise PeerError("a peer named GPU memory by something that is not a handle")
        ctypes.memmove(ctypes.byref(named), raw, len(raw))
        with torch.cuda.device(self._device):
            code = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), named, ctypes.c_uint(1))
        if code or pointer.value is None:
            self._runtime.cudaGetLastError()  # else the next call of torch would report it
            raise UnmappableError(f"a peer's GPU memory cannot be mapped (CUDA error {code})")
        return pointer.value

    def close(self, address: int, nbytes: int) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # what it computes may read there
        self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address))

    def view(self, address: int, nbytes: int, owner: object) -> Tensor:
        return torch.as_tensor(_CudaBytes(address, nbytes, owner), device=self._device)

    def _check(self, code: int, nbytes: int) -> None:
        if code:
            raise torch.OutOfMemoryError(f"{nbytes >> 20} MiB of shared GPU memory (CUDA error {code})")


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class _CudaBytes:
    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return ctypes.CDLL(line.split()[-1])
    raise InternalError("torch has loaded no CUDA runtime")
