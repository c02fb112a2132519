"""What is forgotten, so that a coordinator that has run for a year is as small as one that has run for a day.

    tasks that are over    the last MOST_TASKS_OVER to end stay
    nodes that are gone    the last MOST_NODES_GONE to go stay; those that an operator drained, or that are
                           kept out as lemons, are forgotten after all others: a lemon that returns is one
    closed incidents       the last MOST_CLOSED to close stay; of the others only counts are kept

What is forgotten is part of the state, like any decision: it depends on events and on nothing else, so a
journal that is read again forgets the same. It is looked for at every `EVERY`-th event only, because a pass
over thousands of nodes is not free; until then there may be a few more than the bound.
"""

from __future__ import annotations

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import OVER
from everstep.protocol.incidents import IncidentLog

MOST_TASKS_OVER = 200
MOST_NODES_GONE = 500
MOST_CLOSED = 1000
EVERY = 64  # events


class Retention:
    def __init__(self, *, roster: Roster, log: IncidentLog) -> None:
        self._roster, self._log = roster, log

    def handled(self, events: int) -> None:
        """So many events are handled."""
        if events % EVERY == 0:
            self._forget_tasks()
            self._forget_nodes()
            self._log.forget_closed(MOST_CLOSED)

    def _forget_tasks(self) -> None:
        tasks = self._roster.tasks
        if len(tasks) <= MOST_TASKS_OVER:
            return
        over = sorted((task.ended_at, name) for name, task in tasks.items() if task.state in OVER)
        for _, name in over[: len(over) - min(len(over), MOST_TASKS_OVER)]:
            self._roster.drop_task(name)
            for node in self._roster.nodes.values():
                node.opened.discard(name)
                node.memory_open.discard(name)

    def _forget_nodes(self) -> None:
        if self._roster.num_gone <= MOST_NODES_GONE:
            return
        gone = sorted((node for node in self._roster.nodes.values() if not node.reachable), key=_worth)
        for node in gone[: len(gone) - MOST_NODES_GONE]:
            self._roster.drop_node(node.name)


def _worth(node: Node) -> tuple[bool, float]:
    """The least first."""
    return (node.admin is not NodeAdmin.UP, node.liveness_since)
