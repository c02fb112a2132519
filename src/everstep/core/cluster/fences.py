"""Whose reports count: the one place where a report of a worker that was given up is kept out.

A node that was silent is given up and its workers are started elsewhere; yet they may live on behind a cut
line or a stopped agent, and all they did arrives when the line is back. Each report of a worker therefore
says which process it comes from (`Sender`), and counts only if that process holds the worker's place now:

    task, worker       the place the report is about
    incarnation        which of the processes that place has had
    node               where it was started

An agent speaks of its own node. What it says of a task counts only if its node was asked for it: any other
node of the cluster may belong to somebody who has no business with that task.

Who may say what, and what must have been asked, is in the table of messages. What a process did before a
step was taken back, or in an earlier epoch, is known by the numbers that a message carries:
`Recovery.is_late` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from everstep.core.cluster.node import Node
from everstep.core.cluster.task import Task
from everstep.protocol import messages as msg
from everstep.protocol.table import AGENT, ASKED, TABLE, WORKER, AnyMessage, Fence, Row


def refused(node: Node, report: msg.NodeReport, sender: msg.Sender | None, tasks: Mapping[str, Task]) -> str:
    """Why a report does not count; empty: it does."""
    said = report.event if isinstance(report, msg.TaskEvent) else report
    row = TABLE[type(said)]
    if sender is None:
        task = None if isinstance(report, msg.OwnReport) else tasks.get(report.task)
        return _refused_of_agent(node, isinstance(report, msg.OwnReport), task, said, row)
    if WORKER not in row.by:
        return f"{type(said).__name__} is not a report of a worker"
    task = tasks.get(sender.task)
    if task is None or isinstance(report, msg.OwnReport) or report.task != sender.task:
        return "the report is about a different task"
    seat = task.seats.get(sender.worker)
    if seat is None or (seat.node, seat.incarnation) != (node.name, sender.incarnation):
        return f"incarnation {sender.incarnation} of worker {sender.worker} on {node.name} was given up"
    if not _is_about(sender, said):
        return f"worker {sender.worker} reports about a different worker"
    if said is report and task.recovery is not None and task.recovery.is_late(report):
        return "it is of an attempt at its step that was taken back"
    return ""


def _is_about(sender: msg.Sender, said: object) -> bool:
    """A message names its worker, or its stage, or neither."""
    return (
        getattr(said, "worker", sender.worker) == sender.worker
        and getattr(said, "incarnation", sender.incarnation) == sender.incarnation
        and getattr(said, "stage", sender.worker.stage) == sender.worker.stage
    )


def _refused_of_agent(node: Node, is_own: bool, task: Task | None, said: AnyMessage, row: Row) -> str:
    what = type(said).__name__
    if AGENT not in row.by:
        return f"{what} does not say which process it comes from"
    fences = [fence for fence in row.fences if fence in ASKED]
    if not is_own and (task is None or not fences):
        return f"{what} is about a task, and node {node.name} has no word in it"
    if all(_was_asked(node, task, said, fence) for fence in fences):
        return ""
    return f"node {node.name} was not asked for this {fences[0]}"


def _was_asked(node: Node, task: Task | None, said: AnyMessage, fence: Fence) -> bool:
    if fence is Fence.PAIR:  # both ends know the key; one of them measures, once
        return any(
            pair.measures and pair.found is None and (pair.peer, pair.key) == (said.peer, said.key)
            for pair in node.pairs
        )
    assert task is not None
    match fence:
        case Fence.SEARCH:
            return (task.checkpoints.searcher, task.checkpoints.search) == (node.name, said.search)
        case Fence.COMMIT:
            # Agents that were alone have committed without an order; and an answer may come too late.
            was_ordered = task.checkpoints.committing.get(said.step) == node.name
            return was_ordered or task.name in node.opened or _has_seat(node, task)
        case Fence.PROBE:
            return node.name in task.failures.links.probed
        case Fence.INCARNATION | Fence.EPOCH | Fence.ATTEMPT | Fence.NEXT_ATTEMPT:
            return True
        case _:
            assert_never(fence)


def _has_seat(node: Node, task: Task) -> bool:
    return any(seat.node == node.name for seat in task.seats.values())
