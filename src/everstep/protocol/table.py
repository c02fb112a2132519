"""The table of messages. Every message is declared once, where its class is:

    @message(by=WORKER, fences=(EPOCH,), says="worker {worker} of {task} runs ops again, epoch {epoch}")
    class WorkerResumed(Event): ...

Its base classes are the wires it travels on: empty classes, which annotations and the codec use for any of
their messages. Wires do not inherit from one another: a wider wire is a union of them. From the rows of the
table follow which reports a coordinator accepts (`core.cluster.fences`), what can be decoded (`codec`), the
sentences that people read (`server.words`), what an agent keeps while the line is cut (`core.agent.reports`)
and the reference of the protocol. A machine that takes the messages of a wire has `Handlers`; a test compares
them with the rows, so a message without a handler fails there.

To add a message: its row, its sender, its handler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from string import Formatter
from types import UnionType
from typing import Any, ClassVar, Generic, TypeVar, dataclass_transform, get_args, get_type_hints

from everstep.errors import InternalError

PROTOCOL = 4  # raised when a message changes in a way that an older program would misread
Message = TypeVar("Message")
Result = TypeVar("Result")
Json = Any  # a field of this type is JSON already: nobody here looks into it, and the codec leaves it alone
Document = dict[str, Json]
AnyMessage = Any  # its row says what it has
MessageClass = type[AnyMessage]
Wire = MessageClass | UnionType
Method = TypeVar("Method", bound=Callable[..., Any])


class Speaker(StrEnum):
    """Who may say a message."""

    WORKER = "worker"  # or its agent, about this one process: the report names it (`Sender`)
    AGENT = "agent"
    COORDINATOR = "coordinator"  # its machine, its clock, its scheduler and its planner
    OPERATOR = "operator"


class Fence(StrEnum):
    """What must hold of a message, or it does not count. Whatever a worker says counts only if its process
    (`Sender`) holds the worker's place on that node; an agent speaks of its own node, and of others' matters
    only where it was asked.
    """

    # A number that must be the current one; else the message is of the past.
    INCARNATION = "incarnation"  # of the worker that it names
    EPOCH = "epoch"
    ATTEMPT = "attempt"  # at the step that it names
    NEXT_ATTEMPT = "attempt at the next step"
    # What an agent must have been asked; else it speaks for somebody else.
    SEARCH = "search for checkpoints"  # by its number: this node makes it
    COMMIT = "commit"  # this node was ordered to make it, or has the task
    PROBE = "probe of links"
    PAIR = "measurement of a pair"  # by its key: this node makes it


WORKER, AGENT, COORDINATOR, OPERATOR = Speaker
INCARNATION, EPOCH, ATTEMPT, NEXT_ATTEMPT, SEARCH, COMMIT, PROBE, PAIR = Fence
ASKED = frozenset({SEARCH, COMMIT, PROBE, PAIR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    kind: type[Any]
    by: tuple[Speaker, ...]
    fences: tuple[Fence, ...]
    says: str  # with the message's fields, and `node` and `task` where they are around it
    fleeting: bool  # of no use later: not kept while the line is cut

    def sentence(self, message: object, **around: object) -> str:
        kind: AnyMessage = self.kind
        known = {name: getattr(message, name) for name in _named_in(self.says, kind)}
        return self.says.format(**around | known)


@cache
def _named_in(says: str, kind: MessageClass) -> tuple[str, ...]:
    """The fields of a message that its sentence names: it is said of thousands of orders at once."""
    wanted = {re.split(r"[.[]", name)[0] for _, name, _, _ in Formatter().parse(says) if name}
    return tuple(each.name for each in fields(kind) if each.name in wanted)


TABLE: dict[MessageClass, Row] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def message(
    *,
    says: str,
    by: Speaker | tuple[Speaker, ...] = COORDINATOR,
    fences: tuple[Fence, ...] = (),
    fleeting: bool = False,
) -> Callable[[type[Message]], type[Message]]:
    """Make the class a frozen dataclass and give it its row."""

    def declare(kind: type[Message]) -> type[Message]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(kind)
        speakers = (by,) if isinstance(by, Speaker) else by
        TABLE[made] = Row(kind=made, by=speakers, fences=fences, says=says, fleeting=fleeting)
        return made

    return declare


def rows(wire: Wire) -> Iterator[Row]:
    """The messages of a wire, in the order of their declaration."""
    return (row for kind, row in TABLE.items() if issubclass(kind, wire))


def is_wire(kind: object) -> bool:
    """An empty base class of messages?"""
    return isinstance(kind, type) and kind not in TABLE and any(issubclass(each, kind) for each in TABLE)


class Handlers(Generic[Result]):
    """What a machine does about each message of a wire: its methods, by the class in their annotation.

    on = Handlers[Actions](NodeReport)

    @on
    def _slot_freed(self, report: SlotFreed, now: float) -> Actions: ...

    def handle(self, report: NodeReport, now: float) -> Actions:
        return self.on.handler(self, report)(report, now)
    """

    ALL: ClassVar[list[Handlers[Any]]] = []

    def __init__(self, *wires: Wire) -> None:
        self.wires = wires
        self._names: dict[MessageClass, str] = {}
        self.ALL.append(self)

    def __call__(self, method: Method) -> Method:
        kinds = [kind for hint in get_type_hints(method).values() for kind in _kinds(hint)]
        found = [kind for kind in TABLE if kind in kinds and issubclass(kind, self.wires)]
        assert found, f"{method.__qualname__} takes no message of {self.wires}"
        for kind in found:
            assert kind not in self._names, f"{kind.__name__} has two handlers"
            self._names[kind] = method.__name__
        return method

    def handler(self, machine: object, message: object) -> Callable[..., Result]:
        """The method of this machine for this message."""
        name = self._names.get(type(message))
        if name is None:
            raise InternalError(f"{type(message).__name__} has no handler in {type(machine).__name__}")
        method: Callable[..., Result] = getattr(machine, name)
        return method

    def missing(self) -> set[str]:
        """The messages that would not be handled."""
        wanted = {row.kind.__name__ for wire in self.wires for row in rows(wire)}
        return wanted - {kind.__name__ for kind in self._names}


def _kinds(hint: object) -> tuple[object, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)
