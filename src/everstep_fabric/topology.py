"""What is connected to what: nodes with NIC ports, leaves, spines, and directed links with capacities.

    node h1, NIC 0 ── port of plane 0 ──► leaf ──► spine ──► leaf ──► port of plane 0 ── node h2, NIC 0
                   └─ port of plane 1 ──► …

A link has one direction: congestion has one. A path is the links it takes, host links included, so that two
flows meet exactly if their paths share a link. A NIC with two ports belongs to two planes; a path stays in
its plane unless the fabric says that spines join them (`cross_planes`), which is what lets hashing put both
of a NIC's flows on one port of the receiver.

A link's condition is the fraction of its capacity that is left: 1 healthy, 0.1 degraded, 0 dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from everstep.errors import UserError

WIDTH = 4  # links of the longest path: host, up, down, host
Path = tuple[int, ...]  # indices of links, from the sender's port to the receiver's
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of a NIC. The address is what probes and data connect to; simulations need none."""

    nic: int
    plane: int
    leaf: str
    gbps: float
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricNode:
    """A machine with the ports of its NICs."""

    name: str
    ports: tuple[Port, ...]
    nic_gbps: float | None = None  # what can be fed into one NIC, all its ports together


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A leaf or a spine; planes are networks that do not meet."""

    name: str
    plane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a cable. `address` is the receiver's interface: what a probe that dies there shows."""

    sender: str
    receiver: str
    gbps: float
    address: str | None = None

    @property
    def name(self) -> str:
        return f"{self.sender}>{self.receiver}"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A leaf-spine fabric. `condition`: the part of its capacity that a link still has, by its name."""

    name: str
    nodes: tuple[FabricNode, ...]
    leaves: tuple[Switch, ...]
    spines: tuple[Switch, ...]
    fabric_links: tuple[Link, ...]  # between leaves and spines; host links follow from the ports
    cross_planes: bool = False
    condition: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    def with_condition(self, condition: Mapping[str, float]) -> Topology:
        """The same fabric with some links degraded; a condition given replaces the one known."""
        return replace(self, condition={**self.condition, **condition})

    # ------------------------------------------------------------------ links by number

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Host links first, by node and port, both directions; then the fabric's own."""
        host = [link for node in self.nodes for port in node.ports for link in _host_links(node, port)]
        return (*host, *self.fabric_links)

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {link.name: number for number, link in enumerate(self.links)}

    @cached_property
    def capacity(self) -> Floats:
        """What each link can carry now, Gbit/s."""
        return np.array([link.gbps * self.condition.get(link.name, 1.0) for link in self.links])

    @cached_property
    def by_node(self) -> Mapping[str, FabricNode]:
        return {node.name: node for node in self.nodes}

    # ------------------------------------------------------------------ paths

    def port_pairs(self, source: tuple[str, int], target: tuple[str, int]) -> Iterator[tuple[Port, Port]]:
        """The ports a flow between two NICs may leave by and arrive at."""
        for one in self._ports_of[source]:
            for other in self._ports_of[target]:
                if one.plane == other.plane or self.cross_planes:
                    yield one, other

    def paths(self, source: tuple[str, int], target: tuple[str, int]) -> Ints:
        """All paths between two NICs, one a row, dead ones too; a path under one leaf ends with -1, -1."""
        blocks = []
        for one, other in self.port_pairs(source, target):
            middle = self.between(one.leaf, other.leaf)
            block = np.full((len(middle), WIDTH), -1, dtype=np.int64)
            block[:, 0] = self.index[f"{port_name(source[0], one)}>{one.leaf}"]
            block[:, 1 : 1 + middle.shape[1]] = middle
            block[:, 1 + middle.shape[1]] = self.index[f"{other.leaf}>{port_name(target[0], other)}"]
            blocks.append(block)
        return np.concatenate(blocks) if blocks else np.zeros((0, WIDTH), dtype=np.int64)

    @cached_property
    def plane_of(self) -> Ints:
        """The plane of each host link; -1 for the fabric's."""
        planes = [port.plane for node in self.nodes for port in node.ports for _ in range(2)]
        return np.array(planes + [-1] * len(self.fabric_links), dtype=np.int64)

    def between(self, leaf: str, other: str) -> Ints:
        """The ways from leaf to leaf: one of no links under one leaf, else one of two links per spine."""
        known = self._between.get((leaf, other))
        if known is None:
            known = self._between[leaf, other] = self._ways(leaf, other)
        return known

    def _ways(self, leaf: str, other: str) -> Ints:
        if leaf == other:
            return np.zeros((1, 0), dtype=np.int64)
        ways = [
            (self.index[f"{leaf}>{spine.name}"], self.index[f"{spine.name}>{other}"])
            for spine in self.spines
            if f"{leaf}>{spine.name}" in self.index and f"{spine.name}>{other}" in self.index
        ]
        return np.array(ways, dtype=np.int64).reshape(-1, 2)

    def alive(self, paths: Ints) -> NDArray[np.bool_]:
        """Which rows have no dead link. Negative entries are padding."""
        return np.asarray(np.where(paths >= 0, self.capacity[paths] > 0, True).all(axis=1))

    def spell(self, path: Path) -> str:
        """`h1.0.p0 > l1 > s3 > l2 > h2.0.p0`"""
        names = [self.links[number] for number in path if number >= 0]
        return " > ".join([names[0].sender, *(link.receiver for link in names)]) if names else "(no path)"

    @cached_property
    def _between(self) -> dict[tuple[str, str], Ints]:
        return {}

    @cached_property
    def _ports_of(self) -> Mapping[tuple[str, int], tuple[Port, ...]]:
        found: dict[tuple[str, int], list[Port]] = {}
        for node in self.nodes:
            for port in node.ports:
                found.setdefault((node.name, port.nic), []).append(port)
        return {key: tuple(ports) for key, ports in found.items()}


def port_name(node: str, port: Port) -> str:
    return f"{node}.{port.nic}.p{port.plane}"


def _host_links(node: FabricNode, port: Port) -> tuple[Link, Link]:
    name = port_name(node.name, port)
    return (
        Link(sender=name, receiver=port.leaf, gbps=port.gbps),
        Link(sender=port.leaf, receiver=name, gbps=port.gbps, address=port.address),
    )


def _check(fabric: Topology) -> None:
    leaves, spines = {s.name for s in fabric.leaves}, {s.name for s in fabric.spines}
    names = [*(n.name for n in fabric.nodes), *leaves, *spines]
    if len(set(names)) != len(fabric.nodes) + len(fabric.leaves) + len(fabric.spines):
        raise UserError(
            f"fabric {fabric.name}: two of its nodes, leaves or spines have one name; rename one."
        )
    for node in fabric.nodes:
        seen = set()
        for port in node.ports:
            if port.leaf not in leaves:
                raise UserError(f"node {node.name}: its port names leaf {port.leaf!r}, which is not a leaf.")
            if (port.nic, port.plane) in seen:
                raise UserError(f"node {node.name}: NIC {port.nic} has two ports in plane {port.plane}.")
            seen.add((port.nic, port.plane))
            if port.gbps <= 0:
                raise UserError(f"node {node.name}: gbps of NIC {port.nic} must be more than 0.")
    for link in fabric.fabric_links:
        if {link.sender, link.receiver} & leaves == set() or {link.sender, link.receiver} & spines == set():
            raise UserError(f"link {link.name}: a link joins a leaf and a spine, by their names.")
        if link.gbps <= 0:
            raise UserError(f"link {link.name}: gbps must be more than 0; a dead link has condition 0.")
    for name, fraction in fabric.condition.items():
        if name not in fabric.index:
            raise UserError(f"condition: {name!r} is not a link; write it as sender>receiver.")
        if not 0 <= fraction <= 1:
            raise UserError(f"condition of {name}: {fraction:g} is not a fraction between 0 and 1.")
