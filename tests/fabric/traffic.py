"""Real traffic on the testbed: bulk TCP, links under a watch; planned and not."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from everstep.net.envelope import Envelope
from everstep.net.links import Address, LinkEvents, Links
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep_fabric import Flow, Routing, allocate
from everstep_fabric.flows import connection_name
from everstep_fabric.steer import PlannedPath, RoutesFile, SourcePorts, Steering
from everstep_fabric.watch import MoveFlow, WatchLimits
from tests.fabric.fabric_testbed import Testbed, enter

PORTS = range(24000, 28000)
FIRST_PORT = 29000  # where bulk flows are received
MESSAGE = 32 * 1024
WINDOW = 8  # messages of one flow under way; two such flows still fit into a switch's queue
MEND_AFTER_S = 0.5  # as in the engine's body


def flow(name: str, source: int, target: int, nbytes: float = 1e9) -> Flow:
    return Flow(
        name=name,
        task="t",
        phase="all",
        group=name,
        source=(f"h{source}", 0),
        target=(f"h{target}", 0),
        bytes=nbytes,
    )


# ---------------------------------------------------------------------- bulk TCP


@dataclass(slots=True)
class Bulk:
    """One TCP connection that sends as fast as it can."""

    sender: socket.socket
    receiver: socket.socket
    received: int = 0

    def start(self) -> None:
        for work in (self._send, self._receive):
            threading.Thread(target=work, daemon=True).start()

    def _send(self) -> None:
        block = bytes(256 * 1024)
        try:
            while True:
                self.sender.sendall(block)
        except OSError:
            return

    def _receive(self) -> None:
        buffer = bytearray(256 * 1024)
        try:
            while count := self.receiver.recv_into(buffer):
                self.received += count
        except OSError:
            return

    def close(self) -> None:
        """At once: what is still queued must not be in the next measurement's way."""
        for sock in (self.sender, self.receiver):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # wakes its thread
            sock.close()


def bulk_rates(
    testbed: Testbed, flows: Sequence[Flow], routing: Routing | None, *, warm_s: float, seconds: float
) -> list[float]:
    """Mbit/s of each flow while all send; by the plan, or, without one, with ports of the kernel's choice."""
    steered = {} if routing is None else _source_ports(testbed, routing)
    runs = []
    for number, one in enumerate(flows):
        node, target = one.source[0], one.target[0]
        where = testbed.host(int(target[1:])), FIRST_PORT + number
        listener = testbed.inside(target, lambda where=where: socket.create_server(where))
        sender = testbed.inside(node, lambda where=where, node=node: _connect(where, steered.get(node)))
        receiver, _ = listener.accept()
        listener.close()
        runs.append(Bulk(sender, receiver))
    for run in runs:
        run.start()
    time.sleep(warm_s)
    before, began = [run.received for run in runs], time.monotonic()
    time.sleep(seconds)
    spent = time.monotonic() - began
    rates = [(run.received - was) * 8 / spent / 1e6 for run, was in zip(runs, before, strict=True)]
    for run in runs:
        run.close()
    return rates


def _source_ports(testbed: Testbed, routing: Routing) -> dict[str, SourcePorts]:
    found: dict[str, SourcePorts] = {}
    for node in {one.source[0] for one in routing.flows}:
        found[node] = SourcePorts(testbed.host(int(node[1:])), PORTS)
        found[node].take(
            routing.topology,
            {
                (testbed.host(int(one.target[0][1:])), FIRST_PORT + number): (
                    one.name,
                    PlannedPath.of(routing.topology, routing.path(number)),
                )
                for number, one in enumerate(routing.flows)
                if one.source[0] == node
            },
        )
    return found


def _connect(where: tuple[str, int], ports: SourcePorts | None) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ports is not None:
        way = ports(*where)
        if way is None:
            raise RuntimeError(f"no source port for {where}")
        sock.bind((way.source, way.port))
    sock.connect(where)
    return sock


# ---------------------------------------------------------------------- links under a watch


@dataclass(slots=True)
class Stream:
    """Messages over Links from one worker to another, resent when their link breaks, as the engine does."""

    links: Links
    to: Address
    number: int
    sent: int = 0
    pending: dict[int, torch.Tensor] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)  # when each message first arrived
    room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(WINDOW))
    lock: threading.Lock = field(default_factory=threading.Lock)
    duplicates: int = 0
    stopped: bool = False

    def run(self, namespace: str) -> None:
        enter(namespace)
        while not self.stopped:
            if self.room.acquire(timeout=0.2):
                with self.lock:
                    self.sent += 1
                    self.pending[self.sent] = torch.zeros(MESSAGE // 4)
                self._post(self.sent)

    def resend(self, namespace: str) -> None:
        enter(namespace)
        for number in sorted(self.pending):
            self._post(number)

    def _post(self, number: int) -> None:
        tensor = self.pending.get(number)
        if tensor is not None:
            name = Parcel(ParcelKind.ACTIVATION, 0, number, 0, None, 0, self.number, 0)
            self.links.send(self.to, name, Envelope(), tensor)

    def delivered(self, number: int) -> None:
        with self.lock:
            if self.pending.pop(number, None) is None:
                self.duplicates += 1
                return
        self.arrivals.append(time.monotonic())
        self.room.release()

    def mbit(self, start: float, end: float) -> float:
        return sum(start <= at < end for at in self.arrivals) * MESSAGE * 8 / (end - start) / 1e6


@dataclass(slots=True)
class WatchedRun:
    streams: list[Stream]
    hurt: int  # the stream whose path is harmed
    moves: list[tuple[float, str, str]]  # when, flow, why
    broken_at: float
    end: float
    start: float


def watched_run(
    testbed: Testbed, *, num_flows: int, harm: str, before_s: float, after_s: float, limits: WatchLimits
) -> WatchedRun:
    """Flows h1 to h2 over Links, planned; then spine 1's cable to leaf 2 is cut to a tenth, or dies."""
    ports = SourcePorts(testbed.host(1), PORTS)
    plan = Steering(Sender("t", Worker(0, 0), 1), RoutesFile(Path("none")), ports, limits)
    streams: list[Stream] = []
    namespace = "h1"

    def broken(address: Address) -> None:
        for stream in streams:
            if stream.to == address:
                threading.Timer(MEND_AFTER_S, stream.resend, (namespace,)).start()

    def deliver(frame: object) -> None:
        streams[frame.parcel.sender].delivered(frame.parcel.step)  # type: ignore[attr-defined]

    def links(host: str, way: object = None) -> Links:
        made = Links(
            LinkEvents(deliver=deliver, broken=broken, failed=lambda error: print(error, file=sys.stderr)),
            token=b"t" * 16,
            host=host,
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
            way=way,  # type: ignore[arg-type]
        )
        made.start()
        return made

    receivers = [testbed.inside("h2", lambda: links(testbed.host(2))) for _ in range(num_flows)]
    flows = [flow(connection_name("t", "0:0", *receiver.address), 1, 2) for receiver in receivers]
    routing = allocate(testbed.topology(), flows)
    plan.follow(routing)
    sender = testbed.inside("h1", lambda: links(testbed.host(1), plan.ports))
    streams += [Stream(sender, receiver.address, n) for n, receiver in enumerate(receivers)]
    moves: list[tuple[float, str, str]] = []

    def told(action: object) -> None:
        moves.append((time.monotonic(), action.flow, action.because))  # type: ignore[attr-defined]
        if not isinstance(action, MoveFlow):
            print("not moved:", action.because, file=sys.stderr)  # type: ignore[attr-defined]

    start = time.monotonic()
    for stream in streams:
        threading.Thread(target=stream.run, args=("h1",), daemon=True).start()
    plan.start(sender)
    plan.report = told
    time.sleep(before_s)
    over_spine_1 = testbed.topology().index["s1>l2"]
    hurt_flow = next(name for name, path in routing.by_name.items() if over_spine_1 in path)
    hurt = next(s.number for s in streams if plan.ports.flow_of[tuple(s.to)] == hurt_flow)
    broken_at = time.monotonic()
    if harm == "cut":
        testbed.cut(2, 1, testbed.rate_mbit / 10)
    elif harm == "dead":
        testbed.kill(2, 1)
    time.sleep(after_s)
    end = time.monotonic()
    for stream in streams:
        stream.stopped = True
    plan.stop()
    for one in (sender, *receivers):
        one.stop()
    testbed.heal(2, 1)
    return WatchedRun(streams=streams, hurt=hurt, moves=moves, broken_at=broken_at, end=end, start=start)
