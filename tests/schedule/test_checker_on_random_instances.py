"""Every generator's output passes the independent checker: random shapes, times, deaths, broken steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.schedule import MODES, Done, Instance, Microbatch, Schedule, Worker, plan
from tests.schedule.check import deadlocks, violations


@st.composite
def instances(draw: st.DrawFn, *, broken_step: bool = False) -> Instance:
    replicas, stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    times = st.sampled_from([1.0, 1.0, 2.0, 0.5, 3.25])
    rows = draw(
        st.lists(
            st.lists(st.tuples(times, times, times), min_size=stages, max_size=stages),
            min_size=1,
            max_size=replicas,
        )
    )
    grid = [rows[k % len(rows)] for k in range(replicas)]
    dead = draw(st.sets(st.builds(Worker, st.integers(0, replicas - 1), st.integers(0, stages - 1))))
    spared = {s: draw(st.integers(0, replicas - 1)) for s in range(stages)}
    dead = frozenset(w for w in dead if spared[w.stage] != w.replica)
    workers = [Worker(k, s) for k in range(replicas) for s in range(stages)]
    per_stage = st.lists(times, min_size=stages, max_size=stages).map(tuple)
    caps = {w: draw(st.integers(1, 6)) for w in workers} if draw(st.booleans()) else None
    instance = Instance(
        replicas=replicas,
        stages=stages,
        microbatches=count,
        hop=draw(st.sampled_from([0.0, 0.25, 2.0])),
        forward=tuple(tuple(x[0] for x in row) for row in grid),
        input_grad=tuple(tuple(x[1] for x in row) for row in grid),
        weight_grad=tuple(tuple(x[2] for x in row) for row in grid),
        reduce=draw(st.sampled_from([(), (1.0,) * stages])),
        update=draw(per_stage),
        stash_cap=caps,
        dead=dead,
    )
    return draw(breaks(instance)) if broken_step else instance


@st.composite
def breaks(draw: st.DrawFn, instance: Instance) -> Instance:
    """A moment inside a step: a prefix of every worker's list is done; then some workers die."""
    before = plan(replace(instance, dead=frozenset()), "decoupled")
    stop = draw(st.floats(0.0, 1.0)) * before.makespan
    kinds: dict[tuple[Microbatch, int], tuple[int, str]] = {}
    for timed in before.timeline(instance.time):
        if timed.op.microbatch is not None and timed.end <= stop:
            place = (timed.op.microbatch, timed.op.stage)
            host, so_far = kinds.get(place, (timed.worker.replica, ""))
            kinds[place] = host, so_far + str(timed.op.kind)
    done = {
        place: Done(host, letters)
        for place, (host, letters) in kinds.items()
        if Worker(host, place[1]) not in instance.dead
    }
    return replace(instance, done=done, stash_cap=None)


@given(instances(), st.sampled_from(MODES))
def test_every_plan_is_valid(instance: Instance, mode: str) -> None:
    assert violations(instance, plan(instance, mode)) == []


@given(instances(broken_step=True), st.sampled_from(MODES))
def test_the_rest_of_a_broken_step_is_valid(instance: Instance, mode: str) -> None:
    assert violations(instance, plan(instance, mode)) == []


def test_a_stage_whose_ops_are_all_done_begins_with_its_reduce() -> None:
    """Found by the test above: the clock began with the first op and left such a stage before 0."""
    finished = {
        0: [(1, 1), (0, 1)],
        1: [(1, 1), (0, 1), (0, 0), (1, 0)],
        2: [(1, 1), (0, 1)],
        3: [(0, 0), (1, 1)],
        4: [(1, 1), (0, 0), (0, 1), (1, 0)],
    }
    instance = Instance(
        replicas=2,
        stages=5,
        microbatches=2,
        forward=((2.0, 1.0, 1.0, 0.5, 1.0), (0.5, 0.5, 2.0, 1.0, 1.0)),
        input_grad=((1.0, 1.0, 2.0, 1.0, 3.25), (1.0, 0.5, 2.0, 3.25, 0.5)),
        weight_grad=((1.0, 1.0, 1.0, 3.25, 1.0), (1.0, 1.0, 3.25, 2.0, 1.0)),
        update=(1.0,) * 5,
        dead=frozenset({Worker(0, 2), Worker(0, 3), Worker(1, 0)}),
        done={
            (Microbatch(*microbatch), stage): Done(host=int(stage in (2, 3)), kinds="FIW")
            for stage, microbatches in finished.items()
            for microbatch in microbatches
        },
    )
    assert violations(instance, plan(instance, "staggered")) == []


@given(instances(broken_step=True), st.data())
def test_what_runs_again_for_its_output_alone_is_ordered_too(instance: Instance, data: st.DataObject) -> None:
    """A weight gradient that is in the sum already is never run twice, though its F and I are."""
    again = {
        place: Done(d.host, data.draw(st.sampled_from(["W", "IW", "FW", d.kinds]))) if d.kinds == "FIW" else d
        for place, d in instance.done.items()
    }
    instance = replace(instance, done=again)
    assert violations(instance, plan(instance, data.draw(st.sampled_from(MODES)))) == []


@settings(max_examples=30, deadline=None)
@given(instances(), st.sampled_from(MODES))
def test_planning_is_deterministic(instance: Instance, mode: str) -> None:
    one, two = plan(instance, mode), plan(instance, mode)
    assert one.schedule.text() == two.schedule.text()
    assert one.period == two.period


def small() -> Instance:
    ones = ((1.0,) * 3,) * 2
    return Instance(
        replicas=2, stages=3, microbatches=2, hop=0.5, forward=ones, input_grad=ones, weight_grad=ones
    )


@pytest.mark.parametrize("damage", ["swap", "drop", "repeat", "elsewhere", "early", "over"])
def test_the_checker_sees_each_kind_of_damage(damage: str) -> None:
    instance = replace(small(), stash_cap={Worker(k, s): 2 for k in range(2) for s in range(3)})
    planned = plan(instance, "decoupled")
    ops = {w: list(x) for w, x in planned.schedule.ops.items()}
    starts = dict(planned.starts)
    mine = ops[Worker(0, 1)]
    if damage == "swap":
        mine[0], mine[1] = mine[1], mine[0]
        mine.insert(0, mine.pop(3))
    elif damage == "drop":
        mine.pop(0)
    elif damage == "repeat":
        mine.insert(1, mine[0])
    elif damage == "elsewhere":
        ops[Worker(1, 1)].insert(0, mine.pop(0))
    elif damage == "early":
        starts[Worker(0, 1)] = tuple(t - 1 for t in starts[Worker(0, 1)])
    else:
        instance = replace(instance, stash_cap={Worker(k, s): 1 for k in range(2) for s in range(3)})
    schedule = Schedule({w: tuple(x) for w, x in ops.items()})
    broken = replace(planned, schedule=schedule, starts=starts)
    assert violations(instance, broken)


def test_a_dry_run_names_who_waits_for_ever() -> None:
    planned = plan(small(), "decoupled")
    ops = {w: list(x) for w, x in planned.schedule.ops.items()}
    last = ops[Worker(0, 2)]
    last.insert(0, last.pop(1))  # its backward before its forward
    found = deadlocks(small(), Schedule({w: tuple(x) for w, x in ops.items()}))
    assert any("0:2 waits forever" in line for line in found)
