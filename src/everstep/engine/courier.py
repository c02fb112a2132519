"""How a parcel's bytes get from one worker to another: by shared memory where both see it, else by TCP.

    ipc   same GPU: the bytes stay where they are, the message says where; the receiver reads them there
    shm   same machine, CPU: the same with memory files
    tcp   everyone else, and until the peer is known: through the host and a socket

The choice is made for each peer by what both sides say of themselves when they connect. Names, facts and
order are the same in all three, so nothing above knows which it was.

Who may write to what is in shared memory: no process, until the step is sealed (`step_tensors`). A peer has
read all it needs of a step by then, for it says so (HELD, NEWS) only after its own device has finished. What
must outlive that (a feed to a joiner, a whole state) is copied to the host and belongs to the queue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.core.words.worker_messages import Parcel, ParcelKind
from everstep.engine import device as devices
from everstep.engine import frames
from everstep.engine.arena import Arena, CudaMemory, Location, Mappings, SharedFiles, SharedMemory
from everstep.engine.completions import Completions
from everstep.engine.links import Address, Links
from everstep.errors import PeerError

_AT = "in memory"  # the fact that says where tensors are
_LASTING = frozenset({ParcelKind.FEED})  # read by its receiver when the sender is steps ahead


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself to those who connect: which memory it can share, by kind."""

    kind: str  # ipc, shm or tcp
    memory: str  # the same text: the same memory

    def encode(self) -> bytes:
        return json.dumps([self.kind, self.memory]).encode()

    @staticmethod
    def decode(data: bytes) -> Identity:
        try:
            kind, memory = json.loads(data)
        except ValueError:
            raise PeerError("a peer did not say who it is") from None
        return Identity(str(kind), str(memory))


def identity_of(device: torch.device, transport: str) -> Identity:
    """Of a worker that computes on this device."""
    if transport == "tcp":
        return Identity("tcp", "")
    if device.type == "cuda":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Identity("ipc", f"{boot} {torch.cuda.get_device_properties(device).uuid}")
    if transport == "shm":
        processes = os.stat("/proc/self/ns/pid")  # who shares them can open each other's memory files
        return Identity("shm", f"{processes.st_dev} {processes.st_ino}")
    return Identity("tcp", "")


@dataclass(slots=True)
class Courier:
    """Sends a worker's parcels and opens those that arrive."""

    links: Links
    identity: Identity
    device: torch.device
    completions: Completions | None = None  # on a GPU
    arena: Arena | None = None
    mappings: Mappings | None = None
    used: dict[str, int] = field(default_factory=dict)  # messages by transport, for the log and the page

    @staticmethod
    def of(
        links: Links, identity: Identity, device: torch.device, failed: Callable[[BaseException], None]
    ) -> Courier:
        memory: SharedMemory | None = None
        if identity.kind == "ipc":
            memory = CudaMemory(device)
        elif identity.kind == "shm":
            memory = SharedFiles()
        return Courier(
            links,
            identity,
            device,
            Completions(device, failed) if device.type == "cuda" else None,
            None if memory is None else Arena(memory),
            None if memory is None else Mappings(memory),
        )

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """A buffer that peers are to read from."""
        if self.arena is not None:
            return self.arena.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def kept(self, tensor: Tensor) -> Tensor:
        """A boundary tensor as it is kept until its step is over: where peers can read it, or on the host."""
        return devices.to_host(tensor) if self.arena is None else self.arena.copy(tensor)

    def post(
        self, to: Address, what: ParcelKind, parcel: Parcel, facts: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Send, once the device has made the tensors. Never blocks."""
        kind = self._transport(to, what, tensors)
        self.used[kind] = self.used.get(kind, 0) + 1
        if kind != "tcp":
            facts, tensors = {_AT: [self._place(tensor) for tensor in tensors], "facts": facts}, ()
        elif self.completions is not None:
            tensors = tuple(map(_to_host_behind, tensors))
        if self.completions is None:
            self.links.send(to, what, parcel, facts, *tensors)
        else:
            self.completions.after_now(lambda: self.links.send(to, what, parcel, facts, *tensors))

    def opened(self, frame: frames.Incoming) -> tuple[Any, tuple[Tensor, ...]]:
        """The facts and the tensors of a message, wherever they are."""
        facts = frame.facts
        if not isinstance(facts, dict) or _AT not in facts:
            return facts, frame.tensors
        if self.mappings is None:
            raise PeerError("a peer sent memory to a worker that shares none")
        try:
            places = [
                (str(owner), Location(*at), tuple(shape), frames.DTYPES[dtype])
                for owner, at, shape, dtype in facts[_AT]
            ]
            return facts["facts"], tuple(self.mappings.tensor(*place) for place in places)
        except (TypeError, ValueError, IndexError, KeyError):
            raise PeerError("a peer named memory in a way that cannot be read") from None

    def forget(self, keep: set[Address]) -> None:
        """Only these are peers now."""
        self.links.forget(keep)
        if self.mappings is not None:
            self.mappings.keep({str(address) for address in keep})

    def drain(self) -> None:
        """Return when the device has done all that was asked of it."""
        if self.completions is not None:
            self.completions.drain()

    def stop(self) -> None:
        if self.completions is not None:
            self.completions.stop()

    def _transport(self, to: Address, what: ParcelKind, tensors: tuple[Tensor, ...]) -> str:
        if not tensors or self.arena is None or what in _LASTING:
            return "tcp"
        known = self.links.identity(to)
        if known is None or Identity.decode(known) != self.identity:
            return "tcp"
        here = all(self.arena.location(tensor) is not None for tensor in tensors)
        return self.identity.kind if here else "tcp"

    def _place(self, tensor: Tensor) -> Any:
        assert self.arena is not None
        return [
            str(self.links.address),
            self.arena.location(tensor),
            list(tensor.shape),
            frames.DTYPES.index(tensor.dtype),
        ]


def _to_host_behind(tensor: Tensor) -> Tensor:
    """Host memory that the device fills in its own time; whole when what is launched now has finished."""
    if tensor.device.type == "cpu":
        return tensor.detach().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
