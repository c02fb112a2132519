"""Inputs that no honest program would send: valid messages made from their types, then broken.

`made` draws a message of a type from the types of its fields, so every kind of message and every field is
reached without a list kept by hand. `broken` changes one in some places: another type, a huge number, a text
of another size, a field too few or too many, deep nesting. All of it comes from one `random.Random`.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from everstep.protocol.ops import Microbatch, Op, OpLists, Replicas, Worker
from everstep.protocol.table import is_wire, rows

TASKS, NODES = ("t", "u", "nowhere"), ("a", "b", "nowhere")
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    -0.0,
    "",
    "x" * 5000,
    "\ud800",
    "\x00",
    "..",
    "../../etc",
    [],
    {},
    [[]],
    {"is": "Nothing"},
    {"": None},
)


class Maker:
    """Messages of core's types, as JSON."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def made(self, kind: Any, name: str = "") -> Any:
        draw = self.random
        origin = get_origin(kind)
        if origin in (Union, types.UnionType):
            return self.made(draw.choice(get_args(kind)), name)
        if origin is Literal:
            return draw.choice(get_args(kind))
        if origin in (list, set, frozenset):
            return [self.made(get_args(kind)[0]) for _ in range(draw.randrange(3))]
        if origin is tuple:
            return self._tuple(get_args(kind))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            key, value = get_args(kind)
            return [[self.made(key), self.made(value)] for _ in range(draw.randrange(3))]
        if kind in (Op, Worker, Microbatch):
            return self._text(kind)
        if kind is Replicas:
            return draw.choice(("", "0", "0-2", "0-1,3"))
        if kind is OpLists:
            return {"patterns": ["2F~.0 2U", "0U"], "numbers": draw.choice(([], [[0]], [[1, -1], [0, 0]]))}
        if isinstance(kind, type) and issubclass(kind, Enum):
            return draw.choice(list(kind)).value
        if is_wire(kind):
            return self.made(draw.choice([row.kind for row in rows(kind)]), name)
        if is_dataclass(kind):
            hints = get_type_hints(kind)
            told = {one.name: self.made(hints[one.name], one.name) for one in fields(kind)}
            return {"is": kind.__name__, **told}  # type: ignore[union-attr]
        if hasattr(kind, "_fields"):
            return [self.made(hint, at) for at, hint in get_type_hints(kind).items()]
        return self._plain(kind, name)

    def broken(self, document: Any) -> Any:
        """Changed in one place or in a few."""
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 5))):
            document = self._break(document)
        return document

    def _break(self, document: Any) -> Any:
        draw = self.random
        if isinstance(document, dict) and document and draw.random() < 0.85:
            key = draw.choice(list(document))
            changed = dict(document)
            how = draw.random()
            if how < 0.15:
                del changed[key]
            elif how < 0.2:
                changed[str(draw.choice(ODD))[:50]] = draw.choice(ODD)
            else:
                changed[key] = self._break(changed[key])
            return changed
        if isinstance(document, list) and document and draw.random() < 0.8:
            at = draw.randrange(len(document))
            return [*document[:at], self._break(document[at]), *document[at + 1 :]]
        if draw.random() < 0.02:
            return _deep(draw.choice((50, 900)))
        if isinstance(document, int) and not isinstance(document, bool) and draw.random() < 0.5:
            return document + draw.choice((-1, 1, 1000, 2**40))
        return draw.choice(ODD)

    def _tuple(self, items: tuple[Any, ...]) -> list[Any]:
        if len(items) == 2 and items[1] is Ellipsis:
            return [self.made(items[0]) for _ in range(self.random.randrange(3))]
        return [self.made(item) for item in items]

    def _text(self, kind: Any) -> str:
        a, b = self.random.randrange(3), self.random.randrange(3)
        if kind is Op:
            of_microbatch = self.random.choice("FIW")
            return f"{a}{of_microbatch}{b}.0" if self.random.random() < 0.8 else f"{a}U"
        return f"{a}.{b}" if kind is Microbatch else f"{a}:{b}"

    def _plain(self, kind: Any, name: str) -> Any:
        draw = self.random
        if kind is str:
            known = {"task": TASKS, "node": NODES, "boot": ("1", "2"), "secret": ("00" * 32,)}
            return draw.choice(known.get(name, ("", "some words", "a")))
        if kind is int:
            return draw.choice((0, 1, 1, 2, 3, 7))
        if kind is float:
            return draw.choice((0.0, 0.5, 3.0))
        if kind is bool:
            return draw.random() < 0.5
        return None if kind in (None, type(None)) else draw.choice(({}, [], None, "part", 3))


def _deep(levels: int) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = [found]
    return found


@dataclass(slots=True)
class FuzzReport:
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    def tried(self, do: Callable[[], Any], refusals: tuple[type[BaseException], ...], what: Any) -> None:
        """One input. A refusal is an answer; anything else that is raised is a failure."""
        self.inputs += 1
        try:
            do()
        except refusals:
            self.refused += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.failures.append(f"{type(error).__name__}: {error!s:.200} for {what!r:.600}")
