"""Workers of different speed: bounds that no schedule beats, and plans near them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from everstep.cli.main import run
from everstep.errors import UserError
from everstep.schedule import Instance, Worker, plan
from everstep.schedule.best_order import time_order, value_of
from everstep.schedule.bounds import lower_bound
from everstep.schedule.compact import compact
from everstep.schedule.dispatch import HABITS, dispatch
from everstep.schedule.modes import MODES, ScheduleMode
from everstep_lab.schedule.compare import compare
from tests.schedule.free_hosts import solve

SEARCHED = ("staggered", "decoupled", "reroute")


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
    for mode in SEARCHED:
        bound = lower_bound(instance, mode)
        for _ in range(4):
            moved = {}
            for microbatch in instance.homes():
                for stage in range(instance.stages):
                    host = draw.choice(instance.live(stage))
                    if host != microbatch.home:
                        moved[microbatch.home, microbatch.number, stage] = host
            problem = compact(instance, fused=MODES[mode].fused, moved=moved)
            for habit in HABITS:
                timing = time_order(problem, dispatch(problem, habit, bound), mode)
                assert value_of(timing, mode) >= bound - 1e-6


@pytest.mark.parametrize("seed", [3, pytest.param(range(20), marks=pytest.mark.slow)], ids=["one", "many"])
def test_no_solution_of_cp_sat_with_free_hosts_is_below_the_bound(seed: int | range) -> None:
    pytest.importorskip("ortools.sat.python.cp_model")
    for number in [seed] if isinstance(seed, int) else seed:
        instance = uneven_step(number)
        for mode in SEARCHED:
            planned = plan(instance, mode)
            found, _ = solve(
                instance,
                fused=MODES[mode].fused,
                staggered=MODES[mode].staggered,
                seconds=1.0 if isinstance(seed, int) else 5.0,
                most=planned.makespan + 10,
            )
            assert found >= planned.lower_bound - 1e-6


def test_the_queue_below_a_slow_worker_is_in_the_bound() -> None:
    """Two replicas, three stages, two microbatches each, worker 0:1 at half speed. Its peer runs three of the
    four microbatches, in a burst, and the last stage cannot serve them as they come. The bound was 98.
    """
    pytest.importorskip("ortools.sat.python.cp_model")

    def grid(weight: float) -> tuple[tuple[float, ...], ...]:
        return ((weight, 2 * weight, weight), (weight, weight, weight))

    instance = Instance(
        replicas=2,
        stages=3,
        microbatches=2,
        forward=grid(10.0),
        input_grad=grid(11.0),
        weight_grad=grid(9.0),
        hop=1.0,
    )
    planned = plan(instance, "staggered")
    assert planned.value == planned.lower_bound == 108.0
    assert solve(instance, fused=False, staggered=True, seconds=60.0, most=130.0) == (108.0, 108.0)


def behind_one_worker() -> Instance:
    """Two replicas, three stages, two microbatches each. The last stage takes three times as long, and of the
    one above it one worker is left.
    """

    def grid(weight: float) -> tuple[tuple[float, ...], ...]:
        return ((weight, weight, 3 * weight),) * 2

    return Instance(
        replicas=2,
        stages=3,
        microbatches=2,
        forward=grid(10.0),
        input_grad=grid(11.0),
        weight_grad=grid(9.0),
        hop=1.0,
        dead=frozenset({Worker(0, 1)}),
    )


def test_microbatches_that_come_one_after_the_other_are_in_the_bound() -> None:
    """The second worker of the last stage begins an F of the stage above later than the first one, or the
    first one waits for it, and then the stages above are late. The bound was 181, and the plan is 192.
    """
    planned = plan(behind_one_worker(), "staggered")
    assert planned.lower_bound == 191.0
    assert planned.gap < 0.01


def test_no_order_beats_a_bound_that_counts_the_gaps_between_microbatches() -> None:
    """Also where the first F had better wait: with two stages CP-SAT finds 184, and 190 would be too much."""
    pytest.importorskip("ortools.sat.python.cp_model")
    three = behind_one_worker()
    forward, input_grad, weight_grad = (
        tuple(row[1:] for row in grid) for grid in (three.forward, three.input_grad, three.weight_grad)
    )
    instance = replace(
        three,
        stages=2,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        dead=frozenset({Worker(0, 0)}),
    )
    found, _ = solve(instance, fused=False, staggered=True, seconds=4.0, most=400.0)
    assert lower_bound(instance, "staggered") <= found <= 184.0
    assert plan(instance, "staggered").value == 184.0, "190 by the advance of single rounds"
    for seed in range(40):
        draw = random.Random(seed)
        step = replace(uneven_step(seed), stash_cap=None)
        above = draw.randrange(step.stages)
        one_left = replace(step, dead=frozenset(Worker(k, above) for k in range(1, step.replicas)))
        for mode in SEARCHED:
            assert plan(one_left, mode).gap >= -1e-9


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
    """By quotas alone the plan was a tenth above what the speeds of the workers allow."""
    planned = plan(slow_stage_step(), "staggered")
    assert planned.gap < 0.001
    assert planned.value == pytest.approx(414.8, abs=0.5)


@pytest.mark.parametrize("mode", ["staggered", "decoupled"])
def test_plans_of_uneven_workers_are_near_the_bound(mode: str) -> None:
    """What is above 5 % holds one or two microbatches per worker: there CP-SAT proves more than the bound."""
    longer = [replace(uneven_step(seed), microbatches=8) for seed in range(24)]
    gaps = [plan(instance, mode).gap for instance in longer]
    assert sum(gaps) / len(gaps) < 0.025
    assert sum(gap > 0.05 for gap in gaps) <= 4


def test_uneven_plans_are_the_same_every_time() -> None:
    for seed in (2, 5, 11):
        one, other = (plan(uneven_step(seed), "staggered") for _ in range(2))
        assert one.schedule.text() == other.schedule.text()


def test_a_new_mode_is_a_new_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ScheduleMode(fused=True, staggered=True, label="fused and staggered", about="a test")
    monkeypatch.setitem(MODES, "fused-staggered", row)
    planned = plan(uneven_step(1), "fused-staggered")
    assert planned.value == planned.period >= planned.lower_bound
    assert "re-route, fused and staggered" in [each.policy for each in compare(uneven_step(1))]


@pytest.mark.parametrize("hop", ["inf", "nan", "-1"])
def test_a_hop_that_is_no_time_is_one_sentence(hop: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "--hop", hop]) == 2
    said = capsys.readouterr().err
    assert "--hop is" in said
    assert "Traceback" not in said


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
