"""Spot markets made up by kind: what a pool of single-GPU instances may do, from minutes to hours.

Each kind says how many of the pool the market offers at any time; who is lost comes from the seed. None was
fitted to a file: the kinds are those that reports name (independent losses, bulk preemptions, slow refills,
day and night, a few instances that come and go, droughts, waves).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from everstep_lab.draw import Draw
from everstep_lab.study.failures import HOUR_S, Trace
from everstep_lab.study.readers import Samples, from_counts

MINUTE_S = 60.0
NODES, DAYS = 32, 2.0
Kind = Callable[[Draw, int, float], Samples]  # draw, nodes, horizon in seconds


def churn(kind: str, seed: int, *, nodes: int = NODES, days: float = DAYS) -> Trace:
    horizon = days * 86_400.0
    samples = KINDS[kind](Draw(seed, kind), nodes, horizon)
    kept = [(at, max(0, min(nodes, count))) for at, count in samples if at < horizon]
    return from_counts(kind, [(0.0, nodes), *kept, (horizon, kept[-1][1] if kept else nodes)], seed)


def _independent(between_s: float, refill_s: tuple[float, float], burst: tuple[int, int] = (1, 1)) -> Kind:
    """Losses at a rate of the whole pool, each refilled on its own after a while."""

    def samples(draw: Draw, nodes: int, horizon: float) -> Samples:
        changes: list[tuple[float, int]] = []
        at = _gap(draw, between_s)
        while at < horizon:
            for _ in range(draw.between(*burst)):
                changes += [(at, -1), (at + draw.uniform(*refill_s), 1)]
            at += _gap(draw, between_s)
        return _summed(changes, nodes)

    return samples


def _bulk(draw: Draw, nodes: int, horizon: float) -> Samples:
    """Every few hours a third of the pool or more at once, given back one by one within the hour."""
    changes: list[tuple[float, int]] = []
    at = _gap(draw, 3 * HOUR_S)
    while at < horizon:
        lost = draw.between(nodes // 3, nodes * 3 // 4)
        changes.append((at, -lost))
        changes += [(at + draw.uniform(5 * MINUTE_S, HOUR_S), 1) for _ in range(lost)]
        at += HOUR_S + _gap(draw, 2 * HOUR_S)
    return _summed(changes, nodes)


def _diurnal(draw: Draw, nodes: int, horizon: float) -> Samples:
    """By night nearly all, by day a half, with noise every ten minutes."""
    phase = draw.uniform(0, 86_400.0)
    found, at = [], 0.0
    while at < horizon:
        wave = 0.75 + 0.22 * math.cos(2 * math.pi * (at + phase) / 86_400.0)
        found.append((at, round(nodes * (wave + draw.uniform(-0.06, 0.06)))))
        at += 10 * MINUTE_S
    return found


def _flapping(draw: Draw, nodes: int, horizon: float) -> Samples:
    """One to four instances are taken and given back every few minutes; the others stay."""
    found, at, away = [], 0.0, 0
    while at < horizon:
        at += draw.uniform(2 * MINUTE_S, 8 * MINUTE_S)
        away = 0 if away else draw.between(1, 4)
        found.append((at, nodes - away))
    return found


def _drought(draw: Draw, nodes: int, horizon: float) -> Samples:
    """Twice a day nearly everything is taken within minutes, and comes back at once an hour or two later."""
    found, at = [], draw.uniform(HOUR_S, 6 * HOUR_S)
    while at < horizon:
        left = nodes
        while left > nodes // 8:
            left = max(nodes // 8, left - draw.between(1, nodes // 4))
            found.append((at, left))
            at += draw.uniform(MINUTE_S, 4 * MINUTE_S)
        at += draw.uniform(HOUR_S, 2 * HOUR_S)
        found.append((at, nodes))
        at += draw.uniform(6 * HOUR_S, 14 * HOUR_S)
    return found


KINDS: Mapping[str, Kind] = {
    "churn-minutes": _independent(4 * MINUTE_S, (5 * MINUTE_S, 30 * MINUTE_S)),
    "churn-hours": _independent(HOUR_S, (HOUR_S, 6 * HOUR_S)),
    "churn-bursts": _independent(10 * MINUTE_S, (4 * MINUTE_S, 40 * MINUTE_S), (1, 6)),
    "churn-slow-refill": _independent(25 * MINUTE_S, (2 * HOUR_S, 10 * HOUR_S)),
    "churn-bulk": _bulk,
    "churn-diurnal": _diurnal,
    "churn-flapping": _flapping,
    "churn-drought": _drought,
}


def _summed(changes: list[tuple[float, int]], nodes: int) -> Samples:
    """Counts over time; the market never gives more than the pool holds, nor takes more than is there."""
    found, wanted = [], nodes
    for at, change in sorted(changes):
        wanted += change
        found.append((at, wanted))
    return found


def _gap(draw: Draw, mean: float) -> float:
    return -mean * math.log(1.0 - draw.random())
