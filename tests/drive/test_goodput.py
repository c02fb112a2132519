"""Where the time of a task went: every second is in one place, and the parts add up, in storms too."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.cluster.task import CheckpointProgress, WrittenParts
from everstep.drive.goodput import STEPS, Accounts, Cause, TaskAccount, account_from
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from tests.storms import draw_storm, run_storm
from tests.storms.cluster_world import ClusterWorld
from tests.support.fake_cluster import FakeCluster


def parts(account: TaskAccount) -> float:
    known = sum(amount for what, amount in account.totals.items() if what != STEPS)
    return known + account.undivided_s


def account_that_trains(steps: int = 10, each: float = 1.0) -> TaskAccount:
    account = TaskAccount(since=0.0, until=0.0, condition=None)
    for step in range(1, steps + 1):
        account.advance(step * each)
        account.recorded(step, full=True)
    return account


def test_without_faults_all_the_time_is_productive() -> None:
    account = account_that_trains()
    assert (account.productive_s, account.ratio, account.totals[STEPS]) == (10.0, 1.0, 10.0)


def test_a_fault_inside_a_step_costs_what_the_step_took_longer() -> None:
    account = account_that_trains()
    account.advance(10.5)
    account.condition, account.disturbed = Cause.FAULT, True
    account.advance(10.8)
    account.condition = None
    account.advance(11.6)  # 0.5 before and 0.8 after: 0.3 more than usual
    account.recorded(11, full=True)
    for step in (12, 13):
        account.advance(0.6 + step)
        account.recorded(step, full=True)
    lost = account.lost()
    assert lost["fault"] == pytest.approx(0.3 + 0.3)
    assert account.productive_s == pytest.approx(13.0)


def test_a_step_that_is_done_again_counts_once() -> None:
    account = account_that_trains()
    for number, step in enumerate((9, 10, 11), 11):
        account.advance(float(number))
        account.recorded(step, full=True)
    assert account.lost()["fault"] == 2.0
    assert account.productive_s == 11.0


def test_steps_with_fewer_workers_are_reduced_and_not_the_new_normal() -> None:
    account = account_that_trains()
    for step in range(11, 60):
        account.advance(10 + 2.0 * (step - 10))
        account.recorded(step, full=False)
    assert account.usual_s == 1.0
    assert account.lost()["reduced"] + account.held == pytest.approx(49.0)


def test_what_a_step_takes_longer_while_a_checkpoint_is_written_is_the_saves() -> None:
    account = account_that_trains()
    account.saving = True  # since step 10
    account.advance(11.5)
    account.recorded(11, full=True)
    account.advance(12.8)
    account.recorded(12, full=True)  # the save is over, and this one is slow for another reason
    account.advance(13.8)
    account.recorded(13, full=True)
    assert account.lost()["save"] == pytest.approx(0.5)
    assert account.lost()["slow"] == pytest.approx(0.3)
    assert account.productive_s == pytest.approx(13.0)


def test_a_checkpoint_is_being_written_from_its_step_to_its_commit() -> None:
    progress = CheckpointProgress()
    assert not progress.is_saving(9, 10)
    assert progress.is_saving(10, 10)
    assert progress.is_saving(13, 10), "a slow disk takes several steps"
    progress.newest = 10
    assert not progress.is_saving(13, 10)
    progress.parts[15] = WrittenParts(0)
    assert progress.is_saving(15, 10), "at the end of a shape"
    progress.parts.clear()
    progress.broken[20] = 0
    assert not progress.is_saving(21, 10), "it failed"
    assert not CheckpointProgress().is_saving(10, 0), "it is not said how often"


def test_steps_that_come_at_once_after_a_coordinator_was_away_were_productive() -> None:
    account = account_that_trains()
    account.advance(30.0)  # nothing was heard for 20 s, then all twenty steps
    for step in range(11, 31):
        account.recorded(step, full=True)
    assert account.productive_s == pytest.approx(30.0)
    assert account.ratio == pytest.approx(1.0)
    assert min(account.lost().values()) >= 0


def test_an_interval_is_divided_at_the_hour_and_old_hours_go() -> None:
    account = TaskAccount(since=3000.0, until=3000.0, condition=Cause.WAIT)
    account.advance(3600.0 * 3 + 600)
    assert {hour: amounts["wait"] for hour, amounts in account.hours.items()} == {
        0: 600.0,
        1: 3600.0,
        2: 3600.0,
        3: 600.0,
    }
    assert account.between(3600.0 * 2, 3600.0 * 4) == {"wait": 4200.0}


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5000),
            st.sampled_from([None, None, None, *Cause]),
            st.integers(0, 3),
            st.booleans(),
            st.booleans(),
        )
    )
)
def test_whatever_happens_the_parts_add_up_and_counters_only_rise(history: list[Any]) -> None:
    account, at, before = TaskAccount(since=7.0, until=7.0), 7.0, dict[str, float]()
    for seconds, condition, back, full, saving in history:
        at += seconds
        account.advance(at)
        account.recorded(max(1, account.last + 1 - back), full=full, saving=saving)
        account.condition = condition
        account = account_from(json.loads(json.dumps(account.document())))
        assert math.isclose(parts(account), account.wall_s, rel_tol=1e-9, abs_tol=1e-6)
        assert all(account.totals.get(what, 0.0) >= amount - 1e-9 for what, amount in before.items())
        before = dict(account.totals)
    account.ended()
    assert account.undivided_s == 0
    assert math.isclose(parts(account), account.wall_s, rel_tol=1e-9, abs_tol=1e-6)


def test_a_death_on_a_cluster_is_accounted() -> None:
    accounts = Accounts()

    class Counted(FakeCluster):
        def handled(self, one: Any) -> None:
            super().handled(one)
            follow(accounts, one, self.coordinator)

    cluster = Counted(nodes={"a": 2, "b": 2})
    cluster.submit(steps=12)
    for _ in range(8):
        cluster.seal()
    cluster.exits(Worker(0, 0), "SIGKILL")
    for _ in range(4):
        cluster.seal()
    account = accounts.tasks["t"]
    assert account.totals[STEPS] == 12
    assert account.lost()["fault"] > 0
    assert account.lost()["start"] > 0
    assert parts(account) == pytest.approx(account.wall_s)


def follow(accounts: Accounts, one: Any, coordinator: Any) -> None:
    """As `ClusterRecord` does."""
    rows = [action for action in one.actions if isinstance(action, msg.RecordRow)]
    steps = [(row.task, row.record.step) for row in rows if row.record.trains]
    accounts.handled(coordinator, steps, one.at)


@pytest.mark.parametrize("seed", range(6))
def test_in_a_storm_the_parts_add_up_after_every_event(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are the same as if every event looked at every task."""
    accounts, everything = Accounts(), Accounts()
    real, last = ClusterWorld.handled, [0]

    def handled(world: ClusterWorld, one: Any) -> None:
        nonlocal accounts, everything
        real(world, one)
        if one.number <= last[0]:  # another coordinator leads, and reads the journal
            accounts, everything = Accounts(), Accounts()
        last[0] = one.number
        follow(accounts, one, world.coordinator)
        everything._seen.clear()
        follow(everything, one, world.coordinator)
        assert accounts.tasks == everything.tasks
        for account in accounts.tasks.values():
            assert math.isclose(parts(account), account.wall_s, rel_tol=1e-9, abs_tol=1e-9)
            assert account.until == pytest.approx(one.at) or account.state in ("finished", "failed")

    monkeypatch.setattr(ClusterWorld, "handled", handled)
    report = run_storm(draw_storm(seed, "cluster"), cluster=True)
    assert report.violation is None
    (account,) = accounts.tasks.values()
    assert account.undivided_s == 0
    assert account.productive_s > 0


def test_of_tasks_for_which_an_event_changes_nothing_the_time_is_counted_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every event went through the accounts of all tasks: with 300 of them, some milliseconds each."""
    accounts, real, advanced, last = Accounts(), TaskAccount.advance, list[float](), [0.0]

    def advance(account: TaskAccount, at: float) -> None:
        advanced.append(at)
        real(account, at)

    class Counted(FakeCluster):
        def handled(self, one: Any) -> None:
            super().handled(one)
            advanced.clear()
            follow(accounts, one, self.coordinator)
            assert len(advanced) <= 2
            last[0] = one.at

    monkeypatch.setattr(TaskAccount, "advance", advance)
    cluster = Counted(nodes={f"n{number}": 4 for number in range(12)})
    for number in range(12):
        cluster.submit(f"t{number}", steps=12)
    for _ in range(3):
        cluster.seal("t3")
    assert {account.until for account in accounts.tasks.values()} == set(last)
    assert all(parts(one) == pytest.approx(one.wall_s) for one in accounts.tasks.values())
