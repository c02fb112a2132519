"""Which path a source port takes, asked of the fabric itself, without raw sockets and without root.

A packet with a small time-to-live dies at a switch, and the switch says so to the sender; the kernel hands
that message to the socket that sent the packet (IP_RECVERR, the error queue). So: bind the source port, set
the TTL, start to connect, read who answered. The connection never comes about: with TTL 2 its first packet
dies at the spine.

    node ── TTL 1 dies here ──► leaf ── TTL 2 ──► spine ── TTL 3 ──► leaf ──► node

Probes use the protocol of the data and its target port: hashes differ between TCP and UDP, and between
ports. Every probe counts against a budget of packets and seconds, and goes to addresses of the fabric's
description only.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from everstep.errors import UserError
from everstep_fabric.catalogue import Catalogue, Hops, Tuple4
from everstep_fabric.topology import Topology

_IP_RECVERR = 11
_MSG_ERRQUEUE = 0x2000
_FROM_ICMP, _TIME_EXCEEDED = 2, 11
_LINGER_0 = struct.pack("ii", 1, 0)
_AT_ONCE = 64
FABRIC_TTLS = (2, 3)  # the spine, the far leaf
MESH_PORT = 33434  # probes of links die before they are there
PORTS_PER_PATH = 8  # and twice so many before a link is accused: e^-16 of the healthy ones are
LEAVES_PER_LOOK = 8
REACHED = ""  # in a hop: the target itself answered


@dataclass(slots=True, kw_only=True)
class Budget:
    """What probing may cost, in all."""

    packets: int = 4096
    seconds: float = 10.0
    reply_s: float = 0.25  # how long one round of answers is waited for
    clock: Callable[[], float] = time.monotonic
    sent: int = 0
    _began_s: float | None = None

    def take(self, wanted: int) -> int:
        """How many of these packets may be sent."""
        if self._began_s is None:
            self._began_s = self.clock()
        if self.clock() - self._began_s > self.seconds:
            return 0
        granted = max(0, min(wanted, self.packets - self.sent))
        self.sent += granted
        return granted


@dataclass(slots=True, kw_only=True)
class Prober:
    """Probes from this machine to the fabric's nodes; remembers what it learns."""

    topology: Topology
    ports: range  # source ports that may be used, for probes and then for data
    budget: Budget = field(default_factory=Budget)
    catalogue: Catalogue = field(default_factory=Catalogue)
    ttls: tuple[int, ...] = FABRIC_TTLS

    def __post_init__(self) -> None:
        if not self.ports or self.ports.start < 1 or self.ports.stop > 65536:
            raise UserError("ports: give a range of source ports such as 24000-24999.")

    def learn(self, key: Tuple4, ports: Sequence[int]) -> dict[int, Hops]:
        """Probe these ports; only those are reported whose every hop answered."""
        self._refuse_strangers(key.target)
        found: dict[int, list[str]] = {port: [] for port in ports}
        for ttl in self.ttls:
            asked = [port for port, hops in found.items() if len(hops) == self.ttls.index(ttl)]
            asked = asked[: self.budget.take(len(asked))]
            for port, hop in probe(key, asked, ttl, reply_s=self.budget.reply_s).items():
                found[port].append(hop)
        whole = {port: tuple(hops) for port, hops in found.items() if len(hops) == len(self.ttls)}
        self.catalogue.learn(key, whole, self.budget.clock())
        return whole

    def port_for(self, key: Tuple4, hops: Hops, *, taken: Iterable[int] = ()) -> int | None:
        """A source port whose path has these hops: a known one, or the first that probing finds."""
        busy = set(taken)
        now = self.budget.clock
        port = self.catalogue.take(key, hops, now(), avoid=busy)
        tried = {p for ports in self.catalogue.ports(key, now()).values() for p in ports} | busy
        left = [p for p in self.ports if p not in tried]
        for start in range(0, len(left), _AT_ONCE):
            if port is not None:
                break
            before = self.budget.sent
            self.learn(key, left[start : start + _AT_ONCE])
            port = self.catalogue.take(key, hops, now(), avoid=busy)
            if self.budget.sent == before:
                break  # nothing may be sent any more
        return port

    def _refuse_strangers(self, target: str) -> None:
        known = {port.address for node in self.topology.nodes for port in node.ports}
        if target not in known:
            raise UserError(
                f"{target} is not the address of a node in fabric {self.topology.name}: "
                "only addresses of the fabric file are probed."
            )


def dead_links(prober: Prober, source: str) -> tuple[str, ...]:
    """Links that no probe from this address comes over: those up from its leaf, and those from spines down to
    the next few leaves of its plane; nodes of other leaves look at others. So many ports are tried before a
    link is accused that hashes leave out a healthy one once in millions of looks. Where no switch answers, or
    the budget is used up, nothing is known.
    """
    links = prober.topology.fabric_links
    ports = [port for node in prober.topology.nodes for port in node.ports if port.address]
    leaf, plane = next(((p.leaf, p.plane) for p in ports if p.address == source), ("", 0))
    at = {p.leaf: p.address for p in ports if p.plane == plane or prober.topology.cross_planes}
    up = {link.address: link for link in links if link.sender == leaf and link.address}
    others = sorted(other for other in at if other != leaf)
    first = sum(other < leaf for other in others)
    seen_up: set[str] = set()
    found: list[str] = []
    examined = 0
    for other in (others[first:] + others[:first])[:LEAVES_PER_LOOK]:
        down = {link.address: link for link in links if link.receiver == other and link.address}
        key = Tuple4(protocol="tcp", source=source, target=str(at[other]), target_port=MESH_PORT)
        near, far = (_seen(prober, key, ttl, set(w)) for ttl, w in zip(FABRIC_TTLS, (up, down), strict=True))
        if near is None or far is None:
            break
        examined += 1
        seen_up |= near
        spines = {link.receiver for address, link in up.items() if address in seen_up}
        missed = [link.name for address, link in down.items() if address not in far and link.sender in spines]
        found += missed if far & set(down) else []
    missed = [link.name for address, link in up.items() if address not in seen_up]
    return (*(missed if examined and len(missed) < len(up) else ()), *found)


def _seen(prober: Prober, key: Tuple4, ttl: int, expected: set[str]) -> set[str] | None:
    """Which of these interfaces answer, tried until all have or enough ports were; None: the budget is used
    up.
    """
    seen: set[str] = set()
    enough = 2 * max(_AT_ONCE, PORTS_PER_PATH * len(expected))
    for start in range(0, min(enough, len(prober.ports)), _AT_ONCE):
        ports = prober.ports[start : start + _AT_ONCE]
        if expected <= seen:
            break
        if prober.budget.take(len(ports)) < len(ports):
            return None
        seen |= set(probe(key, ports, ttl, reply_s=prober.budget.reply_s).values())
    return seen & expected


def probe(key: Tuple4, ports: Sequence[int], ttl: int, *, reply_s: float) -> dict[int, str]:
    """One packet from each source port; where each died, or REACHED. Ports in use are left out."""
    found: dict[int, str] = {}
    for start in range(0, len(ports), _AT_ONCE):
        found |= _round(key, ports[start : start + _AT_ONCE], ttl, reply_s)
    return found


def _round(key: Tuple4, ports: Sequence[int], ttl: int, reply_s: float) -> dict[int, str]:
    found: dict[int, str] = {}
    with contextlib.ExitStack() as open_sockets, selectors.DefaultSelector() as selector:
        for port in ports:
            sock = _send(key, port, ttl)
            if sock is not None:
                open_sockets.callback(sock.close)
                selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, port)
        deadline = time.monotonic() + reply_s
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                assert isinstance(ready.fileobj, socket.socket)
                answer = _answer(ready.fileobj)
                if answer is not None:
                    found[ready.data] = answer
                    selector.unregister(ready.fileobj)
                elif key.protocol == "udp":  # writable at once; only an error tells something
                    selector.modify(ready.fileobj, selectors.EVENT_READ, ready.data)
    return found


def _send(key: Tuple4, port: int, ttl: int) -> socket.socket | None:
    kind = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}.get(key.protocol)
    if kind is None:
        raise UserError(f"protocol {key.protocol!r} cannot be probed; use tcp or udp.")
    sock = socket.socket(socket.AF_INET, kind)
    bound = False
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_IP, socket.IP_TTL, ttl)
        sock.setsockopt(socket.SOL_IP, _IP_RECVERR, 1)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        sock.bind((key.source, port))
        bound = True
        if kind == socket.SOCK_STREAM:
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                sock.connect((key.target, key.target_port))
        else:
            sock.sendto(b"", (key.target, key.target_port))
    except OSError as error:
        sock.close()
        in_use = (errno.EADDRINUSE, errno.EADDRNOTAVAIL) if bound else (errno.EADDRINUSE,)
        if error.errno in (
            *in_use,
            errno.ECONNREFUSED,
        ):  # bound and not available: this very connection exists
            return None
        raise UserError(_sentence(error, key, port)) from None
    return sock


def _sentence(error: OSError, key: Tuple4, port: int) -> str:
    match error.errno:
        case errno.EADDRNOTAVAIL:
            return f"{key.source} is not an address of this machine; probe from the node that has it."
        case errno.EACCES | errno.EPERM:
            return f"source port {port} is not for users; take ports from 1024 up."
        case errno.ENETUNREACH | errno.EHOSTUNREACH:
            return f"{key.target} cannot be reached from {key.source}: there is no route to it."
    return f"probing {key} from port {port} failed: {error.strerror}."


def _answer(sock: socket.socket) -> str | None:
    """The switch that killed the packet, REACHED if the target took or refused it, None if nothing yet."""
    try:
        _, ancillary, _, _ = sock.recvmsg(1, 512, _MSG_ERRQUEUE)
    except BlockingIOError:
        return _own_answer(sock)
    except OSError:
        return REACHED
    for level, kind, data in ancillary:
        if level == socket.SOL_IP and kind == _IP_RECVERR:
            _, origin, icmp_type, _, _, _, _ = struct.unpack_from("=IBBBBII", data)
            if origin == _FROM_ICMP and icmp_type == _TIME_EXCEEDED:
                return socket.inet_ntoa(data[16 + 4 : 16 + 8])  # sockaddr_in after sock_extended_err
            return REACHED
    return None


def _own_answer(sock: socket.socket) -> str | None:
    if sock.type == socket.SOCK_DGRAM:
        return None
    failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed == errno.ECONNREFUSED:
        return REACHED
    if failed:
        return None
    with contextlib.suppress(OSError):
        sock.getpeername()
        return REACHED
    return None
