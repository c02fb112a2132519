"""Detectors, told as claims."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from everstep.core.faults.detector import (
    DetectorLimits,
    Glance,
    Heartbeats,
    Hung,
    OverdueReports,
    ProgressWatch,
    Stalled,
    locate,
)
from everstep.protocol.messages import OpOverdue, WorkerMoved
from everstep.protocol.ops import Worker

W, V, X = Worker(0, 0), Worker(0, 1), Worker(1, 0)
LIMITS = DetectorLimits()


def glance(
    moment: int, *, busy: bool = True, doing: str = "0F0.0", age_s: float = 0.0, step: int = 1
) -> Glance:
    return Glance(moment=moment, step=step, busy=busy, doing=doing, age_s=age_s)


class Watch:
    """One worker looked at again and again."""

    def __init__(self) -> None:
        self.progress = ProgressWatch(LIMITS)
        self.progress.expects("t", W, {"F": 0.1})
        self.now = 0.0

    def look(
        self, seen: Glance, *, stopped: bool = False, unanswered_s: float = 0.0
    ) -> OpOverdue | WorkerMoved | None:
        self.now += 0.05
        return self.progress.look("t", W, 1, seen, stopped=stopped, now=self.now, unanswered_s=unanswered_s)


def test_a_node_is_silent_once_and_heard_again_once() -> None:
    hearts = Heartbeats(patience_s=1.0)
    hearts.heard("a", 0.0)
    assert hearts.fell_silent(0.9) == []
    assert hearts.fell_silent(1.1) == [("a", 1.1)]
    assert hearts.fell_silent(1.2) == []
    assert hearts.heard("a", 1.3)
    assert not hearts.heard("a", 1.4)


def test_a_listener_that_was_away_blames_nobody() -> None:
    hearts = Heartbeats(patience_s=1.0)
    hearts.heard("a", 0.0)
    hearts.excuse(5.0)
    assert hearts.fell_silent(5.5) == []
    assert hearts.fell_silent(6.1) != []


def test_a_worker_whose_beacon_moves_is_never_reported() -> None:
    watch = Watch()
    assert all(watch.look(glance(moment, age_s=0.01)) is None for moment in range(100))


def test_an_op_at_four_times_its_usual_time_is_overdue_and_told_again_at_twice_that() -> None:
    watch = Watch()
    watch.look(glance(1))
    told = [watch.look(glance(1, age_s=age / 20)) for age in range(1, 41)]
    ages = [report.elapsed_s for report in told if isinstance(report, OpOverdue)]
    assert ages == [0.45, 0.9, 1.8]


def test_a_worker_that_moves_again_says_so_once() -> None:
    watch = Watch()
    watch.look(glance(1))
    assert isinstance(watch.look(glance(1, age_s=0.6)), OpOverdue)
    assert isinstance(watch.look(glance(2)), WorkerMoved)
    assert watch.look(glance(3)) is None


def test_a_process_is_reported_as_stopped_once_it_was_so_at_every_look_for_a_second() -> None:
    """One look was enough: `kill -STOP` to look at a worker cost it."""
    watch = Watch()
    watch.progress.expects("t", W, {"F": 10.0})
    looks = [watch.look(glance(1, age_s=0.05 * number), stopped=number > 9) for number in range(40)]
    said = [number for number, report in enumerate(looks) if report is not None]
    assert said == [10 + 20], "once"
    report = looks[30]
    assert isinstance(report, OpOverdue)
    assert report.stopped


def test_a_process_that_is_stopped_for_a_moment_in_a_long_op_is_not_called_stopped() -> None:
    watch = Watch()
    watch.progress.expects("t", W, {"F": 10.0})
    for number in range(400):
        assert watch.look(glance(1, age_s=0.05 * number), stopped=number % 16 < 12) is None


def test_what_was_between_two_looks_that_are_far_apart_does_not_count_as_stopped() -> None:
    """The agent itself did not run."""
    watch = Watch()
    watch.progress.expects("t", W, {"F": 10.0})
    assert watch.look(glance(1, age_s=0.0), stopped=True) is None
    watch.now += 30.0
    assert watch.look(glance(1, age_s=30.0), stopped=True) is None


def test_a_worker_that_wrote_a_moment_ago_can_be_passed_over_but_not_one_that_stands_still() -> None:
    watch = Watch()
    quiet_s = watch.progress.passes_over(glance(1, age_s=0.02))
    assert 0 < quiet_s < min(LIMITS.overdue_floor_s, LIMITS.wait_floor_s, LIMITS.look_gap_s)
    assert watch.progress.passes_over(glance(1, age_s=quiet_s)) == 0.0
    strict = ProgressWatch(DetectorLimits(overdue_floor_s=0.01))
    assert strict.passes_over(glance(1)) == 0.01


def test_a_worker_told_to_wait_is_left_alone() -> None:
    watch = Watch()
    assert watch.look(glance(1, busy=False, doing="Paused", age_s=1e6)) is None


def test_waiting_is_reported_after_a_usual_step() -> None:
    watch = Watch()
    for step in range(1, 6):
        for tick in range(10):
            watch.look(glance(step * 10 + tick, step=step))
    assert watch.look(glance(59, busy=False, doing="A", age_s=0.4, step=5)) is None
    assert isinstance(watch.look(glance(59, busy=False, doing="A", age_s=0.6, step=5)), OpOverdue)


@pytest.mark.parametrize("busy", [True, False])
def test_what_a_frozen_agent_did_not_see_is_held_against_no_worker(busy: bool) -> None:
    """A machine without a free core stood still for 7 s: its workers were ended as hung and as deaf."""
    watch = Watch()
    for step in range(1, 6):
        for tick in range(10):
            watch.look(glance(step * 10 + tick, step=step))
    watch.look(glance(59, busy=busy, doing="1F0.0", age_s=0.05, step=5))
    watch.now += 7.0
    for look in range(2, 6):
        seen = glance(59, busy=busy, doing="1F0.0", age_s=7.0 + look * 0.05, step=5)
        said = watch.look(seen, unanswered_s=7.0 + look * 0.05)
        assert not isinstance(said, OpOverdue) or (said.elapsed_s < 1.0 and not said.unanswered_s)


def test_a_worker_that_hangs_on_a_busy_machine_is_found_by_the_time_that_was_seen() -> None:
    """Looks come every 1.5 s, and of each pause half a second counts."""
    watch = Watch()
    watch.look(glance(1))
    found = []
    for look in range(1, 11):
        watch.now += 1.45
        said = watch.look(glance(1, age_s=look * 1.5))
        found += [said.elapsed_s] if isinstance(said, OpOverdue) else []
    assert (found[0], found[-1]) == pytest.approx((0.5, 5.0))


def overdue(worker: Worker, *, busy: bool, elapsed_s: float, stopped: bool = False) -> OpOverdue:
    return OpOverdue(
        task="t",
        worker=worker,
        incarnation=1,
        doing="0F0.0",
        busy=busy,
        stopped=stopped,
        elapsed_s=elapsed_s,
        expected_s=0.1,
        step=3,
    )


def test_what_was_told_while_nobody_listened_is_told_again() -> None:
    """Reports of progress are not kept while the line is cut: the next one would come at twice the time."""
    watch = Watch()
    stands = [watch.look(glance(1, age_s=tenths / 10)) for tenths in range(1, 100)]
    assert [one.elapsed_s for one in stands if isinstance(one, OpOverdue)] == [0.5, 1.0, 2.0, 4.0, 8.0]
    watch.progress.tell_again()
    assert isinstance(watch.look(glance(1, age_s=10.0)), OpOverdue)
    assert watch.look(glance(1, age_s=10.1)) is None


def located(reports: dict[Worker, OpOverdue], members: tuple[Worker, ...]) -> Hung | Stalled | None:
    known = OverdueReports(dict(reports))
    return locate(known, is_member=members.__contains__, num_members=len(members), limits=LIMITS)


@pytest.mark.parametrize("seed", range(60))
def test_reports_that_came_one_by_one_add_up_to_the_same_as_all_at_once(seed: int) -> None:
    """What is counted as they come and go says the same as looking at all of them."""
    chance = random.Random(seed)
    workers = [Worker(k, s) for k in range(3) for s in range(2)]
    members = tuple(workers[: chance.randint(1, 6)])
    one_by_one = OverdueReports()
    for _ in range(80):
        worker = chance.choice(workers)
        match chance.randrange(8):
            case 0:
                one_by_one.drop(worker)
            case 1 if chance.random() < 0.2:
                one_by_one.clear()
            case _:
                report = overdue(
                    worker,
                    busy=chance.random() < 0.1,
                    elapsed_s=chance.choice([0.2, 1.0, 3.0, 4.0, 70.0]) + chance.random() / 8,
                    stopped=chance.random() < 0.03,
                )
                deaf_s = 6 + chance.random() if chance.random() < 0.02 else 0.0
                one_by_one.put(replace(report, unanswered_s=deaf_s), 0.0)
        found = locate(one_by_one, is_member=members.__contains__, num_members=len(members), limits=LIMITS)
        assert found == located(one_by_one.reports, members)
        theirs = [report for w, report in one_by_one.items() if w in members]
        calm = not any(r.busy or r.stopped or r.unanswered_s for r in one_by_one.values())
        if calm and theirs:
            everyone = len(theirs) == len(members) and min(r.elapsed_s for r in theirs) >= 3.0
            assert isinstance(found, Stalled) == everyone


def test_a_hang_needs_somebody_who_waits() -> None:
    alone = {W: overdue(W, busy=True, elapsed_s=5.0)}
    assert located(alone, (W, V)) is None
    both = alone | {V: overdue(V, busy=False, elapsed_s=1.0)}
    found = located(both, (W, V))
    assert isinstance(found, Hung)
    assert found.worker == W
    assert found.waiting == (V,)


def test_a_slow_op_is_no_hang() -> None:
    both = {W: overdue(W, busy=True, elapsed_s=0.9), V: overdue(V, busy=False, elapsed_s=1.0)}
    assert located(both, (W, V)) is None


def test_a_process_that_stood_in_line_for_a_cpu_is_starved_not_hung() -> None:
    starved = replace(overdue(W, busy=True, elapsed_s=5.0), active_s=4.9)
    both = {W: starved, V: overdue(V, busy=False, elapsed_s=5.0)}
    assert located(both, (W, V)) is None
    for_long = {W: replace(starved, elapsed_s=20.0, active_s=19.0), V: overdue(V, busy=False, elapsed_s=20.0)}
    assert isinstance(located(for_long, (W, V)), Hung)


def test_of_a_stopped_and_a_slow_worker_the_stopped_one_is_it() -> None:
    both = {W: overdue(W, busy=True, elapsed_s=9.0), X: overdue(X, busy=False, elapsed_s=0.2, stopped=True)}
    found = located(both, (W, V, X))
    assert isinstance(found, Hung)
    assert found.worker == X


def test_if_everybody_waits_nobody_is_it() -> None:
    all_wait = {w: overdue(w, busy=False, elapsed_s=4.0) for w in (W, V, X)}
    assert isinstance(located(all_wait, (W, V, X)), Stalled)
    assert located(all_wait, (W, V, X, Worker(3, 3))) is None


def test_a_worker_that_joins_does_not_hide_that_all_members_wait() -> None:
    """It waits for a state, for as long as that takes, and no member waits for it."""
    all_wait = {w: overdue(w, busy=False, elapsed_s=4.0) for w in (W, V)}
    assert isinstance(located(all_wait, (W, V)), Stalled)
    with_joiner = all_wait | {X: overdue(X, busy=False, elapsed_s=0.3)}
    assert isinstance(located(with_joiner, (W, V)), Stalled)


def test_a_worker_that_only_waits_and_takes_no_order_is_hung() -> None:
    waits = {w: overdue(w, busy=False, elapsed_s=1.0) for w in (W, V)}
    assert located(waits, (W, V)) is None
    found = located({**waits, V: replace(waits[V], unanswered_s=6.0)}, (W, V))
    assert isinstance(found, Hung)
    assert found.worker == V
    assert "has not taken an order for 6.00 s" in found.because


def test_a_first_op_has_the_time_of_a_first_op_and_no_multiple_of_it() -> None:
    """120 s were taken for its usual time: a hang in it was called after 24 minutes."""
    first = replace(overdue(W, busy=True, elapsed_s=110.0), expected_s=LIMITS.first_op_s)
    waits = overdue(V, busy=False, elapsed_s=110.0)
    assert located({W: first, V: waits}, (W, V)) is None
    assert isinstance(located({W: replace(first, elapsed_s=121.0), V: waits}, (W, V)), Hung)


def test_an_op_that_spins_for_three_steps_while_others_wait_is_a_hang() -> None:
    """It was called after 120 times the op's usual time."""
    spins = replace(overdue(W, busy=True, elapsed_s=20.0), expected_s=1.0, active_s=20.0)
    waits = replace(overdue(V, busy=False, elapsed_s=20.0), expected_s=8.0)
    assert located({W: spins, V: waits}, (W, V)) is None
    assert isinstance(located({W: replace(spins, elapsed_s=25.0, active_s=25.0), V: waits}, (W, V)), Hung)
    assert located({W: replace(spins, elapsed_s=70.0, active_s=70.0)}, (W, V)) is None, "nobody waits for it"
