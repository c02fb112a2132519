"""Spot files made up to try policies on: markets that are not among `everstep_lab.study.churn`'s kinds.

Each market is a text as a user would have it, in one of the forms that `everstep simulate --trace` reads.
None begins at time 0. They were written after the policy and are fitted to nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
START = 26_000.0  # seconds: no file begins at 0
Counts = list[tuple[float, int]]
Market = Callable[[random.Random, int, float], Counts]  # chance, nodes, seconds


def market(name: str, seed: int, *, nodes: int = 32, days: float = 1.0) -> str:
    """The file's text."""
    make, form = MARKETS[name]
    end = days * DAY
    rows = [
        (at, max(0, min(nodes, count))) for at, count in make(random.Random(f"{name} {seed}"), nodes, end)
    ]
    rows = sorted((at, count) for at, count in rows if 0 <= at < end)
    if not rows or rows[0][0] > 0:
        rows.insert(0, (0.0, nodes))
    rows.append((end, rows[-1][1]))
    return form(rows)


def _changes(nodes: int, changes: list[tuple[float, int]]) -> Counts:
    found, count = [(0.0, nodes)], nodes
    for at, change in sorted(changes):
        count += change
        found.append((at, count))
    return found


def _events(chance: random.Random, end: float, gap: Callable[[], float]) -> list[float]:
    found, at = [], gap()
    while at < end:
        found.append(at)
        at += gap()
    return found


def _seldom(chance: random.Random, nodes: int, end: float) -> Counts:
    """One instance every five hours or so, back half a day later."""
    lost = _events(chance, end, lambda: chance.expovariate(1 / (5 * HOUR)))
    return _changes(nodes, [row for at in lost for row in ((at, -1), (at + chance.uniform(8, 20) * HOUR, 1))])


def _half_gone(chance: random.Random, nodes: int, end: float) -> Counts:
    """Half of the pool at once, twice a day, back together two hours later."""
    lost = _events(chance, end, lambda: chance.uniform(6, 10) * HOUR)
    return _changes(nodes, [row for at in lost for row in ((at, -nodes // 2), (at + 2 * HOUR, nodes // 2))])


def _staircase(chance: random.Random, nodes: int, end: float) -> Counts:
    """One after the other until a third is gone, then one after the other back, over and over."""
    found, at, count, step = [], 0.0, nodes, -1
    while at < end:
        at += chance.uniform(10, 30) * MINUTE
        step = 1 if count <= nodes - nodes // 3 else -1 if count >= nodes else step
        count += step
        found.append((at, count))
    return found


def _random_walk(chance: random.Random, nodes: int, end: float) -> Counts:
    found, at, count = [], 0.0, nodes - 2
    while at < end:
        found.append((at, count))
        at += 15 * MINUTE
        count = max(nodes // 2, min(nodes, count + chance.choice([-2, -1, 0, 0, 1, 2])))
    return found


def _office_hours(chance: random.Random, nodes: int, end: float) -> Counts:
    """From nine to six others take two fifths, within the hour; by night all are there but for one or two."""
    found, at = [], 0.0
    while at < end:
        hour = (at / HOUR + 15) % 24
        busy = max(0.0, min(1.0, hour - 9, 18 - hour))
        found.append((at, round(nodes * (1 - 0.4 * busy)) - chance.choice([0, 0, 1, 2])))
        at += 20 * MINUTE
    return found


def _waves(chance: random.Random, nodes: int, end: float) -> Counts:
    """Every hour or so four to ten within two minutes; each is refilled on its own after about twenty."""
    rows = []
    for at in _events(chance, end, lambda: chance.uniform(45, 90) * MINUTE):
        for _ in range(chance.randint(4, 10)):
            lost = at + chance.uniform(0, 2 * MINUTE)
            rows += [(lost, -1), (lost + chance.expovariate(1 / (20 * MINUTE)) + MINUTE, 1)]
    return _changes(nodes, rows)


def _heavy_tails(chance: random.Random, nodes: int, end: float) -> Counts:
    """Gaps from two minutes to half a day, and refills alike."""
    lost = _events(chance, end, lambda: min(12 * HOUR, 2 * MINUTE * chance.paretovariate(0.8)))
    back = (3 * MINUTE * chance.paretovariate(0.9) for _ in iter(int, 1))
    return _changes(nodes, [row for at in lost for row in ((at, -1), (at + next(back), 1))])


def _slow_start(chance: random.Random, nodes: int, end: float) -> Counts:
    """Half of the request is filled at once, the rest one by one over six hours; then a loss every two."""
    rows = [(chance.uniform(20 * MINUTE, 6 * HOUR), 1) for _ in range(nodes - nodes // 2)]
    for at in _events(chance, end, lambda: chance.expovariate(1 / (2 * HOUR))):
        rows += [(at, -1), (at + chance.uniform(10, 40) * MINUTE, 1)]
    return [(at, count) for at, count in _changes(nodes // 2, rows)]


def _day_limit(chance: random.Random, nodes: int, end: float) -> Counts:
    """Every instance is taken a day after it came, each at its own hour, and replaced within minutes."""
    lost = [(chance.uniform(0, DAY) + day * DAY) for _ in range(nodes) for day in range(1 + int(end // DAY))]
    return _changes(
        nodes, [row for at in lost for row in ((at, -1), (at + chance.uniform(1, 3) * MINUTE, 1))]
    )


def _zone(chance: random.Random, nodes: int, end: float) -> Counts:
    """A third, one zone's, is out for five hours; otherwise a loss every ninety minutes."""
    at = chance.uniform(2 * HOUR, 12 * HOUR)
    rows = [(at, -(nodes // 3)), (at + 5 * HOUR, nodes // 3)]
    for one in _events(chance, end, lambda: chance.expovariate(1 / (1.5 * HOUR))):
        rows += [(one, -1), (one + chance.uniform(15, 60) * MINUTE, 1)]
    return _changes(nodes, rows)


def _sputter(chance: random.Random, nodes: int, end: float) -> Counts:
    """Ten minutes with a loss every minute and a half, then three calm hours."""
    rows = []
    for at in _events(chance, end, lambda: 3 * HOUR + chance.expovariate(1 / HOUR)):
        for i in range(7):
            rows += [(at + i * 90, -1), (at + i * 90 + chance.uniform(4, 25) * MINUTE, 1)]
    return _changes(nodes, rows)


def _last_place(chance: random.Random, nodes: int, end: float) -> Counts:
    """Two or three are lost every two hours; all but one are back in minutes, the last after eight hours."""
    rows = []
    for at in _events(chance, end, lambda: chance.expovariate(1 / (2 * HOUR))):
        count = chance.randint(2, 3)
        rows += [(at, -count), (at + 8 * HOUR, 1)]
        rows += [(at + chance.uniform(3, 9) * MINUTE, 1) for _ in range(count - 1)]
    return _changes(nodes, rows)


def _as_counts(rows: Counts) -> str:
    return "time,up\n" + "".join(f"{START + at:.0f},{count}\n" for at, count in rows)


def _as_log(rows: Counts) -> str:
    first = datetime(2024, 3, 4, 7, 13, tzinfo=UTC)
    stamps = ((first + timedelta(seconds=at), count) for at, count in rows)
    return "".join(f"{stamp:%Y-%m-%d}, {stamp:%H:%M:%S}, {count}\n" for stamp, count in stamps)


def _as_names(rows: Counts) -> str:
    """Instances under ever new names; who was there longest goes first."""
    there: list[str] = []
    lines, number = [], 0
    for at, count in rows:
        stamp = round((START + at) * 1000)
        while len(there) > count:
            lines.append(f"{stamp},remove,{there.pop(0)}")
        while len(there) < count:
            number += 1
            there.append(f"i-{number:05d}")
            lines.append(f"{stamp},add,{there[-1]}")
    return "\n".join(lines) + "\n"


MARKETS: Mapping[str, tuple[Market, Callable[[Counts], str]]] = {
    "seldom": (_seldom, _as_counts),
    "half-gone": (_half_gone, _as_names),
    "staircase": (_staircase, _as_names),
    "random-walk": (_random_walk, _as_log),
    "office-hours": (_office_hours, _as_log),
    "waves": (_waves, _as_names),
    "heavy-tails": (_heavy_tails, _as_counts),
    "slow-start": (_slow_start, _as_counts),
    "day-limit": (_day_limit, _as_names),
    "zone": (_zone, _as_counts),
    "sputter": (_sputter, _as_names),
    "last-place": (_last_place, _as_counts),
}
