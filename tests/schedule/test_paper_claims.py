"""Claims about the planner, each with the sentence it verifies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import UserError
from everstep.schedule import MODES, Instance, Microbatch, Worker, plan, same_cap, uniform
from everstep.schedule.bounds import lower_bound
from everstep.schedule.cache import PlanCache
from everstep.schedule.compact import compact
from everstep.schedule.hosts import choose_hosts
from tests.schedule.check import violations


def step(
    replicas: int,
    stages: int,
    count: int,
    *,
    dead: tuple[Worker, ...] = (),
    cap: int | None = None,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    hop: float = 0.0,
) -> Instance:
    f, i, w = (uniform(replicas=replicas, stages=stages, value=t) for t in times)
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        hop=hop,
        dead=frozenset(dead),
        forward=f,
        input_grad=i,
        weight_grad=w,
        stash_cap=None if cap is None else same_cap(replicas=replicas, stages=stages, cap=cap),
    )


@pytest.mark.parametrize("stage", range(4))
def test_three_pipelines_four_stages_six_microbatches_one_death(stage: int) -> None:
    """ReCycle's example: 27 slots without a failure; the proved optima of both modes, met online."""
    instance = step(3, 4, 6, dead=(Worker(1, stage),))
    assert plan(instance, "decoupled").value <= (27, 28, 29, 30)[stage]
    assert plan(instance, "staggered").value == 27


def test_zero_bubble_reaches_the_work_bound_with_twice_the_stash() -> None:
    """With 2P - 1 stash slots a fault-free pipeline has no bubble: P=4, M=8, unit times give 24."""
    assert plan(step(1, 4, 8, cap=7), "staggered").period == 24
    assert plan(step(1, 4, 8, cap=4), "staggered").period <= 28  # proved optimum 27


def test_replicas_without_rerouted_work_are_scheduled_once() -> None:
    big = step(64, 8, 32, dead=(Worker(1, 2),), cap=16)
    problem = compact(big)
    assert len(problem.replicas) < 40
    planned = plan(big, "decoupled")
    clean = [k for k in range(64) if problem.replicas[problem.stands_for[k]] != k]
    assert clean
    mine = planned.schedule.ops[Worker(clean[-1], 3)]
    assert {op.microbatch.home for op in mine if op.microbatch is not None} == {clean[-1]}


def test_a_slow_worker_sheds_work_only_if_that_shortens_the_step() -> None:
    slow = step(4, 2, 12)
    slow = replace(slow, forward=((3.0, 1.0), *slow.forward[1:]))
    moved = choose_hosts(slow)
    assert moved
    assert {home for home, _, _ in moved} == {0}
    assert {stage for _, _, stage in moved} == {0}
    # A slow stage elsewhere sets the pace anyway: then everybody keeps his own.
    paced = replace(slow, weight_grad=tuple((1.0, 4.0) for _ in range(4)))
    assert not choose_hosts(paced)
    assert violations(slow, plan(slow, "staggered")) == []


@settings(max_examples=25, deadline=None)
@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=4), st.permutations(range(5)))
def test_a_cached_plan_serves_every_renaming_of_its_survivors(
    gone: set[tuple[int, int]], names: list[int]
) -> None:
    healthy = step(5, 3, 4, hop=0.5)
    cache = PlanCache(healthy)
    first = frozenset(Worker(k, s) for k, s in gone if k)  # replica 0 lives
    second = frozenset(Worker(names[w.replica], w.stage) for w in first)
    planned = cache.get(first, "staggered")
    assert cache.is_ready(second, "staggered")
    renamed = cache.get(second, "staggered")
    assert renamed.period == planned.period
    assert violations(replace(healthy, dead=second), renamed) == []


def test_the_cache_is_ready_for_the_next_death() -> None:
    cache = PlanCache(step(4, 3, 4))
    assert cache.prepare((), "decoupled", most=10) == 3  # a death in each stage; replicas are alike
    assert all(cache.is_ready({Worker(k, s)}, "decoupled") for k in range(4) for s in range(3))
    assert cache.prepare((), "decoupled", most=10) == 0
    assert len(cache.likely_next({Worker(0, 0), Worker(1, 0), Worker(2, 0)})) > 0


def test_a_dead_stage_has_no_schedule_and_says_so() -> None:
    with pytest.raises(UserError, match="stage 1 has no live worker"):
        step(2, 3, 4, dead=(Worker(0, 1), Worker(1, 1)))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0, 0.5]))
def test_no_plan_beats_its_bound(replicas: int, stages: int, count: int, cap: int, hop: float) -> None:
    instance = step(replicas, stages, count, cap=cap, hop=hop)
    for mode in MODES:
        assert plan(instance, mode, effort=10**6).value >= lower_bound(instance, mode) - 1e-9


def test_who_hosts_what_is_told() -> None:
    hosts = plan(step(3, 4, 6, dead=(Worker(1, 2),)), "staggered").schedule.hosts()
    assert len(hosts) == 3 * 4 * 6
    assert {hosts[Microbatch(1, m), 2] for m in range(6)} == {0, 2}


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=6),
    st.sampled_from(MODES),
)
def test_no_death_makes_a_step_faster(gone: set[tuple[int, int]], mode: str) -> None:
    """Not even a slow worker's: nobody has to give it work."""
    healthy = replace(step(5, 3, 4, hop=0.5, cap=3), forward=((1.0, 1.0, 1.0),) * 4 + ((3.0, 1.0, 1.0),))
    hurt = replace(healthy, dead=frozenset(Worker(*w) for w in gone))
    assert lower_bound(healthy, mode) <= lower_bound(hurt, mode) < float("inf")
