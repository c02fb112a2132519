"""What `everstep.traffic` asks for. A process loads its own part: workers nothing of the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.protocol.messages import Sender
    from everstep_fabric.at_node import FabricSettings
    from everstep_fabric.plan import TrafficPlan
    from everstep_fabric.steer import Steering


def planner(file: Path) -> Callable[[], TrafficPlan]:
    from everstep_fabric.document import topology_from
    from everstep_fabric.files import read_tables
    from everstep_fabric.plan import TrafficPlan

    topology = topology_from(read_tables(file))
    if not any(port.address for node in topology.nodes for port in node.ports):
        raise UserError(f'--fabric {file}: no port of a node has an address; give address = "10.1.1.2".')
    return lambda: TrafficPlan(topology)


def at_node(ports: str, slots: int) -> FabricSettings:
    from everstep_fabric.at_node import FabricSettings
    from everstep_fabric.files import port_range

    return FabricSettings(ports=port_range(ports, "--fabric-ports"), slots=slots)


def of_worker(settings: Mapping[str, Any], me: Sender, host: str, shard: int) -> Steering:
    from everstep_fabric.steer import Steering

    return Steering.of(settings, me, host, shard)
