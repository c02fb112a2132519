"""Which lanes may begin a transfer: at most so many each way at once, and none while the device is at rest.

A device that has work which may wait for all that is on it (a kernel that is loaded, a graph that is launched
for the first time) must not be in a transfer meanwhile: that waits for another worker, whose device may wait
in the same way. So a worker asks for rest first. From then on it begins no transfer that another one would
have to answer; it still answers those of others, or two workers that ask at once would wait for each other.
Once nothing is on its way, nothing is begun until it resumes.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from enum import Enum, auto


class Way(Enum):
    SENDS = auto()
    RECEIVES = auto()
    OPENS = auto()  # a lane's first transfer, which both ends begin by themselves


class _Rest(Enum):
    NONE = auto()
    WANTED = auto()
    TAKEN = auto()


class Turns:
    """Used by all threads."""

    def __init__(self, most: float) -> None:
        """`most`: so many may send at once, and as many receive."""
        self._most = most
        self._under_way: dict[Way, set[Hashable]] = {way: set() for way in Way}
        self._rest = _Rest.NONE
        self._lock = threading.Lock()

    def take(self, lane: Hashable, way: Way) -> bool:
        """Its transfer may begin, and is under way from now on."""
        with self._lock:
            if self._rest is _Rest.TAKEN or (self._rest is _Rest.WANTED and way is Way.SENDS):
                return False
            if way is not Way.OPENS and len(self._under_way[way]) >= self._most:
                return False
            self._under_way[way].add(lane)
            return True

    def ended(self, lane: Hashable, way: Way) -> None:
        with self._lock:
            self._under_way[way].discard(lane)

    def rests(self) -> bool:
        """Ask for rest. Is it there?"""
        with self._lock:
            if self._rest is not _Rest.TAKEN:
                self._rest = _Rest.WANTED if any(self._under_way.values()) else _Rest.TAKEN
            return self._rest is _Rest.TAKEN

    def resume(self) -> None:
        with self._lock:
            self._rest = _Rest.NONE
