"""A fabric from what probes have seen: which switch interfaces packets die at, from node to node.

A trace is the list of addresses a packet passes, one a hop. An address belongs to one end of one link, so
it names that link: the one that arrives there. Addresses of one switch are joined by what must hold in a
leaf-spine network: the last switch before a node is that node's leaf, whatever interface it answered from;
nodes that are one switch apart share it; and a spine is the same spine if its next hop arrives at the same
interface. Where that leaves doubt (two leaves only), a spine seen from both sides counts as two. That is
harmless: each of the two carries one direction, and load has a direction.

Capacities do not show; they are given.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from everstep.errors import UserError
from everstep.fabric.topology import FabricNode, Link, Port, Switch, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTrace:
    """From node to node, by address: the switches' interfaces in between."""

    source: str
    target: str
    hops: tuple[str, ...]


def topology_of(
    traces: Sequence[PathTrace], *, link_gbps: float, port_gbps: float, name: str = "found"
) -> Topology:
    for trace in traces:
        if len(trace.hops) not in (1, 3):
            raise UserError(
                f"from {trace.source} to {trace.target} there are {len(trace.hops)} switches; "
                "a leaf-spine fabric has 1 or 3: describe this one in a file."
            )
    same = _Same()
    for trace in traces:  # a node's leaf, by any of its interfaces
        same.join(("leaf of", trace.source), trace.hops[0])
        same.join(("leaf of", trace.target), trace.hops[-1])
    for trace in traces:  # a spine: its arrival, and any interface it sends to
        if len(trace.hops) == 3:
            same.join(trace.hops[1], ("spine before", trace.hops[2]))
    nodes = sorted({end for trace in traces for end in (trace.source, trace.target)})
    leaf_names = _named("l", [same.root(("leaf of", node)) for node in nodes])
    spine_names = _named("s", [same.root(t.hops[1]) for t in traces if len(t.hops) == 3])
    links: dict[str, Link] = {}
    for trace in traces:
        if len(trace.hops) == 3:
            near = leaf_names[same.root(("leaf of", trace.source))]
            far = leaf_names[same.root(("leaf of", trace.target))]
            spine = spine_names[same.root(trace.hops[1])]
            for link in (
                Link(sender=near, receiver=spine, gbps=link_gbps, address=trace.hops[1]),
                Link(sender=spine, receiver=far, gbps=link_gbps, address=trace.hops[2]),
            ):
                links[link.name] = link
    return Topology(
        name=name,
        nodes=tuple(
            FabricNode(
                name=f"h{number + 1}",
                ports=(
                    Port(
                        nic=0,
                        plane=0,
                        leaf=leaf_names[same.root(("leaf of", node))],
                        gbps=port_gbps,
                        address=node,
                    ),
                ),
            )
            for number, node in enumerate(nodes)
        ),
        leaves=tuple(Switch(name=leaf) for leaf in sorted(set(leaf_names.values()))),
        spines=tuple(Switch(name=spine) for spine in sorted(set(spine_names.values()))),
        fabric_links=tuple(links[key] for key in sorted(links)),
    )


def _named(letter: str, roots: Sequence[Hashable]) -> dict[Hashable, str]:
    return {root: f"{letter}{number + 1}" for number, root in enumerate(dict.fromkeys(roots))}


class _Same:
    """Which names mean one thing."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def root(self, name: Hashable) -> Hashable:
        parent = self._parent.setdefault(name, name)
        while parent != name:
            name, parent = parent, self._parent[parent]
        return name

    def join(self, one: Hashable, other: Hashable) -> None:
        self._parent[self.root(one)] = self.root(other)
