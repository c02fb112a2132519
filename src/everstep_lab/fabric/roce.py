"""The plan for RDMA over Ethernet, as a file. Written, never run: no machine here has such a NIC.

RoCE v2 travels in UDP to port 4791; switches hash its source port, which a NIC derives from the queue pair
unless it is given another (mlx5: `mlx5dv_modify_qp_udp_sport`). NCCL has no setting for it, so the file is
for a network plugin or a library that sets ports itself. What NCCL's environment can do is to open as many
queue pairs as the plan has parts, and to cut messages over them.
"""

from __future__ import annotations

from typing import Any

from everstep.fabric.catalogue import Catalogue, Tuple4
from everstep.fabric.document import hops_of
from everstep.fabric.flows import Endpoint
from everstep.fabric.routing import Routing
from everstep.fabric.topology import Topology

UDP_PORT = 4791
UNTESTED = (
    "Untested: the planner writes this file and no program reads it yet. Source ports come from UDP probes "
    "to port 4791 where a catalogue was given, else they are null. Whether a NIC keeps the port it is given, "
    "and whether switches hash RoCE as they hash the probes, must be checked where it is used."
)


def plan_file(routing: Routing, catalogue: Catalogue | None, now_s: float) -> dict[str, Any]:
    topology = routing.topology
    parts: dict[tuple[str, Endpoint, Endpoint], int] = {}
    rows = []
    for number, flow in enumerate(routing.flows):
        edge = flow.group, flow.source, flow.target
        part = parts.get(edge, 0)
        parts[edge] = part + 1
        path = routing.path(number)
        source, target = (_address(topology, topology.links[path[i]].name, i) for i in (0, -1))
        hops = hops_of(topology, path)
        port = None
        if catalogue is not None and source and target and hops:
            key = Tuple4(protocol="udp", source=source, target=target, target_port=UDP_PORT)
            port = catalogue.take(key, hops, now_s)
        rows.append(
            {
                "flow": flow.name,
                "source": {"node": flow.source[0], "nic": flow.source[1], "address": source},
                "target": {"node": flow.target[0], "nic": flow.target[1], "address": target},
                "queue_pair": part,
                "plane": int(topology.links[path[0]].sender.rsplit(".p", 1)[1]),
                "path": topology.spell(path),
                "udp_source_port": port,
            }
        )
    return {
        "untested": UNTESTED,
        "udp_port": UDP_PORT,
        "environment": _environment(max(parts.values(), default=1)),
        "queue_pairs": rows,
    }


def _environment(parts: int) -> dict[str, str]:
    return {
        "NCCL_IB_QPS_PER_CONNECTION": str(parts),
        "NCCL_IB_SPLIT_DATA_ON_QPS": "1" if parts > 1 else "0",
    }


def _address(topology: Topology, link: str, end: int) -> str | None:
    port_name = link.split(">")[0 if end == 0 else 1]
    node, nic, plane = port_name.rsplit(".", 2)
    for port in topology.by_node[node].ports:
        if port.nic == int(nic) and f"p{port.plane}" == plane:
            return port.address
    return None
