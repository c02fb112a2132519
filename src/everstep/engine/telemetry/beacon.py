"""A worker's last words, kept up to date: 128 bytes of shared memory that outlive the process.

The worker writes before and after each op, about a microsecond; the agent reads whenever it likes, also after
a death. A sequence number, odd while writing, tells a torn read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

SIZE = 128
_LAYOUT = struct.Struct("<Q q q q i i ? 31s")
_FIRST = struct.Struct("<Q q q q")


def ring_beside(beacon: Path) -> Path:
    """Where the worker of this beacon records what it does."""
    return beacon.with_name(f"{beacon.name}.ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeaconReading:
    """What a worker last wrote. Times are in nanoseconds of the machine's monotonic clock."""

    at_ns: int
    epoch: int
    step: int
    done: int  # ops it has run in this step
    num_ops: int  # ops of its list that are still to run
    busy: bool
    doing: str  # an op, or what it waits for


class Beacon:
    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if create:
            path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._sequence = 0

    def write(
        self, *, at_ns: int, epoch: int, step: int, done: int, num_ops: int, busy: bool, doing: str
    ) -> None:
        self._sequence += 2
        _LAYOUT.pack_into(
            self._map, 0, self._sequence - 1, at_ns, epoch, step, done, num_ops, busy, doing.encode()[:31]
        )
        struct.pack_into("<Q", self._map, 0, self._sequence)

    def read(self) -> BeaconReading | None:
        """None: nothing written yet, or torn for good (its writer died inside)."""
        for _ in range(5):
            sequence, at_ns, epoch, step, done, num_ops, busy, doing = _LAYOUT.unpack_from(self._map, 0)
            again = struct.unpack_from("<Q", self._map, 0)[0]
            if sequence and sequence % 2 == 0 and again == sequence:
                return BeaconReading(
                    at_ns=at_ns,
                    epoch=epoch,
                    step=step,
                    done=done,
                    num_ops=num_ops,
                    busy=busy,
                    doing=doing.rstrip(b"\0").decode(errors="replace"),
                )
        return None

    def moment(self) -> tuple[int, int] | None:
        """When it last wrote, and its step: less to read. None: ask `read`."""
        sequence, at_ns, _, step = _FIRST.unpack_from(self._map, 0)
        is_whole = sequence and sequence % 2 == 0 and _FIRST.unpack_from(self._map, 0)[0] == sequence
        return (at_ns, step) if is_whole else None

    def close(self) -> None:
        self._map.close()
