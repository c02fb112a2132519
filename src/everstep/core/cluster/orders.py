"""Orders to nodes: numbered, and kept until the node says it has carried them out."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.cluster.node import Node
from everstep.protocol.messages import ClusterAction, Dispatch, Order
from everstep.protocol.moment import Moment

Actions = list[ClusterAction]


class Orders:
    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes

    def send(self, node: str, order: Order, because: str, now: Moment) -> Actions:
        """To a node that can be reached, now or later; nothing for one that was given up."""
        known = self._nodes[node]
        if not known.reachable:
            return []
        known.sent += 1
        action = Dispatch(node=node, number=known.sent, order=order, because=because, cause=now.event)
        known.pending.append(action)
        return [action]

    def acknowledged(self, node: str, number: int) -> None:
        """A node has carried out its orders up to this one. Changes no decision, only what is kept."""
        if node in self._nodes:
            known = self._nodes[node]
            if known.pending and known.pending[0].number <= number:  # asked at every heartbeat
                known.pending = [order for order in known.pending if order.number > number]

    def unfinished(self) -> Actions:
        """The orders that nodes may not have got."""
        return [order for node in self._nodes.values() if node.reachable for order in node.pending]
