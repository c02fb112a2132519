"""The plan's paths made real: which source port a connection takes, how it fares, and when it must move.

    coordinator: `plan` ──► agent ──► routes.json ──┐ looked at by every worker of the node
                                                             ▼
      a port whose probed path is the planned one ◄── SourcePorts ◄── reassign ◄── PathWatch
                         └──► Links ──► the kernel's counts of each socket (TCP_INFO) ──┘

The coordinator plans for all tasks whenever workers come or go (`RoutesFile`). In between every worker has
the whole plan and moves its own flows only. Two workers that meet the same broken link decide alike, because
`reallocate` is a function of the plan and of the links suspected; where they suspect different links for a
moment they may choose one path both, which the next windows show and mend.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import UserError
from everstep.log import say
from everstep.net.links import Address, Links
from everstep.net.sockets import Way, progress_of
from everstep.protocol.messages import Sender
from everstep_fabric.catalogue import Hops, Tuple4
from everstep_fabric.document import ends_of, hops_of, routes_from
from everstep_fabric.flows import connection_name
from everstep_fabric.probe import Budget, Prober
from everstep_fabric.routing import Routing
from everstep_fabric.topology import Topology
from everstep_fabric.watch import Action, FlowMeasured, MoveFlow, PathWatch, WatchLimits

_PROBE_PACKETS = 1024  # of one connection
_PROBE_S = 2.0
Peer = tuple[str, int]  # where it listens


class PlannedPath(NamedTuple):
    """Of a flow: where its links arrive, and the addresses of its two ports, which are in one plane."""

    hops: Hops
    source: str
    target: str

    @classmethod
    def of(cls, topology: Topology, path: Sequence[int]) -> PlannedPath:
        return cls(hops_of(topology, path), *ends_of(topology, path))


@dataclass(slots=True)
class SourcePorts:
    """`ports(host, port)`: the addresses and the source port that take a connection to this peer onto its
    planned path; None, for any, where no path is planned.
    """

    source: str
    ports: range
    because: Callable[[str], None] = say
    flow_of: dict[Peer, str] = field(default_factory=dict)
    paths: dict[str, PlannedPath] = field(default_factory=dict)
    _prober: Prober | None = None
    _used: set[int] = field(default_factory=set)

    def __call__(self, host: str, port: int) -> Way | None:
        flow, prober = self.flow_of.get((host, port)), self._prober
        if flow is None or prober is None:
            return None
        path = self.paths[flow]
        source, target = path.source or self.source, path.target or host
        if target != host and not _listens(source, target, port):
            self.because(
                f"{flow} does not take its planned plane: {target}:{port} does not answer; start the agents "
                "of nodes with several planes with --bind 0.0.0.0."
            )
            return None
        key = Tuple4(protocol="tcp", source=source, target=target, target_port=port)
        prober.budget = Budget(packets=_PROBE_PACKETS, seconds=_PROBE_S, reply_s=prober.budget.reply_s)
        try:
            found = prober.port_for(key, path.hops, taken=self._used)
        except UserError as error:  # a worse path is no reason to stop training
            self.because(f"{flow} takes the kernel's port: {error}")
            return None
        if found is None:
            self.because(f"{flow} takes the kernel's port: none to {target}:{port} has the planned path.")
            return None
        self._used.add(found)
        return Way(source, found, target)

    def take(self, topology: Topology, planned: dict[Peer, tuple[str, PlannedPath]]) -> list[Peer]:
        """Other paths are planned. The peers whose connections are to be opened again."""
        moved = [peer for peer, (flow, path) in planned.items() if self.paths.get(flow) != path]
        if self._prober is None or self._prober.topology != topology:
            self._prober = Prober(topology=topology, ports=self.ports)
        self.flow_of = {peer: flow for peer, (flow, _) in planned.items()}
        self.paths = dict(planned.values())
        return moved

    def reassign(self, flow: str, path: PlannedPath) -> None:
        """The flow's next connection goes another way. What was known of ports may be stale by now."""
        self.paths[flow] = path
        if self._prober is not None:
            self._prober.catalogue.forget_all()

    def peer_of(self, flow: str) -> Peer | None:
        return next((peer for peer, name in self.flow_of.items() if name == flow), None)


def _listens(source: str, target: str, port: int) -> bool:
    """Does the peer listen at its address in this plane, too?"""
    try:
        socket.create_connection((target, port), timeout=_PROBE_S, source_address=(source, 0)).close()
    except OSError:
        return False
    return True


@dataclass(slots=True)
class RoutesFile:
    """What the coordinator has planned for all, as this node's agent writes it down."""

    path: Path
    _read: int = 0  # which version of the file

    def news(self) -> Routing | None:
        """The routes, if they are others than at the last look."""
        try:
            version = self.path.stat().st_mtime_ns
            if version == self._read:
                return None
            self._read = version
            return routes_from(json.loads(self.path.read_text()))
        except FileNotFoundError:  # nothing is planned yet
            return None
        except (OSError, UserError, KeyError, TypeError, ValueError) as error:
            say(f"the routes are not followed: {type(error).__name__}: {error}")
            return None


@dataclass(slots=True)
class Steering:
    """Looks at the routes and at this worker's connections every `interval_s`, and moves what must move."""

    me: Sender
    routes: RoutesFile
    ports: SourcePorts
    limits: WatchLimits = field(default_factory=WatchLimits)
    watch: PathWatch | None = None  # None: nothing is planned yet
    sockets: Callable[[], Sequence[tuple[Peer, socket.socket]]] = tuple
    move: Callable[[Peer], None] = lambda peer: None
    report: Callable[[Action], None] = lambda action: None
    interval_s: float = 0.25
    clock: Callable[[], float] = time.monotonic
    _stopped: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, fabric: Mapping[str, Any], me: Sender, host: str, shard: int) -> Steering:
        """From a worker's settings: `routes`, a file, and `ports`, the first and last of each shard."""
        first, last = fabric["ports"][shard]
        found = cls(me, RoutesFile(Path(fabric["routes"])), SourcePorts(host, range(first, last + 1)))
        found.look_at_routes()
        return found

    def way(self, host: str, port: int) -> Way | None:
        return self.ports(host, port)

    def start(self, links: Links) -> None:
        self.sockets, self.move = links.sockets, lambda peer: links.move(Address(*peer))
        self.report = lambda action: say(
            f"{'moved' if isinstance(action, MoveFlow) else 'not moved'}: {action.because}"
        )
        threading.Thread(target=self._run, name="flows", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self.interval_s):
            self.look_at_routes()
            self.look()

    def look_at_routes(self) -> None:
        routing = self.routes.news()
        if routing is not None:
            self.follow(routing)

    def follow(self, routing: Routing) -> None:
        """Of this plan, what is this worker's."""
        mine: dict[Peer, tuple[str, PlannedPath]] = {}
        start = connection_name(self.me.task, str(self.me.worker), "", 0).removesuffix(":0")
        for number, flow in enumerate(routing.flows):
            if flow.name.startswith(start):
                host, _, port = flow.name.removeprefix(start).rpartition(":")
                mine[host, int(port)] = flow.name, PlannedPath.of(routing.topology, routing.path(number))
        for peer in self.ports.take(routing.topology, mine):
            self.move(peer)
        if self.watch is None:
            self.watch = PathWatch(routing.topology, routing, self.limits)
        else:
            self._carry_out(self.watch.adopt(routing, self.clock()))

    def look(self) -> list[Action]:
        """One look at every connection, and what follows from it."""
        if self.watch is None:
            return []
        looks = []
        for peer, sock in self.sockets():
            flow = self.ports.flow_of.get(peer)
            if flow is None:
                continue
            try:
                seen = progress_of(sock)
            except OSError:  # closed while we looked
                continue
            looks.append(
                FlowMeasured(
                    flow=flow, acked_bytes=seen.acked_bytes, busy_s=seen.busy_s, waiting=seen.waiting
                )
            )
        actions = self.watch.handle(looks, self.clock())
        self._carry_out(actions)
        return actions

    def _carry_out(self, actions: list[Action]) -> None:
        assert self.watch is not None
        for action in actions:
            if isinstance(action, MoveFlow):
                peer = self.ports.peer_of(action.flow)
                if peer is None:
                    continue  # another worker's; it sees the same and moves it
                self.ports.reassign(action.flow, PlannedPath.of(self.watch.topology, action.after))
                self.move(peer)
            self.report(action)
