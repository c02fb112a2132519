"""Shapes with places left empty: what a task makes of any number of workers.

A running task works around a place without a worker, whether it has lost that worker or never had it. So 31
workers need not be cut to the 24 of the next whole shape below: they run as the 32 of the one above with one
place empty. The empty places are spread evenly over the stages, first stages fullest.

    workers   24        25  ...  31                    32
    shape     24 x 1    32 x 1 with 7 ... 1 empty      32 x 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everstep.protocol.ops import Worker
from everstep_lab.plan.curve import Curve, SameCut
from everstep_lab.plan.pipeline_orders import ORDERS
from everstep_lab.plan.reroute import throughput_ratio
from everstep_lab.plan.task_shape import Floats

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WithHoles:
    """By number of workers, from 0: the best shape with places empty; throughput 0 where there is none."""

    throughput: Floats
    cut: Ints
    replicas: Ints


def per_stage(groups: int, stages: int) -> list[int]:
    """How many groups each stage has, spread evenly."""
    each, more = divmod(groups, stages)
    return [each + (stage < more) for stage in range(stages)]


def with_holes(curve: Curve) -> WithHoles:
    """Shortlisted by work alone, then timed by the scheduler. Kept with the curve."""
    if (kept := curve.kept.get("holes")) is not None:
        assert isinstance(kept, WithHoles)
        return kept
    likely = np.zeros(curve.most + 1)
    cuts, replicas = (np.full(curve.most + 1, -1, dtype=np.int64) for _ in range(2))
    for number, cut in enumerate(curve.cuts):
        _shortlist(curve, number, cut, likely, cuts, replicas)
    throughput = np.zeros(curve.most + 1)
    for workers in np.flatnonzero(likely > 0):
        cut, count = curve.cuts[cuts[workers]], int(replicas[workers])
        throughput[workers] = cut.throughput[count] * ratio(curve, cut, count, int(workers) // cut.shards)
    found = WithHoles(throughput=throughput, cut=cuts, replicas=replicas)
    curve.kept["holes"] = found
    return found


def ratio(curve: Curve, cut: SameCut, replicas: int, groups: int) -> float:
    """Throughput of so many groups in a shape of so many replicas, over that of the whole shape."""
    live = per_stage(groups, cut.stages)
    dead = frozenset(Worker(k, s) for s, n in enumerate(live) for k in range(n, replicas))
    return throughput_ratio(
        cut.shape(replicas),
        dead,
        batch=curve.batch,
        schedule=curve.schedule,
        shares=cut.shares(replicas),
    )


def in_shape(curve: Curve, cut: SameCut, replicas: int, live: int) -> Floats:
    """By number of workers, from 0: what this shape brings with its other places empty. 0: none, or not
    looked at (`counts`).
    """
    key = f"{cut.stages} x {cut.shards} x {replicas}"
    table = curve.kept.setdefault(key, np.zeros(replicas * cut.stages * cut.shards + 1))
    assert isinstance(table, np.ndarray)
    for groups in counts(replicas, cut.stages, live // cut.shards):
        if not table[groups * cut.shards]:
            table[groups * cut.shards] = cut.throughput[replicas] * ratio(curve, cut, replicas, groups)
    return table


SMALL = 16  # workers: every number of them is looked at
MOST_COUNTS = 64  # numbers of whole replicas that are looked at


def counts(replicas: int, stages: int, live: int, most: int = MOST_COUNTS) -> list[int]:
    """Numbers of workers that are looked at: of a large shape whole replicas, the last few, and those near as
    many as there are; of a very large one not every number of replicas, but those near all of them.
    """
    places = replicas * stages
    if places <= SMALL:
        return list(range(stages, places + 1))
    stride = -(-2 * replicas // most) if replicas > most else 1
    near = replicas - most // 2
    whole = [k for k in range(1, replicas + 1) if k % stride == 0 or k == 1 or k > near]
    last = range(places - max(stages, 4) + 1, places + 1)
    here = range(max(stages, live - most // 4), min(places, live + most // 4) + 1) if live else ()
    return sorted({*(k * stages for k in whole), *last, *here})


def _shortlist(curve: Curve, number: int, cut: SameCut, likely: Floats, cuts: Ints, replicas: Ints) -> None:
    """The fullest stage's work decides: so many microbatches among so few."""
    for count in np.flatnonzero(cut.throughput):
        rows = max(1, int(cut.microbatch[count]))
        each = curve.batch // (int(count) * rows) if curve.batch else 4 * cut.stages
        groups = np.arange(cut.stages, min(int(count) * cut.stages, curve.most // cut.shards + 1))
        workers = groups * cut.shards
        if not len(groups) or each < 1:
            continue
        busiest = -(-int(count) * each // (groups // cut.stages))
        shares = cut.shares(int(count))
        filled = 0.0 if ORDERS[curve.schedule].whole else shares.bubble
        working = 1 - shares.per_step - filled
        rate = cut.throughput[count] / np.maximum(1.0, working * busiest / each + shares.per_step)
        better = rate > likely[workers]
        at = workers[better]
        likely[at], cuts[at], replicas[at] = rate[better], number, count


def num_moving(live: Sequence[int], groups: Ints, stages: int) -> Ints:
    """Per option of so many groups: how many of today's live ones must change their stage."""
    each, more = groups // stages, groups % stages
    target = each[:, None] + (np.arange(stages)[None, :] < more[:, None])
    filled = np.maximum(target - np.asarray(live)[None, :], 0).sum(axis=1)
    return np.asarray(np.maximum(filled - np.maximum(groups - sum(live), 0), 0))
