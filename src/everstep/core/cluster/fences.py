"""Whose reports count: the one place where a report of a worker that was given up is kept out.

A node that was silent is given up and its workers are started elsewhere; yet they may live on behind a cut
line or a stopped agent, and all they did arrives when the line is back. Each report of a worker therefore
says which process it comes from (`Sender`), and counts only if that process holds the worker's place now:

    task, worker       the place the report is about
    incarnation        which of the processes that place has had
    node               where it was started

What a process did before a step was taken back is known by the step's `attempt`: parts of a checkpoint are
compared here, seals and ledgers in `core.task.recovery`, which counts attempts and epochs.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.cluster.task import Task
from everstep.protocol import cluster_messages as msg
from everstep.protocol import events as ev

# No worker's words.
_OF_AGENTS = (msg.CheckpointFound, msg.CheckpointUnusable, msg.KernelSpoke, msg.SlotFreed, msg.LeaveNoticed)
_OF_WORKERS = (
    ev.WorkerStarted,
    ev.WorkerExited,
    ev.WorkerRaised,
    ev.LedgerReported,
    ev.StepSealed,
    ev.UpdateInvalidated,
    ev.StateCopied,
    ev.WorkerResumed,
    ev.RestoreFailed,
)


def refused(node: str, report: msg.NodeReport, sender: msg.Sender | None, tasks: Mapping[str, Task]) -> str:
    """Why a report does not count; empty: it does."""
    if isinstance(report, _OF_AGENTS):
        return ""
    event = report.event if isinstance(report, msg.TaskEvent) else None
    if isinstance(report, msg.SaveFailed) and sender is None:  # of an agent that could not commit
        return ""
    if isinstance(event, ev.CheckpointCommitted):  # of an agent; recovery knows which steps are on record
        return ""
    if event is not None and not isinstance(event, _OF_WORKERS):
        return f"{type(event).__name__} is no report of a worker"
    task = tasks.get(report.task)
    if sender is None or task is None or sender.task != report.task:
        return "it does not say which process of a task it comes from"
    seat = task.seats.get(sender.worker)
    if seat is None or (seat.node, seat.incarnation) != (node, sender.incarnation):
        return f"incarnation {sender.incarnation} of worker {sender.worker} on {node} was given up"
    if not _is_about(sender, report if event is None else event):
        return f"worker {sender.worker} speaks of another"
    if isinstance(report, msg.PartWritten | msg.SaveFailed) and not is_of_this_attempt(task, report):
        return f"step {report.step} was taken back since"
    return ""


def is_of_this_attempt(task: Task, part: msg.PartWritten | msg.SaveFailed) -> bool:
    return task.recovery is None or part.attempt == task.recovery.attempt_of(part.step)


def _is_about(sender: msg.Sender, said: object) -> bool:
    if isinstance(said, msg.SaveFailed):
        return True
    if isinstance(said, ev.StepSealed | msg.PartWritten):
        return said.stage == sender.worker.stage
    incarnation = getattr(said, "incarnation", sender.incarnation)
    return (getattr(said, "worker", None), incarnation) == (sender.worker, sender.incarnation)
