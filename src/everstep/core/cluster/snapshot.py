"""The coordinator's whole state as JSON and back, and its hash: what a journal may be shortened to.

Whatever `handle` reads must be here; a test replays random lives with and without a snapshot in between and
compares every action after it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.lives import Lives
from everstep.core.cluster.node import Node
from everstep.core.cluster.task import Task
from everstep.core.cluster.tasks import PlannerQuestion
from everstep.core.task.recovery import Recovery
from everstep.errors import UserError
from everstep.protocol.codec import decode, encode
from everstep.protocol.incidents import ForgottenIncidents, Incident
from everstep.protocol.messages import Patience, ResumeTask
from everstep.protocol.table import Document
from everstep.protocol.work import EpochFacts, FactChanges

FORMAT = 4  # of a snapshot: another one is refused, not guessed at


def freeze(coordinator: Coordinator) -> Document:
    epochs = _Epochs()
    return {
        "format": FORMAT,
        "question": encode(coordinator.question),
        "patience": encode(coordinator.policy.patience),
        "planned": coordinator.policy.planned,
        "journal": coordinator.policy.journal,
        "version": coordinator.policy.version,
        "events": coordinator.events,
        "nodes": [_freeze_node(node, epochs) for node in coordinator.nodes.values()],
        "tasks": [_freeze_task(task) for task in coordinator.tasks.values()],
        "incidents": [encode(incident) for incident in coordinator.log.incidents],
        "forgotten": encode(coordinator.log.forgotten),
        "epochs": [[encode(order.facts), encode(order.news)] for order in epochs.orders],
    }


def thaw(coordinator: Coordinator, frozen: Document) -> None:
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
    policy.journal, policy.version = frozen.get("journal", ""), frozen.get("version", "")
    coordinator.log.incidents = [decode(Incident, data) for data in frozen["incidents"]]
    if "forgotten" in frozen:
        coordinator.log.forgotten = decode(ForgottenIncidents, frozen["forgotten"])
    epochs = [
        (decode(EpochFacts, facts), decode(FactChanges | None, news)) for facts, news in frozen["epochs"]
    ]
    for data in frozen["nodes"]:
        coordinator.roster.add_node(_thaw_node(data, epochs))
    for data in frozen["tasks"]:
        task = _thaw_task(data, coordinator)
        coordinator.roster.add_task(task)


def digest(coordinator: Coordinator) -> str:
    """Equal for equal states. Orders not yet acknowledged are no state: they change no decision."""
    return digest_of(freeze(coordinator))


def digest_of(frozen: Document) -> str:
    nodes = [{name: value for name, value in node.items() if name != "pending"} for node in frozen["nodes"]]
    state = {name: value for name, value in frozen.items() if name != "epochs"} | {"nodes": nodes}
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class _Epochs:
    """Orders to resume share their facts with those to other nodes, so facts are written once."""

    def __init__(self) -> None:
        self.orders: list[ResumeTask] = []
        self._numbers: dict[int, int] = {}

    def number(self, order: ResumeTask) -> int:
        if id(order.facts) not in self._numbers:
            self._numbers[id(order.facts)] = len(self.orders)
            self.orders.append(order)
        return self._numbers[id(order.facts)]


def _freeze_node(node: Node, epochs: _Epochs) -> Document:
    frozen: Document = encode(replace(node, pending=[]))
    for action in node.pending:
        order = action.order
        if isinstance(order, ResumeTask):
            bare = encode(replace(action, order=replace(order, facts=None, news=None)))
            frozen["pending"].append({**bare, "epoch": epochs.number(order)})
        else:
            frozen["pending"].append(encode(action))
    return frozen


def _thaw_node(data: Document, epochs: list[tuple[EpochFacts, FactChanges | None]]) -> Node:
    node: Node = decode(Node, data)
    for place, (action, frozen) in enumerate(zip(node.pending, data["pending"], strict=True)):
        if isinstance(action.order, ResumeTask):
            facts, news = epochs[frozen["epoch"]]
            node.pending[place] = replace(action, order=replace(action.order, facts=facts, news=news))
    return node


def _freeze_task(task: Task) -> Document:
    recovery = None if task.recovery is None else task.recovery.snapshot()
    bare = replace(task, progress=replace(task.progress, recovery=None))
    return {"task": encode(bare), "recovery": recovery}


def _thaw_task(data: Document, coordinator: Coordinator) -> Task:
    task: Task = decode(Task, data["task"])
    if data["recovery"] is not None:
        log = coordinator.log.of_task(task.name)
        kind = Lives if "lives" in data["recovery"] else Recovery
        task.progress.recovery = kind.from_snapshot(data["recovery"], log)
    return task
