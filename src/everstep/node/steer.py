"""The plan's paths made real: which source port a connection takes, how it fares, and when it must move.

    plan ──► SourcePorts ──► a port whose probed path is the planned one ──► Links
               ▲                                                              │
               └── reassign ◄── FlowWatch ◄── the kernel's counts of each socket (TCP_INFO)

Every worker knows the whole plan and moves its own flows only. Two workers that meet the same broken link
decide alike, because `reallocate` is a function of the plan and of the links suspected; where they suspect
different links for a moment they may choose one path both, which the next windows show and mend.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.errors import UserError
from everstep.fabric.allocate import allocate
from everstep.fabric.catalogue import Hops, Tuple4
from everstep.fabric.document import hops_of, tasks_from, topology_from
from everstep.fabric.flows import engine_flows
from everstep.fabric.routing import Routing
from everstep.fabric.watch import Action, CannotMove, FlowMeasured, MoveFlow, PathWatch, WatchLimits
from everstep.log import say
from everstep.net.links import Address, Links
from everstep.net.sockets import progress_of
from everstep.node.probe import Budget, Prober

_PROBE_PACKETS = 1024  # of one connection
_PROBE_S = 2.0


@dataclass(slots=True)
class SourcePorts:
    """`ports(host, port)`: the source port that takes a connection to this peer onto its planned path.

    Flows to one host are given out in their order, one to each (host, port): the fabric does not care which
    of two equal connections is which. A peer that is asked for again gets its flow's present path.
    """

    prober: Prober
    source: str
    planned: dict[str, list[tuple[str, Hops]]]  # target host -> flows to it and their hops
    because: Callable[[str], None] = say
    flow_of: dict[tuple[str, int], str] = field(default_factory=dict)
    hops: dict[str, Hops] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)

    def __call__(self, host: str, port: int) -> int | None:
        flow = self.flow_of.get((host, port)) or self._next_flow(host, port)
        if flow is None:
            return None
        key = Tuple4(protocol="tcp", source=self.source, target=host, target_port=port)
        self.prober.budget = Budget(
            packets=_PROBE_PACKETS, seconds=_PROBE_S, reply_s=self.prober.budget.reply_s
        )
        try:
            found = self.prober.port_for(key, self.hops[flow], taken=self._used)
        except UserError as error:  # a worse path is no reason to stop training
            self.because(f"{flow} takes the kernel's port: {error}")
            return None
        if found is None:
            self.because(f"{flow} takes the kernel's port: none to {host}:{port} has the planned path.")
            return None
        self._used.add(found)
        return found

    def reassign(self, flow: str, hops: Hops) -> None:
        """The flow's next connection goes another way. What was known of ports may be stale by now."""
        self.hops[flow] = hops
        self.prober.catalogue.forget_all()

    def peer_of(self, flow: str) -> tuple[str, int] | None:
        return next((peer for peer, name in self.flow_of.items() if name == flow), None)

    def _next_flow(self, host: str, port: int) -> str | None:
        waiting = self.planned.get(host, [])
        if not waiting:
            return None
        name, hops = waiting.pop(0)
        self.flow_of[host, port] = name
        self.hops[name] = hops
        return name


@dataclass(slots=True)
class FlowWatch:
    """Looks at this worker's connections every `interval_s`, and moves what the watch says must move."""

    watch: PathWatch
    ports: SourcePorts
    sockets: Callable[[], Sequence[tuple[tuple[str, int], socket.socket]]]
    move: Callable[[tuple[str, int]], None]
    report: Callable[[Action], None]
    interval_s: float = 0.25
    clock: Callable[[], float] = time.monotonic
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        threading.Thread(target=self._run, name="flows", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self.interval_s):
            self.look()

    def look(self) -> list[Action]:
        """One look at every connection, and what follows from it."""
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
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case MoveFlow():
                peer = self.ports.peer_of(action.flow)
                if peer is None:
                    return  # another worker's; it sees the same and moves it
                self.ports.reassign(action.flow, hops_of(self.watch.topology, action.after))
                self.move(peer)
            case CannotMove():
                pass
        self.report(action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """Everything a worker needs to follow the plan."""

    ports: SourcePorts
    watch: PathWatch


def steering_from(document: Mapping[str, Any]) -> Steering:
    """From a worker's settings: `fabric` (the fabric file with its tasks), `node`, `ports` (first, last),
    and `worker_flows`, if not all of the node's are this worker's.

    The plan is a function of the fabric and its tasks, so all workers compute the same one.
    """
    topology = topology_from({k: v for k, v in document["fabric"].items() if k != "task"})
    return steering(
        allocate(topology, engine_flows(tasks_from(document["fabric"], topology))),
        node=document["node"],
        mine=document.get("worker_flows"),
        ports=range(document["ports"][0], document["ports"][1] + 1),
    )


def steering(
    routing: Routing,
    *,
    node: str,
    ports: range,
    mine: Sequence[str] | None = None,
    limits: WatchLimits | None = None,
) -> Steering:
    """For one node's flows, or of them only those named."""
    topology = routing.topology
    if node not in topology.by_node:
        raise UserError(f"node {node!r} is not in fabric {topology.name}.")
    addresses = {n.name: next((p.address for p in n.ports if p.address), None) for n in topology.nodes}
    source = addresses[node]
    if source is None:
        raise UserError(f"node {node}: its port has no address; steering needs one in the fabric file.")
    planned: dict[str, list[tuple[str, Hops]]] = {}
    for number, flow in enumerate(routing.flows):
        target = addresses[flow.target[0]]
        if flow.source[0] == node and (mine is None or flow.name in mine) and target is not None:
            hops = hops_of(topology, routing.path(number))
            planned.setdefault(target, []).append((flow.name, hops))
    prober = Prober(topology=topology, ports=ports)
    return Steering(
        ports=SourcePorts(prober, source, planned),
        watch=PathWatch(topology, routing, limits or WatchLimits()),
    )


def watch_links(
    steering: Steering, links: Links, tell: Callable[[str, dict[str, Any]], None], *, interval_s: float = 0.25
) -> FlowWatch:
    """Watch a worker's links; report every move, and every flow that cannot be moved, with the reason."""

    def report(action: Action) -> None:
        say(f"{'moved' if isinstance(action, MoveFlow) else 'not moved'}: {action.because}")
        tell("flow", {"flow": action.flow, "moved": isinstance(action, MoveFlow), "because": action.because})

    watching = FlowWatch(
        watch=steering.watch,
        ports=steering.ports,
        sockets=links.sockets,
        move=lambda peer: links.move(Address(*peer)),
        report=report,
        interval_s=interval_s,
    )
    watching.start()
    return watching
