"""How a parcel's bytes get from one worker to another. A worker has one data plane: it joins links, lanes and
shared memory, and puts whatever arrives into one inbox. The transport is chosen for each pair of workers:

    ipc    same GPU: the bytes stay where they are, the message says where; the receiver reads them there
    nccl   different GPUs: the message announces a transfer on a lane, the bytes go from GPU to GPU
    tcp    all others, and until the peer is known or its lane is open: through the host and a socket

Each worker says of itself which memory it can share and which lanes it can open; both ends of a pair compute
the same answer from the two statements. Names, facts and order are the same in all of them, so nothing above
knows which it was.

    links' thread   frame ──► a piece of a chunk, or announced on a lane? kept until it is whole ──► inbox
    lanes' threads  a frame whose tensors have come ──────────────────────────────────────────────► inbox
    worker's thread inbox ──► `opened`: the tensors, wherever they are

Who may write to what is in shared memory: no process, until the step is sealed (`step_tensors`). A peer has
read all it needs of a step by then, for it says so (HELD, NEWS) only after its own device has finished. What
must outlive that (a feed to a joiner, a whole state, that of a chunk) is copied to the host and belongs to
the queue; states go there piece by piece (`transfers`).
"""

from __future__ import annotations

import json
import os
import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.errors import PeerError, UserError
from everstep.job.job import NetSpec
from everstep.log import say
from everstep.net import frames, host_memory, nccl, seal
from everstep.net.arena import Arena, CudaMemory, Mappings, UnmappableError
from everstep.net.completions import Completions
from everstep.net.envelope import (
    DTYPES,
    MAX_TENSORS,
    Envelope,
    Form,
    FrameKind,
    InMemory,
    PlaceInMemory,
    Unmappable,
)
from everstep.net.lanes import Lane, Lanes, LaneState, Wire
from everstep.net.links import Address, LinkEvents, Links
from everstep.net.sockets import FlowProgress, Way, listening
from everstep.net.transfers import ArrivingFills
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import LinkBroke, LinkOpened

MAX_COMPUTES = 300
MOST_LANES_AHEAD = 16  # peers to which lanes are opened before they are used
_LASTING = frozenset({ParcelKind.FEED})  # read by its receiver when the sender is steps ahead

# ------------------------------------------------------------------ what a pair of workers can use


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself to peers that connect."""

    kind: str  # of the memory it can share: ipc; tcp: none
    memory: str  # the same text: the same memory
    lanes: str = ""  # the kind of lane it can open, with the version both ends must have: "nccl 22809"
    # Device and software that its bits depend on; empty: sums depend on their order anyway.
    computes: str = ""

    def encode(self) -> bytes:
        return json.dumps([self.kind, self.memory, self.lanes, self.computes]).encode()

    @staticmethod
    def decode(data: bytes) -> Identity:
        try:
            kind, memory, lanes, computes = json.loads(data)
        except (TypeError, ValueError):
            raise PeerError("a peer did not say who it is") from None
        return Identity(str(kind), str(memory), str(lanes), str(computes)[:MAX_COMPUTES])


def chosen(mine: Identity, theirs: Identity) -> str:
    """The transport that carries tensors between these two."""
    if mine.memory and (mine.kind, mine.memory) == (theirs.kind, theirs.memory):
        return mine.kind
    if mine.lanes and mine.lanes == theirs.lanes:
        return mine.lanes.partition(" ")[0]
    return "tcp"


def bits_differ(mine: Identity, theirs: Identity) -> str | None:
    """One sentence, if the same microbatch may give other bits there."""
    if not mine.computes or not theirs.computes or mine.computes == theirs.computes:
        return None
    return (
        f"it computes with {theirs.computes}, this worker with {mine.computes}: the losses of a healed run "
        "are those of a clean one to the bit only if all workers compute with the same"
    )


def identity_of(
    device: torch.device, transport: str, computes: str = "", *, encrypt: bool = False
) -> Identity:
    """Of a worker that computes on this device. NCCL does not encrypt: then its lanes stay on one machine."""
    kind, memory, lanes = _memory_and_lanes(device, transport)
    if encrypt and lanes.startswith("nccl"):
        lanes = f"{lanes} {_machine()}"
    return Identity(kind, memory, lanes, computes)


def _memory_and_lanes(device: torch.device, transport: str) -> tuple[str, str, str]:
    if transport == "tcp":
        return "tcp", "", ""
    if device.type == "cuda":
        version = nccl.version()
        lanes = f"nccl {version}" if version else ""
        if transport == "nccl":
            if not lanes:
                raise UserError('transport = "nccl" needs a torch with NCCL; use "auto" or "tcp".')
            return "tcp", "", lanes
        return "ipc", f"{torch.cuda.get_device_properties(device).uuid} {_machine()}", lanes
    if transport == "nccl":
        raise UserError('transport = "nccl" is for GPUs; set device = "cuda", or use "auto".')
    return "tcp", "", ""


def _machine() -> str:
    """Of two containers on one machine that do not share these, none can open the other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {_namespace('pid')} {_namespace('ipc')}"


def _namespace(kind: str) -> str:
    found = os.stat(f"/proc/self/ns/{kind}")
    return f"{found.st_dev} {found.st_ino}"


# ------------------------------------------------------------------ the plane


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSettings:
    secret: bytes  # by which the workers of a task know each other
    host: str  # where peers reach this worker
    bind: str = ""  # where it listens, if that is another address
    device: torch.device
    transport: str = "auto"
    net: NetSpec = field(default_factory=NetSpec)
    computes: str = ""  # as in `Identity`
    waits: bool = False  # for a lane that the job asks for; else tcp carries messages until it is open
    listener: socket.socket | None = None  # for peers; None: one of its own
    way: Callable[[str, int], Way | None] | None = None  # onto its planned path


# What carries the bytes of a lane, by transport. All others of `chosen` need no lane.
WIRES: dict[str, Callable[[PlaneSettings], Wire]] = {
    "nccl": lambda settings: nccl.NcclWire(settings.device),
}


class DataPlane:
    """Sends a worker's parcels, and opens those that arrive. `got` hears of tensors as soon as they are here:
    the worker itself may be busy for long.
    """

    def __init__(
        self, settings: PlaneSettings, got: Callable[[Parcel, int], None] = lambda parcel, nbytes: None
    ) -> None:
        device = self.device = settings.device
        self.waits, self._got = settings.waits and settings.transport in WIRES, got
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        encrypt = settings.net.encrypt
        if encrypt:
            seal.require_encryption()
        self.identity = identity_of(device, settings.transport, settings.computes, encrypt=encrypt)
        listener = settings.listener or (listening(settings.bind) if settings.bind else None)
        self.links = Links(
            LinkEvents(
                deliver=self._arrived,
                broken=self._link_broke,
                failed=self.inbox.put,
                opened=self._link_opened,
            ),
            token=settings.secret,
            host=settings.host,
            empty=lambda shape, dtype: host_memory.host_empty(shape, dtype, device),
            way=settings.way,
            identity=self.identity.encode(),
            listener=listener,
            accepts=partial(seal.accepted, settings.net),
        )
        self.completions = Completions(device, self.inbox.put) if device.type == "cuda" else None
        memory = CudaMemory(device) if self.identity.kind == "ipc" else None
        self.arena = None if memory is None else Arena(memory)
        self._mappings = None if memory is None else Mappings(memory)
        self._lanes: Lanes | None = None
        if self.identity.lanes:
            kind = self.identity.lanes.partition(" ")[0]
            self._lanes = Lanes(
                self.links,
                partial(WIRES[kind], settings),
                deliver=self._deliver,
                failed=self.inbox.put,
                kind=kind,
                most=nccl.MOST_AT_ONCE,
            )
        self._fills = ArrivingFills(device, self._deliver)
        self.carriers: dict[Address, str] = {}  # what carried tensors to it last
        self._ahead: set[Address] = set()  # peers to which lanes are to be opened
        self._warned: set[Address] = set()
        self._apart: set[Address] = set()  # peers that cannot read this worker's memory

    def start(self) -> None:
        self.links.start()

    def stop(self) -> None:
        if self._lanes is not None:
            self._lanes.stop()
        if self.completions is not None:
            self.completions.stop()
        self.links.stop()

    # -------------------------------------------------------------- what arrives (other threads)

    def _arrived(self, frame: frames.Incoming) -> None:
        """Its tensors may still be on their way by a lane, which delivers it later; so may other pieces."""
        if isinstance(frame.envelope.value, Unmappable):
            self._keep_apart(frame.envelope.value)
            return
        if self._fills.take(frame):
            return
        if self._lanes is not None and self._lanes.take(frame):
            return
        self._deliver(frame)

    def _deliver(self, frame: frames.Incoming) -> None:
        if frame.parcel is not None and frame.tensors:
            self._got(frame.parcel, frame.nbytes)
        self.inbox.put(frame)

    def _keep_apart(self, said: Unmappable) -> None:
        """A peer cannot read what lies here: what it is owed goes to it by other ways, and is sent again."""
        to = Address(said.host, said.port)
        if to not in self._apart:
            self._apart.add(to)
            self.links.move(to)

    def _link_opened(self, address: Address) -> None:
        self.inbox.put(LinkOpened(address))

    def _link_broke(self, address: Address) -> None:
        if self._lanes is not None:
            self._lanes.link_broke(address)
        self.inbox.put(LinkBroke(address, self.links.errors.pop(address, "")))

    # -------------------------------------------------------------- the worker's own thread

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
        return host_memory.to_host(tensor) if self._lanes is None else tensor.detach().contiguous()

    def post(self, to: Address, parcel: Parcel, envelope: Envelope, tensors: tuple[Tensor, ...]) -> None:
        """Send, once the device has made the tensors. Never blocks."""
        if len(tensors) > MAX_TENSORS:
            raise UserError(
                f"a layer gives {len(tensors)} tensors to the next stage, and {MAX_TENSORS} is the most; "
                "let it stack them."
            )
        if self._ahead:
            self._open_ahead()
        kind, lane = self._transport(to, parcel.what, tensors)
        if tensors and parcel.what not in _LASTING and self.carriers.get(to) != kind:
            self.carriers[to] = kind
            say(f"tensors to {to.host}:{to.port} go by {kind}")
        if tensors and to not in self._warned:
            self._warn(to)
        if lane is not None:
            assert self._lanes is not None
            transfer = self._lanes.reserve(lane, tensors)
            self._after_now(partial(self._lanes.send, lane, parcel, envelope, transfer))
            return
        if kind != "tcp":
            envelope, tensors = envelope._replace(where=InMemory(tuple(map(self._place, tensors)))), ()
        elif self.completions is not None:
            tensors = tuple(map(_to_host_behind, tensors))
        self._after_now(partial(self.links.send, to, parcel, envelope, *tensors))

    def _after_now(self, do: Callable[[], None]) -> None:
        if self.completions is None:
            do()
        else:
            self.completions.after_now(do)

    def prepare(self, peers: set[Address]) -> None:
        """Open lanes to these: those this worker sends to, and those it would send to after a death."""
        if self._lanes is not None and len(peers) <= MOST_LANES_AHEAD:
            self._ahead = peers - {self.links.address}
            for to in self._ahead:
                self.links.connect(to)

    def _open_ahead(self) -> None:
        assert self._lanes is not None
        for to in [to for to in self._ahead if self.links.identity(to) is not None]:
            self._ahead.discard(to)
            if self._pair(to) in WIRES:
                self._lanes.lane(to)

    def opened(self, frame: frames.Incoming) -> tuple[Tensor, ...]:
        """The tensors of a message, wherever they are."""
        where = frame.envelope.where
        if where is None:
            return frame.tensors
        if self._mappings is None or not isinstance(where, InMemory):
            raise PeerError("a peer sent memory to a worker that shares none")
        try:
            return tuple(
                self._mappings.tensor(owner, at, form.shape, DTYPES[form.dtype])
                for owner, at, form in where.places
            )
        except UnmappableError:  # the sender thinks that it has come; if it lives, it must send it otherwise
            host, _, port = where.places[0].owner.rpartition(":")
            if port.isdecimal():
                said = Envelope(Unmappable(*self.links.address))
                self.links.send(Address(host, int(port)), FrameKind.LANE, said)
            raise
        except ValueError:
            raise PeerError("malformed memory reference from a peer") from None

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Around a call that waits for all that the device does: within, no transfer of a lane is on it."""
        if self._lanes is None:
            yield
            return
        with self._lanes.at_rest() as rests:
            if not rests:
                say("transfers are not over in time: a call that waits for them is made all the same")
            yield

    def borrows(self, tensor: Tensor) -> bool:
        """Is any of the memory behind this tensor still to be sent?"""
        return self.links.borrows(tensor) or (self._lanes is not None and self._lanes.borrows(tensor))

    def forget(self, keep: set[Address]) -> None:
        """Only these are peers now."""
        if self._lanes is not None:
            self._lanes.forget(keep)
        self.links.forget(keep)
        self.carriers = {to: kind for to, kind in self.carriers.items() if to in keep}
        if self._mappings is not None:
            self._mappings.keep({f"{host}:{port}" for host, port in keep})
        self._apart &= keep

    def progress(self) -> dict[Address, FlowProgress]:
        """By peer, totals of what was sent to it by its socket and its lane."""
        found = self.links.progress()
        for to, seen in ({} if self._lanes is None else self._lanes.progress()).items():
            other = found.get(to, FlowProgress(0, 0.0, False))
            found[to] = FlowProgress(
                seen.acked_bytes + other.acked_bytes,
                seen.busy_s + other.busy_s,
                seen.waiting or other.waiting,
            )
        return found

    def drain(self) -> None:
        """Return when the device has done all that was asked of it."""
        if self.completions is not None:
            self.completions.drain()

    def _warn(self, to: Address) -> None:
        """Once per peer, as soon as it has said who it is."""
        known = self.links.identity(to)
        if known is None:
            return
        self._warned.add(to)
        if (sentence := bits_differ(self.identity, Identity.decode(known))) is not None:
            say(f"worker at {to.host}:{to.port}: {sentence}")

    def _pair(self, to: Address) -> str:
        known = self.links.identity(to)
        if known is None:
            return "tcp"
        mine = replace(self.identity, memory="") if to in self._apart else self.identity
        return chosen(mine, Identity.decode(known))

    def _transport(
        self, to: Address, what: ParcelKind, tensors: tuple[Tensor, ...]
    ) -> tuple[str, Lane | None]:
        if not tensors or what in _LASTING:
            return "tcp", None
        pair = self._pair(to)
        if pair in WIRES:
            lane = None if self._lanes is None else self._lanes.lane(to)
            use = lane is not None and (self.waits or lane.state is LaneState.READY)
            return (pair, lane) if use else ("tcp", None)
        if self.arena is None or not all(self.arena.location(tensor) is not None for tensor in tensors):
            return "tcp", None
        return pair, None

    def _place(self, tensor: Tensor) -> PlaceInMemory:
        at = None if self.arena is None else self.arena.location(tensor)
        assert at is not None
        host, port = self.links.address
        return PlaceInMemory(f"{host}:{port}", at, Form.of(tensor))


def _to_host_behind(tensor: Tensor) -> Tensor:
    """Host memory that the device fills in its own time; whole when what is launched now has finished."""
    if tensor.device.type == "cpu":
        return tensor.detach().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
