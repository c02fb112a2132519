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
from everstep.core.cluster.node import Node
from everstep.core.cluster.task import Task
from everstep.core.cluster.tasks import PlannerQuestion
from everstep.core.task.recovery import Recovery
from everstep.errors import UserError
from everstep.protocol.codec import decode, encode
from everstep.protocol.incidents import ForgottenIncidents, Incident
from everstep.protocol.messages import Patience

FORMAT = 3  # of a snapshot: another one is refused, not guessed at


def freeze(coordinator: Coordinator) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "question": encode(coordinator.question),
        "patience": encode(coordinator.policy.patience),
        "planned": coordinator.policy.planned,
        "events": coordinator.events,
        "nodes": [encode(node) for node in coordinator.nodes.values()],
        "tasks": [_freeze_task(task) for task in coordinator.tasks.values()],
        "incidents": [encode(incident) for incident in coordinator.log.incidents],
        "forgotten": encode(coordinator.log.forgotten),
    }


def thaw(coordinator: Coordinator, frozen: dict[str, Any]) -> None:
    """Fill a fresh coordinator with this state."""
    if frozen.get("format") != FORMAT:
        raise UserError(
            f"the journal's snapshot has format {frozen.get('format', 1)}, this version reads {FORMAT}; "
            "start the version of Everstep that wrote it, or move the journal away to start with nothing."
        )
    coordinator.events = frozen["events"]
    question: PlannerQuestion = decode(PlannerQuestion, frozen["question"])
    coordinator.question.version, coordinator.question.is_open = question.version, question.is_open
    coordinator.question.review_at = question.review_at
    policy = coordinator.policy
    policy.patience, policy.planned = decode(Patience, frozen["patience"]), frozen["planned"]
    coordinator.log.incidents = [decode(Incident, data) for data in frozen["incidents"]]
    if "forgotten" in frozen:
        coordinator.log.forgotten = decode(ForgottenIncidents, frozen["forgotten"])
    for data in frozen["nodes"]:
        node: Node = decode(Node, data)
        coordinator.roster.add_node(node)
    for data in frozen["tasks"]:
        task = _thaw_task(data, coordinator)
        coordinator.roster.add_task(task)


def digest(coordinator: Coordinator) -> str:
    """Equal for equal states. Orders not yet acknowledged are no state: they change no decision."""
    frozen = freeze(coordinator)
    for node in frozen["nodes"]:
        del node["pending"]
    text = json.dumps(frozen, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _freeze_task(task: Task) -> dict[str, Any]:
    recovery = None if task.recovery is None else task.recovery.snapshot()
    bare = replace(task, progress=replace(task.progress, recovery=None))
    return {"task": encode(bare), "recovery": recovery}


def _thaw_task(data: dict[str, Any], coordinator: Coordinator) -> Task:
    task: Task = decode(Task, data["task"])
    if data["recovery"] is not None:
        log = coordinator.log.of_task(task.name)
        task.progress.recovery = Recovery.from_snapshot(data["recovery"], log)
    return task
