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

from everstep_lab.plan.curve import Curve, Ints, SameCut
from everstep_lab.plan.task_shape import Floats


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


# ------------------------------------------------------------------ what no policy exceeds


def upper_bound(curve: Curve) -> Floats:
    """By number of workers, from 0: no whole shape, no shape with places empty and no pipelines of two depths
    bring more. As if work could be divided at will: the busiest worker has its exact share.
    """
    if (kept := curve.kept.get("upper bound")) is None:
        workers = np.arange(curve.most + 1, dtype=np.float64)
        kept = np.maximum.accumulate(curve.throughput)
        if curve.batch:
            for cut in curve.cuts:
                kept = np.maximum(kept, _with_places_empty(cut, workers))
            kept = np.maximum(kept, _with_two_depths(curve, workers))
        curve.kept["upper bound"] = kept
    assert isinstance(kept, np.ndarray)
    return kept


def _with_places_empty(cut: SameCut, workers: Floats) -> Floats:
    """`plan.holes` without rounding, in the order that wastes least."""
    best = np.zeros(len(workers))
    each = np.maximum(workers / (cut.stages * cut.shards), 1e-9)  # groups of a stage
    for replicas in np.flatnonzero(cut.throughput):
        shares = cut.shares(int(replicas))
        working = 1.0 - shares.per_step - shares.bubble
        rate = cut.throughput[replicas] / np.maximum(1.0, working * replicas / each + shares.per_step)
        best = np.maximum(best, np.where(each >= 1.0, rate, 0.0))
    return best


PARTS = 8  # into which the share of one depth is cut: more are closer


def _with_two_depths(curve: Curve, workers: Floats) -> Floats:
    """For all shares of workers between two bounds: at most the speed and at least the pipelines, bubble and
    reduction of any of them. One depth alone is the end of a pair.
    """
    lines = [_Line.of(cut, curve.batch) for cut in curve.cuts if cut.throughput.any()]
    best = np.zeros(len(workers))
    for i, one in enumerate(lines):
        for other in lines[: i + 1]:
            for part in range(PARTS if other is not one else 1):
                ends = (part / PARTS, (part + 1) / PARTS) if other is not one else (0.0, 1.0)
                step = _shortest_step(one, other, ends, curve.batch, workers)
                best = np.maximum(best, np.where(workers >= min(one.size, other.size), 1.0 / step, 0.0))
    return np.maximum.accumulate(best)


def _shortest_step(
    one: _Line, other: _Line, ends: tuple[float, float], batch: int, workers: Floats
) -> Floats:
    """`ends`: the least and the most of the workers that are in pipelines of `one`."""
    pipelines = workers * min(x / one.size + (1 - x) / other.size for x in ends)
    a, b = one.among(pipelines), other.among(pipelines)
    speed = np.maximum(*(x * one.speed[a] + (1 - x) * other.speed[b] for x in ends))
    bubble = np.maximum(
        _common(one, a, other, b, min(ends)),
        _common(other, b, one, a, 1.0 - max(ends)),
    )
    shared = np.maximum(one.shared[a], other.shared[b])
    if ends[1] == 1.0:  # none of the other
        shared = np.minimum(shared, one.shared[a])
    if ends[0] == 0.0:
        shared = np.minimum(shared, other.shared[b])
    return batch / (np.maximum(workers, 1.0) * speed) + bubble + shared


def _common(long: _Line, a: Ints, short: _Line, b: Ints, share: float) -> Floats:
    """The bubble of all pipelines together, by their speeds, if at least this share of the workers is in
    pipelines of `long`; no less than the shorter bubble.
    """
    least = share * long.slowest[a] / (share * long.slowest[a] + (1 - share) * short.speed[b])
    more = np.maximum(0.0, long.bubble[a] - short.bubble[b])
    return np.minimum(long.bubble[a], short.bubble[b]) + least * more


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Pipelines of one cut, by how many there are at the least: the best of each figure."""

    size: int
    known: Ints
    speed: Floats  # sequences per second and worker
    slowest: Floats
    bubble: Floats
    shared: Floats

    @classmethod
    def of(cls, cut: SameCut, batch: int) -> _Line:
        known = np.flatnonzero(cut.throughput)
        lines = [_pipeline(cut, int(n), batch) for n in known]
        size = cut.stages * cut.shards
        return cls(
            size=size,
            known=known,
            speed=_from_here_on([1.0 / line.sequence / size for line in lines], np.maximum),
            slowest=_from_here_on([1.0 / line.sequence / size for line in lines], np.minimum),
            bubble=_from_here_on([line.bubble for line in lines], np.minimum),
            shared=_from_here_on([line.shared for line in lines], np.minimum),
        )

    def among(self, pipelines: Floats) -> Ints:
        """So many or more: `_pipeline` may take the nearest number below."""
        return np.maximum(np.searchsorted(self.known, pipelines, side="right") - 1, 0)


def _from_here_on(values: list[float], best: np.ufunc) -> Floats:
    return np.asarray(best.accumulate(np.array(values)[::-1])[::-1])
