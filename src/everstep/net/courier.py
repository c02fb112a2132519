"""How a parcel's bytes get from one worker to another: the transport is chosen for each pair (`transport`).

    ipc    same GPU: the bytes stay where they are, the message says where; the receiver reads them there
    shm    same machine, CPU: the same with memory files
    nccl   different GPUs: the message announces a transfer on a lane, the bytes go from GPU to GPU
    tcp    all others, and until the peer is known or its lane is open: through the host and a socket

The choice follows from what both sides say of themselves when they connect. Names, facts and order are the
same in all of them, so nothing above knows which it was.

Who may write to what is in shared memory: no process, until the step is sealed (`step_tensors`). A peer has
read all it needs of a step by then, for it says so (HELD, NEWS) only after its own device has finished. What
must outlive that (a feed to a joiner, a whole state, that of a chunk) is copied to the host and belongs to
the queue; states go there piece by piece (`transfers`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.errors import PeerError, UserError
from everstep.log import say
from everstep.net import frames, host_memory, nccl
from everstep.net.arena import (
    Arena,
    CudaMemory,
    Location,
    Mappings,
    SharedFiles,
    SharedMemory,
    UnmappableError,
)
from everstep.net.completions import Completions
from everstep.net.fills import ArrivingFills
from everstep.net.lanes import Lane, Lanes, LaneState
from everstep.net.links import Address, Links
from everstep.net.pipe_wire import PipeWire
from everstep.net.transport import MAX_TENSORS, Carrier, Identity, bits_differ, chosen
from everstep.protocol.parcels import Parcel, ParcelKind

_AT = "in memory"  # the fact that says where tensors are
_UNMAPPABLE = "unmappable"  # the fact that says by whom they cannot be read there
MOST_LANES_AHEAD = 16  # peers to which lanes are opened before they are used
_LASTING = frozenset({ParcelKind.FEED})  # read by its receiver when the sender is steps ahead


def identity_of(device: torch.device, transport: str, *, computes: str = "") -> Identity:
    """Of a worker that computes on this device. `computes`: what its bits depend on."""
    return replace(_memory_and_lanes(device, transport), computes=computes)


def _memory_and_lanes(device: torch.device, transport: str) -> Identity:
    if transport == "tcp":
        return Identity("tcp", "")
    if device.type == "cuda":
        version = nccl.version()
        lanes = f"nccl {version}" if version else ""
        if transport == "nccl":
            if not lanes:
                raise UserError('transport = "nccl" needs a torch with NCCL; use "auto" or "tcp".')
            return Identity("tcp", "", lanes)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        uuid = torch.cuda.get_device_properties(device).uuid
        # Of two containers that share a GPU and not these, none can open the other's memory.
        return Identity("ipc", f"{boot} {uuid} {_namespace('pid')} {_namespace('ipc')}", lanes)
    if transport == "nccl":
        raise UserError('transport = "nccl" is for GPUs; set device = "cuda", or use "auto".')
    if transport in ("shm", "pipe"):
        here = _namespace("pid")  # who shares it can open each other's memory files
        return Identity("shm", here) if transport == "shm" else Identity("tcp", "", f"pipe {here}")
    return Identity("tcp", "")


def _namespace(kind: str) -> str:
    found = os.stat(f"/proc/self/ns/{kind}")
    return f"{found.st_dev} {found.st_ino}"


@dataclass(slots=True)
class Courier:
    """Sends a worker's parcels and opens those that arrive."""

    links: Links
    identity: Identity
    device: torch.device
    completions: Completions | None = None  # on a GPU
    arena: Arena | None = None
    mappings: Mappings | None = None
    lanes: Lanes | None = None
    fills: ArrivingFills | None = None
    waits: bool = False  # for a lane that is being opened; else tcp carries messages meanwhile
    carriers: dict[Address, Carrier] = field(default_factory=dict)  # what carried tensors to it last
    _ahead: set[Address] = field(default_factory=set)  # peers to which lanes are to be opened
    _warned: set[Address] = field(default_factory=set)
    _apart: set[Address] = field(default_factory=set)  # peers that cannot read this worker's memory

    @staticmethod
    def of(
        links: Links,
        identity: Identity,
        device: torch.device,
        *,
        deliver: Callable[[frames.Incoming], None],
        failed: Callable[[BaseException], None],
        waits: bool = False,
    ) -> Courier:
        memory: SharedMemory | None = None
        if identity.kind == "ipc":
            memory = CudaMemory(device)
        elif identity.kind == "shm":
            memory = SharedFiles()
        lanes: Lanes | None = None
        if identity.lanes:
            wire = partial(nccl.NcclWire, device) if device.type == "cuda" else PipeWire
            lanes = Lanes(links, wire, deliver=deliver, kind=identity.lanes.partition(" ")[0])
        return Courier(
            links,
            identity,
            device,
            Completions(device, failed) if device.type == "cuda" else None,
            None if memory is None else Arena(memory),
            None if memory is None else Mappings(memory),
            lanes,
            ArrivingFills(device, deliver),
            waits,
        )

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """A buffer that peers are to read from."""
        if self.arena is not None:
            return self.arena.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    @property
    def shared_bytes(self) -> int:
        """On the device besides torch's own."""
        return 0 if self.arena is None or self.device.type != "cuda" else self.arena.nbytes

    def kept(self, tensor: Tensor) -> Tensor:
        """A boundary tensor as it is kept until its step is over: where it can be sent from again."""
        tensor = tensor.resolve_conj().resolve_neg()  # the bytes are sent, not how they are to be read
        if self.arena is not None:
            return self.arena.copy(tensor)
        return host_memory.to_host(tensor) if self.lanes is None else tensor.detach().contiguous()

    def post(
        self, to: Address, what: ParcelKind, parcel: Parcel, facts: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Send, once the device has made the tensors. Never blocks."""
        if len(tensors) > MAX_TENSORS:
            raise UserError(
                f"a layer gives {len(tensors)} tensors to the next stage, and {MAX_TENSORS} is the most; "
                "let it stack them."
            )
        if self._ahead:
            self._open_ahead()
        kind, lane = self._transport(to, what, tensors)
        if tensors and what not in _LASTING and self.carriers.get(to) != kind:
            self.carriers[to] = kind
            say(f"tensors to {to.host}:{to.port} go by {kind}")
        if tensors and to not in self._warned:
            self._warn(to)
        if lane is not None:
            assert self.lanes is not None
            transfer = self.lanes.reserve(lane, tensors)
            self._after_now(partial(self.lanes.send, lane, what, parcel, facts, transfer))
            return
        if kind != "tcp":
            facts, tensors = {_AT: [self._place(tensor) for tensor in tensors], "facts": facts}, ()
        elif self.completions is not None:
            tensors = tuple(map(_to_host_behind, tensors))
        self._after_now(partial(self.links.send, to, what, parcel, facts, *tensors))

    def sends_beside(self, to: Address) -> bool:
        """Does what is posted now leave while the device computes on? In shared memory it need not leave; and
        a GPU's way through the host begins with a copy that all that follows would wait for.
        """
        pair = self._pair(to)
        if pair in ("nccl", "pipe"):
            lane = None if self.lanes is None else self.lanes.lane(to)
            return lane is not None and lane.state is LaneState.READY
        return pair == "tcp" and self.completions is None

    def _after_now(self, do: Callable[[], None]) -> None:
        if self.completions is None:
            do()
        else:
            self.completions.after_now(do)

    def takes(self, frame: frames.Incoming) -> bool:
        """In the links' thread. True: its tensors are on their way by a lane, which delivers it later, or
        others of its pieces are.
        """
        if self.fills is not None and self.fills.take(frame):
            return True
        if frame.kind == frames.LANE and isinstance(frame.facts, dict) and _UNMAPPABLE in frame.facts:
            self._keep_apart(frame.facts[_UNMAPPABLE])
            return True
        return self.lanes is not None and self.lanes.take(frame)

    def prepare(self, peers: set[Address]) -> None:
        """Open lanes to these: those this worker sends to, and those it would send to after a death."""
        if self.lanes is not None and len(peers) <= MOST_LANES_AHEAD:
            self._ahead = peers - {self.links.address}
            for to in self._ahead:
                self.links.connect(to)

    def _open_ahead(self) -> None:
        assert self.lanes is not None
        for to in [to for to in self._ahead if self.links.identity(to) is not None]:
            self._ahead.discard(to)
            if self._pair(to) in ("nccl", "pipe"):
                self.lanes.lane(to)

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
        except UnmappableError:  # the sender thinks that it has come; if it lives, it must send it otherwise
            host, _, port = places[0][0].rpartition(":")
            if port.isdecimal():
                there = {_UNMAPPABLE: list(self.links.address)}
                self.links.send(Address(host, int(port)), frames.LANE, None, there)
            raise
        except (TypeError, ValueError, IndexError, KeyError):
            raise PeerError("a peer named memory in a way that cannot be read") from None

    def _keep_apart(self, fact: Any) -> None:
        """A peer cannot read what lies here: what it is owed goes to it by other ways, and is sent again."""
        try:
            host, port = fact
            to = Address(str(host), int(port))
        except (TypeError, ValueError):
            raise PeerError("a peer said in a way that cannot be read that it maps no memory") from None
        if to not in self._apart:
            self._apart.add(to)
            self.links.move(to)

    def borrows(self, tensor: Tensor) -> bool:
        """Is any of the memory behind this tensor still to be sent?"""
        return self.links.borrows(tensor) or (self.lanes is not None and self.lanes.borrows(tensor))

    def forget(self, keep: set[Address]) -> None:
        """Only these are peers now."""
        if self.lanes is not None:
            self.lanes.forget(keep)
        self.links.forget(keep)
        self.carriers = {to: kind for to, kind in self.carriers.items() if to in keep}
        if self.mappings is not None:
            self.mappings.keep({f"{host}:{port}" for host, port in keep})
        self._apart &= keep

    def link_broke(self, to: Address) -> None:
        if self.lanes is not None:
            self.lanes.link_broke(to)

    def drain(self) -> None:
        """Return when the device has done all that was asked of it."""
        if self.completions is not None:
            self.completions.drain()

    def stop(self) -> None:
        if self.lanes is not None:
            self.lanes.stop()
        if self.completions is not None:
            self.completions.stop()

    def _warn(self, to: Address) -> None:
        """Once per peer, as soon as it has said who it is."""
        known = self.links.identity(to)
        if known is None:
            return
        self._warned.add(to)
        if (sentence := bits_differ(self.identity, Identity.decode(known))) is not None:
            say(f"worker at {to.host}:{to.port}: {sentence}")

    def _pair(self, to: Address) -> Carrier:
        known = self.links.identity(to)
        if known is None:
            return "tcp"
        mine = replace(self.identity, memory="") if to in self._apart else self.identity
        return chosen(mine, Identity.decode(known))

    def _transport(
        self, to: Address, what: ParcelKind, tensors: tuple[Tensor, ...]
    ) -> tuple[Carrier, Lane | None]:
        if not tensors or what in _LASTING:
            return "tcp", None
        pair = self._pair(to)
        if pair in ("nccl", "pipe"):
            lane = None if self.lanes is None else self.lanes.lane(to)
            use = lane is not None and (self.waits or lane.state is LaneState.READY)
            return (pair, lane) if use else ("tcp", None)
        if self.arena is None or not all(self.arena.location(tensor) is not None for tensor in tensors):
            return "tcp", None
        return pair, None

    def _place(self, tensor: Tensor) -> Any:
        assert self.arena is not None
        return [
            f"{self.links.address.host}:{self.links.address.port}",
            self.arena.location(tensor),
            list(tensor.shape),
            frames.type_number(tensor.dtype),
        ]


def _to_host_behind(tensor: Tensor) -> Tensor:
    """Host memory that the device fills in its own time; whole when what is launched now has finished."""
    if tensor.device.type == "cpu":
        return tensor.detach().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
