"""The ops a worker has run lately and what it sent and got, from its recorder: for people who look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from everstep.diagnose.flight import UnusableFileError
from everstep.diagnose.ring import KINDS
from everstep.engine.telemetry.beacon import ring_beside
from everstep.node.rings import ring_at
from everstep.protocol.parcels import STEP_AT

_COMPUTE, _SEND, _RECV = (KINDS.index(kind) for kind in ("compute", "send", "recv"))


def recorded(beacon: Path, first: int, last: int) -> dict[str, Any]:
    """Everything of these steps that is still in the ring: ops as [step, begun, ended], parcels sent as
    [at, peer, bytes, number] and parcels that came as [at, sender, bytes, number]; times in nanoseconds of
    the wall clock, peers as ranks (stage * replicas + replica).
    """
    try:
        dump = ring_at(ring_beside(beacon))
    except (OSError, UnusableFileError):
        return {}
    log = dump.log
    ops = log.kind == _COMPUTE
    steps = np.where(ops, log.seq, log.seq >> STEP_AT)
    wanted = (steps >= first) & (steps <= last)
    found: dict[str, Any] = {"rank": dump.ranks[0], "steps": _range(log.seq[ops])}
    rows = wanted & ops
    found["ops"] = np.stack([log.seq[rows], log.enqueued_ns[rows], log.ended_ns[rows]], axis=1).tolist()
    for name, kind in (("sent", _SEND), ("got", _RECV)):
        rows = wanted & (log.kind == kind)
        columns = [log.ended_ns[rows], log.peer[rows], log.bytes[rows], log.seq[rows]]
        found[name] = np.stack(columns, axis=1).tolist()
    return found


def _range(steps: np.ndarray[Any, Any]) -> list[int]:
    """The first and the last step of which there are ops."""
    return [int(steps.min()), int(steps.max())] if len(steps) else []
