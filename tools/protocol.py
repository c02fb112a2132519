"""docs/reference/protocol.md: every message between coordinator, agents and workers.

`PARTS` gives the headings and the wire of each. Fields, types, defaults and comments are read from the
classes, who may say a message and its fences from its row; a class that a field mentions is listed under
"Values".
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from types import UnionType
from typing import Any, get_args, get_origin

from everstep.protocol import messages
from everstep.protocol.actions import Notice
from everstep.protocol.events import Event
from everstep.protocol.table import ASKED, PROTOCOL, TABLE, Wire, rows


def classes(wire: Wire) -> tuple[type, ...]:
    return tuple(row.kind for row in rows(wire))


PARTS: tuple[tuple[str, str, tuple[type, ...]], ...] = (
    (
        "Agent to coordinator: first message",
        'Sent as `{"hello": NodeJoined, "done": n}`, where `done` is the number of the last order that was '
        'carried out. The answer is `{"welcome": node, "heard": n, "term": t}` or `{"refused": why}`.',
        (messages.NodeJoined,),
    ),
    (
        "Agent to coordinator: reports",
        'Sent as `{"number": n, "report": …, "sender": …}`. Numbers start at 1 for each life of an agent and '
        'the coordinator acknowledges them by `{"heard": n}`, alone or with an order. Four times '
        'per second the agent sends `{"beat": …, "done": n}`.',
        classes(messages.NodeReport),
    ),
    (
        "Coordinator to agent: orders",
        'Sent as `{"number": n, "order": …, "because": …, "term": t}`. An agent carries out each number once '
        "and ignores orders of an earlier term of leadership.",
        classes(messages.Order),
    ),
    (
        "Worker to agent: first message",
        "A worker process connects to the Unix socket of its agent and says which process it is.",
        (messages.WorkerHello, messages.ShardEnded),
    ),
    (
        "Worker to agent: reports",
        "The agent numbers them and passes them on to the coordinator without looking at their fields.",
        classes(messages.WorkerReport),
    ),
    (
        "Agent to worker: orders",
        "`NotifyWorker` comes from the coordinator and is passed on as it is.",
        classes(messages.WorkerOrder),
    ),
    (
        "Coordinator to worker: notices",
        "What a `NotifyWorker` carries.",
        classes(Notice),
    ),
    (
        "Events of a task",
        "What a `TaskEvent` carries. Workers and agents report some of them; the coordinator makes the "
        "others itself, and writes them to its journal in the same form.",
        classes(Event),
    ),
    (
        "Events of the cluster",
        "What the coordinator writes to its journal, in this order, before it acts on it.",
        classes(messages.ClusterEvent),
    ),
)
INTRODUCTION = (
    "One codec (`protocol.codec`) carries every message: JSON, in which an object is a dataclass and "
    '`"is"` names its class. Between an agent and its workers, each message has a length of four bytes in '
    "front of it; between coordinator and agents it is one text message of a WebSocket. Every value is "
    "checked against its type, and a message that does not fit is refused by name. A field that the "
    "receiver does not know is ignored, and one that is missing takes its default, so two versions "
    "understand each other as long as new fields have defaults. A change that an older program would "
    "misread raises the protocol version, now **{version}**, which a worker states in its first message."
)
_OPS = "Ops, workers and microbatches are text: `1F0.2`, `0:1`, `0.2`."


def page() -> str:
    parts = [
        "# Protocol",
        INTRODUCTION.format(version=PROTOCOL),
        f"{_OPS} This page is made from the classes by `python -m tools.docs protocol`.",
    ]
    shown: list[type] = []
    for title, sentence, kinds in PARTS:
        parts += [f"## {title}", sentence]
        for message in kinds:
            if message in shown:
                parts.append(f"- `{message.__name__}`: see above.")
            else:
                shown.append(message)
                parts += _message(message)
    parts += ["## Values", "What the fields above are made of."]
    for value in _values(shown):
        parts += _message(value)
    return "\n\n".join(_wrapped(part) for part in parts) + "\n"


def describe(message: type) -> str:
    """Its docstring's first paragraph; empty if it has none of its own."""
    text = message.__doc__ or ""
    return "" if text.startswith(f"{message.__name__}(") else " ".join(inspect.cleandoc(text).split())


def _message(message: type) -> list[str]:
    found = [f"### {message.__name__}", describe(message), _said_by(message)]
    if fields := _fields(message):
        found.append("\n".join(["| field | type | default | |", "|---|---|---|---|", *fields]))
    return [part for part in found if part]


def _said_by(message: type) -> str:
    """Who may say it, and which of its numbers must be current; empty for a value."""
    if (row := TABLE.get(message)) is None:
        return ""
    numbers = [fence for fence in row.fences if fence not in ASKED]
    asked = [fence for fence in row.fences if fence in ASKED]
    fences = f" Counts only with the current {', '.join(numbers)}." if numbers else ""
    fences += f" From an agent it counts only as the answer to a {', '.join(asked)}." if asked else ""
    return f"Said by: {', '.join(row.by)}.{fences}"


def _fields(message: type) -> list[str]:
    comments = _comments(message)
    if dataclasses.is_dataclass(message):
        return [
            _row(one.name, str(one.type), _default(one), comments.get(one.name, ""))
            for one in dataclasses.fields(message)
        ]
    hints = message.__annotations__  # a NamedTuple: a list of its values
    return [_row(name, str(kind), "", comments.get(name, "")) for name, kind in hints.items()]


def _row(name: str, kind: str, default: str, comment: str) -> str:
    kind = re.sub(r"ForwardRef\('([^']*)'.*\)", r"\1", kind)
    escaped = kind.replace("|", "\\|")
    return f"| `{name}` | `{escaped}` | {default} | {comment} |"


def _default(one: dataclasses.Field[Any]) -> str:
    if one.default is not dataclasses.MISSING:
        return f"`{one.default!r}`"
    return "empty" if one.default_factory is not dataclasses.MISSING else ""


def _comments(message: type) -> dict[str, str]:
    found = re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(message), re.MULTILINE)
    return {name: text.replace("|", "\\|") for name, text in found}


def _all_of(kind: Any) -> list[type]:
    """The classes of a union, in its order."""
    if isinstance(kind, UnionType) or get_origin(kind) is not None:
        return [found for part in get_args(kind) for found in _all_of(part)]
    return [kind] if isinstance(kind, type) else []


def _values(messages: list[type]) -> list[type]:
    """Classes of ours that the fields of these mention, and those that theirs mention."""
    found: list[type] = []
    todo = list(messages)
    while todo:
        one = todo.pop(0)
        names = vars(sys.modules[one.__module__])
        for kind in one.__annotations__.values():
            for word in re.findall(r"\w+", str(kind)):
                for value in _all_of(names.get(word)):
                    ours = value.__module__.startswith("everstep.protocol") and hasattr(
                        value, "__annotations__"
                    )
                    structured = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
                    if ours and structured and value not in messages and value not in found:
                        found.append(value)
                        todo.append(value)
    return [value for value in found if value.__name__ not in ("Op", "Worker", "Microbatch")]


def _wrapped(part: str) -> str:
    if part.startswith(("#", "|", "```")):
        return part
    return textwrap.fill(part, 100, break_long_words=False, break_on_hyphens=False)
