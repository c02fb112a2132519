"""Regular leaf-spine fabrics, by a few numbers."""

from __future__ import annotations

from everstep.errors import UserError
from everstep_fabric.topology import FabricNode, Link, Port, Switch, Topology


def clos(
    *,
    name: str,
    nodes: int,
    nics: int = 1,
    planes: int = 1,
    port_gbps: float,
    nodes_per_leaf: int,
    spines: int,
    uplink_gbps: float,
    nic_gbps: float | None = None,
    cross_planes: bool = False,
) -> Topology:
    """A regular leaf-spine fabric: every group of nodes has one leaf a plane, every leaf one link to each
    spine.

    `spines` counts one plane's; with `cross_planes` the same spines serve all planes.
    """
    if min(nodes, nics, planes, nodes_per_leaf, spines) < 1:
        raise UserError("clos: nodes, nics, planes, nodes_per_leaf and spines must be at least 1.")
    groups = -(-nodes // nodes_per_leaf)
    leaves = [Switch(name=_leaf(g, p, planes), plane=p) for g in range(groups) for p in range(planes)]
    shared = [Switch(name=f"s{i}") for i in range(spines)]
    apart = [
        Switch(name=f"s{i}" if planes == 1 else f"s{i}p{p}", plane=p)
        for p in range(planes)
        for i in range(spines)
    ]
    tops = shared if cross_planes else apart
    cables = [(leaf, top) for leaf in leaves for top in tops if cross_planes or leaf.plane == top.plane]
    return Topology(
        name=name,
        nodes=tuple(
            FabricNode(
                name=f"n{number}",
                nic_gbps=nic_gbps,
                ports=tuple(
                    Port(nic=i, plane=p, leaf=_leaf(number // nodes_per_leaf, p, planes), gbps=port_gbps)
                    for i in range(nics)
                    for p in range(planes)
                ),
            )
            for number in range(nodes)
        ),
        leaves=tuple(leaves),
        spines=tuple(tops),
        fabric_links=tuple(
            link
            for leaf, top in cables
            for link in (
                Link(sender=leaf.name, receiver=top.name, gbps=uplink_gbps),
                Link(sender=top.name, receiver=leaf.name, gbps=uplink_gbps),
            )
        ),
        cross_planes=cross_planes,
    )


def _leaf(group: int, plane: int, planes: int) -> str:
    return f"l{group}" if planes == 1 else f"l{group}p{plane}"
