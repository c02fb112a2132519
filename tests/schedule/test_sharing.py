"""Steps on machines with fewer cores than workers: what the planner's own clock cannot show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.protocol.shape import Shape
from everstep.schedule import Instance, Worker, plan, uniform
from everstep.schedule.profile import Profile
from everstep.schedule.sharing import Machine, shared_period


def step(replicas: int, stages: int, count: int, *, dead: tuple[Worker, ...] = ()) -> Instance:
    times = [uniform(replicas=replicas, stages=stages, value=t) for t in (1.0, 1.25, 0.75)]
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        forward=times[0],
        input_grad=times[1],
        weight_grad=times[2],
        reduce=(0.25,) * stages,
        update=(0.5,) * stages,
        dead=frozenset(dead),
    )


def on(instance: Instance, cores: float, mode: str = "staggered") -> float:
    machine = Machine(frozenset(instance.workers()), cores)
    return shared_period(plan(instance, mode), instance, [machine])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["reroute", "decoupled", "staggered"]),
)
def test_with_a_core_each_it_is_the_planners_clock(replicas: int, stages: int, count: int, mode: str) -> None:
    """A barrier's makespan is met exactly; the period of a step without one is an upper bound of the pace."""
    instance = step(replicas, stages, count, dead=(Worker(0, 0),) if replicas > 1 else ())
    planned = plan(instance, mode)
    alone = shared_period(planned, instance, [])
    assert alone == pytest.approx(on(instance, replicas * stages, mode))
    assert alone <= planned.value + 1e-9
    if mode != "staggered":
        assert alone == pytest.approx(planned.value)


@pytest.mark.parametrize("dead", [(), (Worker(0, 1),)])
def test_one_core_runs_everything_one_after_the_other_whoever_died(dead: tuple[Worker, ...]) -> None:
    instance = step(2, 2, 4, dead=dead)
    num_workers = len(list(instance.workers()))
    assert on(instance, 1) == pytest.approx(2 * 2 * 4 * 3.0 + num_workers * 0.75)


def test_a_death_frees_a_share_of_the_cores() -> None:
    """Four workers on two cores: the heir has twice the work, and not half the speed to do it with."""
    before, after = step(2, 2, 8), step(2, 2, 8, dead=(Worker(0, 1),))
    separate = plan(after, "staggered").period / plan(before, "staggered").period
    shared = on(after, 2) / on(before, 2)
    assert separate > 1.8
    assert shared < 1.35
    assert on(before, 2) > 1.9 * plan(before, "staggered").period


def test_workers_of_different_machines_do_not_slow_each_other() -> None:
    instance = step(2, 2, 6)
    planned = plan(instance, "staggered")
    crowded = Machine(frozenset({Worker(0, 0), Worker(0, 1)}), 1)
    roomy = Machine(frozenset({Worker(1, 0), Worker(1, 1)}), 2)
    both = shared_period(planned, instance, [crowded, roomy])
    assert both == pytest.approx(shared_period(planned, instance, [crowded]))
    assert both > shared_period(planned, instance, [roomy])


def told(**cpu: float) -> dict[str, float]:
    return {
        "F": 2.0,
        "I": 2.5,
        "W": 1.5,
        "R": 0.5,
        "U": 1.0,
        **{k.replace("_", "."): v for k, v in cpu.items()},
    }


def test_a_profile_knows_the_wait_for_a_core_from_the_work() -> None:
    profile = Profile(Shape(1, 1, 4))
    assert profile.alone({}) is None
    profile.learn(Worker(0, 0), told())
    assert profile.alone({}) is None  # a worker on a GPU tells no core seconds
    profile.learn(Worker(0, 0), told(F_cpu=1.0, I_cpu=1.25, W_cpu=0.75, R_cpu=0.25, U_cpu=0.5, step_cpu=15.3))
    assert profile.instance().forward == ((2.0,),)
    alone = profile.alone({Worker(0, 0): 4})
    assert alone is not None
    # 4 x 3 + 0.75 are in ops; what the worker burned besides is spread over them.
    assert alone.forward == ((pytest.approx(1.2),),)
    assert alone.update == (pytest.approx(0.6),)
    assert on(replace(step(1, 1, 4), forward=alone.forward), 1) > on(step(1, 1, 4), 1)
