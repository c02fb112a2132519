"""Failures are put where they cost least: which stage gets the next worker, and which one can spare one.

All workers of a stage share its microbatches, so a step waits for the stage whose busiest worker takes
longest. An empty place costs little at a stage of short ops and much at one of long ops:

    8 x 3, stages of 1 : 1 : 1.4, 24 microbatches, 21 workers      busiest worker
        7, 7, 7    evened by number                                 4, 4, 4 x 1.4 = 5.6
        7, 6, 8    evened by cost                                   4, 4, 3 x 1.4 = 4.2

Used by seats that are given and taken away, by workers that change their stage, and by the planner's
throughput of so many workers. Costs come from measured times, so the planner tells them (`AssignmentChosen`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everstep.core.cluster.task import Task


def load(live: int, cost: float, jobs: int) -> float:
    """The time of the busiest of so many workers that share `jobs` microbatches of `cost` each."""
    return -(-jobs // live) * cost if live else math.inf


def costs_of(costs: Sequence[float], stages: int) -> Sequence[float]:
    """None are told: all stages are alike."""
    return costs if len(costs) == stages else (1.0,) * stages


def load_at(task: Task, stage: int, live: int) -> float:
    """If so many workers of this stage were left."""
    shape = task.shape
    return load(live, costs_of(task.stage_costs, shape.stages)[stage], shape.replicas * shape.microbatches)


def moved(live: Sequence[int], replicas: int, costs: Sequence[float], jobs: int) -> list[tuple[int, int]]:
    """Moves of one worker each, from stage to stage, after which the busiest worker is as quick as it gets
    with so many workers; empty: it is so already.
    """
    counts, found = list(live), list[tuple[int, int]]()
    stages, quickest, useful = range(len(counts)), math.inf, 0
    while True:
        loads = [load(n, cost, jobs) for n, cost in zip(counts, costs, strict=True)]
        if max(loads) < quickest:
            quickest, useful = max(loads), len(found)
        to = max(stages, key=lambda s: (loads[s], -counts[s]))
        donors = [s for s in stages if s != to and counts[s] > 1]
        least = min(donors, key=lambda s: (load(counts[s] - 1, costs[s], jobs), -counts[s]), default=to)
        if counts[to] == replicas or load(counts[least] - 1, costs[least], jobs) >= loads[to]:
            return found[:useful]
        counts[least] -= 1
        counts[to] += 1
        found.append((least, to))
