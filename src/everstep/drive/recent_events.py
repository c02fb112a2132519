"""What happened lately, in words, and what followed from each event.

    event 12  worker 0:1 has waited too long      ──►  stop worker 0:1        (an action names its event)

Incidents, plans and orders name the event that they follow from by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from everstep.drive.ports import HandledEvent
from everstep.protocol import messages as msg

KEPT = 4000
MOST_ACTIONS = 40  # of one event


class ActionTold(NamedTuple):
    """An action in words."""

    text: str
    because: str


@dataclass(frozen=True, slots=True)
class EventTold:
    """One event in words, and what followed from it."""

    number: int
    at: float
    text: str
    actions: tuple[ActionTold, ...]


class RecentEvents:
    """Keeps words, not events: a plan or a ledger can be large."""

    def __init__(
        self,
        *,
        of_event: Callable[[msg.ClusterEvent], str],
        of_action: Callable[[msg.ClusterAction], str],
    ) -> None:
        self._of_event, self._of_action = of_event, of_action
        self._told: deque[EventTold] = deque(maxlen=KEPT)

    def handled(self, one: HandledEvent) -> None:
        if one.event is None:
            return
        done = [ActionTold(self._of_action(each), each.because) for each in one.actions[:MOST_ACTIONS]]
        told = EventTold(one.number, one.at, self._of_event(one.event), tuple(dict.fromkeys(done)))
        self._told.append(told)

    def get(self, number: int) -> EventTold | None:
        """None: it is too long ago, or still to come."""
        place = number - self._told[0].number if self._told else -1
        return self._told[place] if 0 <= place < len(self._told) else None
