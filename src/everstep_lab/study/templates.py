"""Pipelines of two depths side by side, as Oobleck forms them: what any number of workers brings.

Every pipeline runs whole microbatches, then all reduce and update once per step. The slowest pipeline decides
when the reduction begins, and the one with the most layers per worker how long it takes: every layer is
reduced over all pipelines. Any cut that the curve knows is a template, timed as in the whole shape nearest in
replicas:

    step  =  slowest of (microbatches x time of one  +  bubble)  +  longest of (reduction and update)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """Times in units of work over throughput."""

    rows: int  # sequences of a microbatch
    sequence: float
    bubble: float
    shared: float  # reduction and update, which all pipelines go through together

    def time(self, sequences: int) -> float:
        return sequences * self.sequence + self.bubble


def _by_templates(curve: Curve, workers: int) -> float:
    if not curve.batch:
        return 0.0
    cuts = [cut for cut in curve.cuts if cut.throughput.any()]
    best = math.inf
    for one in cuts:
        size = one.stages * one.shards
        for x in range(1, workers // size + 1):
            best = min(best, _alone(curve.batch, x, _pipeline(one, x, curve.batch)))
            for other in cuts:
                y = (workers - x * size) // (other.stages * other.shards)
                if other is not one and y > 0:
                    first = _pipeline(one, x + y, curve.batch)
                    second = _pipeline(other, x + y, curve.batch)
                    best = min(best, _together(curve.batch, x, first, y, second))
    return 1.0 / best if best < math.inf else 0.0


def _pipeline(cut: SameCut, pipelines: int, batch: int) -> _Pipeline:
    """One pipeline among so many."""
    known = np.flatnonzero(cut.throughput)
    nearest = int(known[np.abs(known - pipelines).argmin()])
    step = 1.0 / float(cut.throughput[nearest])
    shared, bubble = step * float(cut.per_step[nearest]), step * float(cut.bubble[nearest])
    return _Pipeline(
        rows=max(1, int(cut.microbatch[nearest])),
        sequence=(step - shared - bubble) * nearest / batch,
        bubble=bubble,
        shared=shared,
    )


def _alone(batch: int, x: int, one: _Pipeline) -> float:
    return one.time(_whole(batch / x, one.rows)) + one.shared


def _together(batch: int, x: int, one: _Pipeline, y: int, other: _Pipeline) -> float:
    """The shortest step of x pipelines and y others that share a batch in whole microbatches."""
    together = x / one.sequence + y / other.sequence
    even = (batch + x * one.bubble / one.sequence + y * other.bubble / other.sequence) / together
    share = max(0.0, (even - one.bubble) / one.sequence)
    best = math.inf
    for first in (int(share // one.rows) * one.rows, _whole(share, one.rows)):
        second = max(0, _whole((batch - x * first) / y, other.rows))
        best = min(best, max(one.time(first), other.time(second)))
    return best + max(one.shared, other.shared)


def _whole(sequences: float, rows: int) -> int:
    return math.ceil(sequences / rows - 1e-9) * rows
