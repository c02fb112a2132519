"""A shard's mark: which collective of its group it has entered, and how long it has waited inside them.

A few bytes of shared memory per shard, beside the worker's beacon: the agent reads them to find the shard
that the others wait for, also when no shard can speak. On a GPU the host only queues a collective: there the
time inside says little, and a slow shard is not named by it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<q q q q")  # pid, collectives entered, left, nanoseconds inside


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReading:
    pid: int
    entered: int
    left: int
    inside_ns: int


def mark_path(beacon: Path, shard: int) -> Path:
    return beacon.with_name(f"{beacon.name}.shard-{shard}")


def read_marks(beacon: Path, count: int) -> list[MarkReading] | None:
    """Of all shards of a worker; None: not all of them have begun."""
    found = []
    for shard in range(count):
        data = b""
        with contextlib.suppress(OSError):
            data = mark_path(beacon, shard).read_bytes()
        if len(data) < _LAYOUT.size:
            return None
        pid, entered, left, inside_ns = _LAYOUT.unpack_from(data)
        found.append(MarkReading(pid=pid, entered=entered, left=left, inside_ns=inside_ns))
    return found


class ShardMark:
    """Written by its shard alone."""

    def __init__(self, beacon: Path, shard: int, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._entered = self._left = self._inside_ns = self._since_ns = 0
        path = mark_path(beacon, shard)
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._write()

    def entering(self) -> None:
        self._entered += 1
        self._since_ns = self._clock_ns()
        self._write()

    def leaving(self) -> None:
        self._left = self._entered
        self._inside_ns += self._clock_ns() - self._since_ns
        self._write()

    def _write(self) -> None:
        _LAYOUT.pack_into(self._map, 0, os.getpid(), self._entered, self._left, self._inside_ns)


class GroupWaits:
    """How long each shard of a worker has waited inside collectives, from one report to the next."""

    def __init__(self, beacon: Path, count: int) -> None:
        self._beacon, self._count = beacon, count
        self._before = [0] * count

    def since_the_last(self) -> tuple[float, ...]:
        marks = read_marks(self._beacon, self._count)
        if marks is None:
            return ()
        waited = tuple((mark.inside_ns - was) / 1e9 for mark, was in zip(marks, self._before, strict=True))
        self._before = [mark.inside_ns for mark in marks]
        return waited
