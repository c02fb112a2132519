"""Fabrics as TOML, plans as JSON.

[fabric]
name = "lab"
[[leaf]] name = "l1"          [[node]] name = "h1"
[[spine]] name = "s1"         ports = [{ leaf = "l1", gbps = 0.1, address = "10.1.1.2" }]
[[cable]]                     # both directions; the address where each direction arrives
leaf = "l1", spine = "s1", gbps = 0.1, spine_address = "10.10.1.2", leaf_address = "10.10.1.1"
[[link]]                      # one direction only: sender, receiver, gbps, address
[condition]                   # what is known to be broken: fraction of capacity left
"l1>s1" = 0.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everstep.errors import UserError
from everstep_fabric.flows import Flow
from everstep_fabric.routing import Routing
from everstep_fabric.topology import WIDTH, FabricNode, Link, Port, Switch, Topology


def topology_from(document: Mapping[str, Any]) -> Topology:
    check_fields(
        document,
        "the fabric file",
        ("fabric", "leaf", "spine", "node", "cable", "link", "condition"),
    )
    about = document.get("fabric", {})
    check_fields(about, "[fabric]", ("name", "cross_planes"))
    condition = {str(k): number(v, f"condition of {k}") for k, v in document.get("condition", {}).items()}
    leaves = tuple(_switch(row, "[[leaf]]") for row in document.get("leaf", ()))
    spines = tuple(_switch(row, "[[spine]]") for row in document.get("spine", ()))
    if not leaves or "node" not in document:
        raise UserError("the fabric file has no [[leaf]] or no [[node]]; see docs/fabric.md.")
    return Topology(
        name=about.get("name", "fabric"),
        nodes=tuple(_node(row, leaves) for row in document["node"]),
        leaves=leaves,
        spines=spines,
        fabric_links=(
            *(link for row in document.get("cable", ()) for link in _cable(row)),
            *(_one_way(row) for row in document.get("link", ())),
        ),
        cross_planes=bool(about.get("cross_planes", False)),
        condition=condition,
    )


def _switch(row: Mapping[str, Any], where: str) -> Switch:
    check_fields(row, where, ("name", "plane"))
    return Switch(name=str(required(row, "name", where)), plane=int(row.get("plane", 0)))


def _node(row: Mapping[str, Any], leaves: Sequence[Switch]) -> FabricNode:
    name = str(required(row, "name", "[[node]]"))
    check_fields(row, f"node {name}", ("name", "ports", "nic_gbps"))
    planes = {leaf.name: leaf.plane for leaf in leaves}
    ports = []
    for port in required(row, "ports", f"node {name}"):
        where = f"a port of node {name}"
        check_fields(port, where, ("nic", "plane", "leaf", "gbps", "address"))
        leaf = str(required(port, "leaf", where))
        ports.append(
            Port(
                nic=int(port.get("nic", 0)),
                plane=int(port.get("plane", planes.get(leaf, 0))),
                leaf=leaf,
                gbps=number(required(port, "gbps", where), f"gbps of {where}"),
                address=port.get("address"),
            )
        )
    nic_gbps = row.get("nic_gbps")
    return FabricNode(name=name, ports=tuple(ports), nic_gbps=None if nic_gbps is None else float(nic_gbps))


def _cable(row: Mapping[str, Any]) -> tuple[Link, Link]:
    check_fields(row, "[[cable]]", ("leaf", "spine", "gbps", "spine_address", "leaf_address"))
    leaf, spine = str(required(row, "leaf", "[[cable]]")), str(required(row, "spine", "[[cable]]"))
    gbps = number(required(row, "gbps", f"cable {leaf}-{spine}"), f"gbps of cable {leaf}-{spine}")
    return (
        Link(sender=leaf, receiver=spine, gbps=gbps, address=row.get("spine_address")),
        Link(sender=spine, receiver=leaf, gbps=gbps, address=row.get("leaf_address")),
    )


def _one_way(row: Mapping[str, Any]) -> Link:
    check_fields(row, "[[link]]", ("sender", "receiver", "gbps", "address"))
    sender, receiver = str(required(row, "sender", "[[link]]")), str(required(row, "receiver", "[[link]]"))
    gbps = number(required(row, "gbps", f"link {sender}>{receiver}"), f"gbps of link {sender}>{receiver}")
    return Link(sender=sender, receiver=receiver, gbps=gbps, address=row.get("address"))


def _back(link: Link) -> str:
    return f"{link.receiver}>{link.sender}"


def topology_document(topology: Topology) -> dict[str, Any]:
    """Link by link, whatever it was described by; `topology_from` reads it back."""
    by_name = {link.name: link for link in topology.fabric_links}
    leaves = {leaf.name for leaf in topology.leaves}
    return {
        "fabric": {"name": topology.name, "cross_planes": topology.cross_planes},
        "leaf": [dataclasses.asdict(leaf) for leaf in topology.leaves],
        "spine": [dataclasses.asdict(spine) for spine in topology.spines],
        "node": [
            _bare(
                {
                    "name": n.name,
                    "nic_gbps": n.nic_gbps,
                    "ports": [_bare(dataclasses.asdict(p)) for p in n.ports],
                }
            )
            for n in topology.nodes
        ],
        "cable": [
            _bare(
                {
                    "leaf": link.sender,
                    "spine": link.receiver,
                    "gbps": link.gbps,
                    "spine_address": link.address,
                    "leaf_address": by_name[_back(link)].address,
                }
            )
            for link in topology.fabric_links
            if link.sender in leaves and _back(link) in by_name
        ],
        "link": [
            _bare(dataclasses.asdict(link)) for link in topology.fabric_links if _back(link) not in by_name
        ],
        "condition": dict(topology.condition),
    }


_FLOW = ("name", "task", "phase", "group", "source", "target", "bytes", "weight")


def routes_document(routing: Routing) -> dict[str, Any]:
    """The fabric, and every flow with the numbers of its links; `routes_from` reads it back."""
    return {
        "fabric": topology_document(routing.topology),
        "flows": [[getattr(flow, key) for key in _FLOW] for flow in routing.flows],
        "paths": routing.paths.tolist(),
        "because": routing.because,
    }


def routes_from(document: Mapping[str, Any]) -> Routing:
    topology = topology_from(document["fabric"])
    flows = [dict(zip(_FLOW, row, strict=True)) for row in document["flows"]]
    paths = np.array(document["paths"], dtype=np.int64).reshape(-1, WIDTH)
    if len(paths) != len(flows) or paths.max(initial=-1) >= len(topology.links):
        raise UserError("routes: every flow has one path, of links of the fabric.")
    return Routing(
        topology=topology,
        flows=tuple(
            Flow(**{**row, "source": tuple(row["source"]), "target": tuple(row["target"])}) for row in flows
        ),
        paths=paths,
        because=str(document["because"]),
    )


def hops_of(topology: Topology, path: Sequence[int]) -> tuple[str, ...]:
    """Where the path's fabric links arrive, as a probe would tell it; empty where addresses are not given."""
    hops = [topology.links[link].address for link in path[1:-1] if link >= 0]
    return tuple(hop for hop in hops if hop is not None) if all(hops) else ()


def ends_of(topology: Topology, path: Sequence[int]) -> tuple[str, str]:
    """The addresses of the two ports that a path joins, of one plane; empty where they are not given."""
    if not path:
        return "", ""
    up, down = topology.links[path[0]], topology.links[path[-1]]
    back = topology.links[topology.index[f"{up.receiver}>{up.sender}"]]
    return back.address or "", down.address or ""


def _bare(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def required(row: Mapping[str, Any], field: str, where: str) -> Any:
    if field not in row:
        raise UserError(f"{where}: {field} is missing.")
    return row[field]


def check_fields(row: Mapping[str, Any], where: str, fields: Sequence[str]) -> None:
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is not a table.")
    for key in row:
        if key not in fields:
            raise UserError(f"{where}: {key!r} is not a field; known are {', '.join(fields)}.")


def number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{what}: {value!r} is not a number.")
    return float(value)
