"""Lines between agents and a coordinator in a forecast.

After a coordinator's death an agent tries again every two seconds, so half of that passes until it is heard.
A coordinator that dies again before that has healed nothing, and no task has followed a finished one.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.node.agent import RETRY_MOST_S
from everstep_lab.agenda import Agenda


class Lines:
    """Of all agents together."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda, self._are_up, self._deaths = agenda, True, 0
        self._held: list[Callable[[], None]] = []

    def carry(self, what: Callable[[], None]) -> None:
        if self._are_up:
            what()
        else:
            self._held.append(what)

    def cut(self) -> None:
        self._are_up = False
        self._deaths += 1

    def mend(self) -> None:
        """The coordinator is there again."""
        if not self._are_up:
            self._agenda.after(int(RETRY_MOST_S / 2 * 1e6), self._mended, self._deaths)

    def _mended(self, deaths: int) -> None:
        if deaths != self._deaths or self._are_up:
            return
        self._are_up = True
        held, self._held = self._held, []
        for each in held:
            each()
