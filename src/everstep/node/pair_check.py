"""The network between two nodes, measured by one of them: answers, bytes in both directions, clocks.

The coordinator names both ends and gives them a key that counts once:

    measures                    answers
    key               ──►       known for `KEY_S`; else it closes, and is tried again
    p                 ──►       its clock          `PINGS` times: time of an answer, difference of the clocks
    u, size, bytes    ──►       their hash         first a few, then as many as take about `SPAN_S`
    d, size           ──►       bytes, their hash
    r                 ──►       packets it has sent, and sent again

Over the address at which the workers of a node are reached, with plain TCP as their tensors go. One
connection, so a network of more than some GB/s shows as that.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable

import xxhash

from everstep.net.sockets import listening, read_exactly
from everstep.protocol.messages import MeasurePair, PairMeasured

KEY_S = 30.0  # how long a key is known
KEY_BYTES = 32
PINGS = 20
SPAN_S = 0.3  # of a transfer
FIRST_BYTES, MOST_BYTES, BLOCK = 1 << 18, 1 << 28, 1 << 18
TRY_S = 5.0  # for all of it
SERVE_S = 10.0
STRANGER_S = 2.0  # for a caller to bring its key
MOST_CALLERS = 16
_RESENT_AT, _SENT_AT = 100, 136  # in the kernel's tcp_info: tcpi_total_retrans, tcpi_segs_out
_PATTERN = bytes(range(256)) * (BLOCK // 256)
_SIZE, _CLOCK, _HASH = struct.Struct("!Q"), struct.Struct("!d"), struct.Struct("!Q")
_PACKETS = struct.Struct("!II")


class PairServer:
    """Answers those whose key it was told."""

    def __init__(self, host: str, *, clock: Callable[[], float] = time.time) -> None:
        self.host, self.port = host, 0
        self._clock = clock
        self._keys: dict[bytes, float] = {}  # until when
        self._callers = threading.BoundedSemaphore(MOST_CALLERS)
        self._listener: socket.socket | None = None

    def open(self) -> None:
        self._listener = listening(self.host)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), name="pairs", daemon=True).start()

    def close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()

    def expect(self, key: str) -> None:
        now = time.monotonic()
        self._keys = {one: until for one, until in self._keys.items() if until > now}
        self._keys[key.encode()] = now + KEY_S

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            if self._callers.acquire(blocking=False):
                threading.Thread(target=self._answer, args=(caller,), daemon=True).start()
            else:
                caller.close()

    def _answer(self, caller: socket.socket) -> None:
        try:
            with caller, contextlib.suppress(OSError):
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                given, now = read_exactly(caller, KEY_BYTES, within_s=STRANGER_S), time.monotonic()
                known = [k for k, until in list(self._keys.items()) if until > now]
                if not (found := [key for key in known if hmac.compare_digest(key, given)]):
                    return
                if self._keys.pop(found[0], None) is None:  # another caller with this key was faster
                    return
                caller.settimeout(SERVE_S)
                caller.sendall(b"k")
                self._serve(caller)
        finally:
            self._callers.release()

    def _serve(self, caller: socket.socket) -> None:
        ends = time.monotonic() + SERVE_S
        while time.monotonic() < ends:
            match read_exactly(caller, 1):
                case b"p":
                    caller.sendall(_CLOCK.pack(self._clock()))
                case b"u":
                    caller.sendall(_HASH.pack(_take(caller, _size(caller))))
                case b"d":
                    caller.sendall(_HASH.pack(_give(caller, _size(caller))))
                case b"r":
                    caller.sendall(_PACKETS.pack(*_packets(caller)))
                case _:
                    return


def measured(order: MeasurePair, *, clock: Callable[[], float] = time.time) -> PairMeasured:
    """Never raises for what the network does: that is an answer."""
    ends = time.monotonic() + TRY_S
    while True:
        try:
            with _called(order, ends) as line:
                return _measured(line, order, clock)
        except ConnectionRefusedError as error:
            why = error.strerror or str(error)
            break
        except _NotYet:
            why = "it does not know of this check"
            if time.monotonic() + 0.1 > ends:
                break
            time.sleep(0.05)
        except OSError as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            break
    return PairMeasured(peer=order.peer, key=order.key, error=why)


class _NotYet(Exception):
    """The other end has not been told the key."""


def _called(order: MeasurePair, ends: float) -> socket.socket:
    line = socket.create_connection((order.host, order.port), timeout=max(0.1, ends - time.monotonic()))
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(order.key.encode())
        if line.recv(1) != b"k":
            raise _NotYet
    except ConnectionResetError:
        line.close()
        raise _NotYet from None
    except BaseException:
        line.close()
        raise
    return line


def _measured(line: socket.socket, order: MeasurePair, clock: Callable[[], float]) -> PairMeasured:
    pings = [_ping(line, clock) for _ in range(PINGS)]
    wrong = 0
    rates: dict[bytes, float] = {}
    for way in (b"u", b"d"):
        took, same = _transfer(line, way, FIRST_BYTES)
        size = int(min(MOST_BYTES, max(FIRST_BYTES, FIRST_BYTES / took * SPAN_S)))
        again, same_again = _transfer(line, way, size)
        wrong += (not same) + (not same_again)
        rates[way] = size / again
    return PairMeasured(
        peer=order.peer,
        key=order.key,
        out_mb_s=rates[b"u"] / 1e6,
        in_mb_s=rates[b"d"] / 1e6,
        answer_ms=min(pings)[0] * 1e3,  # the fastest: a busy machine answers late now and then
        clock_off_s=min(pings)[1],
        resent=_resent(line),
        error="other bytes arrived than were sent" if wrong else "",
    )


def _ping(line: socket.socket, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds until the answer, and how far the clock here is ahead of the other one."""
    began, here = time.monotonic(), clock()
    line.sendall(b"p")
    (there,) = _CLOCK.unpack(read_exactly(line, _CLOCK.size))
    took = time.monotonic() - began
    return took, here + took / 2 - there


def _transfer(line: socket.socket, way: bytes, size: int) -> tuple[float, bool]:
    began = time.monotonic()
    line.sendall(way + _SIZE.pack(size))
    mine = _give(line, size) if way == b"u" else _take(line, size)
    (theirs,) = _HASH.unpack(read_exactly(line, _HASH.size))
    return max(1e-6, time.monotonic() - began), mine == theirs


def _give(line: socket.socket, size: int) -> int:
    told = xxhash.xxh3_64()
    while size:
        block = _PATTERN[:size]
        line.sendall(block)
        told.update(block)
        size -= len(block)
    return told.intdigest()


def _take(line: socket.socket, size: int) -> int:
    told, room = xxhash.xxh3_64(), memoryview(bytearray(BLOCK))
    while size:
        if not (count := line.recv_into(room[: min(size, BLOCK)])):
            raise ConnectionResetError(0, "the other end closed the connection")
        told.update(room[:count])
        size -= count
    return told.intdigest()


def _size(line: socket.socket) -> int:
    size: int = _SIZE.unpack(read_exactly(line, _SIZE.size))[0]
    return min(size, MOST_BYTES)


def _resent(line: socket.socket) -> float:
    """The share of packets that both ends have sent again: bytes go both ways, and so do losses."""
    line.sendall(b"r")
    ends = [_packets(line), _PACKETS.unpack(read_exactly(line, _PACKETS.size))]
    sent = sum(sent for sent, _ in ends)
    return sum(again for _, again in ends) / sent if sent else 0.0


def _packets(line: socket.socket) -> tuple[int, int]:
    """Sent, and sent again; zeros where the kernel does not say."""
    facts = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    if len(facts) < _SENT_AT + 4:
        return 0, 0
    (again,), (sent,) = struct.unpack_from("I", facts, _RESENT_AT), struct.unpack_from("I", facts, _SENT_AT)
    return sent, again
