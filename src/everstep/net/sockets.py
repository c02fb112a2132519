"""Options of every TCP connection of Everstep, and what the kernel knows of one.

A path that swallows everything is noticed by the kernel.

A machine that lost its power, or a firewall that forgot a connection, closes nothing: without these options a
reader waits without end and a writer for a quarter of an hour. A process that is stopped is another matter:
its kernel answers for it, so the connection stays.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from typing import NamedTuple

UNANSWERED_MS = 10_000  # bytes that no one has acknowledged for so long: the path is dead
IDLE_S, PROBE_EVERY_S, PROBES = 4, 2, 3  # without traffic it takes 10 s as well


def watch_path(sock: socket.socket) -> None:
    """Small messages go at once, and a dead path ends the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)


def listening(host: str, port: int = 0, backlog: int = 128) -> socket.socket:
    """A socket that listens at an address or a name of this machine, IPv4 or IPv6."""
    family, _, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    try:
        return socket.create_server(at, family=family, backlog=backlog)
    except OSError as error:  # without the address, which Python puts into the reason
        raise OSError(error.errno, os.strerror(error.errno or 0)) from None


class Way(NamedTuple):
    """How a connection to a peer is opened: from which of this machine's addresses and ports, and to which of
    the peer's addresses.
    """

    source: str
    port: int
    target: str


def family_of(address: str) -> socket.AddressFamily:
    """Of an address in numbers."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def in_numbers(host: str) -> str:
    """An address or a name, as an address."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def allow_many_files() -> None:
    """As many connections as the system allows this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class FlowProgress(NamedTuple):
    """What the kernel knows of a sender: totals since its socket was opened."""

    acked_bytes: int
    busy_s: float  # had something to send, and the receiver had room for it
    waiting: bool  # something is out and not acknowledged


def progress_of(sock: socket.socket) -> FlowProgress:
    """From struct tcp_info, whose front has not moved since Linux 4.10."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (unacked,) = struct.unpack_from("=I", info, 24)
    (acked,) = struct.unpack_from("=Q", info, 120)
    busy_us, receiver_full_us = struct.unpack_from("=QQ", info, 168)
    return FlowProgress(acked, (busy_us - receiver_full_us) / 1e6, unacked > 0)


def read_exactly(line: socket.socket, count: int, *, within_s: float | None = None) -> bytes:
    """`within_s`: for all of them, and not for each of the pieces in which a stranger may send them."""
    found, ends = b"", None if within_s is None else time.monotonic() + within_s
    while len(found) < count:
        if ends is not None:
            line.settimeout(max(0.001, ends - time.monotonic()))
        if not (more := line.recv(count - len(found))):
            raise ConnectionResetError(0, "the other end closed the connection")
        found += more
    return found
