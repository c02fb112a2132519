"""Several sockets as the wire of a lane: `net.sockets` in the job file.

One TCP connection takes one path and one core's worth of bytes; a bundle of them takes several. A transfer is
cut into pieces, and each socket takes the next piece as soon as its kernel has sent most of the last one: who
completes more gets more, so a slow path delays its own piece and no others.

    sender    piece 0 ──► socket a ──► ┐        head: transfer, tensor, offset, length
              piece 1 ──► socket b ──► ├──► receiver: straight into the tensor's memory, in any order
              piece 2 ──► socket a ──► ┘        whole when all bytes are here

The sender listens and the receiver connects. Both prove that they know the task's secret (`handshake`), and
every piece is protected as a link's chunks are (`seal`). Any socket that breaks breaks the lane.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everstep.errors import PeerError
from everstep.net import frames
from everstep.net.handshake import Acceptor, Opener
from everstep.net.seal import CHUNK_BYTES, Sealer, Suite, TamperedError, Unsealer
from everstep.net.sockets import in_numbers, listening, watch_path

PIECE_BYTES = 256 << 10
GREETING_S = 5.0
_HEAD = struct.Struct("<IIQI")  # number of the transfer, of the tensor, offset, length
_NOTSENT_LOWAT = 25  # of TCP: no more than this is waiting in the kernel to be sent


@dataclass(slots=True)
class _Sending:
    socket: socket.socket
    sealer: Sealer
    queue: deque[memoryview] = field(default_factory=deque)
    sent: int = 0  # pieces

    def put(self, *parts: memoryview) -> None:
        for part in parts:
            while part.nbytes:
                chunk = self.sealer.next_chunk(part)
                self.queue.extend(self.sealer.seal(chunk))
                part = part[chunk.nbytes :]


@dataclass(slots=True)
class _Receiving:
    socket: socket.socket
    unsealer: Unsealer
    head: bytearray = field(default_factory=lambda: bytearray(_HEAD.size))
    filled: int = 0  # of the head
    want: memoryview | None = None  # what is to come of the piece


class BundleWire:
    def __init__(
        self,
        secret: bytes,
        host: str,
        count: int,
        accepts: Callable[[str], Sequence[Suite]],
        *,
        bind: str = "",
    ) -> None:
        """`host`: where peers reach this worker. `bind`: where it listens, if that is another address."""
        self._secret, self._host, self._count, self._accepts = secret, host, count, accepts
        self._bind = bind or host
        self._listener: socket.socket | None = None
        self._sending: list[_Sending] = []
        self._receiving: list[_Receiving] = []
        self._transfer = 0
        self._pieces: deque[tuple[bytes, memoryview]] = deque()
        self._views: list[memoryview] = []
        self._left = 0  # bytes to receive

    def name(self) -> bytes:
        self._listener = listening(self._bind)
        self._listener.setblocking(False)
        return f"{in_numbers(self._host)} {self._listener.getsockname()[1]}".encode()

    def begin_open(self, name: bytes, *, sends: bool) -> None:
        if sends:
            return
        host, _, port = name.decode().partition(" ")
        if not port.isdigit():
            raise PeerError("a peer opened a lane by an address that cannot be read")
        for _ in range(self._count):
            line = socket.create_connection((host, int(port)), timeout=GREETING_S)
            self._receiving.append(_Receiving(line, self._greet(line).other_end()))
            line.setblocking(False)

    def is_open(self) -> bool:
        while self._listener is not None and len(self._sending) < self._count:
            try:
                line, (peer, *_) = self._listener.accept()
            except BlockingIOError:
                return False
            line.settimeout(GREETING_S)
            try:
                sealer = self._answer(line, peer).other_end()
            except (OSError, PeerError):  # a stranger: the peer's come all the same
                line.close()
                continue
            line.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, PIECE_BYTES)
            line.setblocking(False)
            self._sending.append(_Sending(line, sealer))
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        return len(self._sending or self._receiving) == self._count

    def _greet(self, line: socket.socket) -> Sealer:
        watch_path(line)
        opener = Opener(self._secret, self._accepts(line.getpeername()[0]))
        line.sendall(opener.hello())
        while (proof := opener.feed(_received(line, opener.wants))) is None:
            pass
        line.sendall(proof)
        assert opener.sealer is not None
        return opener.sealer

    def _answer(self, line: socket.socket, peer: str) -> Unsealer:
        watch_path(line)
        acceptor = Acceptor(self._secret, b"", self._accepts(peer))
        while acceptor.wants:
            line.sendall(acceptor.feed(_received(line, acceptor.wants)))
        assert acceptor.unsealer is not None
        return acceptor.unsealer

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        self._transfer += 1
        self._views = [frames.raw(tensor) for tensor in tensors]
        self._left = sum(view.nbytes for view in self._views)
        if self._sending:
            for number, view in enumerate(self._views):
                for at in range(0, view.nbytes, PIECE_BYTES):
                    piece = view[at : at + PIECE_BYTES]
                    self._pieces.append((_HEAD.pack(self._transfer, number, at, piece.nbytes), piece))

    def is_done(self) -> bool:
        try:
            if self._sending:
                for each in self._sending:
                    self._send_some(each)
                return not self._pieces and not any(each.queue for each in self._sending)
            for line in self._receiving:
                self._receive_some(line)
        except (OSError, TamperedError) as error:
            raise PeerError(str(error)) from None
        return self._left == 0

    def _send_some(self, to: _Sending) -> None:
        """Until the kernel takes no more."""
        try:
            while to.queue or self._pieces:
                if not to.queue:
                    head, piece = self._pieces.popleft()
                    to.put(memoryview(head), piece)
                    to.sent += 1
                sent = to.socket.sendmsg(list(to.queue)[:16])
                while to.queue and sent >= to.queue[0].nbytes:
                    sent -= to.queue.popleft().nbytes
                if sent:
                    to.queue[0] = to.queue[0][sent:]
        except BlockingIOError:
            return

    def _receive_some(self, of: _Receiving) -> None:
        """Until nothing is there, or what is there belongs to a later transfer."""
        try:
            while of.want is not None or self._left:
                if of.want is None and of.filled == _HEAD.size and not self._takes_head(of):
                    return
                want = memoryview(of.head)[of.filled :] if of.want is None else of.want
                count = of.socket.recvmsg_into(of.unsealer.room(want))[0]
                if count == 0:
                    raise PeerError("the other end has closed it")
                whole = of.unsealer.took(want, count)
                if of.want is None:
                    of.filled += whole
                else:
                    self._left -= whole
                    of.want = of.want[whole:] if whole < of.want.nbytes else None
        except BlockingIOError:
            return

    def _takes_head(self, of: _Receiving) -> bool:
        """Where the bytes that follow belong. False: the transfer before theirs is not over."""
        transfer, number, at, length = _HEAD.unpack(of.head)
        if transfer > self._transfer:
            return False
        if transfer < self._transfer or number >= len(self._views) or not 0 < length <= CHUNK_BYTES * 16:
            raise PeerError("a piece of a transfer that cannot be")
        of.want, of.filled = self._views[number][at : at + length], 0
        if of.want.nbytes != length:
            raise PeerError("a piece of a transfer that cannot be")
        return True

    def waits_since(self) -> float | None:
        return None  # the kernel closes a connection on which nothing comes on (`watch_path`)

    def interrupt(self) -> None:
        """`is_done` never waits."""

    def leave(self) -> None:
        for sending in self._sending:
            sending.socket.close()
        for receiving in self._receiving:
            receiving.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._pieces.clear()
        self._views = []

    def close(self) -> None:
        """Nothing is left."""


def _received(line: socket.socket, count: int) -> bytes:
    data = line.recv(count)
    if not data:
        raise PeerError("closed before the greeting")
    return data
