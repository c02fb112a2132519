"""Fabrics and tasks as TOML, plans as JSON.

[fabric]                      either regular:  [clos] nodes = 16, nics = 8, planes = 2, port_gbps = 200, …
name = "lab"                  or link by link:
[[leaf]] name = "l1"          [[node]] name = "h1"
[[spine]] name = "s1"         ports = [{ leaf = "l1", gbps = 0.1, address = "10.1.1.2" }]
[[cable]]                     # both directions; the address where each direction arrives
leaf = "l1", spine = "s1", gbps = 0.1, spine_address = "10.10.1.2", leaf_address = "10.10.1.1"
[[link]]                      # one direction only: sender, receiver, gbps, address
[condition]                   # what is known to be broken: fraction of capacity left
"l1>s1" = 0.0

[[task]]
name = "gpt", replicas = 2, stages = 1, gradient_bytes = 1e9, workers = ["h1", "h2:0"]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everstep.errors import UserError
from everstep.fabric.flows import Endpoint, Flow, TrafficTask, place
from everstep.fabric.routing import Routing
from everstep.fabric.topology import WIDTH, FabricNode, Link, Port, Switch, Topology, clos

_CLOS = (
    *("name", "nodes", "nics", "planes", "port_gbps", "nodes_per_leaf", "spines", "uplink_gbps", "nic_gbps"),
    "cross_planes",
)
_TASK = (
    *("name", "replicas", "stages", "shards", "parts", "microbatches", "gradient_bytes", "boundary_bytes"),
    *("weight", "algorithm", "compute_s"),
)


def topology_from(document: Mapping[str, Any]) -> Topology:
    _known(
        document,
        "the fabric file",
        ("fabric", "clos", "leaf", "spine", "node", "cable", "link", "condition", "task"),
    )
    about = document.get("fabric", {})
    _known(about, "[fabric]", ("name", "cross_planes"))
    condition = {str(k): _number(v, f"condition of {k}") for k, v in document.get("condition", {}).items()}
    if "clos" in document:
        table = {"name": about.get("name", "fabric"), **document["clos"]}
        _known(table, "[clos]", _CLOS)
        for field in ("nodes", "port_gbps", "nodes_per_leaf", "spines", "uplink_gbps"):
            _get(table, field, "[clos]")
        return clos(**table).with_condition(condition)
    leaves = tuple(_switch(row, "[[leaf]]") for row in document.get("leaf", ()))
    spines = tuple(_switch(row, "[[spine]]") for row in document.get("spine", ()))
    if not leaves or "node" not in document:
        raise UserError("the fabric file has neither [clos] nor [[leaf]] and [[node]]; see docs/fabric.md.")
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
    _known(row, where, ("name", "plane"))
    return Switch(name=str(_get(row, "name", where)), plane=int(row.get("plane", 0)))


def _node(row: Mapping[str, Any], leaves: Sequence[Switch]) -> FabricNode:
    name = str(_get(row, "name", "[[node]]"))
    _known(row, f"node {name}", ("name", "ports", "nic_gbps"))
    planes = {leaf.name: leaf.plane for leaf in leaves}
    ports = []
    for port in _get(row, "ports", f"node {name}"):
        where = f"a port of node {name}"
        _known(port, where, ("nic", "plane", "leaf", "gbps", "address"))
        leaf = str(_get(port, "leaf", where))
        ports.append(
            Port(
                nic=int(port.get("nic", 0)),
                plane=int(port.get("plane", planes.get(leaf, 0))),
                leaf=leaf,
                gbps=_number(_get(port, "gbps", where), f"gbps of {where}"),
                address=port.get("address"),
            )
        )
    nic_gbps = row.get("nic_gbps")
    return FabricNode(name=name, ports=tuple(ports), nic_gbps=None if nic_gbps is None else float(nic_gbps))


def _cable(row: Mapping[str, Any]) -> tuple[Link, Link]:
    _known(row, "[[cable]]", ("leaf", "spine", "gbps", "spine_address", "leaf_address"))
    leaf, spine = str(_get(row, "leaf", "[[cable]]")), str(_get(row, "spine", "[[cable]]"))
    gbps = _number(_get(row, "gbps", f"cable {leaf}-{spine}"), f"gbps of cable {leaf}-{spine}")
    return (
        Link(sender=leaf, receiver=spine, gbps=gbps, address=row.get("spine_address")),
        Link(sender=spine, receiver=leaf, gbps=gbps, address=row.get("leaf_address")),
    )


def _one_way(row: Mapping[str, Any]) -> Link:
    _known(row, "[[link]]", ("sender", "receiver", "gbps", "address"))
    sender, receiver = str(_get(row, "sender", "[[link]]")), str(_get(row, "receiver", "[[link]]"))
    gbps = _number(_get(row, "gbps", f"link {sender}>{receiver}"), f"gbps of link {sender}>{receiver}")
    return Link(sender=sender, receiver=receiver, gbps=gbps, address=row.get("address"))


def _back(link: Link) -> str:
    return f"{link.receiver}>{link.sender}"


def tasks_from(document: Mapping[str, Any], topology: Topology) -> list[TrafficTask]:
    rows = document.get("task", [])
    if not rows:
        raise UserError("there is no [[task]]: add one with name, replicas, stages, gradient_bytes, workers.")
    tasks = [_task(row, topology) for row in rows]
    if len({task.name for task in tasks}) != len(tasks):
        raise UserError("two [[task]] entries have one name; rename one.")
    return tasks


def _task(row: Mapping[str, Any], topology: Topology) -> TrafficTask:
    name = str(_get(row, "name", "[[task]]"))
    where = f"task {name}"
    _known(row, where, (*_TASK, "workers"))
    workers = [_endpoint(text, where, topology) for text in _get(row, "workers", where)]
    replicas, stages = int(_get(row, "replicas", where)), int(_get(row, "stages", where))
    shards = int(row.get("shards", 1))
    if row.get("algorithm", "ring") not in ("ring", "tree", "direct"):
        raise UserError(f"{where}: algorithm {row['algorithm']!r} is not ring, tree or direct.")
    fields = {key: value for key, value in row.items() if key not in ("workers",)}
    for key in ("gradient_bytes", "boundary_bytes", "weight", "compute_s"):
        if key in fields:
            fields[key] = _number(fields[key], f"{key} of {where}")
    _get(row, "gradient_bytes", where)
    return TrafficTask(**fields, placement=place(workers, replicas=replicas, stages=stages, shards=shards))


def _endpoint(text: object, where: str, topology: Topology) -> Endpoint:
    node, _, nic = str(text).partition(":")
    if node not in topology.by_node:
        raise UserError(
            f"{where}: worker {text!r} is on no node of fabric {topology.name}; see its [[node]]."
        )
    if nic and (not nic.isdigit() or int(nic) >= topology.num_nics(node)):
        raise UserError(f"{where}: worker {text!r}: {node} has NICs 0 to {topology.num_nics(node) - 1}.")
    return node, int(nic or 0)


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


def _get(row: Mapping[str, Any], field: str, where: str) -> Any:
    if field not in row:
        raise UserError(f"{where}: {field} is missing.")
    return row[field]


def _known(row: Mapping[str, Any], where: str, fields: Sequence[str]) -> None:
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is not a table.")
    for key in row:
        if key not in fields:
            raise UserError(f"{where}: {key!r} is not a field; known are {', '.join(fields)}.")


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{what}: {value!r} is not a number.")
    return float(value)
