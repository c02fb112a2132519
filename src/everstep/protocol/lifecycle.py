"""A lifecycle is a literal table of the transitions that are allowed, with one checked way to make one.

    NODE = {Liveness.HEARD: frozenset({Liveness.SILENT}), …}
    self.liveness = move(NODE, self.liveness, Liveness.SILENT, f"node {name}")

A state with data of its own is an instance of a class; its table is keyed by the classes:

    PLACE = {Starting: frozenset({Joining, Absent}), …}
    self.places[worker] = become(PLACE, self.places[worker], Joining(incarnation), f"worker {worker}")

An illegal transition is a bug of ours, so it is an InternalError that names both states. Staying in a state
is a transition too: the table must list it. `python -m tools.docs lifecycles` draws these
tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from everstep.errors import InternalError

State = TypeVar("State")
New = TypeVar("New")
StateClasses = Mapping[type[Any], frozenset[type[Any]]]


def move(table: Mapping[State, frozenset[State]], old: State, new: State, what: str) -> State:
    """`new`, if the table allows it after `old`. `what` names the thing whose state this is."""
    if new not in table[old]:
        raise InternalError(f"{what}: {state_name(old)} cannot become {state_name(new)}")
    return new


def become(table: StateClasses, old: object, new: New, what: str) -> New:
    """`move` for states that carry data: the table lists their classes."""
    move(table, type(old), type(new), what)
    return new


def state_name(state: object) -> str:
    return state.__name__.lower() if isinstance(state, type) else str(state)
