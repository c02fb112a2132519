"""The coordinator's whole state as JSON and back, and its hash: what a journal may be shortened to.

Whatever `handle` reads must be here; a test replays random lives with and without a snapshot in between and
compares every action after it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.roster import Node, Task
from everstep.core.task.recovery import Recovery
from everstep.core.words.cluster_messages import Patience
from everstep.core.words.codec import decode, encode
from everstep.core.words.incidents import Incident


def freeze(coordinator: Coordinator) -> dict[str, Any]:
    return {
        "version": coordinator.version,
        "asked": coordinator.asked,
        "patience": encode(coordinator.patience),
        "planned": coordinator.planned,
        "events": coordinator.events,
        "nodes": [encode(node) for node in coordinator.nodes.values()],
        "tasks": [_freeze_task(task) for task in coordinator.tasks.values()],
        "incidents": [encode(incident) for incident in coordinator.log.incidents],
    }


def thaw(coordinator: Coordinator, frozen: dict[str, Any]) -> None:
    """Fill a fresh coordinator with this state."""
    coordinator.version, coordinator.events = frozen["version"], frozen["events"]
    coordinator.asked = frozen["asked"]
    coordinator.patience, coordinator.planned = decode(Patience, frozen["patience"]), frozen["planned"]
    coordinator.log.incidents = [decode(Incident, data) for data in frozen["incidents"]]
    for data in frozen["nodes"]:
        node: Node = decode(Node, data)
        coordinator.nodes[node.name] = node
    for data in frozen["tasks"]:
        task = _thaw_task(data, coordinator)
        coordinator.tasks[task.name] = task


def digest(coordinator: Coordinator) -> str:
    """Equal for equal states. Orders not yet acknowledged are no state: they change no decision."""
    frozen = freeze(coordinator)
    for node in frozen["nodes"]:
        del node["pending"]
    text = json.dumps(frozen, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _freeze_task(task: Task) -> dict[str, Any]:
    recovery = None if task.recovery is None else task.recovery.snapshot()
    return {"task": encode(replace(task, recovery=None)), "recovery": recovery}


def _thaw_task(data: dict[str, Any], coordinator: Coordinator) -> Task:
    task: Task = decode(Task, data["task"])
    if data["recovery"] is not None:
        task.recovery = Recovery.from_snapshot(data["recovery"], coordinator.log.of_task(task.name))
    return task
