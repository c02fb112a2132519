"""What the workers of a node must know to follow the plan of a fabric: `everstep agent --fabric FILE`.

The file describes the fabric and, as [[task]], the tasks whose traffic is planned. A worker of such a task
gets the file, its own flows and a range of source ports that no other worker of the node uses. The plan is a
function of the file, so all workers compute the same one (`node.steer`). Other tasks are not steered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.errors import UserError
from everstep.fabric.document import tasks_from, topology_from
from everstep.fabric.flows import Flow, engine_flows
from everstep.protocol.messages import Sender

LEAST_PORTS = 64  # per worker: enough to find every path among a few dozen


class FabricSettings:
    def __init__(self, document: Mapping[str, Any], *, node: str, ports: range, slots: int) -> None:
        self._document, self._node = dict(document), node
        topology = topology_from({key: value for key, value in document.items() if key != "task"})
        if node not in topology.by_node:
            known = ", ".join(each.name for each in topology.nodes[:8])
            raise UserError(f"--fabric: node {node!r} is not in {topology.name}; its nodes are {known}.")
        if not any(port.address for each in topology.nodes if each.name == node for port in each.ports):
            raise UserError(f"--fabric: no port of node {node} has an address; add it to the fabric file.")
        self._ports, self._each = ports, len(ports) // slots
        if self._each < LEAST_PORTS:
            raise UserError(
                f"--fabric-ports has {len(ports)} ports for {slots} slots; give at least {LEAST_PORTS} each."
            )
        flows = engine_flows(tasks_from(document, topology))
        self._flows = [flow for flow in flows if flow.source[0] == node]

    def of(self, sender: Sender, slot: int) -> dict[str, Any] | None:
        """For `node.steer.steering_from`; None if the plan has no flow for this worker."""
        flows = self._of_worker(sender)
        if not flows:
            return None
        first = self._ports[slot * self._each]
        return {
            "fabric": self._document,
            "node": self._node,
            "worker_flows": [flow.name for flow in flows],
            "ports": [first, first + self._each - 1],
        }

    def _of_worker(self, sender: Sender) -> list[Flow]:
        """Its own; where another replica is planned on this node, that one's: the traffic is the same."""
        worker = sender.worker
        stage = [
            (flow.sender[0], flow)
            for flow in self._flows
            if flow.task == sender.task and flow.sender is not None and flow.sender[1] == worker.stage
        ]
        own = [flow for replica, flow in stage if replica == worker.replica]
        return own or [flow for _, flow in stage]
