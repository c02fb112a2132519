"""A worker's decisions about orders, links and reports: events in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.core.worker.control import KeepLinks, SendReport, WorkerControl, raised
from everstep.core.worker.mending import LinkMending, MendLimits
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.worker_state import WorkerState
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import CopyState, InterruptWorkers
from everstep.protocol.messages import EndWorker, OrderTaken
from everstep.protocol.ops import Replicas, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import (
    EpochFacts,
    Finished,
    Forget,
    Ledger,
    LinkBroke,
    LinkOpened,
    Members,
    OwnOrders,
    Paused,
    Restore,
    StateDirections,
    Wait,
)

ME, PEER = Worker(0, 0), Worker(1, 0)
SENDER = msg.Sender("t", ME, 3)
OPS = "0F0.0 0I0.0 0W0.0 0R 0U"
HERE, THERE = ("a", 1), ("b", 2)
ADDRESS = msg.MemoryAddress("a", "host", 9)


def control() -> WorkerControl:
    rules = TaskRules(replicas=2, stages=1, microbatches=1, steps=4)
    return WorkerControl(
        SENDER, WorkerState(ME, rules, incarnation=SENDER.incarnation), MendLimits(after_s=1.0, most_s=4.0)
    )


def notify(words: Any, **more: Any) -> msg.NotifyWorker:
    book = ((ME, *HERE), (PEER, *THERE))
    return msg.NotifyWorker(task="t", worker=ME, words=words, **({"book": book} | more))


def interrupt(epoch: int) -> msg.NotifyWorker:
    return notify(InterruptWorkers(workers=(ME,), epoch=epoch, because="so"))


def resume(
    epoch: int,
    *,
    restore: int | None = None,
    peers: Mapping[Worker, Any] = {PEER: THERE},
    reduce_round: int = 1,
    **states: Any,
) -> msg.ResumeWorker:
    facts = EpochFacts(
        epoch=epoch,
        attempts=((0, 0),),
        members=(Members(0, (Replicas((0, 1)),), (reduce_round,)),),
        restore=restore,
        book={ME: HERE, **peers},
    )
    own = OwnOrders(step=1, steady=OPS)
    return msg.ResumeWorker(task="t", worker=ME, facts=facts, own=own, states=StateDirections(**states))


def event_in(action: Any) -> ev.Event:
    assert isinstance(action, SendReport)
    assert isinstance(action.report, msg.TaskEvent)
    assert action.report.task == "t"
    return action.report.event


def test_an_interrupt_is_answered_by_a_ledger() -> None:
    taken, action = control().handle(interrupt(2), 0.0)
    assert taken == SendReport(OrderTaken())
    assert event_in(action) == ev.LedgerReported(worker=ME, epoch=2, ledger=Ledger(step=1, joining=True))


def test_an_order_to_resume_brings_the_addresses_and_the_directions() -> None:
    worker = control()
    found = worker.handle(resume(1, restore=0, copy_to=ADDRESS, copy_at_end=False), 0.0)
    assert found == [SendReport(OrderTaken()), KeepLinks(frozenset({HERE, THERE}))]
    assert worker.book == {ME: HERE, PEER: THERE}
    assert (worker.directions.copy_to, worker.directions.copy_at_end) == (ADDRESS, False)


def test_an_order_of_an_earlier_epoch_changes_nothing() -> None:
    worker = control()
    worker.handle(interrupt(5), 0.0)
    assert worker.handle(resume(4, restore=0), 0.0) == [SendReport(OrderTaken())]
    assert worker.book == {}


def test_a_state_is_loaded_from_where_the_order_to_load_it_said_though_another_order_came_before() -> None:
    """The interrupt was in the inbox before the load began; the next order has no load in it."""
    worker = control()
    kept = ((ADDRESS, {"file": "part"}),)
    worker.handle(resume(1, restore=2, copies=kept), 0.0)
    worker.handle(interrupt(2), 0.0)
    worker.handle(resume(2), 0.0)
    assert worker.state.next() == Restore(2)
    assert worker.directions.copies == kept


def test_parts_of_a_reduce_that_starts_over_are_forgotten_at_once() -> None:
    """Each is as large as the gradients of a chunk, and was kept until the step was closed."""
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    worker.finished(worker.state.next(), True, began=0.0)
    for epoch in (2, 3):
        part = Parcel(ParcelKind.PART, 0, 1, 0, round=epoch - 1, sender=1, owner=0)
        assert worker.state.arrived(part)
        worker.handle(interrupt(epoch), 0.0)
        worker.handle(resume(epoch, reduce_round=epoch), 0.0)
        assert Forget((part,)) in worker.state.mail.commands
    assert not worker.state.mail.box


def test_a_first_op_of_an_epoch_is_said_once() -> None:
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    worker.finished(worker.state.next(), True, began=0.0)
    worker.take_actions()
    worker.finished(worker.state.next(), None, began=7.5)
    said = [action for action in worker.take_actions() if isinstance(action, SendReport)]
    assert [event_in(action) for action in said] == [ev.WorkerResumed(worker=ME, epoch=1, at=7.5)]
    worker.finished(worker.state.next(), None, began=8.0)
    assert not [action for action in worker.take_actions() if isinstance(action, SendReport)]


def test_a_joiner_that_nobody_knows_the_address_of_gets_no_copy() -> None:
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    copy = CopyState(source=ME, joiner=PEER, incarnation=2, transfer=1, because="so")
    worker.handle(notify(copy, book=()), 0.0)
    assert worker.state.feeder.snapshots_due == []
    worker.handle(notify(copy), 0.0)
    assert worker.state.feeder.snapshots_due == [1]


def test_a_worker_asked_to_finish_leaves_when_nothing_is_in_hand() -> None:
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    worker.handle(EndWorker(gently=True), 0.0)
    assert not worker.may_leave(worker.state.next())
    assert worker.may_leave(Paused())
    assert worker.may_leave(Finished())
    worker.handle(EndWorker(gently=False), 0.0)
    assert worker.may_leave(worker.state.next())


def test_one_that_joins_leaves_at_once_when_asked_to_finish() -> None:
    worker = control()
    worker.handle(EndWorker(gently=True), 0.0)
    assert worker.may_leave(Wait("a snapshot"))


def test_waiting_for_the_same_thing_is_shown_once() -> None:
    worker = control()
    assert worker.shows(busy=False, doing="A")
    assert not worker.shows(busy=False, doing="A")
    assert worker.shows(busy=False, doing="B")
    assert worker.shows(busy=True, doing="0F0.0")
    assert worker.shows(busy=True, doing="0F0.0")
    assert worker.shows(busy=False, doing="B")


# ------------------------------------------------------------------ broken links


def test_a_broken_link_is_mended_after_a_wait_and_said_only_once_it_has_held() -> None:
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    worker.take_actions()
    worker.handle(LinkBroke(THERE, "a lane stood still"), 10.0)
    worker.handle(LinkBroke(THERE, "closed"), 10.0)  # the second of its two directions
    assert worker.due_at() == 11.0
    assert worker.handle(msg.TimePassed(), 11.0) == []
    assert worker.due_at() is None, "silence proves nothing: the peer's machine may have no power"
    worker.handle(LinkOpened(THERE), 11.5)
    assert worker.due_at() == 12.5
    (said,) = worker.handle(msg.TimePassed(), 12.5)
    assert said == SendReport(msg.LinkMended(task="t", worker=ME, peer=PEER, error="a lane stood still"))
    assert worker.due_at() is None


def test_a_link_that_another_message_opened_is_mended_too() -> None:
    links = LinkMending(MendLimits(after_s=1.0, most_s=4.0))
    links.broke(THERE, 10.0)
    links.opened(THERE, 10.2)
    assert links.due(11.0) == ([THERE], {}), "what was lost is sent again all the same"
    assert links.due_at() == 12.0
    assert links.due(12.0) == ([], {THERE: ""})


def test_each_break_waits_longer_and_nothing_is_said_while_it_breaks_again() -> None:
    links = LinkMending(MendLimits(after_s=1.0, most_s=4.0))
    now, waits = 0.0, []
    for _ in range(5):
        links.broke(THERE, now)
        links.broke(THERE, now)  # both directions of one connection, and what was queued behind
        due = links.due_at()
        assert due is not None
        waits.append(due - now)
        assert links.due(due) == ([THERE], {})
        links.opened(THERE, due)
        now = due + 0.5
    assert waits == [1.0, 4.0, 4.0, 4.0, 4.0]
    assert links.due(now + 1.0) == ([], {THERE: ""})


def test_a_peer_that_cannot_be_reached_again_is_reported_once() -> None:
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    worker.take_actions()
    assert worker.handle(LinkBroke(THERE), 10.0) == []
    assert worker.handle(LinkBroke(THERE), 10.0) == [], "the other direction: nothing was tried yet"
    worker.handle(msg.TimePassed(), 12.0)
    (said,) = worker.handle(LinkBroke(THERE, "timed out"), 14.5)
    assert said == SendReport(
        msg.LinkDown(task="t", worker=ME, peer=PEER, address=THERE, down_s=4.5, error="timed out")
    )
    worker.handle(msg.TimePassed(), 30.0)
    assert worker.handle(LinkBroke(THERE), 31.0) == []


def test_a_link_that_opens_and_breaks_again_is_not_out_of_reach() -> None:
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    worker.take_actions()
    worker.handle(LinkBroke(THERE), 10.0)
    worker.handle(msg.TimePassed(), 11.0)
    worker.handle(LinkOpened(THERE), 11.1)
    assert worker.handle(LinkBroke(THERE), 11.2) == []


def test_breaks_of_a_peer_that_is_gone_are_forgotten() -> None:
    worker = control()
    worker.handle(resume(1, restore=0), 0.0)
    worker.handle(LinkBroke(THERE), 0.0)
    worker.handle(resume(2, peers={}), 0.5)
    assert worker.due_at() is None


# ------------------------------------------------------------------ bounds


def test_an_exception_that_quotes_a_tensor_is_clipped() -> None:
    told = raised(SENDER, "x" * 70_000_000, where="step 3", traceback="y" * 70_000_000).event
    assert isinstance(told, ev.WorkerRaised)
    assert len(told.error) < 2_100
    assert "69998000 characters left out" in told.error
    assert len(told.traceback) < 16_100
