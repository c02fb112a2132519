"""After a restart: agents come back one after the other, and who is still on the way is not silent.

The first to come may bring a witness that waits, to whom all that are still on their way would look dead. The
last one missing is waited for as long as an agent may sleep before it tries again: until then it is as likely
to be on its way as to be dead, and giving it up costs its workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.faults.detector import Heartbeats

RETURN_S = 15.0  # for agents to notice that a coordinator's machine is dead, and to find another
LAST_S = 3.0  # an agent that is up tries again within 2.5 s (everstep.node.agent)


class Returns:
    def __init__(self, hearts: Heartbeats) -> None:
        self._hearts = hearts
        self._missing: set[str] = set()
        self._by = 0.0
        self._came_at: float | None = None  # the last of them; None: since the last look

    def expect(self, nodes: Iterable[str], now: float) -> None:
        self._missing, self._by, self._came_at = set(nodes), now + RETURN_S, now
        for node in self._missing:
            self._hearts.heard(node, now)

    def came(self, node: str) -> None:
        if node in self._missing:
            self._missing.discard(node)
            self._came_at = None

    def wait(self, now: float) -> None:
        """Called often."""
        if self._came_at is None:
            self._came_at = now
        is_last_late = len(self._missing) <= 1 and now > self._came_at + LAST_S
        if now > self._by or is_last_late:
            self._missing.clear()
        for node in self._missing:
            self._hearts.heard(node, now)
