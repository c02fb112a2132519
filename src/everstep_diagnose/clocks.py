"""How far the clocks of two hosts are apart, from what their ranks recorded themselves.

Ranks of one host share its clock; only hosts are compared, and a rank whose host is not named is its own
host.

A message cannot end before it was sent. With messages both ways, the smallest (end at b - send at a) is
offset + latency, the smallest the other way is latency - offset, and half their difference is the offset. An
operation that no rank leaves before all have come ends everywhere at nearly one time: the median difference
of the ends is the offset. The latter needs no messages and is used where ends are known; else, with only
times of enqueueing, clocks are taken as equal and the diagnosis says so.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

import numpy as np

from everstep_diagnose.case import Case
from everstep_diagnose.comm_record import SYNCHRONIZING, UNKNOWN
from everstep_diagnose.message_delays import Pairs


def offsets_ns(case: Case, pairs: Pairs) -> dict[int, int]:
    """For each rank what to subtract from its times; ranks nothing is known about get 0."""
    clock = {rank: case.hosts.get(rank, f"rank {rank}") for rank in case.ranks}
    if len(set(clock.values())) < 2:
        return {}
    ahead: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for a, b, offset in _from_collectives(case) or _from_messages(pairs, clock):
        if clock[a] != clock[b]:
            ahead[clock[a]][clock[b]].append(offset)
            ahead[clock[b]][clock[a]].append(-offset)
    found: dict[str, float] = {}
    for root in sorted(ahead):
        if root in found:
            continue
        found[root] = 0.0
        todo = deque([root])
        while todo:
            here = todo.popleft()
            for other, offsets in ahead[here].items():
                if other not in found:
                    found[other] = found[here] + float(np.median(offsets))
                    todo.append(other)
    return {rank: int(found[clock[rank]]) for rank in case.ranks if found.get(clock[rank])}


def _from_messages(pairs: Pairs, clock: Mapping[int, str]) -> list[tuple[int, int, float]]:
    """(a, b, how far b's clock is ahead of a's), from the fastest message each way between two clocks."""
    known = (pairs.sent_ns != UNKNOWN) & (pairs.received_ns != UNKNOWN)
    if not known.any():
        return []
    delay = (pairs.received_ns - pairs.sent_ns)[known]
    ends = np.stack([pairs.sender[known], pairs.receiver[known]], axis=1)
    fastest: dict[tuple[str, str], tuple[float, int, int]] = {}
    for a, b in np.unique(ends, axis=0).tolist():
        if a in clock and b in clock:
            least = float(delay[(ends[:, 0] == a) & (ends[:, 1] == b)].min())
            key = clock[a], clock[b]
            fastest[key] = min(fastest.get(key, (np.inf, a, b)), (least, a, b))
    return [
        (a, b, (least - fastest[there, here][0]) / 2)
        for (here, there), (least, a, b) in fastest.items()
        if here < there and (there, here) in fastest
    ]


def _from_collectives(case: Case) -> list[tuple[int, int, float]]:
    log = case.log
    rows = np.flatnonzero((log.ended_ns != UNKNOWN) & log.is_kind(*SYNCHRONIZING))
    found = []
    for group in np.unique(log.group[rows]).tolist():
        inside = rows[log.group[rows] == group]
        ranks = np.unique(log.rank[inside]).tolist()
        first = inside[log.rank[inside] == ranks[0]]
        for rank in ranks[1:]:
            mine = inside[log.rank[inside] == rank]
            _, at, other = np.intersect1d(log.seq[first], log.seq[mine], return_indices=True)
            if len(at) >= 3:
                difference = log.ended_ns[mine][other] - log.ended_ns[first][at]
                found.append((ranks[0], rank, float(np.median(difference))))
    return found
