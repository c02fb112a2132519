"""Gray failures: a node that fails more often than its peers do is a lemon, by statistics.

A node that dies, mends links, slows down or corrects memory errors now and then is no defect: all do. What
counts is the rate, and how surprising it is. The rate of a kind is not known: it has a wide prior (`KINDS`:
about how often healthy nodes do it), which the peers' own counts narrow. Then a healthy node has `count`
events or more in a window with probability

    P(count)      counts of a Gamma rate are negative binomial: shape 1 + events of the peers,
                  time  prior + time of the peers; window: the node's own time

One bad hour and one bad month both show: four windows are looked at, whenever something is noted. `LIMIT` is
the probability below which a node is a lemon. Events of one kind within an hour are one event: a fault often
speaks several times. False alarms: at most `FALSE_ALARMS` per node and week, measured by simulation
(`tests/core/test_gray.py`); a kind that peers have not shown needs `LEAST_PEERS` of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HOUR_S, DAY_S = 3600.0, 86_400.0
WINDOWS_S = (HOUR_S, DAY_S, 7 * DAY_S, 28 * DAY_S)
KEPT_S = WINDOWS_S[-1]
LIMIT = 2e-6
FALSE_ALARMS = 1e-3  # per node and week, at most
LEAST_PEERS = 3
MOST_KEPT = 256  # events per kind of a node

ISOLATION, DEATH, MENDED, SLOW, CORRECTED = (
    "isolation",
    "death",
    "mended link",
    "slow window",
    "corrected error",
)
# By kind: days between two events of a healthy node, a rough prior that counts as one event.
KINDS: dict[str, float] = {
    ISOLATION: 100.0,
    DEATH: 30.0,
    MENDED: 7.0,
    SLOW: 7.0,
    CORRECTED: 7.0,
}


@dataclass(slots=True)
class GrayRecord:
    """What a node has done, over weeks. Bounded."""

    since: float  # it is known since then
    events: dict[str, list[float]] = field(default_factory=dict)

    def note(self, kind: str, now: float) -> bool:
        """False: it belongs to one that is counted already."""
        times = [at for at in self.events.get(kind, []) if now - at <= KEPT_S][-MOST_KEPT:]
        if kind != ISOLATION and times and now - times[-1] < HOUR_S:
            return False
        self.events[kind] = [*times, now]
        return True

    def count(self, kind: str, now: float, window_s: float) -> int:
        return sum(now - at <= window_s for at in self.events.get(kind, ()))

    def days(self, now: float, window_s: float) -> float:
        return max(min(now - self.since, window_s), HOUR_S / 60) / DAY_S


class Peers(NamedTuple):
    """What the other nodes did in the longest time that is known of them: it tells the usual rate."""

    nodes: int
    events: int
    days: float

    @staticmethod
    def of(records: Sequence[GrayRecord], kind: str, now: float) -> Peers:
        events = sum(record.count(kind, now, KEPT_S) for record in records)
        return Peers(len(records), events, sum(record.days(now, KEPT_S) for record in records))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemon:
    kind: str
    count: int
    days: float
    peers: Peers
    probability: float

    @property
    def because(self) -> str:
        window = f"{self.days:.0f} days" if self.days >= 2 else f"{24 * self.days:.1f} hours"
        peers = f"{self.peers.nodes} peers had {self.peers.events} in {self.peers.days:.0f} node-days"
        return f"{self.count} times {self.kind} within {window}; {peers} (p = {self.probability:.1g})"


def judge_gray(kind: str, node: GrayRecord, peers: Peers, now: float) -> Lemon | None:
    """Is this node a lemon? The most surprising of the windows says so."""
    if peers.nodes < LEAST_PEERS and kind != ISOLATION:
        return None
    found: list[Lemon] = []
    for window_s in WINDOWS_S:
        count, days = node.count(kind, now, window_s), node.days(now, window_s)
        odds = days / (KINDS[kind] + peers.days + days)
        probability = at_least(count, shape=1.0 + peers.events, odds=odds)
        found.append(Lemon(kind=kind, count=count, days=days, peers=peers, probability=probability))
    worst = min(found, key=lambda one: one.probability)
    return worst if worst.probability < LIMIT and worst.count > 1 else None


def at_least(count: int, *, shape: float, odds: float) -> float:
    """P(X >= count) of a negative binomial: X events at chance `odds` each before `shape` others. The tail
    is added up term by term, so a small one keeps its digits.
    """
    if count <= 0:
        return 1.0
    first = math.lgamma(shape + count) - math.lgamma(shape) - math.lgamma(count + 1)
    term = math.exp(first + count * math.log(odds) + shape * math.log1p(-odds))
    return min(1.0, math.fsum(_tail(term, count, shape, odds)))


def _tail(term: float, count: int, shape: float, odds: float) -> Iterable[float]:
    for _ in range(10_000):
        yield term
        count += 1
        growth = odds * (shape + count - 1) / count
        term *= growth
        if growth < 1 and term < 1e-18:  # terms rise up to the most likely count, and may begin at nothing
            return
