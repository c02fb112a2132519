"""The ops a worker has run lately and what it sent and got, from its recorder: for people who look.

The ring is its user's file: no link is followed, nothing is waited for, and no more is read than a ring has.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from everstep import ring
from everstep.engine.telemetry.beacon import ring_beside
from everstep.protocol.parcels import STEP_AT

_MOST_BYTES = 4 << 20  # a ring of 4,096 records has 266 KB
_COMPUTE, _SEND, _RECV = (ring.KINDS.index(kind) for kind in ("compute", "send", "recv"))


def recorded(beacon: Path, first: int, last: int) -> dict[str, Any]:
    """Everything of these steps that is still in the ring: ops as [step, begun, ended], parcels sent as
    [at, peer, bytes, number] and parcels that came as [at, sender, bytes, number]; times in nanoseconds of
    the wall clock, peers as ranks (stage * replicas + replica).
    """
    try:
        content = ring_at(ring_beside(beacon))
        head = ring.head_of(content)
    except (OSError, ValueError):
        return {}

    def at(ns: int) -> int:
        return ns + head.ahead_ns if ns > 0 else -1

    steps: list[int] = []
    found: dict[str, Any] = {"rank": head.rank, "steps": [], "ops": [], "sent": [], "got": []}
    for slot in ring.slots_of(content, head):
        if slot.kind == _COMPUTE:
            steps.append(slot.seq)
            if first <= slot.seq <= last:
                found["ops"].append([slot.seq, at(slot.enqueued_ns), at(slot.ended_ns)])
        elif slot.kind in (_SEND, _RECV) and first <= slot.seq >> STEP_AT <= last:
            way = "sent" if slot.kind == _SEND else "got"
            found[way].append([at(slot.ended_ns), slot.peer, slot.bytes, slot.seq])
    return found | {"steps": [min(steps), max(steps)] if steps else []}


def ring_at(path: Path) -> bytes:
    """OSError or ValueError if there is no ring."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES or not content.startswith(ring.MAGIC):
        raise ValueError("no ring of records")
    return content
