"""What others do with the same flows: hashing (ECMP), chance, and taking turns.

`ecmp` is what a fabric does by itself. The sender's bond hashes each connection onto a port of its NIC, the
leaf hashes it onto an uplink, the spine, where it serves both planes, hashes it onto one of the receiver's
ports. Each hash is a function of the connection's ports, which are as good as random; the switches leave
out links that are dead, and know nothing of load or of degraded links.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from everstep.errors import UserError
from everstep.fabric.flows import Flow
from everstep.fabric.routing import Routing
from everstep.fabric.topology import WIDTH, Ints, Topology

POLICIES = ("ecmp", "random", "round-robin")


def route(topology: Topology, flows: Sequence[Flow], policy: str, chance: np.random.Generator) -> Routing:
    match policy:
        case "ecmp":
            return ecmp(topology, flows, chance)
        case "random":
            return anywhere(topology, flows, chance)
        case "round-robin":
            return in_turn(topology, flows)
    raise UserError(f"policy {policy!r} is not one of {', '.join(POLICIES)}.")


def ecmp(topology: Topology, flows: Sequence[Flow], chance: np.random.Generator) -> Routing:
    rows = []
    for flow in flows:
        paths = _live(topology, flow)
        for column in range(WIDTH):  # port, uplink, port of the receiver: each hop hashes for itself
            hops = np.unique(paths[:, column])
            paths = paths[paths[:, column] == hops[chance.integers(len(hops))]]
        rows.append(paths[0])
    return _routing(topology, flows, rows, "by hash")


def anywhere(topology: Topology, flows: Sequence[Flow], chance: np.random.Generator) -> Routing:
    """One draw over all paths, planes kept: hashing without the bond's and the spine's share of bad luck."""
    rows = []
    for flow in flows:
        paths = _same_plane(topology, flow)
        rows.append(paths[chance.integers(len(paths))])
    return _routing(topology, flows, rows, "by chance")


def in_turn(topology: Topology, flows: Sequence[Flow]) -> Routing:
    """Each sending NIC takes its paths one after the other: even at the sender, blind to the receiver."""
    turn: dict[str, int] = {}
    rows = []
    for flow in flows:
        paths = _same_plane(topology, flow)
        leaf = topology.links[int(paths[0][0])].receiver
        rows.append(paths[turn.get(leaf, 0) % len(paths)])
        turn[leaf] = turn.get(leaf, 0) + 1
    return _routing(topology, flows, rows, "in turn")


def _live(topology: Topology, flow: Flow) -> Ints:
    paths = topology.paths(flow.source, flow.target)
    paths = paths[topology.alive(paths)]
    if not len(paths):
        raise UserError(f"flow {flow.name}: no live path from {flow.source[0]} to {flow.target[0]}.")
    return paths


def _same_plane(topology: Topology, flow: Flow) -> Ints:
    paths = _live(topology, flow)
    last = np.where(paths[:, 3] >= 0, paths[:, 3], paths[:, 1])
    same = topology.plane_of[paths[:, 0]] == topology.plane_of[last]
    return np.asarray(paths[same]) if same.any() else paths


def _routing(topology: Topology, flows: Sequence[Flow], rows: list[Ints], because: str) -> Routing:
    paths = np.array(rows, dtype=np.int64).reshape(-1, WIDTH)
    return Routing(topology=topology, flows=tuple(flows), paths=paths, because=because)
