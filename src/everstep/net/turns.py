"""Which lanes may begin a transfer: at most so many each way at once, and none while the device is at rest.

A call that waits for all that a device does (memory is freed) must not be made beside a transfer: that waits
for another worker, which may be in the same call. So a worker asks for rest first. From then on it begins no
transfer that another one would have to answer; it still answers those of others, or two workers that ask at
once would wait for each other. Once nothing is on its way, nothing is begun until it resumes.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from enum import Enum, auto


class Traffic(Enum):
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
        self._under_way: dict[Traffic, set[Hashable]] = {what: set() for what in Traffic}
        self._rest = _Rest.NONE
        self._lock = threading.Lock()

    def take(self, lane: Hashable, what: Traffic) -> bool:
        """Its transfer may begin, and is under way from now on."""
        with self._lock:
            if self._rest is _Rest.TAKEN or (self._rest is _Rest.WANTED and what is Traffic.SENDS):
                return False
            if what is not Traffic.OPENS and len(self._under_way[what]) >= self._most:
                return False
            self._under_way[what].add(lane)
            return True

    def ended(self, lane: Hashable, what: Traffic) -> None:
        with self._lock:
            self._under_way[what].discard(lane)

    def rests(self) -> bool:
        """Ask for rest. Is it there?"""
        with self._lock:
            if self._rest is not _Rest.TAKEN:
                self._rest = _Rest.WANTED if any(self._under_way.values()) else _Rest.TAKEN
            return self._rest is _Rest.TAKEN

    def resume(self) -> None:
        with self._lock:
            self._rest = _Rest.NONE
