"""An order that repeats takes what the planner's clock says, with the times it was planned for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.schedule import Instance, Worker, plan, uniform
from everstep.schedule.repeating import repeating_period


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


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["reroute", "decoupled", "staggered"]),
)
def test_with_its_own_times_it_is_the_planners_clock(
    replicas: int, stages: int, count: int, mode: str
) -> None:
    """A barrier's makespan is met exactly; the period of a step without one is an upper bound of the pace."""
    instance = step(replicas, stages, count, dead=(Worker(0, 0),) if replicas > 1 else ())
    planned = plan(instance, mode)
    pace = repeating_period(planned, instance)
    assert pace <= planned.value + 1e-9
    if mode != "staggered":
        assert pace == pytest.approx(planned.value)


def test_a_stage_that_takes_twice_as_long_sets_the_pace() -> None:
    instance = step(2, 2, 6)
    slower = {
        field: tuple((row[0], 2 * row[1]) for row in getattr(instance, field))
        for field in ("forward", "input_grad", "weight_grad")
    }
    pace = repeating_period(plan(instance, "staggered"), replace(instance, **slower))
    assert pace == pytest.approx(6 * 2 * 3.0 + 0.75, rel=0.02)
