"""The words of the dashboard, as tables: states, ops, parcels, decisions, columns of tables.

The page gets them as the module `/web/tables.js`, which `script` writes from these tables; no other file of
the page repeats them. Tests check that every state, op, parcel and order of `core` has its words here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everstep.core.cluster.node_states import NodeState
from everstep.protocol import messages as msg
from everstep.protocol.ops import Kind
from everstep.protocol.table import TABLE

MOST_TEXT = 300  # characters of an event
NODE_STATES: Mapping[str, Mapping[str, Any]] = {
    NodeState.UP: {"mark": "✓", "colour": "--up", "good": True},
    NodeState.SILENT: {"mark": "?", "colour": "--silent"},
    NodeState.CHECKING: {"mark": "…", "colour": "--silent"},
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
    NodeState.CHECKING,
)
OPS: Mapping[str, Mapping[str, str]] = {
    Kind.F: {"words": "forward", "colour": "#0072b2"},
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
    "D": "hashes of a vote",
    "Q": "request to compute again",
    "V": "answer to a replay",
}
PLACES: Mapping[str, str] = {  # of a worker that does not run ops; see `views`
    "absent": "gone; work rerouted",
    "starting": "starting",
    "joining": "copying state",
}
TASK_COLUMNS = (  # heading, is it a number
    ("", False),
    ("task", False),
    ("state", False),
    ("workers", True),
    ("step", False),
    ("loss", True),
    ("seconds per step", True),
    ("goodput", True),
    ("owner", False),
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
    said = action.order if isinstance(action, msg.Dispatch) else action
    return TABLE[type(said)].sentence(said, node=getattr(action, "node", ""))


def event(one: msg.ClusterEvent) -> str:
    """One event in plain words."""
    inner = one.report if isinstance(one, msg.FromNode) else one
    said = inner.event if isinstance(inner, msg.TaskEvent | msg.PlanAnswered) else inner
    around = {"task": getattr(inner, "task", ""), "node": getattr(one, "node", "")}
    return TABLE[type(said)].sentence(said, **around)[:MOST_TEXT]


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
