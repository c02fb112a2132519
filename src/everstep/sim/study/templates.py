"""Pipelines of two depths side by side, as Oobleck forms them: what any number of workers brings.

Every pipeline runs whole microbatches, so the slowest one's share decides. A pipeline is as fast as in a
whole shape of about as many replicas, with its bubbles and its share of the reduction. Any cut that the curve
knows is a template.
"""

from __future__ import annotations

import math

import numpy as np

from everstep.plan.curve import Curve, SameCut


def by_templates(curve: Curve, workers: int) -> float:
    """The best throughput of x pipelines of one depth and y of another, on at most so many workers."""
    key = f"templates {workers}"
    if key not in curve.kept:
        curve.kept[key] = _by_templates(curve, workers)
    found = curve.kept[key]
    assert isinstance(found, float)
    return found


def _by_templates(curve: Curve, workers: int) -> float:
    if not curve.batch:
        return 0.0
    cuts = [cut for cut in curve.cuts if cut.throughput.any()]
    best = 0.0
    for one in cuts:
        size = one.stages * one.shards
        for x in range(1, workers // size + 1):
            best = max(best, _rate(curve.batch, x, _each(one, x), 0, 1.0))
            for other in cuts:
                y = (workers - x * size) // (other.stages * other.shards)
                if other is not one and y > 0:
                    best = max(best, _rate(curve.batch, x, _each(one, x + y), y, _each(other, x + y)))
    return best


def _each(cut: SameCut, pipelines: int) -> float:
    """Throughput of one pipeline among so many: as in the whole shape nearest in replicas."""
    known = np.flatnonzero(cut.throughput)
    nearest = int(known[np.abs(known - pipelines).argmin()])
    return float(cut.throughput[nearest]) / nearest


def _rate(batch: int, x: int, one: float, y: int, other: float) -> float:
    """Throughput of x pipelines and y others that share a batch in whole sequences; `one` and `other` are
    theirs when they have work all the time.
    """
    if not y:
        return one * batch / math.ceil(batch / x)
    even = batch * one / (x * one + y * other)
    best = 0.0
    for first in (math.floor(even), math.ceil(even)):
        second = max(0, math.ceil((batch - x * first) / y))
        best = max(best, batch / max(first / one, second / other))
    return best
