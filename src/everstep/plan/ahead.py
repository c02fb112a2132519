"""Answers for the likely next events, thought of in idle moments: each node lost, each lost node back, each
task finished.

What the cluster would be after an event is made as the coordinator would make it: the node's seats are empty,
and free slots are given as its roster gives them. The question that follows is the key. When the event comes,
the same question is asked, and its answer is there; if anything else has changed meanwhile, it is another
question, and it is thought about on the spot.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin, NodeLiveness
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import OVER, Task, TaskState
from everstep.core.cluster.tasks import WANTS_WORKERS
from everstep.plan.ask import ClusterView, Thought, question, think
from everstep.plan.measured import Measurements
from everstep.protocol.incidents import IncidentLog
from everstep.protocol.messages import Patience

MOST_READY = 256
LOOKED_AT = 2  # events whose question is made at once


@dataclass(frozen=True, slots=True)
class SupposedCluster:
    """What a coordinator would know after an event."""

    nodes: Mapping[str, Node]
    tasks: Mapping[str, Task]
    log: IncidentLog
    patience: Patience


class ReadyAnswers:
    """The table, and where it goes on being filled."""

    def __init__(self) -> None:
        self.table: OrderedDict[object, Thought] = OrderedDict()
        self._next = 0

    def prepare(self, view: ClusterView, now: float, measured: Measurements) -> int:
        """Look at a few of the events that may come next; think of the first that has no answer."""
        events = list(next_events(view))
        for _ in range(min(LOOKED_AT, len(events))):
            kind, name = events[self._next % len(events)]
            self._next += 1
            asked = question(after(kind, name, view), now, measured)
            if asked is not None and asked.key not in self.table:
                self.table[asked.key] = think(asked)
                while len(self.table) > MOST_READY:
                    self.table.popitem(last=False)
                return 1
        return 0


def next_events(view: ClusterView) -> Iterator[tuple[str, str]]:
    for node in view.nodes.values():
        if node.reachable and node.admin is NodeAdmin.UP:
            yield "lose", node.name
        elif not node.reachable:
            yield "join", node.name
    for task in view.tasks.values():
        if task.state is TaskState.RUNNING:
            yield "finish", task.name


def after(kind: str, name: str, view: ClusterView) -> SupposedCluster:
    """The cluster once this has happened and free slots are given."""
    nodes, log = dict(view.nodes), view.log
    tasks = {task.name: replace(task, seats=dict(task.seats)) for task in view.tasks.values()}
    match kind:
        case "lose":
            nodes[name] = replace(nodes[name], liveness=NodeLiveness.GONE)
            log = _with_incidents(view, name)
            for task in tasks.values():
                task.seats = {worker: seat for worker, seat in task.seats.items() if seat.node != name}
        case "join":
            nodes[name] = replace(nodes[name], liveness=NodeLiveness.HEARD)
        case "finish":
            tasks[name].seats, tasks[name].state = {}, TaskState.FINISHED
    _fill(nodes, tasks)
    return SupposedCluster(nodes, tasks, log, view.patience)


def _fill(nodes: Mapping[str, Node], tasks: Mapping[str, Task]) -> None:
    roster = Roster()
    for node in nodes.values():
        roster.add_node(node)
    for task in tasks.values():
        roster.add_task(task)
    for task in sorted(tasks.values(), key=lambda t: (-t.weight, t.submitted_at, t.name)):
        if task.state in WANTS_WORKERS and task.state not in OVER:
            roster.seat_workers(task)


def _with_incidents(view: ClusterView, node: str) -> IncidentLog:
    """The loss of a node is an incident of every task that trains there."""
    hurt = [
        SimpleNamespace(
            task=task.name, stops_training=True, evidence_at=math.inf, resumed_at=None, planned_at=None
        )
        for task in view.tasks.values()
        if task.state is TaskState.RUNNING and any(seat.node == node for seat in task.seats.values())
    ]
    return cast(
        IncidentLog, SimpleNamespace(incidents=[*view.log.incidents, *hurt], forgotten=view.log.forgotten)
    )
