"""Who issued an operation long after the others: later than they wait for it.

What is usual between two ranks is taken out first: their clocks may differ, and one may always be the last.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from everstep.diagnose.case import Case
from everstep.diagnose.record import UNKNOWN, Record
from everstep.diagnose.stops import Operation, Stops
from everstep.diagnose.waiting import operation

_SURE, _UNSURE = 0.9, 0.6
_LATE_NS = 500_000_000
_PATIENCE = 5.0  # times the longest usual pause
_LOOK_BACK = 32  # operations


def latecomers(
    case: Case, stops: Stops, places: Iterable[Operation], *, surely: bool
) -> dict[int, tuple[float, str]]:
    """Rank -> how sure, and what says so. `surely`: only those that came when the others had given up."""
    found = {}
    for place in places:
        issued = {r: call for r, call in stops.issued.get(place, {}).items() if call.enqueued_ns != UNKNOWN}
        timeout = case.groups[place[0]].timeout_ns
        limit = 0.9 * timeout if timeout > 0 else float("inf")
        enough = limit if surely else min(limit, max(_LATE_NS, _PATIENCE * _usual_pause(stops, issued)))
        late = {rank: by for rank, by in _late_ns(stops, issued).items() if by >= enough}
        if 0 < len(late) <= len(issued) / 2:
            for rank, by in late.items():
                said = f"issued {operation(case, issued[rank])} {by / 1e9:.1f} s after the others"
                found[rank] = (_SURE if by >= limit else _UNSURE, said)
    return found


def _late_ns(stops: Stops, issued: dict[int, Record]) -> dict[int, float]:
    """By how much each rank came after the first half of them."""
    if len(issued) < 2:
        return {}
    first = min(issued, key=lambda rank: issued[rank].enqueued_ns)
    after = {
        rank: call.enqueued_ns - issued[first].enqueued_ns - _usually_late(stops, call, rank, first)
        for rank, call in issued.items()
    }
    half = sorted(after.values())[(len(after) - 1) // 2]
    return {rank: late - half for rank, late in after.items()}


def _usually_late(stops: Stops, call: Record, rank: int, other: int) -> float:
    mine, its = (
        {c.seq: c.enqueued_ns for c in stops.calls[r] if c.group == call.group and c.seq < call.seq}
        for r in (rank, other)
    )
    both = sorted(mine.keys() & its.keys())[-_LOOK_BACK:]
    return float(np.median([mine[n] - its[n] for n in both])) if both else 0.0


def _usual_pause(stops: Stops, ranks: Iterable[int]) -> float:
    pauses = [np.diff([call.enqueued_ns for call in stops.calls[rank][:-1]]) for rank in ranks]
    together = np.concatenate(pauses) if pauses else np.zeros(0)
    return float(np.quantile(together, 0.98)) if len(together) >= 8 else 0.0
