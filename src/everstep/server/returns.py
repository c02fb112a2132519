"""After a restart: agents come back one after the other, and who is still on the way is not silent.

The first to come may bring a witness that waits, to whom all that are still on their way would look dead. The
last one missing is waited for no longer than any silent node.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.faults.detector import Heartbeats

RETURN_S = 15.0  # for agents to notice that a coordinator's machine is dead, and to find another


class Returns:
    def __init__(self, hearts: Heartbeats) -> None:
        self._hearts = hearts
        self._missing: set[str] = set()
        self._by = 0.0

    def expect(self, nodes: Iterable[str], now: float) -> None:
        self._missing, self._by = set(nodes), now + RETURN_S
        for node in self._missing:
            self._hearts.heard(node, now)

    def came(self, node: str) -> None:
        self._missing.discard(node)

    def wait(self, now: float) -> None:
        """Called often."""
        if now > self._by or len(self._missing) <= 1:
            self._missing.clear()
        for node in self._missing:
            self._hearts.heard(node, now)
