"""Facts behind evidence: what a sentence of an incident says, as values that a picture can be made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.protocol.ops import Worker
from everstep.protocol.worker_messages import ParcelKind


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWaits:
    """A worker waits for a parcel, and so is not to blame."""

    worker: Worker
    awaits: str  # the parcel, in its notation
    sender: Worker | None  # who would send it when every microbatch is at home
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsTook:
    """The ops of a worker in one step: their own time, and what is usual."""

    step: int
    took_s: float
    usual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PacesSeen:
    """By worker: the time of its ops, in parts of their usual time."""

    paces: Mapping[Worker, float]


Fact = WorkerWaits | OpsTook | PacesSeen

_PARCEL = re.compile(r"([A-Z])\[\d+ stage (\d+) (\d+)")


def usual_sender(parcel: str) -> Worker | None:
    """Who sends the parcel of this notation when every microbatch is at home; None: it is not a parcel."""
    found = _PARCEL.match(parcel)
    if found is None:
        return None
    what, stage, replica = found[1], int(found[2]), int(found[3])
    away = {ParcelKind.ACTIVATION.value: -1, ParcelKind.GRADIENT.value: +1}.get(what, 0)
    return Worker(replica, stage + away)
