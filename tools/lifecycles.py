"""docs/reference/lifecycles.md: every lifecycle of `core`, drawn from the table that the code checks.

A lifecycle is a module-level table `{state: frozenset(states that may follow)}` (`protocol.lifecycle`). The
tables are found in the modules; `TITLES` only gives each one its heading, its sentence and its place on the
page. What a state means is its class's docstring, or the comment beside the enum's member.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import everstep.core
from everstep.protocol.lifecycle import state_name

Table = Mapping[Any, frozenset[Any]]

TITLES: dict[str, tuple[str, str]] = {
    "core.cluster.node_states.ADMIN": (
        "A node: administrative state",
        "What operators and remedies want with a node.",
    ),
    "core.cluster.node_states.LIVENESS": (
        "A node: liveness",
        "Whether the coordinator hears from the node. It changes independently of the administrative state.",
    ),
    "core.cluster.task.TASK": (
        "A task",
        "The task as the coordinator sees it, from submission to its end.",
    ),
    "protocol.incidents.INCIDENT": (
        "An incident",
        "From the first evidence to the end. An incident that does not stop training is never `planned`.",
    ),
    "core.task.states.PHASE": (
        "A running task: its phase",
        "What the recovery of a task does. Every change of membership leads through `gathering`.",
    ),
    "core.task.states.PLACE": (
        "A place of a task",
        "The process that fills one (replica, stage), as the coordinator sees it.",
    ),
    "core.worker.joining.WORKER": (
        "A worker",
        "The same process as it sees itself: how it comes by its state.",
    ),
    "core.worker.step_state.SUM": (
        "A step at a worker: the gradient sum",
        "From the first op to the sum over all microbatches. `held` may follow at once: a peer can give its "
        "whole sum.",
    ),
    "core.worker.step_state.SEAL": (
        "A step at a worker: the seal",
        "A sum is safe when every live peer of the stage holds it.",
    ),
    "core.worker.step_state.UPDATE": (
        "A step at a worker: the update",
        "A stage may update before the norm of all stages is known; then the update is validated afterwards.",
    ),
    "core.agent.process.PROCESS": (
        "A worker process on its node",
        "What an agent asks of a process has a deadline. One that outlives SIGKILL is reported as stuck.",
    ),
}


class Lifecycle(NamedTuple):
    name: str  # core.task.states.PHASE
    table: Table


def lifecycles() -> list[Lifecycle]:
    """Every table of `core`, in the order of `TITLES`; those it does not know last."""
    found = {
        f"{module}.{name}": value
        for module, names in _modules()
        for name, value in names.items()
        if name.isupper() and is_table(value)
    }
    known = [name for name in TITLES if name in found]
    return [Lifecycle(name, found[name]) for name in (*known, *sorted(found.keys() - TITLES.keys()))]


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each module of `core`, with what is defined in it and not imported."""
    for info in pkgutil.walk_packages(everstep.core.__path__, "everstep.core."):
        module = import_module(info.name)
        source = Path(module.__file__ or "").read_text()
        own = {k: v for k, v in vars(module).items() if re.search(rf"^{k}\b.*=", source, re.MULTILINE)}
        yield info.name.removeprefix("everstep."), own


def is_table(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(after, frozenset) and after <= value.keys() for after in value.values())
    )


def page() -> str:
    parts = [
        "# Lifecycles",
        "Every state in Everstep that changes is a table of allowed transitions, and one function makes them "
        "(`protocol.lifecycle`). A transition that its table does not list is an internal error that names "
        "both states. This page is drawn from the tables by `python -m tools.docs lifecycles`.",
    ]
    for name, table in lifecycles():
        title, sentence = TITLES.get(name, (f"`{name}`", ""))
        module = name.rpartition(".")[0]
        parts.append(f"## {title}")
        parts.append(f"{sentence} (`{module}`)".strip())
        parts.append(f"```mermaid\n{diagram(table)}\n```")
        parts.append(listing(table))
    return "\n\n".join(_wrapped(part) for part in parts) + "\n"


def diagram(table: Table) -> str:
    """A Mermaid state diagram. The first state of a table is where its life begins."""
    lines = ["stateDiagram-v2", f"    [*] --> {_node(next(iter(table)))}"]
    for old, after in table.items():
        lines += [f"    {_node(old)} --> {_node(new)}" for new in _in_order(table, after)]
        if not after:
            lines.append(f"    {_node(old)} --> [*]")
    return "\n".join(lines)


def listing(table: Table) -> str:
    rows = ["| state | meaning | may become |", "|---|---|---|"]
    for old, after in table.items():
        follows = ", ".join(state_name(new) for new in _in_order(table, after)) or "nothing: it is over"
        rows.append(f"| {state_name(old)} | {meaning(old)} | {follows} |")
    return "\n".join(rows)


def meaning(state: Any) -> str:
    """The docstring of a class, the comment beside an enum's member."""
    if isinstance(state, type):
        doc = inspect.getdoc(state) or ""
        return "" if doc.startswith(f"{state.__name__}(") else " ".join(doc.split("\n\n")[0].split())
    assert isinstance(state, Enum)
    source = inspect.getsource(type(state))
    found = re.search(rf"^\s+{state.name} = [^#\n]*#\s*(.*)$", source, re.MULTILINE)
    return found[1] if found else ""


def _in_order(table: Table, states: frozenset[Any]) -> list[Any]:
    return [state for state in table if state in states]


def _node(state: Any) -> str:
    return state_name(state).replace(" ", "_")


def _wrapped(part: str) -> str:
    if part.startswith(("#", "|", "```")):
        return part
    return textwrap.fill(part, 100, break_long_words=False, break_on_hyphens=False)
