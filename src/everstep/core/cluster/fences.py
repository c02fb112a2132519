"""Whose reports count: the one place where a report of a worker that was given up is kept out.

A node that was silent is given up and its workers are started elsewhere; yet they may live on behind a cut
line or a stopped agent, and all they did arrives when the line is back. Each report of a worker therefore
says which process it comes from (`Sender`), and counts only if that process holds the worker's place now:

    task, worker       the place the report is about
    incarnation        which of the processes that place has had
    node               where it was started

Who may say what is in the table of messages. What a process did before a step was taken back, or in an
earlier epoch, is known by the numbers that a message carries: `Recovery.is_late` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.cluster.task import Task
from everstep.protocol import messages as msg
from everstep.protocol.table import AGENT, TABLE, WORKER


def refused(node: str, report: msg.NodeReport, sender: msg.Sender | None, tasks: Mapping[str, Task]) -> str:
    """Why a report does not count; empty: it does."""
    said = report.event if isinstance(report, msg.TaskEvent) else report
    row = TABLE[type(said)]
    if sender is None:
        return "" if AGENT in row.by else f"{type(said).__name__} does not say which process it comes from"
    if WORKER not in row.by:
        return f"{type(said).__name__} is not a report of a worker"
    task = tasks.get(sender.task)
    if task is None or isinstance(report, msg.OwnReport) or report.task != sender.task:
        return "the report is about a different task"
    seat = task.seats.get(sender.worker)
    if seat is None or (seat.node, seat.incarnation) != (node, sender.incarnation):
        return f"incarnation {sender.incarnation} of worker {sender.worker} on {node} was given up"
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
