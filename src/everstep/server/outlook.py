"""WAF, now and over time, and what the planner would do next.

WAF is the sum over tasks of weight times achieved work, in the work of one worker of a full pipeline; `full`
is what it would be if every running task had all its workers. It is kept when it changes, also while the
journal is read, so a page that is opened today shows yesterday. One decision can be hundreds of orders, each
of them announced, and a sum over all tasks for each of them would cost more than the decision: so it is
looked at once per second, and when a page asks.

The planner is asked what it would do if the next likely thing happened: the node that holds most is lost, or
one comes. These are questions about a cluster that is not: nothing is decided by them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeLiveness, NodeState
from everstep.core.cluster.task import Task, TaskState
from everstep.plan.ahead import SupposedCluster
from everstep.plan.ask import choose, worth
from everstep.server.record import ClusterRecord

KEPT = 2000
UNCHANGED = "nothing changes"
STAY = "the remaining workers stay where they are"  # instead: after a loss something has changed
FRESH_S = 5.0  # an answer serves everybody for so long
LOOK_S = 1.0


class Outlook:
    def __init__(self, record: ClusterRecord) -> None:
        self._record = record
        self._past: deque[tuple[float, float, float]] = deque(maxlen=KEPT)  # at, WAF, full
        self._fresh: list[tuple[float, float, float]] = []  # not sent yet
        self._looked_at = float("-inf")
        self._changed_at: float | None = None  # since the last look
        self._asked_at = float("-inf")
        self._foreseen: list[dict[str, Any]] = []

    def hear(self, news: Mapping[str, Any]) -> None:
        if news["kind"] == "begin":
            self._past.clear()
            self._looked_at = float("-inf")
        self._changed_at = news["at"]
        if not 0 <= news["at"] - self._looked_at < LOOK_S:
            self._look()

    def _look(self) -> None:
        if self._changed_at is None:
            return
        at, self._changed_at = self._changed_at, None
        now, self._looked_at = waf(self._record.machine), at
        if not self._past or self._past[-1][1:] != now:
            self._past.append((at, *now))
            self._fresh.append(self._past[-1])
            del self._fresh[:-KEPT]

    def past(self) -> list[tuple[float, float, float]]:
        self._look()
        return list(self._past)

    def take_fresh(self) -> list[tuple[float, float, float]]:
        self._look()
        fresh, self._fresh = self._fresh, []
        return fresh

    def foreseen(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._asked_at > FRESH_S:
            self._asked_at = time.monotonic()
            self._foreseen = foresee(self._record.machine)
        return self._foreseen


def waf(machine: Coordinator) -> tuple[float, float]:
    now = full = 0.0
    for task in machine.tasks.values():
        if task.state is TaskState.RUNNING:
            now += worth(task, 0 if task.recovery is None else task.recovery.num_members)
            full += worth(task, task.shape.replicas * task.shape.stages)
    return round(now, 4), round(full, 4)


def foresee(machine: Coordinator) -> list[dict[str, Any]]:
    """What the planner would do after the next likely event, with its reason."""
    tasks = {name: task for name, task in machine.tasks.items() if task.state is TaskState.RUNNING}
    if not tasks:
        return []
    held: dict[str, int] = {}
    for task in tasks.values():
        for seat in task.seats.values():
            held[seat.node] = held.get(seat.node, 0) + 1
    found = []
    if held:
        name = max(held, key=lambda node: (held[node], node))
        workers = "worker" if held[name] == 1 else "workers"
        found.append(_if_lost(machine, name, f"node {name} fails ({held[name]} {workers})"))
    if any(len(task.seats) < task.wanted() for task in tasks.values()):
        slots = max(node.slots for node in machine.nodes.values())
        found.append(_if_joined(machine, slots, f"a node with {slots} slots joins"))
    return found


def _if_lost(machine: Coordinator, name: str, what: str) -> dict[str, Any]:
    nodes = machine.nodes | {name: replace(machine.nodes[name], liveness=NodeLiveness.GONE)}
    tasks = {
        task.name: replace(task, seats={w: s for w, s in task.seats.items() if s.node != name})
        for task in machine.tasks.values()
    }
    outlook = _asked(machine, nodes, tasks, what)
    left = sum(node.slots for node in nodes.values() if node.state is NodeState.UP)
    stopped = [task for task in _running(machine) if task.shape.stages > left]
    for task in stopped:  # the planner speaks of those it can place
        outlook["then"] = [row for row in outlook["then"] if row["task"] != task.name]
        outlook["then"].append({"task": task.name, "before": len(task.seats), "after": 0})
    if stopped:
        outlook["because"] = "; ".join(_stops(task, left) for task in stopped)
    return outlook


def _running(machine: Coordinator) -> list[Task]:
    return [task for task in machine.tasks.values() if task.state is TaskState.RUNNING]


def _stops(task: Task, left: int) -> str:
    step = f"step {task.protected + 1}" if task.protected else "the beginning"
    needs = f"slots needed: {task.shape.stages}, left: {left}"
    return f"{task.name} stops ({needs}), and resumes from {step}"


def _if_joined(machine: Coordinator, slots: int, what: str) -> dict[str, Any]:
    new = Node(name="\uffff", boot="", slots=slots, host="")
    return _asked(machine, machine.nodes | {new.name: new}, machine.tasks, what)


def _asked(
    machine: Coordinator, nodes: Mapping[str, Node], tasks: Mapping[str, Task], what: str
) -> dict[str, Any]:
    supposed = SupposedCluster(nodes, tasks, machine.log, machine.patience)
    chosen = choose(supposed, machine.version, what)
    return {
        "if": what,
        "then": [
            {"task": name, "before": len(machine.tasks[name].seats), "after": workers}
            for name, workers in sorted(chosen.workers.items())
        ],
        "because": chosen.because.removeprefix(f"{what}: ").replace(UNCHANGED, STAY),
    }
