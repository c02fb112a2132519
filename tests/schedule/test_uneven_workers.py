"""Workers of different speed: bounds that no schedule beats, and plans near them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.schedule import MODES, Instance, Worker, plan
from everstep.schedule.bounds import lower_bound
from everstep.schedule.compact import compact
from everstep.schedule.dispatch import HABITS, dispatch
from everstep.schedule.planner import judged
from tests.schedule.free_hosts import solve


def uneven_step(seed: int) -> Instance:
    """Small, with whole times: slow workers, uneven stages, dead ones, tight stashes."""
    draw = random.Random(seed)
    replicas, stages, count = draw.choice(((2, 2, 3), (2, 3, 2), (3, 2, 2), (2, 2, 4), (3, 3, 2)))
    speed = [[draw.choice((1, 1, 1, 2, 3)) for _ in range(stages)] for _ in range(replicas)]
    base = [draw.choice((1, 2, 3)) for _ in range(stages)]

    def grid(weight: int) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(float(weight * base[s] * speed[k][s]) for s in range(stages)) for k in range(replicas)
        )

    dead = frozenset(
        {Worker(draw.randrange(replicas), draw.randrange(stages))} if draw.random() < 0.5 else ()
    )
    caps = {Worker(k, s): draw.choice((1, 2, 3)) for k in range(replicas) for s in range(stages)}
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        forward=grid(2),
        input_grad=grid(2),
        weight_grad=grid(draw.choice((1, 2))),
        hop=float(draw.choice((0, 1, 2))),
        reduce=tuple(float(draw.choice((0, 3))) for _ in range(stages)),
        dead=dead,
        stash_cap=caps if draw.random() < 0.7 else None,
    )


@pytest.mark.parametrize("seed", range(60))
def test_no_division_of_the_work_beats_the_bound(seed: int) -> None:
    """Hosts at random, ordered by every habit."""
    draw = random.Random(1000 + seed)
    instance = uneven_step(seed)
    for mode in MODES:
        bound = lower_bound(instance, mode)
        for _ in range(4):
            moved = {}
            for microbatch in instance.homes():
                for stage in range(instance.stages):
                    host = draw.choice(instance.live(stage))
                    if host != microbatch.home:
                        moved[microbatch.home, microbatch.number, stage] = host
            problem = compact(instance, moved)
            for habit in HABITS:
                assert judged(problem, dispatch(problem, habit, bound), mode)[1] >= bound - 1e-6


@pytest.mark.parametrize("seed", [3, pytest.param(range(20), marks=pytest.mark.slow)], ids=["one", "many"])
def test_no_solution_of_cp_sat_with_free_hosts_is_below_the_bound(seed: int | range) -> None:
    pytest.importorskip("ortools.sat.python.cp_model")
    for number in [seed] if isinstance(seed, int) else seed:
        instance = uneven_step(number)
        for mode in MODES:
            planned = plan(instance, mode)
            found, _ = solve(
                instance,
                staggered=mode == "staggered",
                seconds=1.0 if isinstance(seed, int) else 5.0,
                most=planned.makespan + 10,
            )
            assert found >= planned.lower_bound - 1e-6


def slow_stage_step() -> Instance:
    """Three replicas, three stages; at the last stage two of three workers take three times as long."""
    speed = ((2.0, 1.0, 1.55), (3.0, 3.0, 4.65), (2.0, 1.0, 4.65))
    return Instance(
        replicas=3,
        stages=3,
        microbatches=4,
        forward=tuple(tuple(10 * x for x in row) for row in speed),
        input_grad=tuple(tuple(11 * x for x in row) for row in speed),
        weight_grad=tuple(tuple(9 * x for x in row) for row in speed),
        hop=1.0,
        stash_cap={Worker(k, s): 3 for k in range(3) for s in range(3)},
    )


def test_slow_workers_are_given_what_they_can_finish() -> None:
    """With their quotas, and no less patience, the plan was a tenth above what the speeds allow."""
    planned = plan(slow_stage_step(), "staggered")
    assert planned.gap < 0.01


@pytest.mark.parametrize("mode", ["staggered", "decoupled"])
def test_plans_of_uneven_workers_are_near_the_bound(mode: str) -> None:
    """With room for the microbatches: where a worker holds one or two, hosts by quota leave up to a tenth."""
    longer = [replace(uneven_step(seed), microbatches=8, stash_cap=None) for seed in range(24)]
    gaps = [plan(instance, mode).gap for instance in longer]
    assert sum(gaps) / len(gaps) < 0.01
    assert max(gaps) < 0.05


def test_uneven_plans_are_the_same_every_time() -> None:
    for seed in (2, 5, 11):
        one, other = (plan(uneven_step(seed), "staggered") for _ in range(2))
        assert one.schedule.text() == other.schedule.text()


@pytest.mark.parametrize(
    ("name", "value"), [("forward", float("nan")), ("weight_grad", float("inf")), ("hop", -1.0)]
)
def test_times_that_are_none_are_refused_by_name(name: str, value: float) -> None:
    wrong: Any = value if name == "hop" else ((1.0, value), (1.0, 1.0))
    with pytest.raises(UserError, match=name):
        replace(uneven_step(0), replicas=2, stages=2, dead=frozenset(), **_two_by_two() | {name: wrong})


def _two_by_two() -> dict[str, Any]:
    one = ((1.0, 1.0), (1.0, 1.0))
    plain = {"forward": one, "input_grad": one, "weight_grad": one, "reduce": (), "stash_cap": None}
    return plain
