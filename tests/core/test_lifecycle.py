"""A lifecycle's table is the only way from one state to the next."""

from dataclasses import dataclass
from enum import StrEnum

import pytest

from everstep.errors import InternalError
from everstep.protocol.lifecycle import become, move


class Door(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    LOCKED = "locked"


DOOR = {
    Door.OPEN: frozenset({Door.CLOSED}),
    Door.CLOSED: frozenset({Door.OPEN, Door.LOCKED}),
    Door.LOCKED: frozenset({Door.CLOSED}),
}


@dataclass(slots=True)
class Empty:
    pass


@dataclass(slots=True)
class Filled:
    litres: int


GLASS = {Empty: frozenset({Filled}), Filled: frozenset({Empty, Filled})}


def test_an_allowed_transition_gives_the_new_state() -> None:
    assert move(DOOR, Door.CLOSED, Door.LOCKED, "the door") is Door.LOCKED


def test_an_illegal_transition_names_both_states() -> None:
    with pytest.raises(InternalError, match="the door: open cannot become locked"):
        move(DOOR, Door.OPEN, Door.LOCKED, "the door")


def test_staying_is_a_transition_too() -> None:
    with pytest.raises(InternalError, match="open cannot become open"):
        move(DOOR, Door.OPEN, Door.OPEN, "the door")
    assert become(GLASS, Filled(1), Filled(2), "the glass") == Filled(2)


def test_a_state_with_data_is_checked_by_its_class() -> None:
    assert become(GLASS, Empty(), Filled(3), "the glass").litres == 3
    with pytest.raises(InternalError, match="the glass: empty cannot become empty"):
        become(GLASS, Empty(), Empty(), "the glass")
