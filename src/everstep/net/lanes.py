"""Lanes: tensors between two workers, in order, over a wire of its own; names and order stay on the links.

    sender                                            receiver
    open ── link: LANE open, name ──────────────────► open          a first, empty transfer connects both ends
    ready
    post ── link: the parcel, "number 7, these forms" ─► takes memory, receives number 7
         ══ wire: the bytes ═════════════════════════►   delivers the parcel, whole

One thread moves what all open lanes of a worker have to move, however many peers there are: it begins a
transfer, asks the others how far they are, and sleeps if none has come on. A lane is opened and left by a
thread of its own, for both may take long; at any time one thread uses a wire. A lane has one direction: two
workers that send to each other have two, and neither waits for the other. The receiver takes transfers in the
order of their numbers, and a gap breaks the lane.

Ownership. A posted tensor is borrowed from `reserve` on, until the wire has let go of it: `borrows` says so,
and `step_tensors` gives the buffer away instead of writing to it. What is received belongs to the receiver.
A broken lane lets go of its tensors once the device has: a thread leaves the wire, and no one waits for it.

A transfer on the device waits there for the other end, and what waits for the device waits with it: workers
can wait for each other in a circle. So a call that is known to wait is made while nothing is on its way here
(`at_rest`), and a thread that does nothing else interrupts a transfer that has been on its wire for too long
(`_guard`): its lane breaks.

When something breaks, the lane is dropped at both ends and the link to that peer counts as broken, so that
what was under way is sent again, by tcp until a new lane is open. The death of a peer breaks the lanes that
lead to it and from it, and no others.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Protocol

import torch
from torch import Tensor

from everstep.errors import PeerError
from everstep.log import say
from everstep.net import frames
from everstep.net.envelope import DTYPES, Envelope, Form, FrameKind, LaneBroke, OnLane, OpenLane
from everstep.net.links import Address, Links
from everstep.net.sockets import FlowProgress
from everstep.net.turns import Traffic, Turns
from everstep.protocol.parcels import Parcel

OPEN_WITHIN_S = 60.0
MOST_ATTEMPTS = 3  # to open a lane to one address, of late; after that tcp has to do
LATELY_S = 600.0
LATE_S, LEAST_RATE = 3.0, 10e6  # a transfer has so long on the wire, and longer by its bytes at this rate
LOOK_EVERY_S = 0.25  # for one that is late
REST_WITHIN_S = 2.0  # longer than messages take, shorter than what counts as late
MAX_NAME = 128
LEAST_PAUSE_S, MOST_PAUSE_S = 20e-6, 200e-6  # until transfers are asked about again


class Wire(Protocol):
    """What moves the bytes of one lane. Used by one thread at a time, `waits_since` and `interrupt` apart.
    Every call may raise PeerError: it is broken. `begin` and `is_done` return at once.
    """

    def name(self) -> bytes:
        """A new name by which the two ends meet; asked at the sending end."""
        ...

    def begin_open(self, name: bytes, *, sends: bool) -> None: ...

    def is_open(self) -> bool: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory to receive into."""
        ...

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        """Send these, or receive into these."""
        ...

    def is_done(self) -> bool:
        """Is what was begun over?"""
        ...

    def waits_since(self) -> float | None:
        """Since when (monotonic) the device does nothing about what was begun but wait for the other end or
        move bytes. None: it does not, or this wire notices by itself when the other end is gone.
        """
        ...

    def interrupt(self) -> None:
        """In any thread, whatever another one does with it: let the device end what it waits for, unfinished.
        All that may follow is `leave`.
        """
        ...

    def leave(self) -> None:
        """Whatever its state, get out. Returns when the device uses no tensor of it any longer, and raises if
        that cannot be had.
        """
        ...

    def close(self) -> None:
        """Clear up what is left; may take long."""
        ...


class _Progress(Enum):
    SOME = auto()  # there may be more at once
    NONE = auto()
    IDLE = auto()  # there is nothing to move


class LaneState(StrEnum):
    OPENING = "opening"
    READY = "ready"
    BROKEN = "broken"


@dataclass(slots=True, eq=False)
class LaneTransfer:
    """A message on its way: at the sender its tensors are borrowed, at the receiver they are being filled."""

    tensors: tuple[Tensor, ...]
    forms: tuple[Form, ...] = ()
    message: tuple[Parcel, Envelope] | None = None  # at the sender: what announces it
    frame: frames.Incoming | None = None  # at the receiver: what is delivered in the end


class LaneOrder:
    """The numbers of a lane's transfers, at either end: each is one more than the one before."""

    def __init__(self) -> None:
        self._next = 1

    def take(self) -> int:
        """The number of the next transfer to be sent."""
        number, self._next = self._next, self._next + 1
        return number

    def expect(self, number: int) -> None:
        """The next announced transfer has this number."""
        if number != self._next:
            raise PeerError(f"transfer {number} was announced where {self._next} was due")
        self._next += 1


@dataclass(slots=True, eq=False)
class Lane:
    """One end of a lane."""

    name: str
    peer: Address
    sends: bool
    wire: Wire
    state: LaneState = LaneState.OPENING
    because: str = ""  # it is broken
    is_interrupted: bool = False  # a thread does it
    order: LaneOrder = field(default_factory=LaneOrder)
    held: dict[int, LaneTransfer] = field(default_factory=dict)  # by id: borrowed, at the sender
    work: queue.SimpleQueue[LaneTransfer] = field(default_factory=queue.SimpleQueue)
    moving: LaneTransfer | None = None
    began: float = 0.0
    sent_bytes: int = 0  # of transfers that are over, at the sender
    busy_s: float = 0.0  # and how long they took, one after the other
    opened_s: float = 0.0  # how long opening took
    left_s: float = 0.0  # how long it took to get out of the broken wire

    @property
    def is_broken(self) -> bool:
        return self.state is LaneState.BROKEN

    @property
    def traffic(self) -> Traffic:
        return Traffic.SENDS if self.sends else Traffic.RECEIVES

    def give_up(self, because: str) -> bool:
        """Break it, from any thread. False: it is broken already."""
        if self.is_broken:
            return False
        self.state, self.because = LaneState.BROKEN, because
        return True


class Lanes:
    """All lanes of one worker. `deliver` is called in the thread that moves them."""

    def __init__(
        self,
        links: Links,
        wire: Callable[[], Wire],
        *,
        deliver: Callable[[frames.Incoming], None],
        failed: Callable[[BaseException], None],
        kind: str,
        most: float = math.inf,
        log: Callable[[str], None] = say,
    ) -> None:
        """`failed`: the worker must end. `most`: so many lanes send at once, and as many receive."""
        self._links, self._wire, self.kind, self._log = links, wire, kind, log
        self._deliver, self._failed = deliver, failed
        self._turns = Turns(most)
        self._to: dict[Address, Lane] = {}
        self._from: dict[str, Lane] = {}
        self._attempts: dict[Address, list[float]] = {}  # when each was made
        self._opened = 0
        self._wired: list[Lane] = []  # all whose wire is not left yet
        self._open: list[Lane] = []  # what the one thread moves, in turn
        self._more = threading.Event()  # there is something to do for it
        self._threads: list[threading.Thread] = []  # which serve all lanes, once there is one
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    # -------------------------------------------------------------- sending (the worker's own thread)

    def lane(self, to: Address) -> Lane | None:
        """The lane to this peer, opened if it can be; None: use tcp."""
        lane = self._to.get(to)
        if lane is not None:
            return None if lane.is_broken else lane
        now = time.monotonic()
        attempts = [at for at in self._attempts.get(to, ()) if now - at < LATELY_S]
        if self._stopped.is_set() or len(attempts) >= MOST_ATTEMPTS:
            return None
        self._attempts[to] = [*attempts, now]
        self._opened += 1
        host, port = self._links.address
        lane = Lane(f"{host}:{port}/{self._opened}", to, sends=True, wire=self._wire())
        self._to[to] = lane
        self._wire_up(lane, None)
        return lane

    def reserve(self, lane: Lane, tensors: tuple[Tensor, ...]) -> LaneTransfer:
        """From now on the lane borrows these."""
        whole = tuple(tensor.detach().contiguous() for tensor in tensors)
        transfer = LaneTransfer(whole, tuple(map(Form.of, whole)))
        lane.held[id(transfer)] = transfer
        return transfer

    def send(self, lane: Lane, parcel: Parcel, envelope: Envelope, transfer: LaneTransfer) -> None:
        """Its tensors are whole: announce it and send it, in turn. A lane that broke meanwhile drops it: the
        link counts as broken then, and what is owed is sent again.
        """
        transfer.message = (parcel, envelope)
        lane.work.put(transfer)
        self._more.set()

    def borrows(self, tensor: Tensor) -> bool:
        """Is any of the memory behind this tensor still to be sent?"""
        storage = tensor.untyped_storage()
        memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        return any(
            part.data_ptr() in memory
            for lane in list(self._wired)
            for transfer in list(lane.held.values())
            for part in transfer.tensors
            if part.numel()
        )

    @contextmanager
    def at_rest(self) -> Iterator[bool]:
        """Within, no transfer is on its way here. False: some were not over in time, and still are."""
        until, rests = time.monotonic() + REST_WITHIN_S, False
        try:
            while not (rests := self._rests()) and time.monotonic() < until:
                time.sleep(LEAST_PAUSE_S)
            yield rests
        finally:
            self._turns.resume()
            self._more.set()

    def _rests(self) -> bool:
        return self._turns.rests() and not any(lane.is_broken for lane in list(self._wired))

    # -------------------------------------------------------------- receiving (the links' thread)

    def take(self, frame: frames.Incoming) -> bool:
        """False: this message has nothing to do with lanes."""
        if frame.kind is FrameKind.LANE:
            self._control(frame.envelope.value)
            return True
        announced = frame.envelope.where
        if not isinstance(announced, OnLane):
            return False
        lane = self._from.get(announced.lane)
        if lane is None or lane.is_broken:
            return True  # the sender hears of it, or has heard
        frame.envelope = frame.envelope._replace(where=None)
        try:
            lane.order.expect(announced.number)
        except PeerError as error:
            self._broke(lane, str(error))
            return True
        lane.work.put(LaneTransfer((), announced.forms, frame=frame))
        self._more.set()
        return True

    def _control(self, said: OpenLane | LaneBroke) -> None:
        if isinstance(said, LaneBroke):
            for lane in [lane for lane in self._to.values() if lane.name == said.lane]:
                self._broke(lane, "the receiver has given it up")
            return
        try:
            meet = bytes.fromhex(said.meet)
        except ValueError:
            raise PeerError("a peer opened a lane by a name that cannot be read") from None
        if not 0 < len(said.lane) <= MAX_NAME or not 0 < said.port < 1 << 16:
            raise PeerError("a peer opened a lane that cannot be")
        peer = Address(said.host, said.port)
        for old in [lane for lane in self._from.values() if lane.peer == peer]:
            old.give_up("the sender has opened another")
            self._from.pop(old.name, None)
        self._more.set()
        lane = Lane(said.lane, peer, sends=False, wire=self._wire())
        self._from[lane.name] = lane
        self._wire_up(lane, meet)

    # -------------------------------------------------------------- ends

    def forget(self, keep: set[Address]) -> None:
        """Only these are peers now. The lanes of others are left in the background."""
        self._drop(lambda peer: peer not in keep, "its peer is gone")
        self._attempts = {to: made for to, made in self._attempts.items() if to in keep}

    def link_broke(self, peer: Address) -> None:
        """The link to a peer broke: announcements may be lost."""
        self._drop(lambda other: other == peer, "the link to its peer broke", to_only=True)

    def stop(self) -> None:
        """The process ends: wires go with it."""
        self._stopped.set()
        self._more.set()

    def ready(self) -> dict[Address, Lane]:
        return {to: lane for to, lane in list(self._to.items()) if lane.state is LaneState.READY}

    def progress(self) -> dict[Address, FlowProgress]:
        """Of every lane that sends, as `Links.progress` has it of sockets."""
        return {
            to: FlowProgress(lane.sent_bytes, lane.busy_s, bool(lane.held))
            for to, lane in list(self._to.items())
        }

    def _drop(self, gone: Callable[[Address], bool], because: str, *, to_only: bool = False) -> None:
        for to, lane in list(self._to.items()):
            if gone(to):
                lane.give_up(because)
                self._to.pop(to, None)
        for name, lane in list(self._from.items()):
            if not to_only and gone(lane.peer):
                lane.give_up(because)
                self._from.pop(name, None)
        self._more.set()

    def _broke(self, lane: Lane, because: str) -> None:
        """A lane between two live workers, as far as is known here. Both ends must hear of it. One that never
        was open and has nothing queued has lost nothing: its link stays.
        """
        unused = lane.state is LaneState.OPENING and not lane.held
        if self._stopped.is_set() or not lane.give_up(because):
            return
        self._more.set()
        self._log(f"the {self.kind} lane {lane.name} broke: {because}")
        if lane.sends:
            if self._to.get(lane.peer) is lane:
                del self._to[lane.peer]
            if not unused:
                self._links.move(lane.peer, f"{self.kind} lane: {because}")
        else:
            self._from.pop(lane.name, None)
            self._links.send(lane.peer, FrameKind.LANE, Envelope(LaneBroke(lane.name)))

    # -------------------------------------------------------------- a lane's own thread: opening, leaving

    def _start(self, what: Callable[..., None], lane: Lane, *rest: object) -> None:
        name = f"lane {lane.name}"
        threading.Thread(target=what, args=(lane, *rest), name=name, daemon=True).start()

    def _wire_up(self, lane: Lane, meet: bytes | None) -> None:
        self._wired.append(lane)
        with self._lock:
            if not self._threads:
                for what, name in ((self._move, "lanes"), (self._guard, "late lanes")):
                    self._threads.append(threading.Thread(target=what, name=name, daemon=True))
                    self._threads[-1].start()
        self._start(self._prepare, lane, meet)

    def _prepare(self, lane: Lane, meet: bytes | None) -> None:
        try:
            self._connect(lane, meet)
        except _Left:
            pass
        except Exception as error:  # whatever it is, tcp carries the messages
            self._broke(lane, str(error))
        if lane.is_broken:
            self._leave(lane)
            return
        with self._lock:
            self._open.append(lane)
        self._more.set()

    def _connect(self, lane: Lane, meet: bytes | None) -> None:
        began = time.monotonic()
        if meet is None:
            meet = lane.wire.name()
            opening = OpenLane(lane.name, *self._links.address, meet.hex())
            self._links.send(lane.peer, FrameKind.LANE, Envelope(opening))
        lane.wire.begin_open(meet, sends=lane.sends)
        self._until(lane, lane.wire.is_open, began + OPEN_WITHIN_S)
        self._until(lane, lambda: self._turns.take(lane, Traffic.OPENS), began + OPEN_WITHIN_S)
        try:
            lane.wire.begin((lane.wire.empty((1,), torch.uint8),))  # connects both ends
            self._until(lane, lane.wire.is_done, began + OPEN_WITHIN_S)
        finally:
            self._turns.ended(lane, Traffic.OPENS)
        lane.opened_s = time.monotonic() - began
        if lane.state is LaneState.OPENING:
            lane.state = LaneState.READY
            if lane.sends:
                self._log(f"{self.kind}: opened lane {lane.name} in {lane.opened_s * 1e3:.0f} ms")

    def _leave(self, lane: Lane) -> None:
        if self._stopped.is_set():
            return
        began = time.monotonic()
        try:
            lane.wire.leave()
        except Exception as error:  # its tensors stay borrowed, for as long as this process lasts
            self._log(f"{self.kind}: lane {lane.name} cannot be left: {error}")
            self._failed(error)
            return
        lane.left_s = time.monotonic() - began
        lane.moving = None
        lane.held.clear()
        self._wired.remove(lane)
        self._log(f"{self.kind}: left lane {lane.name} in {lane.left_s * 1e3:.0f} ms ({lane.because})")
        lane.wire.close()

    # -------------------------------------------------------------- the thread of all open lanes

    def _move(self) -> None:
        pause_s = LEAST_PAUSE_S
        while not self._stopped.is_set():
            self._more.clear()
            found = [self._advance(lane) for lane in list(self._open)]
            if _Progress.SOME in found:
                pause_s = LEAST_PAUSE_S
            elif _Progress.NONE in found:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
            else:
                self._more.wait()
                pause_s = LEAST_PAUSE_S

    def _advance(self, lane: Lane) -> _Progress:
        try:
            if not lane.is_broken:
                if lane.moving is None:
                    if lane.work.empty() or not self._turns.take(lane, lane.traffic):
                        return _Progress.IDLE  # others' progress is waited for
                    self._begin(lane, lane.work.get())
                if not lane.wire.is_done():
                    return _Progress.NONE
                if not lane.is_broken:  # else it was interrupted
                    self._finish(lane)
        except Exception as error:  # it ends one lane, and not the thread of all
            self._broke(lane, str(error))
        if lane.is_broken:
            self._open.remove(lane)
            self._turns.ended(lane, lane.traffic)
            self._start(self._leave, lane)
        return _Progress.SOME

    def _begin(self, lane: Lane, transfer: LaneTransfer) -> None:
        if transfer.frame is not None:
            transfer.tensors = tuple(lane.wire.empty(shape, DTYPES[dtype]) for shape, dtype in transfer.forms)
        elif transfer.message is not None:
            parcel, envelope = transfer.message
            announced = OnLane(lane.name, lane.order.take(), transfer.forms)
            self._links.send(lane.peer, parcel, envelope._replace(where=announced))
        lane.moving, lane.began = transfer, time.monotonic()
        lane.wire.begin(tuple(tensor for tensor in transfer.tensors if tensor.numel()))

    def _finish(self, lane: Lane) -> None:
        transfer, lane.moving = lane.moving, None
        assert transfer is not None
        self._turns.ended(lane, lane.traffic)
        if lane.sends:
            lane.sent_bytes += sum(tensor.nbytes for tensor in transfer.tensors)
            lane.busy_s += time.monotonic() - lane.began
        lane.held.pop(id(transfer), None)
        if transfer.frame is not None:
            transfer.frame.tensors = transfer.tensors
            self._deliver(transfer.frame)

    # -------------------------------------------------------------- the thread that looks for late transfers

    def _guard(self) -> None:
        """The others may be inside a call that waits for the device."""
        while not self._stopped.wait(LOOK_EVERY_S):
            for lane in list(self._wired):
                if (lasts := _is_late(lane, time.monotonic())) is not None:
                    self._broke(lane, f"a transfer was not over after {lasts:.1f} s on the wire")
                if lane.is_broken and not lane.is_interrupted and lane.wire.waits_since() is not None:
                    lane.is_interrupted = True
                    self._start(self._interrupt, lane)

    def _interrupt(self, lane: Lane) -> None:
        try:
            lane.wire.interrupt()
        except RuntimeError as error:
            self._log(f"{self.kind}: lane {lane.name} cannot be interrupted: {error}")

    @staticmethod
    def _until(lane: Lane, over: Callable[[], bool], deadline: float) -> None:
        """Asked again and again, so that a lane that is given up gets out at once."""
        pause_s = LEAST_PAUSE_S
        while not over():
            if lane.is_broken:
                raise _Left
            if time.monotonic() > deadline:
                raise PeerError(f"it was not open within {OPEN_WITHIN_S:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)


def _is_late(lane: Lane, now: float) -> float | None:
    """How long what is on its wire has been there, if that is too long."""
    moving, since = lane.moving, lane.wire.waits_since()
    nbytes = 0 if moving is None else sum(tensor.nbytes for tensor in moving.tensors)
    if since is None or now - since <= LATE_S + nbytes / LEAST_RATE:
        return None
    return now - since


class _Left(Exception):
    """The lane was given up from outside."""
