"""Detectors, told as claims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.core.faults.detector import (
    DetectorLimits,
    Glance,
    Heartbeats,
    Hung,
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


def test_a_stopped_process_is_reported_at_the_second_look_without_a_change() -> None:
    watch = Watch()
    watch.look(glance(1))
    assert watch.look(glance(1, age_s=0.05), stopped=True) is None
    report = watch.look(glance(1, age_s=0.1), stopped=True)
    assert isinstance(report, OpOverdue)
    assert report.stopped


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


def test_a_hang_needs_somebody_who_waits() -> None:
    alone = {W: overdue(W, busy=True, elapsed_s=5.0)}
    assert locate(alone, members=(W, V), limits=LIMITS) is None
    both = alone | {V: overdue(V, busy=False, elapsed_s=1.0)}
    found = locate(both, members=(W, V), limits=LIMITS)
    assert isinstance(found, Hung)
    assert found.worker == W
    assert found.waiting == (V,)


def test_a_slow_op_is_no_hang() -> None:
    both = {W: overdue(W, busy=True, elapsed_s=0.9), V: overdue(V, busy=False, elapsed_s=1.0)}
    assert locate(both, members=(W, V), limits=LIMITS) is None


def test_a_process_that_stood_in_line_for_a_cpu_is_starved_not_hung() -> None:
    starved = replace(overdue(W, busy=True, elapsed_s=5.0), active_s=4.9)
    both = {W: starved, V: overdue(V, busy=False, elapsed_s=5.0)}
    assert locate(both, members=(W, V), limits=LIMITS) is None
    for_long = {W: replace(starved, elapsed_s=20.0, active_s=19.0), V: overdue(V, busy=False, elapsed_s=20.0)}
    assert isinstance(locate(for_long, members=(W, V), limits=LIMITS), Hung)


def test_of_a_stopped_and_a_slow_worker_the_stopped_one_is_it() -> None:
    both = {W: overdue(W, busy=True, elapsed_s=9.0), X: overdue(X, busy=False, elapsed_s=0.2, stopped=True)}
    found = locate(both, members=(W, V, X), limits=LIMITS)
    assert isinstance(found, Hung)
    assert found.worker == X


def test_if_everybody_waits_nobody_is_it() -> None:
    all_wait = {w: overdue(w, busy=False, elapsed_s=4.0) for w in (W, V, X)}
    assert isinstance(locate(all_wait, members=(W, V, X), limits=LIMITS), Stalled)
    assert locate(all_wait, members=(W, V, X, Worker(3, 3)), limits=LIMITS) is None


def test_a_worker_that_joins_does_not_hide_that_all_members_wait() -> None:
    """It waits for a state, for as long as that takes, and no member waits for it."""
    all_wait = {w: overdue(w, busy=False, elapsed_s=4.0) for w in (W, V)}
    assert isinstance(locate(all_wait, members=(W, V), limits=LIMITS), Stalled)
    with_joiner = all_wait | {X: overdue(X, busy=False, elapsed_s=0.3)}
    assert isinstance(locate(with_joiner, members=(W, V), limits=LIMITS), Stalled)


def test_a_worker_that_only_waits_and_takes_no_order_is_hung() -> None:
    waits = {w: overdue(w, busy=False, elapsed_s=1.0) for w in (W, V)}
    assert locate(waits, members=(W, V), limits=LIMITS) is None
    found = locate({**waits, V: replace(waits[V], unanswered_s=6.0)}, members=(W, V), limits=LIMITS)
    assert isinstance(found, Hung)
    assert found.worker == V
    assert "has not taken an order for 6.00 s" in found.because
