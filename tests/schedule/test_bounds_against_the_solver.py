"""The lower bounds against CP-SAT, which is not told of them: on small steps no optimum falls below."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from everstep.schedule import Instance, Worker, per_stage
from everstep.schedule.bounds import lower_bound
from everstep.schedule.compact import compact
from everstep.schedule.dispatch import HABITS, dispatch
from everstep.schedule.modes import MODES
from everstep.schedule.timing import run
from everstep_lab.schedule import polish


def small_step(seed: int) -> Instance:
    draw = random.Random(seed)
    replicas, stages, count = draw.choice(((1, 3, 4), (1, 2, 5), (2, 2, 3), (2, 3, 2), (1, 4, 3), (3, 2, 2)))
    times = [tuple(float(draw.choice((1, 2, 3))) for _ in range(stages)) for _ in range(3)]
    dead = {Worker(draw.randrange(replicas), draw.randrange(stages))} if replicas > 1 else set()
    instance = Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        hop=float(draw.choice((0, 1))),
        forward=per_stage(replicas=replicas, values=times[0]),
        dead=frozenset(dead),
        input_grad=per_stage(replicas=replicas, values=times[1]),
        weight_grad=per_stage(replicas=replicas, values=times[2]),
        reduce=tuple(float(draw.choice((0, 1, 4))) for _ in range(stages)),
    )
    if draw.random() < 0.8:
        caps = [draw.choice((1, 2, 3)) for _ in range(stages)]
        instance = replace(
            instance, stash_cap={Worker(k, s): caps[s] for k in range(replicas) for s in range(stages)}
        )
    if draw.random() < 0.4:  # a slow worker: heavier, not dead
        slow = tuple(2 * x for x in instance.forward[0])
        instance = replace(instance, forward=(slow, *instance.forward[1:]))
    return instance


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_never_below_the_bound(seed: int) -> None:
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    instance = small_step(seed)
    for mode in ("decoupled", "staggered", "reroute"):
        problem = compact(instance, fused=MODES[mode].fused)
        order = dispatch(problem, HABITS[0], 0.0)
        timing = run(problem, order, [0.0] * instance.stages)
        model, _ = polish._model(cp_model, problem, order, timing, MODES[mode].staggered, 0.0, 1.0)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = 2.0
        solver.parameters.num_workers = 2
        solver.solve(model)
        assert solver.objective_value >= lower_bound(instance, mode) - 1e-6


@pytest.mark.parametrize("seed", [1, 3, 6, 9])
def test_letting_microbatches_go_in_turn_loses_no_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools.sat.python.cp_model")
    instance = replace(small_step(seed), microbatches=2)
    for mode in ("decoupled", "staggered"):
        found = []
        for in_turn in (polish._in_turn, lambda *_: None):
            monkeypatch.setattr(polish, "_in_turn", in_turn)
            planned = polish.polish(instance, mode, seconds=20.0)
            found.append((planned.value, planned.lower_bound))
        assert found[0][0] == pytest.approx(found[1][0])
