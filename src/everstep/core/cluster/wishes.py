"""A change of shape that the planner would make if nothing else happened, and what it has cost to stay.

What staying costs adds up as long as the wish is the same, and also when another shape takes its place in
unchanged circumstances: two shapes that are equally good take turns with the noise of the machine. Where a
node or a task has come or gone, another wish starts over: what was missed before says nothing of now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeState
from everstep.protocol.shape import Shape


@dataclass(frozen=True, slots=True)
class WishedShape:
    shape: Shape
    since: float
    rate: float = 0.0  # what staying costs per second, since then
    missed: float = 0.0  # what it had cost before
    circumstances: str = ""

    def missed_at(self, at: float, shape: Shape, circumstances: str) -> float:
        """What staying has cost by then, if this shape is wished for now."""
        if shape != self.shape and circumstances != self.circumstances:
            return 0.0
        return self.missed + self.rate * max(0.0, at - self.since)


def circumstances(nodes: Mapping[str, Node], tasks: Iterable[str]) -> str:
    """The slots there are, and the tasks that share them."""
    slots = sum(node.slots - len(node.lost_slots) for node in nodes.values() if node.state is NodeState.UP)
    return f"{slots} {' '.join(sorted(tasks))}"
