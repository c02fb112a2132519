"""The ring a rank writes its communications into, as bytes: its layout, and the reader.

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

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.diagnose.comm_record import UNKNOWN, Dump, Group, Log
from everstep.diagnose.flight import UnusableFileError

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
_SLOTS = np.dtype(
    {
        "names": ["stamp", "kind", "enqueued", "ended", "took", "bytes", "seq", "peer", "group", "again"],
        "formats": ["<u4", "<u2", "<i8", "<i8", "<i8", "<i8", "<i8", "<i4", "<i4", "<u4"],
        "offsets": [0, 4, 8, ENDED_AT, 24, 32, 40, 48, 52, 56],
        "itemsize": SLOT_SIZE,
    }
)
assert SLOT.size == 64
_MOST_GROUPS = 1024  # more than the names have room for; a number beyond that is no group's


def size_of(capacity: int) -> int:
    return SLOTS_AT + capacity * SLOT_SIZE


def read_ring(name: str, content: bytes) -> Dump:
    if len(content) < SLOTS_AT or not content.startswith(MAGIC):
        raise UnusableFileError("no ring of records")
    _, version, capacity, rank, ahead_ns, length = HEAD.unpack_from(content)
    if version != VERSION or len(content) < size_of(capacity):
        raise UnusableFileError(f"a ring of version {version}, or a truncated one")
    try:
        names: dict[str, Any] = json.loads(content[NAMES_AT : NAMES_AT + length] or b"{}")
    except ValueError:
        names = {}  # its writer died while adding a group; numbers are still good
    groups = [
        Group(
            name=str(g["name"]),
            members=tuple(map(int, g["members"])),
            about=str(g.get("about", "")),
            pairwise=True,
        )
        for g in names.get("groups", [])
    ]
    log = _log(np.frombuffer(content, dtype=_SLOTS, count=capacity, offset=SLOTS_AT), rank, ahead_ns)
    while len(log) and len(groups) <= int(log.group.max()):
        groups.append(Group(name=f"ring group {len(groups)}", pairwise=True))
    return Dump(
        source=name,
        form="ring",
        log=log,
        groups=groups or [Group(name="messages", pairwise=True)],
        ranks=(rank,),
        hosts={rank: str(names["host"])} if names.get("host") else {},
        world_size=int(names.get("world_size", 0)),
    )


def _log(slots: NDArray[Any], rank: int, ahead_ns: int) -> Log:
    whole = (slots["stamp"] > 0) & (slots["stamp"] == slots["again"])
    whole &= (slots["group"] >= 0) & (slots["group"] < _MOST_GROUPS)
    slots = slots[whole & (slots["kind"] < len(KINDS))]
    enqueued = np.where(slots["enqueued"] > 0, slots["enqueued"] + ahead_ns, UNKNOWN)
    ended = np.where(slots["ended"] > 0, slots["ended"] + ahead_ns, UNKNOWN)
    order = np.where(enqueued != UNKNOWN, enqueued, ended)
    log = Log(
        kinds=list(KINDS),
        rank=np.full(len(slots), rank, dtype=np.int32),
        group=slots["group"].astype(np.int32),
        seq=slots["seq"].astype(np.int64),
        kind=slots["kind"].astype(np.int16),
        bytes=slots["bytes"].astype(np.int64),
        peer=slots["peer"].astype(np.int32),
        enqueued_ns=enqueued,
        started_ns=np.full(len(slots), UNKNOWN, dtype=np.int64),
        ended_ns=ended,
        took_ns=slots["took"].astype(np.int64),
        done=(slots["ended"] > 0).astype(np.int8),
        order=order,
    )
    return log.take(np.argsort(order, kind="stable"))
