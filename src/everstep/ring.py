"""The ring a rank writes its communications into, as bytes: its layout, and what each reader asks first.

    head     64 bytes   magic, version, capacity, the rank, wall clock minus monotonic clock, names' length
    names  4032 bytes   JSON: groups, and what else does not fit a number
    slots  64 bytes each, oldest overwritten first

A slot is written when an operation is enqueued and touched once more when it ends, so an operation that
never ends stays in the ring as one that has no end: the last thing a stopped or dead process says. A slot
begins and ends with its turn, the stamp; where the two differ, a death or the writer itself was in
mid-write, and the slot is skipped. The writer is `engine.telemetry.recorder`; no lock is needed, since one
process writes and others only read.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = b"everring"
VERSION = 1
HEAD = struct.Struct("<8sIIiqI")
NAMES_AT, SLOTS_AT = 64, 4096
SLOT = struct.Struct(
    "<IHHqqqqqiiI4x"
)  # stamp, kind, -, enqueued, ended, took, bytes, seq, peer, group, stamp
SLOT_SIZE = SLOT.size
TIME = struct.Struct("<q")
ENDED_AT = 16
KINDS = (
    "other", "send", "recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
    "reduce", "gather", "scatter", "barrier", "compute",
)  # fmt: skip
assert SLOT.size == 64


class Head(NamedTuple):
    capacity: int
    rank: int
    ahead_ns: int  # what the wall clock is ahead of the clock of the slots
    names: bytes


class Slot(NamedTuple):
    """As written; times are 0 where there is none yet, and of the writer's monotonic clock."""

    stamp: int
    kind: int
    unused: int
    enqueued_ns: int
    ended_ns: int
    took_ns: int
    bytes: int
    seq: int
    peer: int
    group: int
    again: int


def size_of(capacity: int) -> int:
    return SLOTS_AT + capacity * SLOT_SIZE


def head_of(content: bytes) -> Head:
    """Raises ValueError with the reason."""
    if len(content) < SLOTS_AT or not content.startswith(MAGIC):
        raise ValueError("no ring of records")
    _, version, capacity, rank, ahead_ns, length = HEAD.unpack_from(content)
    if version != VERSION or len(content) < size_of(capacity):
        raise ValueError(f"a ring of version {version}, or a truncated one")
    return Head(capacity, rank, ahead_ns, content[NAMES_AT : NAMES_AT + length])


def slots_of(content: bytes, head: Head) -> list[Slot]:
    """The whole ones, in order of their times."""
    rows = map(Slot._make, SLOT.iter_unpack(content[SLOTS_AT : size_of(head.capacity)]))
    whole = [row for row in rows if row.stamp and row.stamp == row.again]
    return sorted(whole, key=lambda row: row.enqueued_ns or row.ended_ns)
