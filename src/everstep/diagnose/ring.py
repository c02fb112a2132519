"""The ring a rank writes its communications into, as bytes: its layout, and the reader.

    head     64 bytes   magic, version, capacity, the rank, wall clock minus monotonic clock, names' length
    names  4032 bytes   JSON: groups, and what else does not fit a number
    slots  64 bytes each, oldest overwritten first

A slot is written when an operation is enqueued and touched once more when it ends, so an operation that never
ends stays in the ring as one that has no end: the last thing a stopped or dead process says. `stamp`, written
last, is the slot's turn; a slot whose stamp does not fit its place was torn by a death in mid-write and is
skipped. The writer is `engine.recorder`; nobody needs a lock, since one process writes and others only read.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from everstep.diagnose.flight import Unusable
from everstep.diagnose.record import UNKNOWN, Group, Log, Part, Record

MAGIC = b"everring"
VERSION = 1
HEAD = struct.Struct("<8sIIiqI")
NAMES_AT, SLOTS_AT = 64, 4096
SLOT = struct.Struct("<qqqqqiiHH")  # enqueued, ended, took, bytes, seq, peer, group, kind, -
SLOT_SIZE = 64
STAMP = struct.Struct("<Q")
STAMP_AT = 56
ENDED_AT = 8
KINDS = (
    "other", "send", "recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
    "gather", "scatter", "barrier", "compute",
)  # fmt: skip
assert SLOT.size <= STAMP_AT


def size_of(capacity: int) -> int:
    return SLOTS_AT + capacity * SLOT_SIZE


def read_ring(name: str, content: bytes) -> Part:
    if len(content) < SLOTS_AT or not content.startswith(MAGIC):
        raise Unusable("no ring of records")
    _, version, capacity, rank, ahead_ns, length = HEAD.unpack_from(content)
    if version != VERSION or len(content) < size_of(capacity):
        raise Unusable(f"a ring of version {version}, or a truncated one")
    try:
        names: dict[str, Any] = json.loads(content[NAMES_AT : NAMES_AT + length] or b"{}")
    except ValueError:
        names = {}  # its writer died while adding a group; numbers are still good
    groups = [
        Group(name=str(g["name"]), members=tuple(g["members"]), about=str(g.get("about", "")), pairwise=True)
        for g in names.get("groups", [])
    ]
    records = []
    for at in range(capacity):
        place = SLOTS_AT + at * SLOT_SIZE
        (stamp,) = STAMP.unpack_from(content, place + STAMP_AT)
        if stamp == 0 or (stamp - 1) % capacity != at:
            continue
        enqueued, ended, took, size, seq, peer, group, kind, _ = SLOT.unpack_from(content, place)
        if kind >= len(KINDS):
            continue
        while group >= len(groups):
            groups.append(Group(name=f"ring group {len(groups)}", pairwise=True))
        records.append(
            Record(
                rank=rank,
                group=group,
                seq=seq,
                kind=KINDS[kind],
                bytes=size,
                peer=peer,
                enqueued_ns=enqueued + ahead_ns if enqueued > 0 else UNKNOWN,
                ended_ns=ended + ahead_ns if ended > 0 else UNKNOWN,
                took_ns=took,
                done=ended > 0,
                order=enqueued + ahead_ns if enqueued > 0 else stamp,
            )
        )
    records.sort(key=lambda record: record.order)
    return Part(
        source=name,
        form="ring",
        log=Log.of(records),
        groups=groups or [Group(name="messages", pairwise=True)],
        ranks=(rank,),
        hosts={rank: str(names["host"])} if names.get("host") else {},
        world_size=int(names.get("world_size", 0)),
    )
