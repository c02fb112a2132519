"""Virtual time: what happens next, in whole microseconds. Ties are settled by who asked first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    def __init__(self) -> None:
        self.now_us = 0
        self.done = 0
        self._serial = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time_us: int, what: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heappush(self._heap, (time_us, self._serial, what, args))

    def after(self, delay_us: int, what: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heappush(self._heap, (self.now_us + delay_us, self._serial, what, args))

    def step(self) -> bool:
        """Do the next thing. False: nothing is left."""
        if not self._heap:
            return False
        self.now_us, _, what, args = heappop(self._heap)
        self.done += 1
        what(*args)
        return True

    def next_at(self) -> int | None:
        return self._heap[0][0] if self._heap else None
