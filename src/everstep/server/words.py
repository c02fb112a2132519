"""The words of the dashboard, as tables: states, ops, parcels, decisions, columns of tables.

The page gets them as the module `/web/tables.js`, which `script` writes from these tables; no other file of
the page repeats them. Tests check that every state, op, parcel and order of `core` has its words here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everstep.core.cluster.node_states import NodeState
from everstep.protocol import cluster_messages as msg
from everstep.protocol import events as ev
from everstep.protocol.ops import Kind

MOST_TEXT = 300  # characters of an event
NODE_STATES: Mapping[str, Mapping[str, Any]] = {
    NodeState.UP: {"mark": "✓", "colour": "--up", "good": True},
    NodeState.SILENT: {"mark": "?", "colour": "--silent"},
    NodeState.DRAINING: {"mark": "↓", "colour": "--draining"},
    NodeState.ISOLATED: {"mark": "!", "colour": "--isolated"},
    NodeState.LEMON: {"mark": "L", "colour": "--lemon"},
    NodeState.GONE: {"mark": "✕", "colour": "--gone"},
    NodeState.LEFT: {"mark": "–", "colour": "--left"},
}
MOST_SEVERE_FIRST = (
    NodeState.LEMON,
    NodeState.ISOLATED,
    NodeState.GONE,
    NodeState.SILENT,
    NodeState.DRAINING,
)
OPS: Mapping[str, Mapping[str, str]] = {
    Kind.F: {"words": "forward", "colour": "#0072b2"},
    Kind.B: {"words": "backward", "colour": "#d55e00"},
    Kind.I: {"words": "input gradient", "colour": "#e69f00"},
    Kind.W: {"words": "weight gradient", "colour": "#009e73"},
    Kind.R: {"words": "reduce", "colour": "#cc79a7"},
    Kind.U: {"words": "update", "colour": "#8458b3"},
}
PARCELS: Mapping[str, str] = {  # what a worker waits for; of a stage, a microbatch or a replica
    "A": "activation",
    "G": "gradient",
    "P": "partial sum",
    "S": "sum",
    "H": "confirmation of the sum",
    "T": "tied sum",
    "N": "gradient norm",
    "C": "copy of the sum",
    "J": "state of the joining worker",
    "W": "updated weights",
    "K": "optimizer state",
}
PLACES: Mapping[str, str] = {  # of a worker that does not run ops; see `views`
    "absent": "gone; work rerouted",
    "starting": "starting",
    "joining": "copying state",
}
ORDERS: Mapping[type, str] = {
    msg.OpenTask: "prepare task {task} on {node}",
    msg.StartProcess: "start worker {worker} of {task} on {node}",
    msg.KillProcess: "stop worker {worker} of {task} on {node}",
    msg.NotifyWorker: "notify worker {worker} of {task} on {node}",
    msg.OpenMemory: "reserve memory for copies of {task} on {node}",
    msg.DropCopies: "drop old memory copies of {task} on {node}",
    msg.CloseTask: "stop the workers of {task} on {node}",
    msg.KeepOnly: "reconcile the workers on {node}",
    msg.FindCheckpoint: "search checkpoints of {task} on {node}",
    msg.CommitCheckpoint: "commit a checkpoint of {task} on {node}",
    msg.DiscardPartial: "remove an incomplete checkpoint of {task} on {node}",
}
DECISIONS: Mapping[type, str] = {
    msg.NodeChanged: "node {node} is {state}",
    msg.TaskEnded: "task {task} is {state}",
    msg.TaskReshaped: "task {task} changes its shape",
    msg.IncidentClosed: "incident {number} is closed",
    msg.Think: "task {task}: reschedule the rest of the step",
    msg.ChooseAssignment: "ask the planner to allocate the slots",
}
EVENTS: Mapping[type, str] = {
    msg.NodeJoined: "node {node} joined",
    msg.NodeFellSilent: "node {node} fell silent",
    msg.NodeLeft: "node {node} left",
    msg.DrainRequested: "an operator drains node {node}",
    msg.ReadmitRequested: "node {node} is readmitted by {by}",
    msg.RepairPromised: "node {node} is expected back in {back_in_s:.0f} s",
    msg.LeaveAnnounced: "node {node} leaves in {leaves_in_s:.0f} s, says {by}",
    msg.TaskSubmitted: "task {task} is submitted",
    msg.CancelRequested: "an operator cancels task {task}",
    msg.FinishRequested: "task {task} is to finish early",
    msg.PauseRequested: "an operator pauses task {task}",
    msg.UnpauseRequested: "an operator resumes task {task}",
    msg.ResizeRequested: "an operator resizes task {task} to {workers} workers",
    msg.ResizeReleased: "an operator lets the planner choose the size of task {task}",
    msg.ReshapeRequested: "an operator changes the shape of task {task}",
    msg.AssignmentChosen: "the planner allocates the slots",
    msg.SlownessFound: "worker {worker} of {task} is slow",
    msg.SlownessEnded: "worker {worker} of {task} is no longer slow",
    msg.PolicySet: "the policy is set",
    msg.TimePassed: "a waiting time is over",
    msg.CheckpointFound: "the newest checkpoint of {task} is of step {step}",
    msg.CheckpointUnusable: "the checkpoints of {task} cannot be used: {because}",
    msg.PartWritten: "stage {stage} of {task} has written its state of step {step}",
    msg.SaveFailed: "the state of {task} after step {step} was not saved: {because}",
    msg.StateFetched: "worker {worker} of {task} has loaded the state of step {step}",
    msg.OpOverdue: "worker {worker} of {task} is overdue in {doing}",
    msg.WorkerMoved: "worker {worker} of {task} makes progress again",
    msg.LinkMended: "worker {worker} of {task} has reopened its link to {peer}",
    msg.SlowLinkFound: "the link between workers {worker} and {peer} of {task} is slow",
    msg.SlowLinkEnded: "the link between workers {worker} and {peer} of {task} is no longer slow",
    msg.TimesReported: "worker {worker} of {task} reports its times",
    msg.LeaveNoticed: "node {node} leaves in {leaves_in_s:.0f} s, says {by}",
    msg.SlotFreed: "slot {slot} of node {node} is free again",
    msg.KernelSpoke: "the kernel of node {node} says: {text}",
    ev.WorkerStarted: "worker {worker} of {task} has started",
    ev.WorkerExited: "worker {worker} of {task} exited: {reason}",
    ev.WorkerRaised: "worker {worker} of {task} raised {error}",
    ev.LedgerReported: "worker {worker} of {task} reports its ledger, epoch {epoch}",
    ev.PlanComputed: "task {task} has a new schedule, epoch {epoch}",
    ev.StepSealed: "stage {stage} of {task} has sealed step {step}",
    ev.UpdateInvalidated: "worker {worker} of {task} must undo the update of step {step}",
    ev.StateCopied: "worker {worker} of {task} has copied its state",
    ev.ChunksFilled: "worker {worker} of {task} has the chunks it guards",
    ev.WorkerResumed: "worker {worker} of {task} runs ops again, epoch {epoch}",
    ev.ProfileChanged: "task {task}: {because}",
    ev.CheckpointCommitted: "the checkpoint of step {step} of {task} is committed",
    ev.RestoreFailed: "worker {worker} of {task} cannot load the state of step {step}",
}
TASK_COLUMNS = (  # heading, is it a number
    ("", False),
    ("task", False),
    ("state", False),
    ("workers", True),
    ("step", False),
    ("loss", True),
    ("seconds per step", True),
    ("reason", False),
)
INCIDENT_COLUMNS = (
    ("number", True),
    ("opened", False),
    ("task or node", False),
    ("incident", False),
    ("verdict", False),
    ("recovered in", True),
)


def decision(action: msg.ClusterAction) -> str:
    """One decision of the coordinator in plain words."""
    if isinstance(action, msg.Dispatch):
        order = action.order
        return ORDERS[type(order)].format(
            task=getattr(order, "task", ""), worker=getattr(order, "worker", ""), node=action.node
        )
    if isinstance(action, msg.RecordRow):
        return f"record step {action.record.step} of {action.task}"
    shown = {name: getattr(action, name, "") for name in ("node", "task", "state", "number")}
    return DECISIONS[type(action)].format(**shown)


def event(one: msg.ClusterEvent) -> str:
    """One event in plain words."""
    inner: Any = one.report if isinstance(one, msg.FromNode) else one
    task = getattr(inner, "task", "")
    if isinstance(inner, msg.TaskEvent | msg.PlanAnswered):
        inner = inner.event
    known = {name: getattr(inner, name) for name in inner.__slots__}
    shown = {"task": task, "node": getattr(one, "node", "")} | known
    words = EVENTS.get(
        type(inner), "an event that no node may report"
    )  # it was refused, but is in the journal
    return words.format(**shown)[:MOST_TEXT]


def script() -> str:
    """The tables as a module for the page."""
    tables = {
        "NODE_STATES": NODE_STATES,
        "MOST_SEVERE_FIRST": MOST_SEVERE_FIRST,
        "OPS": OPS,
        "PARCELS": PARCELS,
        "PLACES": PLACES,
        "TASK_COLUMNS": TASK_COLUMNS,
        "INCIDENT_COLUMNS": INCIDENT_COLUMNS,
    }
    lines = [
        f"export const {name} = {json.dumps(table, ensure_ascii=False)};" for name, table in tables.items()
    ]
    return "\n".join(["// Written by everstep.server.words.", *lines, ""])
