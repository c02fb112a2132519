"""Rings to records; the layout is `everstep.ring`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.ring import ENDED_AT, KINDS, SLOT_SIZE, SLOTS_AT, head_of
from everstep_diagnose.comm_record import UNKNOWN, Dump, Group, Log
from everstep_diagnose.flight import UnusableFileError

_SLOTS = np.dtype(
    {
        "names": ["stamp", "kind", "enqueued", "ended", "took", "bytes", "seq", "peer", "group", "again"],
        "formats": ["<u4", "<u2", "<i8", "<i8", "<i8", "<i8", "<i8", "<i4", "<i4", "<u4"],
        "offsets": [0, 4, 8, ENDED_AT, 24, 32, 40, 48, 52, 56],
        "itemsize": SLOT_SIZE,
    }
)
_MOST_GROUPS = 1024  # more than the names have room for; a number beyond that is no group's


def read_ring(name: str, content: bytes) -> Dump:
    try:
        _, rank, ahead_ns, text = head = head_of(content)
    except ValueError as why:
        raise UnusableFileError(str(why)) from None
    try:
        names: dict[str, Any] = json.loads(text or b"{}")
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
    slots = np.frombuffer(content, dtype=_SLOTS, count=head.capacity, offset=SLOTS_AT)
    log = _log(slots, rank, ahead_ns)
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
