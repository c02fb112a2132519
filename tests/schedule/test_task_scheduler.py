"""A schedule in force is kept while it is right, and made anew for told speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.protocol.actions import ComputePlan
from everstep.protocol.messages import TimesReported
from everstep.protocol.ops import Kind, Worker
from everstep.protocol.shape import Shape
from everstep.schedule.task_scheduler import FIRST_LOOK, LEAST_STEPS, TaskScheduler

SHAPE = Shape(2, 2, 8)


def told(worker: Worker, own: float, wall: float | None = None) -> TimesReported:
    wall = own if wall is None else wall
    return TimesReported(
        task="t",
        worker=worker,
        times=dict.fromkeys("FIW", wall) | {"R": 0.01, "U": 0.01},
        ops=dict.fromkeys("FIW", (8, 8 * own)),
    )


def desk_in_use() -> TaskScheduler:
    scheduler = TaskScheduler(SHAPE, "staggered")
    for worker in SHAPE.workers():
        scheduler.learn(told(worker, 1.0))
    assert scheduler.wants_new_schedule(FIRST_LOOK, FIRST_LOOK) is not None
    scheduler.answer(question())
    return scheduler


def question(epoch: int = 1) -> ComputePlan:
    return ComputePlan(epoch=epoch, broken={}, dead=frozenset(), because="a test")


def runs(scheduler: TaskScheduler, slow: dict[Worker, float]) -> dict[Worker, int]:
    plan = scheduler.answer(question(), slow)
    return {w: sum(op.kind is Kind.F for op in ops) for w, ops in plan.steady.items()}


def test_waiting_for_a_core_wants_no_new_schedule() -> None:
    scheduler = desk_in_use()
    for step in range(4, 200):
        scheduler.learn(told(Worker(0, 0), 1.0, wall=3.0))
        assert scheduler.wants_new_schedule(step, step) is None


def test_one_slow_worker_is_not_a_matter_of_stages() -> None:
    scheduler = desk_in_use()
    for step in range(4, 200):
        scheduler.learn(told(Worker(0, 0), 3.0))
        assert scheduler.wants_new_schedule(step, step) is None


def test_a_stage_with_another_share_of_the_work_wants_one_new_schedule() -> None:
    scheduler = desk_in_use()
    wanted = []
    for step in range(4, 200):
        for replica in range(2):
            scheduler.learn(told(Worker(replica, 1), 2.0))
        if scheduler.wants_new_schedule(step, step) is not None:
            scheduler.answer(question())
            wanted.append(step)
    assert len(wanted) == 1
    assert wanted[0] >= LEAST_STEPS


def test_a_slow_worker_gets_less_and_its_peer_more_and_speed_gives_it_back() -> None:
    scheduler = desk_in_use()
    home = runs(scheduler, {})
    slow = runs(scheduler, {Worker(1, 1): 2.0})
    assert set(home.values()) == {8}
    assert slow[Worker(1, 1)] == 5
    assert slow[Worker(0, 1)] == 11
    assert slow[Worker(0, 0)] == slow[Worker(1, 0)] == 8
    assert runs(scheduler, {}) == home


def test_a_slow_worker_does_not_count_twice_once_its_own_times_are_known() -> None:
    scheduler = desk_in_use()
    scheduler.answer(question(), {Worker(1, 1): 2.0})
    scheduler.learn(told(Worker(1, 1), 2.0))
    assert runs(scheduler, {Worker(1, 1): 2.0})[Worker(1, 1)] == 5


def test_where_a_whole_stage_is_slow_its_work_stays_at_home() -> None:
    scheduler = desk_in_use()
    slow = {Worker(0, 1): 2.0, Worker(1, 1): 2.0}
    for worker in slow:
        scheduler.learn(told(worker, 2.0))
    assert set(runs(scheduler, slow).values()) == {8}


def test_a_very_slow_worker_keeps_no_microbatch_that_holds_the_pipeline_up() -> None:
    """Six times as long for one microbatch fits into the busiest time, but not into the pipeline's."""
    scheduler = TaskScheduler(Shape(4, 2, 4), "staggered")
    for worker in Shape(4, 2, 4).workers():
        scheduler.learn(told(worker, 1.0))
    assert runs(scheduler, {Worker(1, 0): 6.0})[Worker(1, 0)] == 0


def test_a_stage_whose_ops_took_no_time_when_it_was_planned_ends_nothing() -> None:
    """A real storm, seed 13: a share of nothing was divided by, and the coordinator ended."""
    scheduler = TaskScheduler(SHAPE, "staggered")
    for worker in SHAPE.workers():
        scheduler.learn(told(worker, 0.0 if worker.stage == 0 else 1.0))
    scheduler.answer(question())
    for worker in SHAPE.workers():
        scheduler.learn(told(worker, 1.0))
    said = scheduler.wants_new_schedule(LEAST_STEPS, LEAST_STEPS)
    assert said is None or "share of the work" in said


LONG = Shape(1, 4, 4)
FAST, SLOW = 1_000_000_000, 1_000_000  # bytes per second of a link


def across(worker: Worker, rate: int, boundary: float = 1e6) -> TimesReported:
    """A report of a worker whose neighbours are on other machines: 8 boundary tensors each way."""
    peers = [stage for stage in (worker.stage - 1, worker.stage + 1) if 0 <= stage < LONG.stages]
    sent = {f"0:{stage}": (int(8 * boundary), 8 * boundary / rate) for stage in peers}
    report = told(worker, 1.0)
    return replace(report, times={**report.times, "boundary": boundary}, sent=sent)


def in_use(rate: int) -> TaskScheduler:
    scheduler = TaskScheduler(LONG, "staggered")
    for worker in LONG.workers():
        scheduler.learn(across(worker, rate))
    scheduler.answer(question())
    return scheduler


def test_a_live_schedule_knows_how_long_tensors_take_to_the_next_stage() -> None:
    """Every live plan had hop 0: a slow line cost nothing in it."""
    fast, slow = in_use(FAST).in_force(), in_use(SLOW).in_force()
    assert fast is not None
    assert slow is not None
    assert fast[1].hop == pytest.approx(1e-3)
    assert slow[1].hop == pytest.approx(1.0)
    assert slow[0].schedule.ops != fast[0].schedule.ops  # work is put where a transfer is waited for
    assert slow[0].value > fast[0].value


def test_where_no_worker_sends_to_another_machine_there_is_no_hop() -> None:
    assert desk_in_use().profile.hop() == 0.0


def test_a_line_that_becomes_slow_wants_one_new_schedule() -> None:
    scheduler = in_use(FAST)
    wanted = []
    for step in range(4, 100):
        for worker in LONG.workers():
            scheduler.learn(across(worker, SLOW))
        if (because := scheduler.wants_new_schedule(step, step)) is not None:
            wanted.append(because)
            scheduler.answer(question())
    assert len(wanted) == 1
    assert "to the next stage" in wanted[0]


def eager(worker: Worker, share: float) -> TimesReported:
    report = told(worker, 1.0)
    return replace(report, times={**report.times, "eager": share})


def test_what_is_planned_is_what_runs_near_the_clip_and_away_from_it() -> None:
    """Updates that wait for the norm of all stages were planned as if they did not."""
    scheduler = desk_in_use()
    assert scheduler.mode == "staggered"
    modes, share = [], 0.0
    for step in range(4, 120):
        share = 0.0 if step < 60 else 1.0  # norms above the clip first, below it later
        for worker in SHAPE.workers():
            scheduler.learn(eager(worker, share))
        if (because := scheduler.wants_new_schedule(step, step)) is not None:
            scheduler.answer(question())
            modes.append((scheduler.mode, because))
    assert [mode for mode, _ in modes] == ["decoupled", "staggered"]
    assert all("did not wait for the norm of all stages" in because for _, because in modes)
    assert scheduler.profile.eager() == pytest.approx(1.0, abs=0.01)


def test_updates_that_are_eager_every_other_time_change_no_schedule() -> None:
    scheduler = desk_in_use()
    for step in range(4, 200):
        for worker in SHAPE.workers():
            scheduler.learn(eager(worker, step % 2))
        assert scheduler.wants_new_schedule(step, step) is None


def test_a_job_that_may_not_stagger_never_does() -> None:
    scheduler = TaskScheduler(SHAPE, "decoupled")
    for worker in SHAPE.workers():
        scheduler.learn(eager(worker, 1.0))
    scheduler.answer(question())
    assert scheduler.mode == "decoupled"
