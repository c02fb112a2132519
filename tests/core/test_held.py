"""A death in a held script, as a person would tell it; storms try the rest."""

from __future__ import annotations

import pytest

from everstep.core.held.ledger import AnswerError, RankBook
from everstep.core.held.machine import (
    EndRank,
    FallBack,
    Healed,
    HeldRules,
    HeldRun,
    RankCondemned,
    RankDied,
    RankFinished,
    StartRank,
    TellRank,
    TimePassed,
)
from everstep.protocol.held import (
    Bye,
    GroupAt,
    Hold,
    Position,
    RankEnded,
    RankOpened,
    RankParked,
    RankReady,
    RankRebuilt,
    RankRefused,
    RankUnheld,
    Rebuild,
    Record,
    Resume,
    Rung,
    before,
    ranks_of,
    runs_of,
)

KILLED = "rank 1 killed by SIGKILL"


def record(interval: int, updates: int, refusal: str = "") -> Record:
    return Record(interval=interval, step=interval, updates=(updates,), refusal=refusal)


def opened(world: int = 3, unit: int = 1, rules: HeldRules | None = None) -> HeldRun:
    run = HeldRun(world=world, unit=unit, rules=rules)
    for rank in range(world):
        run.handle(RankOpened(rank=rank, address=("here", rank)), 0.0)
    return run


def died(rank: int = 1, *records: Record) -> RankDied:
    return RankDied(rank=rank, because=KILLED, records=records or (record(3, 3), record(4, 4)))


def parked(rank: int, epoch: int, interval: int, updates: int, done: Position, world: int = 3) -> RankParked:
    since = interval - (done == before(interval))  # the first of an interval that all finish forgets the last
    group = GroupAt(members=runs_of(range(world)), done=done, since=since)
    gives = (interval - 1, interval)
    return RankParked(
        rank=rank, epoch=epoch, interval=interval, updates=(updates,), groups={"0": group}, gives=gives
    )


def rungs(actions: list) -> list[Rung]:
    return [action.reason.rung for action in actions if isinstance(action, FallBack)]


def test_a_death_in_backward_is_held() -> None:
    run = opened()
    first = run.handle(died(), 10.0)
    assert [a.rank for a in first if isinstance(a, TellRank) and isinstance(a.order, Hold)] == [0, 2]
    (start,) = [a for a in first if isinstance(a, StartRank)]
    assert (start.rank, dict(start.peers)) == (1, {0: ("here", 0), 2: ("here", 2)})

    assert run.handle(parked(0, 1, 4, 4, Position(4, 2)), 10.1) == []
    assert run.handle(parked(2, 1, 4, 4, Position(4, 1)), 10.2) == []
    run.handle(RankOpened(rank=1, address=("here", 1)), 10.3)
    plans = {
        a.rank: a.order.plan for a in run.handle(RankReady(rank=1), 11.0) if isinstance(a.order, Rebuild)
    }
    assert plans[0].asks == ()
    assert [(ask.rank, ask.after) for ask in plans[2].asks] == [(0, Position(4, 1))]  # 0 has come further
    assert [(ask.rank, ask.after) for ask in plans[1].asks] == [(0, before(4))]
    assert (plans[1].interval, plans[1].donor) == (4, 0)

    for rank in (0, 1):
        assert run.handle(RankRebuilt(rank=rank, epoch=1), 11.4) == []
    last = run.handle(RankRebuilt(rank=2, epoch=1), 11.5)
    assert [a.rank for a in last if isinstance(a, TellRank) and isinstance(a.order, Resume)] == [0, 1, 2]
    (healed,) = [a for a in last if isinstance(a, Healed)]
    assert (healed.replaced, healed.held_s, healed.again) == ((1,), 1.5, 4)
    run.validate()


def test_who_has_stepped_gives_its_state_only_if_nobody_else_can() -> None:
    run = opened()
    run.handle(died(), 0.0)
    run.handle(parked(0, 1, 5, 5, before(5)), 0.1)
    run.handle(parked(2, 1, 4, 4, Position(4, 3)), 0.1)
    orders = [a.order for a in run.handle(RankReady(rank=1), 1.0) if isinstance(a, TellRank) and a.rank == 1]
    assert [(order.plan.interval, order.plan.donor) for order in orders] == [(4, 2)]


def test_a_unit_ends_together() -> None:
    run = opened(world=4, unit=2)
    actions = run.handle(died(), 0.0)
    assert [a.rank for a in actions if isinstance(a, EndRank)] == [0]
    assert not [a for a in actions if isinstance(a, StartRank)]
    started = run.handle(died(0), 0.1)
    assert [a.rank for a in started if isinstance(a, StartRank)] == [0, 1]
    assert run.epoch == 1


def test_a_death_during_the_heal_begins_it_again() -> None:
    run = opened()
    run.handle(died(), 0.0)
    run.handle(parked(0, 1, 4, 4, Position(4, 2)), 0.1)
    actions = run.handle(died(2), 0.2)
    assert run.epoch == 2
    assert [a.rank for a in actions if isinstance(a, TellRank)] == [0, 1]  # the newcomer hears it as well
    assert run.handle(parked(0, 1, 4, 4, Position(4, 2)), 0.3) == []  # of the epoch before
    run.validate()


def test_what_cannot_be_held_falls_back_with_its_reason() -> None:
    assert rungs(opened(world=1).handle(died(0), 0.0)) == [Rung.NO_REPLICA]
    early = RankDied(rank=1, because=KILLED)
    assert rungs(opened().handle(early, 0.0)) == [Rung.PRELUDE]
    refused = opened()
    assert refused.handle(RankRefused(rank=2, because="it uses send"), 0.0) == []
    assert rungs(refused.handle(died(), 1.0)) == [Rung.REFUSED]
    finished = opened()
    finished.handle(RankFinished(rank=0), 0.0)
    assert rungs(finished.handle(died(), 1.0)) == [Rung.FINISHED]
    unheld = opened()
    unheld.handle(died(), 0.0)
    assert rungs(unheld.handle(RankUnheld(rank=1, epoch=1, because="another shape"), 0.1)) == [Rung.UNHELD]
    carries = opened(world=2)
    carries.handle(died(1, record(4, 4, "gradients are kept across snapshots")), 0.0)
    carries.handle(parked(0, 1, 4, 4, Position(4, 2), world=2), 0.1)
    assert rungs(carries.handle(RankReady(rank=1), 0.2)) == [Rung.REFUSED]


def test_deaths_without_a_step_between_are_counted() -> None:
    run = opened(world=2, rules=HeldRules(most_strikes=2))
    for _ in range(2):
        assert rungs(run.handle(died(), 0.0)) == []
    assert rungs(run.handle(died(), 0.0)) == [Rung.REPLACEMENTS]


def test_a_rank_that_does_not_park_is_replaced_too() -> None:
    run = opened(rules=HeldRules(park_s=5.0))
    run.handle(died(), 0.0)
    run.handle(parked(0, 1, 4, 4, Position(4, 2)), 0.1)
    assert run.due_at() == 5.0
    actions = run.handle(TimePassed(), 5.0)
    assert [a.rank for a in actions if isinstance(a, EndRank)] == [2]
    assert run.epoch == 2


def test_every_phase_of_a_heal_has_its_time() -> None:
    late = opened(world=2, rules=HeldRules(ready_s=9.0))
    late.handle(died(), 0.0)
    late.handle(parked(0, 1, 4, 4, Position(4, 2), world=2), 0.1)
    assert rungs(late.handle(TimePassed(), late.due_at() or 0.0)) == [Rung.LATE_NEWCOMER]
    torn = opened(world=2, rules=HeldRules(rebuild_s=9.0))
    torn.handle(died(), 0.0)
    torn.handle(parked(0, 1, 4, 4, Position(4, 2), world=2), 0.1)
    torn.handle(RankReady(rank=1), 0.2)
    assert rungs(torn.handle(TimePassed(), torn.due_at() or 0.0)) == [Rung.UNHELD]


def test_a_stopped_rank_is_ended_and_replaced() -> None:
    run = opened()
    actions = run.handle(RankCondemned(rank=1, because="rank 1 is stopped"), 0.0)
    assert [a.rank for a in actions if isinstance(a, EndRank)] == [1]
    assert run.is_expected_to_end(1)
    assert [a.rank for a in run.handle(died(), 0.1) if isinstance(a, StartRank)] == [1]


def test_processes_end_when_every_script_has() -> None:
    run = opened(world=2)
    assert run.handle(RankEnded(rank=0), 0.0) == []
    assert [a.order for a in run.handle(RankEnded(rank=1), 0.1) if isinstance(a.order, Bye)]


def test_ranks_that_follow_each_other_are_one_run() -> None:
    for ranks in ([0], [0, 1, 2, 3], [1, 3, 5, 7], [0, 2, 3, 9], []):
        assert list(ranks_of(runs_of(ranks))) == ranks
    assert runs_of(range(4096)) == ((0, 4095, 1),)


def test_a_machine_is_thawed_as_it_was_frozen() -> None:
    run = opened()
    run.handle(died(), 0.0)
    run.handle(parked(0, 1, 4, 4, Position(4, 2)), 0.1)
    assert HeldRun.thaw(run.freeze()).freeze() == run.freeze()


def test_a_newcomer_that_issues_something_else_than_peers_wait_for_is_found_out() -> None:
    group = RankBook(rank=2, world=3, unit=1).open_group("0", range(3))
    group.awaited[Position(4, 0)] = "allreduce sum float32[8]"
    assert group.answer(group.place(4), "allreduce sum float32[8]") is None
    group.next_number = 0
    with pytest.raises(AnswerError, match=r"was allreduce sum float32\[8\] before, and is barrier now"):
        group.answer(group.place(4), "barrier")
