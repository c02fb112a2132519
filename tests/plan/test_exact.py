"""The plan is the best there is: brute force says so, on a formula written a second time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from everstep.plan import capacity_split
from everstep.plan.capacity_split import best_split
from everstep_lab.plan.assign import assign
from tests.plan.events import PlanWorld
from tests.plan.worlds import random_world


def brute_force(world: PlanWorld) -> float:
    """max over all allocations of sum w T(x') D_running - [changed or hurt] w T(x) D_transition."""
    running_s = world.cluster.running_s
    assert running_s is not None
    total = sum(len(node.usable()) for node in world.cluster.nodes)

    def flops(task, workers: int) -> float:
        table = task.curve.throughput
        return task.weight * table[min(workers, len(table) - 1)] if workers >= task.min_workers else 0.0

    def worth(task, workers: int) -> float:
        places = world.now.of(task.name)
        hurt = any(not world.cluster.is_usable(place) for place in places)
        changed = hurt or workers != len(places)
        return flops(task, workers) * running_s - changed * flops(task, len(places)) * task.transition_s

    rows = [[worth(task, x) for x in range(total + 1)] for task in world.tasks]
    return max(
        sum(row[x] for row, x in zip(rows, split, strict=True))
        for split in itertools.product(range(total + 1), repeat=len(rows))
        if sum(split) <= total
    )


@pytest.mark.parametrize("hundred", range(10))
def test_no_allocation_is_better(hundred: int) -> None:
    """1,000 random worlds with weights, minima, transition costs, curves that fall, and losses."""
    changed = hurt = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        world = random_world(seed)
        plan = assign(world.cluster, world.submitted(), world.now, second=False)
        best = brute_force(world)
        assert plan.objective == pytest.approx(best, rel=1e-9, abs=1e-9), f"seed {seed}"
        assert sum(plan.allocation.values()) <= world.cluster.capacity
        for task in world.tasks:
            assert plan.allocation[task.name] == 0 or plan.allocation[task.name] >= task.min_workers
        changed += any(gain.kind.name not in ("KEEP", "STOP") for gain in plan.gains.values())
        hurt += any(gain.damaged for gain in plan.gains.values())
    assert changed > 30  # the worlds are not all alike
    assert hurt > 10


def curves(draw: np.random.Generator, tasks: int, capacity: int, kind: str):
    found = []
    for _ in range(tasks):
        k = np.arange(capacity + 1)
        match kind:
            case "concave":
                worth = draw.uniform(0.5, 2) * k ** draw.uniform(0.4, 1.0)
            case "bumpy":
                worth = draw.uniform(0.5, 2) * k * draw.uniform(0.6, 1.0, len(k))
            case "stairs":
                worth = np.floor(k / draw.integers(2, 9)) * draw.uniform(0.5, 2)
            case _:
                worth = draw.integers(-5, 20, len(k)).astype(float)
        worth[0] = 0.0
        kept = draw.random(len(k)) < 0.9
        kept[0] = True
        found.append((k[kept], worth[kept].astype(float)))
    return found


@pytest.mark.parametrize("kind", ["concave", "bumpy", "stairs", "noise"])
def test_pruning_by_price_loses_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The priced program and the full one agree, also where all tasks are alike and ties abound."""
    draw = np.random.default_rng(7)
    for _ in range(25):
        capacity = int(draw.integers(5, 120))
        tasks = curves(draw, int(draw.integers(2, 9)), capacity, kind)
        if draw.random() < 0.3:
            tasks = [tasks[0]] * len(tasks)
        monkeypatch.setattr(capacity_split, "SMALL", 10**9)
        full = best_split(tasks, capacity)
        monkeypatch.setattr(capacity_split, "SMALL", 0)
        priced = best_split(tasks, capacity)
        assert priced.worth == pytest.approx(full.worth, rel=1e-9)
        assert sum(priced.units) <= capacity


def test_a_split_without_tasks_or_room() -> None:
    assert best_split([], 5).units == ()
    assert best_split([(np.array([0, 3]), np.array([0.0, 9.0]))], 2).units == (0,)
