"""Connections between workers: plain TCP sockets of our own, one thread for all of them.

Rejected: gloo. A worker blocked in it on a live peer cannot be freed, a group must be re-formed when one
member dies, and it cannot be given a source port. Here a send is a name and bytes; a dead peer's
socket closes and nothing else changes; a receive goes straight into the tensor's memory.

Each ordered pair of workers has one connection, opened by the sender at its first message, so messages
between two workers keep their order. A sender that finds its socket idle writes at once, in its own thread: a
small message costs no thread switch. What the kernel does not take goes on in the I/O thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from everstep.errors import PeerError
from everstep.log import warn
from everstep.net import frames
from everstep.net.envelope import Envelope, FrameKind
from everstep.net.handshake import PLAIN, Acceptor, Opener
from everstep.net.seal import Sealer, Suite, TamperedError
from everstep.net.sockets import FlowProgress, Way, family_of, in_numbers, listening, progress_of, watch_path
from everstep.protocol.parcels import Parcel

_DISCARD = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time
GREETING_S = 10.0  # for a new connection to prove who it is
MAX_STRANGERS = 64  # connections that have not proved it yet; one more, and the oldest is closed
MOST_READY = 16  # pieces that are given to the kernel at once
_FULL = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Address(NamedTuple):
    """Where a worker's process listens. A new process of the same place has another port."""

    host: str
    port: int


@dataclass(slots=True)
class _Outgoing:
    address: Address
    socket: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    queue: deque[memoryview] = field(default_factory=deque)  # parts of messages; a chunk is within one
    ready: deque[memoryview] = field(default_factory=deque)  # sealed, for the kernel
    sealer: Sealer | None = None
    handshake: Opener | None = None  # until the peer has proved who it is
    connected: bool = False  # to a peer that has
    identity: bytes = b""  # what that peer says of itself
    broken: bool = False
    error: str = ""  # why it is
    registered: int = 0
    forgotten: bool = False  # closed for good, or reported already: not to be reopened
    dialled: bool = False  # connect was called: until then there is nothing to watch


@dataclass(slots=True)
class _Receiving:
    socket: socket.socket
    handshake: Acceptor
    since: float
    peer: str
    frame: frames.Incoming | None = None


@dataclass(slots=True, kw_only=True)
class LinkEvents:
    """Who hears of what happens on links; all are called in the I/O thread."""

    deliver: Callable[[frames.Incoming], None]  # a whole message
    broken: Callable[[Address], None]  # the connection to this peer is gone
    failed: Callable[[BaseException], None]  # the thread itself must end
    opened: Callable[[Address], None] = lambda address: None


class Links:
    """All connections of one worker. `empty`: memory to receive into. `identity`: what a peer hears of this
    worker. `way` is asked with the peer's host and port when a connection is opened, for fabrics on which
    addresses and source port decide the path; in a thread of its own, because it may probe for seconds.
    `bind`: where it listens, if that is not `host`, where peers reach
    it. `accepts`: how a connection with this host may be protected.
    """

    def __init__(
        self,
        events: LinkEvents,
        *,
        token: bytes,
        host: str,
        empty: frames.Empty,
        way: Callable[[str, int], Way | None] | None = None,
        identity: bytes = b"",
        listener: socket.socket | None = None,
        accepts: Callable[[str], Sequence[Suite]] = lambda host: PLAIN,
    ) -> None:
        self.events, self._token, self._identity, self._accepts = events, token, identity, accepts
        self._empty, self._way = empty, way
        self._selector = selectors.DefaultSelector()
        self._listener = listener or listening(host)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = Address(in_numbers(host), port)  # where peers reach the listener
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        os.set_blocking(self._wake_in, False)
        self._out: dict[Address, _Outgoing] = {}
        self.errors: dict[Address, str] = {}  # why the last connection to each peer broke
        self._opening = threading.Lock()
        self._ask: deque[_Outgoing] = deque()
        self._strangers: dict[socket.socket, _Receiving] = {}  # oldest first
        self._reserve = os.open(os.devnull, os.O_RDONLY)  # closed for a moment when no descriptor is left
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._to_dial: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()

    def start(self) -> None:
        if self._way is not None:
            threading.Thread(target=self._dial_planned, name="paths", daemon=True).start()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._to_dial.put(None)
        self._wake()
        self._thread.join(timeout=2)

    def send(self, to: Address, what: Parcel | FrameKind, envelope: Envelope, *tensors: Tensor) -> None:
        """Send, or queue. Never blocks; a tensor must not be written to while this `borrows` it."""
        head = frames.encode(what, envelope, *tensors)
        with self._opening:  # messages of several threads to one peer share one connection, and its order
            link = self._out.get(to)
            if link is None or link.broken:
                link = self._open(to)
        with link.lock:
            idle = not link.queue and not link.ready
            link.queue.extend(frames.parts(head))
            link.queue.extend(frames.raw(tensor) for tensor in tensors if tensor.numel())
            if link.connected and idle:
                self._push(link)
            if link.queue or link.ready or link.broken:
                self._ask.append(link)
                self._wake()

    def connect(self, to: Address) -> None:
        """Open the connection before there is something to send."""
        with self._opening:
            if (known := self._out.get(to)) is not None and not known.broken:
                return
            link = self._open(to)
        self._ask.append(link)
        self._wake()

    def identity(self, of: Address) -> bytes | None:
        """What a peer says of itself; None while no connection to it is open."""
        link = self._out.get(of)
        return link.identity if link is not None and link.connected and not link.broken else None

    def borrows(self, tensor: Tensor) -> bool:
        """Is any of the memory behind this tensor still queued?"""
        storage = tensor.untyped_storage()
        memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        return any(self._queues(link, memory) for link in list(self._out.values()))

    def queued(self, to: Address) -> int:
        """Bytes for a peer that the kernel has not taken yet."""
        link = self._out.get(to)
        if link is None:
            return 0
        with link.lock:
            return sum(view.nbytes for view in [*link.ready, *link.queue])

    def progress(self) -> dict[Address, FlowProgress]:
        """What the kernel says of every connection that is open."""
        found = {}
        for to, link in list(self._out.items()):
            if link.connected and not link.broken:
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    found[to] = progress_of(link.socket)
        return found

    def forget(self, keep: set[Address]) -> None:
        """Close the connections to everybody else."""
        for address in [a for a in list(self._out) if a not in keep]:
            link = self._out.pop(address, None)  # the I/O thread may have dropped it meanwhile
            if link is not None:
                link.broken = link.forgotten = True
                self._ask.append(link)
        self._wake()

    def move(self, to: Address, because: str = "") -> None:
        """Close the connection to a peer that lives; the next one may take another path.

        To the rest of the worker it is a link that broke: what was under way is sent again.
        """
        link = self._out.get(to)
        if link is not None:
            with contextlib.suppress(OSError):
                link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)
            link.broken, link.error = True, because
            self._ask.append(link)
            self._wake()

    def sockets(self) -> list[tuple[Address, socket.socket]]:
        """The connections to peers that are open now, to be looked at."""
        return [(to, link.socket) for to, link in list(self._out.items()) if not link.broken]

    # -------------------------------------------------------------- sending

    def _open(self, to: Address) -> _Outgoing:
        sock = socket.socket(family_of(to.host))
        sock.setblocking(False)
        watch_path(sock)
        link = self._out[to] = _Outgoing(to, sock)
        if self._way is None:
            self._dial(link, link.address)
        else:
            self._to_dial.put(link)
        return link

    @staticmethod
    def _dial(link: _Outgoing, to: tuple[str, int]) -> None:
        with contextlib.suppress(BlockingIOError):
            link.socket.connect(to)
        link.dialled = True

    def _dial_planned(self) -> None:
        """In a thread: which source port takes the connection onto its path is probed."""
        assert self._way is not None
        while (link := self._to_dial.get()) is not None:
            way = self._way(*link.address)
            try:
                if way is not None:
                    link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    with contextlib.suppress(OSError):  # taken since: any path is better than none
                        link.socket.bind((way.source, way.port))
                self._dial(link, link.address if way is None else (way.target, link.address.port))
            except OSError as error:  # no way there, or the link was closed meanwhile
                link.broken, link.error = True, str(error)
            self._ask.append(link)
            self._wake()

    def _queues(self, link: _Outgoing, memory: range) -> bool:
        with link.lock:
            return any(
                np.frombuffer(view, np.uint8).ctypes.data in memory for view in [*link.ready, *link.queue]
            )

    def _push(self, link: _Outgoing) -> None:
        """Give the kernel what it takes. The caller holds the lock."""
        try:
            while link.queue or link.ready:
                self._seal_some(link)
                sent = link.socket.sendmsg(link.ready)
                while link.ready and sent >= len(link.ready[0]):
                    sent -= len(link.ready.popleft())
                if sent:
                    link.ready[0] = link.ready[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            link.broken = True
            link.queue.clear()
            link.ready.clear()

    @staticmethod
    def _seal_some(link: _Outgoing) -> None:
        """No more than the kernel may take soon: what is encrypted is in memory twice."""
        assert link.sealer is not None
        while link.queue and len(link.ready) < MOST_READY:
            chunk = link.sealer.next_chunk(link.queue[0])
            link.ready.extend(link.sealer.seal(chunk))
            if len(chunk) < len(link.queue[0]):
                link.queue[0] = link.queue[0][len(chunk) :]
            else:
                link.queue.popleft()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_in, b"!")

    # -------------------------------------------------------------- the I/O thread

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._turn()
        except BaseException as error:
            self.events.failed(error)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        os.close(self._reserve)

    def _turn(self) -> None:
        for key, events in self._selector.select(1.0 if self._strangers else None):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_out, 1 << 16)
                while self._ask:
                    self._watch(self._ask.popleft())
            elif not isinstance(key.data, _Outgoing):
                self._receive(key.data)
            elif key.data.registered:  # else it was dropped by the wake-up in this very batch of events
                self._progress(key.data, events)
        late = time.monotonic() - GREETING_S
        while self._strangers and (oldest := next(iter(self._strangers.values()))).since < late:
            self._hang_up(oldest)

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._turn_away()
            return
        sock.setblocking(False)
        watch_path(sock)
        handshake = Acceptor(self._token, self._identity, self._accepts(peer[0]))
        conn = _Receiving(sock, handshake, time.monotonic(), peer[0])
        self._strangers[sock] = conn
        self._selector.register(sock, selectors.EVENT_READ, conn)
        if len(self._strangers) > MAX_STRANGERS:
            self._hang_up(next(iter(self._strangers.values())))

    def _turn_away(self) -> None:
        """No descriptor is left: make room by a connection that proves nothing, or close the new one."""
        if self._strangers:
            self._hang_up(next(iter(self._strangers.values())))
            return
        os.close(self._reserve)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._reserve = os.open(os.devnull, os.O_RDONLY)

    def _hang_up(self, conn: _Receiving) -> None:
        self._strangers.pop(conn.socket, None)
        self._selector.unregister(conn.socket)
        conn.socket.close()

    def _watch(self, link: _Outgoing) -> None:
        """Registers interest: in writing while something is queued, always in the peer's closing."""
        if link.broken:
            self._drop(link)
            return
        if not link.dialled:
            return
        writes = (link.queue or link.ready or not link.connected) and link.handshake is None
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        if not link.registered:
            self._selector.register(link.socket, wanted, link)
        elif link.registered != wanted:
            self._selector.modify(link.socket, wanted, link)
        link.registered = wanted

    def _progress(self, link: _Outgoing, events: int) -> None:
        with link.lock:
            try:
                if link.handshake is None and not link.connected and events & selectors.EVENT_WRITE:
                    self._greet(link)
                if events & selectors.EVENT_READ and not link.broken:
                    self._hear(link)
            except BlockingIOError:
                pass
            except (OSError, PeerError) as error:
                link.broken, link.error = True, str(error)
            if link.connected and not link.broken:
                self._push(link)
        self._watch(link)

    def _greet(self, link: _Outgoing) -> None:
        failure = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        link.handshake = Opener(self._token, self._accepts(link.socket.getpeername()[0]))
        link.socket.sendall(link.handshake.hello())  # a new socket takes these few bytes at once

    def _hear(self, link: _Outgoing) -> None:
        """The peer's proof. Later it never writes on this socket: then readable means closed."""
        data = link.socket.recv(link.handshake.wants if link.handshake is not None else 1)
        if link.handshake is None or not data:
            raise PeerError("closed")
        proof = link.handshake.feed(data)
        if proof is not None:
            link.identity, link.sealer = link.handshake.identity, link.handshake.sealer
            link.handshake, link.connected = None, True
            link.ready.append(memoryview(proof))
            self.events.opened(link.address)

    def _drop(self, link: _Outgoing) -> None:
        if link.registered:
            self._selector.unregister(link.socket)
            link.registered = 0
        link.socket.close()
        link.queue.clear()
        link.ready.clear()
        if self._out.get(link.address) is link:
            del self._out[link.address]
        if not link.forgotten:  # also if the next one is open by now: what this one held is lost
            link.forgotten = True
            self.errors[link.address] = link.error
            self.events.broken(link.address)

    def _receive(self, conn: _Receiving) -> None:
        try:
            self._read(conn)
        except BlockingIOError:
            return
        except TamperedError as error:
            warn(f"the connection from {conn.peer} is closed and opened again: {error}")
            self._hang_up(conn)
        except (OSError, PeerError, ValueError):
            self._hang_up(conn)

    def _read(self, conn: _Receiving) -> None:
        while conn.handshake.wants:
            got = conn.socket.recv(conn.handshake.wants)
            if not got:
                raise PeerError("closed before the greeting")
            answer = conn.handshake.feed(got)
            if answer:
                conn.socket.sendall(answer)
        self._strangers.pop(conn.socket, None)
        unsealer = conn.handshake.unsealer
        assert unsealer is not None
        for _ in range(64):  # then let the others have their turn
            if conn.frame is None:
                conn.frame = frames.Incoming(self._empty)
            want = conn.frame.want
            count = conn.socket.recvmsg_into(unsealer.room(want))[0]
            if count == 0:
                raise PeerError("closed")
            if (whole := unsealer.took(want, count)) and conn.frame.took(whole):
                frame, conn.frame = conn.frame, None
                self.events.deliver(frame)
