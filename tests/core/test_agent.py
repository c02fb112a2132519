"""An agent's decisions: events in, actions compared. Times are in seconds of no particular clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everstep.core.agent import agent_messages as ag
from everstep.core.agent.agent import (
    AgentSaid,
    AgentState,
    LeaveLine,
    LineClosed,
    LineOpened,
    OrderHeard,
    ReportsKept,
)
from everstep.core.agent.process import AgentLimits, ProcessState
from everstep.core.agent.processes import Curiosity, NodeProcesses
from everstep.core.agent.reports import ReportQueue
from everstep.core.faults.detector import DetectorLimits, Glance
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import InterruptWorkers
from everstep.protocol.messages import SAVING, EndWorker, OrderTaken
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import EpochFacts, FactChanges, OwnOrders

OPEN = msg.OpenTask(task="t", job={}, secret="s", shape=Shape(2, 2, 2), needs=msg.TaskNeeds())
LIMITS = AgentLimits(finish_s=5.0, save_s=60.0, leave_s=20.0, kill_s=30.0)
A, B = Worker(0, 0), Worker(1, 0)


def sender(worker: Worker = A, incarnation: int = 1) -> msg.Sender:
    return msg.Sender("t", worker, incarnation)


def start(worker: Worker = A, incarnation: int = 1, slot: int = 0) -> msg.StartProcess:
    return msg.StartProcess(task="t", worker=worker, incarnation=incarnation, slot=slot)


def exits(actions: list[Any]) -> list[tuple[Worker, int, str]]:
    events = [a.report.event for a in actions if isinstance(a, ag.SendToCoordinator)]
    return [(e.worker, e.incarnation, e.reason) for e in events if isinstance(e, ev.WorkerExited)]


class Node:
    """A node whose shell does everything at once, unless a test wants otherwise."""

    def __init__(self, limits: AgentLimits = LIMITS) -> None:
        self.machine = NodeProcesses(DetectorLimits(), limits)
        self.now = 100.0
        self.give(OPEN)

    def happens(self, event: Any) -> list[Any]:
        found = self.machine.handle(event, self.now)
        self.machine.validate()
        return found

    def give(self, order: msg.Order) -> list[Any]:
        return self.happens(ag.OrderGiven(order))

    def up(self, worker: Worker = A, incarnation: int = 1, slot: int = 0) -> None:
        order = start(worker, incarnation, slot)
        assert self.give(order) == [ag.Spawn(order)]
        assert self.happens(ag.ProcessSpawned(sender(worker, incarnation))) == []
        assert self.happens(ag.ProcessGreeted(sender(worker, incarnation))) == []

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        due = self.machine.due_at()
        return self.happens(msg.TimePassed()) if due is not None and due <= self.now else []

    def state(self, worker: Worker = A, incarnation: int = 1) -> ProcessState:
        return self.machine.processes[sender(worker, incarnation)].state


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.machine.validate()


# ------------------------------------------------------------------ starts


def test_a_start_waits_until_the_process_before_it_is_gone_for_good(node: Node) -> None:
    """A node back from a long stop is told to end its old workers and to start new ones, at once."""
    node.up(A, 1)
    assert node.give(msg.KillProcess(task="t", worker=A, incarnation=1)) == [ag.Kill(sender(A, 1))]
    assert node.give(start(A, 2)) == []
    assert exits(node.happens(ag.ProcessDied(sender(A, 1), "killed by SIGKILL"))) == [
        (A, 1, "killed by SIGKILL")
    ]
    assert node.happens(ag.ProcessGone(sender(A, 1))) == [ag.Spawn(start(A, 2))]
    assert list(node.machine.processes) == [sender(A, 2)]


def test_another_worker_s_start_waits_while_the_dead_one_still_holds_the_slot(node: Node) -> None:
    node.up(A, 1, slot=3)
    node.happens(ag.ProcessDied(sender(A, 1), "ended"))
    assert node.give(start(B, 1, slot=3)) == []
    assert node.happens(ag.ProcessGone(sender(A, 1))) == [ag.Spawn(start(B, 1, slot=3))]


def test_a_start_that_waits_can_be_ended_and_is_reported(node: Node) -> None:
    node.up(A, 1)
    node.give(start(A, 2))
    (exited,) = exits(node.give(msg.KillProcess(task="t", worker=A, incarnation=2)))
    assert exited == (A, 2, "could not be started: it was ended before its turn came")
    node.happens(ag.ProcessDied(sender(A, 1), "ended"))
    assert node.happens(ag.ProcessGone(sender(A, 1))) == []


def test_a_process_ordered_to_end_while_it_is_being_made_is_ended_once_it_is(node: Node) -> None:
    node.give(start(A, 1))
    assert node.give(msg.KillProcess(task="t", worker=A, incarnation=1)) == []
    assert node.happens(ag.ProcessSpawned(sender(A, 1))) == [ag.Kill(sender(A, 1))]


def test_a_task_that_is_not_known_here_starts_nothing(node: Node) -> None:
    order = msg.StartProcess(task="other", worker=A, incarnation=1, slot=0)
    (exited,) = exits(node.give(order))
    assert exited[2] == "could not be started: task other is not known on this node"


# ------------------------------------------------------------------ fork servers


def test_a_dead_fork_server_is_replaced_and_the_start_tried_again(node: Node) -> None:
    node.give(start(A, 1))
    died = ag.SpawnFailed(sender(A, 1), "the fork server was killed by SIGKILL", server_died=True)
    assert node.happens(died) == [ag.Spawn(start(A, 1), fresh_server=True)]
    assert node.happens(ag.ProcessSpawned(sender(A, 1))) == []


def test_a_fork_server_that_dies_each_time_is_reported_by_its_own_name(node: Node) -> None:
    node.give(start(A, 1))
    died = ag.SpawnFailed(sender(A, 1), "the fork server was killed by SIGKILL", server_died=True)
    found = [node.happens(died) for _ in range(3)]
    assert [len(exits(actions)) for actions in found] == [0, 0, 1]
    assert exits(found[2]) == [(A, 1, "could not be started: the fork server was killed by SIGKILL")]
    assert not node.machine.processes


def test_a_fork_server_known_to_be_dead_is_replaced_also_by_the_next_start(node: Node) -> None:
    """The start that found it dead was no longer wanted."""
    node.give(start(A, 1))
    node.give(msg.KillProcess(task="t", worker=A, incarnation=1))
    died = ag.SpawnFailed(sender(A, 1), "the fork server was killed by SIGKILL", server_died=True)
    assert len(exits(node.happens(died))) == 1
    assert node.give(start(A, 2)) == [ag.Spawn(start(A, 2), fresh_server=True)]
    assert node.happens(ag.ProcessSpawned(sender(A, 2))) == []
    assert node.give(start(B, 1, slot=1)) == [ag.Spawn(start(B, 1, slot=1))], "the new one lives"


# ------------------------------------------------------------------ ends


def test_a_task_is_closed_gently_then_firmly_then_by_force_then_given_up(node: Node) -> None:
    node.up(A)
    assert node.give(msg.CloseTask(task="t", gently=True)) == [ag.PassOn(sender(), EndWorker(gently=True))]
    assert node.wait(4.9) == []
    assert node.wait(0.2) == [ag.PassOn(sender(), EndWorker(gently=False))]
    assert node.wait(19.8) == []
    assert node.wait(0.3) == [ag.Kill(sender())]
    assert node.wait(29.9) == []
    (exited,) = exits(node.wait(0.2))
    assert exited == (A, 1, "it is still there 30 s after SIGKILL (uninterruptible sleep)")
    assert node.wait(1e6) == []
    assert node.machine.due_at() is None


def test_a_task_closed_firmly_after_its_worker_died_asks_the_dead_for_nothing(node: Node) -> None:
    """The kernel was still clearing up: the agent ended with "dead cannot become ending"."""
    node.up()
    node.give(msg.CloseTask(task="t", gently=True))
    node.happens(ag.ProcessDied(sender(), "ended"))
    assert node.give(msg.CloseTask(task="t", gently=False)) == []


def test_a_worker_that_writes_its_last_state_is_left_alone_for_longer(node: Node) -> None:
    node.up(A)
    node.give(msg.CloseTask(task="t", gently=True))
    glance = Glance(moment=1, step=9, busy=True, doing=SAVING, age_s=0.0)
    node.happens(ag.Glanced(sender(), glance))
    assert [node.wait(5.0) for _ in range(11)] == [[]] * 11
    assert node.wait(5.0) == [ag.PassOn(sender(), EndWorker(gently=False))]


def test_a_process_that_outlives_sigkill_is_killed_once_and_its_slot_is_told_free_when_it_ends(
    node: Node,
) -> None:
    node.up(A)
    assert node.give(msg.KillProcess(task="t", worker=A, incarnation=1)) == [ag.Kill(sender())]
    (told,) = node.wait(30.0)
    assert told.report.event.stuck
    assert node.give(msg.KillProcess(task="t", worker=A, incarnation=1)) == []
    assert node.wait(1000.0) == []
    freed = node.happens(ag.ProcessGone(sender()))
    assert freed == [ag.SendToCoordinator(msg.SlotFreed(slot=0), None)]


def test_of_a_stuck_worker_with_shards_every_slot_is_told_free(node: Node) -> None:
    node.give(msg.StartProcess(task="t", worker=A, incarnation=1, slot=2, more_slots=(0, 3)))
    node.happens(ag.ProcessSpawned(sender()))
    node.happens(ag.ProcessGreeted(sender()))
    node.give(msg.KillProcess(task="t", worker=A, incarnation=1))
    node.wait(30.0)
    freed = node.happens(ag.ProcessGone(sender()))
    assert [action.report.slot for action in freed] == [0, 2, 3]


def test_a_worker_that_goes_on_writing_its_last_state_is_never_ended(node: Node) -> None:
    """A large state on a slow disk takes longer than any limit; only one that writes nothing is ended."""
    node.up(A)
    node.give(msg.CloseTask(task="t", gently=True))
    for moment in range(1, 60):
        glance = Glance(moment=moment, step=9, busy=True, doing=SAVING, age_s=0.0)
        node.happens(ag.Glanced(sender(), glance))
        assert node.wait(5.0) == []


def test_a_worker_closed_before_it_called_hears_of_it_when_it_does(node: Node) -> None:
    node.give(start(A, 1))
    node.happens(ag.ProcessSpawned(sender()))
    node.give(msg.CloseTask(task="t", gently=False))
    assert node.happens(ag.ProcessGreeted(sender())) == [ag.PassOn(sender(), EndWorker(gently=False))]


def test_closing_a_task_also_ends_starts_that_wait_and_processes_being_made(node: Node) -> None:
    node.up(A, 1)
    node.give(start(A, 2))
    node.give(start(B, 1, slot=1))
    actions = node.give(msg.CloseTask(task="t", gently=True))
    assert [worker for worker, _, _ in exits(actions)] == [A]
    assert node.happens(ag.ProcessSpawned(sender(B))) == [ag.Kill(sender(B))]
    node.happens(ag.ProcessDied(sender(A), "ended"))
    assert node.happens(ag.ProcessGone(sender(A))) == []


def test_a_process_that_outlives_sigkill_is_reported_once_and_holds_its_slot(node: Node) -> None:
    node.up(A)
    node.give(msg.KillProcess(task="t", worker=A, incarnation=1))
    node.give(start(A, 2))
    reported = exits(node.wait(30.0))
    assert [(worker, incarnation) for worker, incarnation, _ in reported] == [(A, 1), (A, 2)]
    assert "worker 0:0 cannot be killed and holds slot 0" in exits(node.give(start(B, 1)))[0][2]
    spoke = msg.TaskEvent(task="t", event=ev.StateCopied(worker=A, incarnation=1, transfer=1, state_step=3))
    assert node.happens(ag.ProcessSpoke(sender(), spoke)) == []
    assert node.happens(ag.ProcessDied(sender(), "killed by SIGKILL")) == []
    node.happens(ag.ProcessGone(sender()))
    assert node.give(start(B, 1)) == [ag.Spawn(start(B, 1))]


def test_what_was_given_up_while_the_line_was_cut_ends_also_if_it_only_waits(node: Node) -> None:
    node.up(A, 1)
    node.up(B, 1, slot=1)
    node.give(start(A, 2))
    actions = node.give(msg.KeepOnly(keep=(("t", B, 1),)))
    assert [a for a in actions if isinstance(a, ag.Kill)] == [ag.Kill(sender(A))]
    node.happens(ag.ProcessDied(sender(A), "killed by SIGKILL"))
    assert node.happens(ag.ProcessGone(sender(A))) == []
    assert list(node.machine.processes) == [sender(B)]


def test_a_death_is_reported_once_however_it_is_noticed(node: Node) -> None:
    node.up(A)
    told = [
        *node.happens(ag.ProcessDied(sender(), "killed by SIGKILL", 7)),
        *node.happens(ag.ProcessDied(sender(), "ended")),
        *node.happens(ag.ProcessGone(sender())),
        *node.happens(ag.ProcessGone(sender())),
    ]
    assert exits(told) == [(A, 1, "killed by SIGKILL")]


# ------------------------------------------------------------------ words and looks


def test_a_worker_that_raised_ends_for_that_reason(node: Node) -> None:
    node.up(A)
    raised = ev.WorkerRaised(worker=A, incarnation=1, error="ValueError: no", where="step 3 0F0.0")
    report = msg.TaskEvent(task="t", event=raised)
    assert node.happens(ag.ProcessSpoke(sender(), report)) == [ag.SendToCoordinator(report, sender())]
    died = node.happens(ag.ProcessDied(sender(), "exited with code 1"))
    assert exits(died) == [(A, 1, "raised ValueError: no")]


def test_a_process_that_talks_nonsense_is_ended_for_that_reason(node: Node) -> None:
    node.up(A)
    assert node.happens(ag.ProcessMisspoke(sender(), "x" * 10_000_000)) == [ag.Kill(sender())]
    ((_, _, reason),) = exits(node.happens(ag.ProcessDied(sender(), "killed by SIGKILL")))
    assert len(reason) < 2_100


def test_orders_for_a_worker_reach_the_process_that_is_there(node: Node) -> None:
    words = InterruptWorkers(workers=(A,), epoch=2, because="so")
    order = msg.NotifyWorker(task="t", worker=A, words=words)
    assert node.give(order) == []
    node.up(A, 4)
    assert node.give(order) == [ag.PassOn(sender(A, 4), order)]


def test_no_more_is_said_of_a_process_that_was_killed(node: Node) -> None:
    """Else one in uninterruptible sleep would be found hung, and ordered killed, for ever."""
    node.up(A)
    still = Glance(moment=1, step=1, busy=True, doing="0F0.0", age_s=500.0)
    node.happens(ag.Glanced(sender(), still))
    (overdue,) = node.happens(ag.Glanced(sender(), still))
    assert isinstance(overdue.report, msg.OpOverdue)
    node.give(msg.KillProcess(task="t", worker=A, incarnation=1))
    later = Glance(moment=1, step=1, busy=True, doing="0F0.0", age_s=5_000.0)
    assert node.happens(ag.Glanced(sender(), later)) == []


def test_an_order_that_a_waiting_worker_does_not_take_is_reported(node: Node) -> None:
    """It hangs inside its loop: its beacon alone cannot tell that from waiting."""
    node.up(A)
    words = InterruptWorkers(workers=(A,), epoch=2, because="so")

    def look(age_s: float) -> list[ag.AgentAction]:
        glance = Glance(moment=1, step=1, busy=False, doing="Paused", age_s=age_s)
        return node.happens(ag.Glanced(sender(), glance))

    look(0.0)
    node.give(msg.NotifyWorker(task="t", worker=A, words=words))
    for looks in range(1, 12):
        node.now += 0.5
        assert look(0.5 * looks) == []
    node.now += 0.5
    assert look(1.0) == [], "it was busy until a second ago"
    assert look(6.0) == [], "the agent may not have read yet that the order was taken"
    (found,) = look(6.0)
    assert isinstance(found, ag.SendToCoordinator)
    assert isinstance(found.report, msg.OpOverdue)
    assert found.report.unanswered_s == 6.0
    assert node.happens(ag.ProcessSpoke(sender(), OrderTaken())) == []
    node.now += 60.0
    assert look(66.0) == look(66.0) == []


def test_a_worker_that_takes_the_order_to_go_on_and_stays_paused_is_reported(node: Node) -> None:
    """Storm seed 700536 of `--agents`: it hung between the order and its first op, and all others waited."""
    node.up(A)
    facts = EpochFacts(epoch=2, attempts=((0, 0),), members=(), steady_hosts={})
    node.give(msg.ResumeTask(task="t", facts=facts, news=None, workers=((A, OwnOrders(step=1), None),)))
    node.happens(ag.ProcessSpoke(sender(), OrderTaken()))

    def look(moment: int, age_s: float) -> list[ag.AgentAction]:
        glance = Glance(moment=moment, step=1, busy=False, doing="Paused", age_s=age_s)
        return node.happens(ag.Glanced(sender(), glance))

    look(1, 0.0)
    for looks in range(1, 243):
        node.now += 0.5
        reported = look(1, 0.5 * looks)
        assert (reported != []) == (looks == 242), "the time of a first op, and two looks"
    words = InterruptWorkers(workers=(A,), epoch=3, because="so")
    node.give(msg.NotifyWorker(task="t", worker=A, words=words))
    node.happens(ag.ProcessSpoke(sender(), OrderTaken()))
    look(2, 0.0)
    node.now += 60.0
    assert look(2, 60.0) == look(2, 60.0) == [], "it was told to pause"


def test_a_worker_that_stays_paused_is_reported_sooner_where_others_of_its_task_began_at_once(
    node: Node,
) -> None:
    node.up(A)
    node.up(B, slot=1)
    facts = EpochFacts(epoch=2, attempts=((0, 0),), members=(), steady_hosts={})
    own = tuple((worker, OwnOrders(step=1), None) for worker in (A, B))
    node.give(msg.ResumeTask(task="t", facts=facts, news=None, workers=own))

    def look(worker: Worker, moment: int, age_s: float, doing: str = "Paused") -> list[ag.AgentAction]:
        glance = Glance(moment=moment, step=1, busy=False, doing=doing, age_s=age_s)
        return node.happens(ag.Glanced(sender(worker), glance))

    for worker in (A, B):
        node.happens(ag.ProcessSpoke(sender(worker), OrderTaken()))
        look(worker, 1, 0.0)
    for looks in range(1, 43):
        node.now += 0.5
        assert look(B, 1 + looks, 0.0, doing="A[1]") == []
        reported = look(A, 1, 0.5 * looks)
        assert (reported != []) == (looks == 42), "20 s, and two looks"
    node.give(msg.CloseTask(task="t", gently=False))
    assert node.machine.longest_begin_s == {}


def test_the_kernel_is_asked_only_about_beacons_that_stand_still(node: Node) -> None:
    young = Glance(moment=1, step=1, busy=True, doing="0F0.0", age_s=0.02)
    asked = node.machine.curious(sender(), young)
    assert asked == Curiosity(stopped=False, slow=False, active=False, passes_over_s=0.1)
    asked = node.machine.curious(sender(), replace(young, age_s=0.2))
    assert asked == Curiosity(stopped=True, slow=True, active=False, passes_over_s=0.0)
    assert not node.machine.curious(sender(), replace(young, age_s=0.2, busy=False, doing="A[1]")).slow
    overdue = replace(young, age_s=120.1)
    assert node.machine.curious(sender(), overdue).active, "its report says how active it was"


# ------------------------------------------------------------------ the line


def sealed(step: int) -> msg.TaskEvent:
    event = ev.StepSealed(step=step, stage=0, attempt=0, microbatches=2, executed=6)
    return msg.TaskEvent(task="t", event=event)


EXIT = msg.TaskEvent(task="t", event=ev.WorkerExited(worker=A, incarnation=1, reason="ended"))
OVERDUE = msg.OpOverdue(
    task="t",
    worker=A,
    incarnation=1,
    doing="0F0.0",
    busy=True,
    stopped=False,
    elapsed_s=1.0,
    expected_s=0.1,
    step=1,
)


def test_reports_are_kept_until_the_coordinator_has_them() -> None:
    agent = AgentState()
    for step in (1, 2, 3):
        agent.handle(AgentSaid(sealed(step)), 0.0)
    assert [kept.number for kept in agent.reports.after(1)] == [2, 3]
    agent.handle(ReportsKept(2, term=0), 0.0)
    assert [kept.number for kept in agent.reports.after(0)] == [3]
    assert list(agent.reports.after(3)) == []


def test_what_is_of_no_use_later_is_not_kept_while_the_line_is_cut() -> None:
    agent = AgentState()
    agent.handle(LineOpened(term=0, heard=0), 0.0)
    agent.handle(AgentSaid(OVERDUE), 0.0)
    agent.handle(LineClosed(), 0.0)
    agent.handle(AgentSaid(OVERDUE), 0.0)
    assert agent.reports.number == 1


def test_too_many_reports_cost_the_oldest_seals_and_nothing_else() -> None:
    reports = ReportQueue(most=10)
    reports.add(EXIT, sender())
    for step in range(1, 10):
        reports.add(sealed(step), sender())
    assert len(reports) == 10
    reports.add(EXIT, sender())
    assert len(reports) == 6
    assert reports.num_dropped == 5
    assert [kept.number for kept in reports.after(0)] == [1, 7, 8, 9, 10, 11]
    assert [kept.number for kept in reports.after(8)] == [9, 10, 11]


def test_the_bound_holds_also_where_nothing_can_be_spared() -> None:
    reports = ReportQueue(most=3)
    for _ in range(50):
        reports.add(EXIT, sender())
        assert len(reports) <= 3
    assert [kept.number for kept in reports.after(0)] == [48, 49, 50]


def test_an_order_heard_twice_is_carried_out_once() -> None:
    agent = AgentState()
    agent.handle(OrderHeard(1, OPEN, term=0), 0.0)
    assert agent.handle(OrderHeard(2, start(), term=0), 0.0) == [ag.Spawn(start())]
    assert agent.handle(OrderHeard(2, start(), term=0), 0.0) == []
    assert agent.done == 2


def test_after_an_order_that_is_not_understood_nothing_of_that_line_counts() -> None:
    """Storm seed 700024 of `--agents`: the order after it was carried out, and so it was never sent again."""
    agent = AgentState()
    facts = EpochFacts(epoch=3, attempts=((0, 0),), members=(), steady_hosts={})
    changes = FactChanges(since=2, facts=facts, book={}, gone=(), holders=())
    news = msg.ResumeTask(task="t", facts=None, news=changes, workers=())
    assert isinstance(agent.handle(OrderHeard(1, news, term=0), 0.0)[0], LeaveLine)
    drop = msg.DropCopies(task="t", before=2)
    assert agent.handle(OrderHeard(2, drop, term=0), 0.0) == []
    assert agent.done == 0
    agent.handle(LineOpened(term=0, heard=0), 0.0)
    agent.handle(OrderHeard(1, replace(news, facts=facts, news=None), term=0), 0.0)
    agent.handle(OrderHeard(2, drop, term=0), 0.0)
    assert agent.done == 2


def test_orders_of_an_older_term_are_refused_and_the_line_is_left() -> None:
    agent = AgentState()
    agent.handle(LineOpened(term=7, heard=0), 0.0)
    agent.handle(OrderHeard(1, OPEN, term=7), 0.0)
    (left,) = agent.handle(OrderHeard(2, start(), term=6), 0.0)
    assert isinstance(left, LeaveLine)
    assert "term 6" in left.because
    assert agent.done == 1
    assert isinstance(agent.handle(LineOpened(term=6, heard=0), 0.0)[0], LeaveLine)
    assert isinstance(agent.handle(ReportsKept(99, term=6), 0.0)[0], LeaveLine)


def test_times_are_told_on_the_coordinator_s_clock() -> None:
    agent = AgentState(ahead_s=1_000.0)
    agent.handle(AgentSaid(msg.TaskEvent(task="t", event=ev.WorkerResumed(worker=A, epoch=1, at=5.0))), 0.0)
    (kept,) = agent.reports.after(0)
    assert kept.report.event.at == 1_005.0


# ------------------------------------------------------------------ whatever happens, in whatever order


class AnyNode(RuleBasedStateMachine):
    """Orders, deaths and time in any order, with a shell that may be late. `validate` after each."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = NodeProcesses(DetectorLimits(), LIMITS)
        self.now = 0.0
        self.spawns: list[msg.Sender] = []
        self.living: list[msg.Sender] = []
        self.dying: list[msg.Sender] = []
        self.ordered: set[msg.Sender] = set()
        self.ended: list[msg.Sender] = []
        self.incarnation = 0
        self._happens(ag.OrderGiven(OPEN))

    def _happens(self, event: Any) -> None:
        for action in self.machine.handle(event, self.now):
            match action:
                case ag.Spawn(order=order):
                    self.spawns.append(sender(order.worker, order.incarnation))
                case ag.Kill(sender=who):
                    assert who in self.living + self.dying
                    if who in self.living:
                        self.living.remove(who)
                        self.dying.append(who)
                case ag.SendToCoordinator(report=msg.TaskEvent(event=ev.WorkerExited() as exited)):
                    self.ended.append(sender(exited.worker, exited.incarnation))

    @rule(worker=st.sampled_from([A, B]), slot=st.integers(0, 1))
    def start(self, worker: Worker, slot: int) -> None:
        self.incarnation += 1
        self.ordered.add(sender(worker, self.incarnation))
        self._happens(ag.OrderGiven(start(worker, self.incarnation, slot)))

    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        if self.ordered:
            who = data.draw(st.sampled_from(sorted(self.ordered)))
            order = msg.KillProcess(task="t", worker=who.worker, incarnation=who.incarnation)
            self._happens(ag.OrderGiven(order))

    @rule(gently=st.booleans())
    def close(self, gently: bool) -> None:
        self._happens(ag.OrderGiven(msg.CloseTask(task="t", gently=gently)))

    @rule(data=st.data())
    def keep_only(self, data: Any) -> None:
        kept = data.draw(st.sets(st.sampled_from(sorted(self.ordered)))) if self.ordered else ()
        self._happens(ag.OrderGiven(msg.KeepOnly(keep=tuple(tuple(who) for who in kept))))

    @rule(fails=st.booleans(), server_died=st.booleans())
    def spawned(self, fails: bool, server_died: bool) -> None:
        if self.spawns:
            who = self.spawns.pop(0)
            if fails:
                self._happens(ag.SpawnFailed(who, "no", server_died=server_died))
            else:
                self.living.append(who)
                self._happens(ag.ProcessSpawned(who))

    @rule(data=st.data())
    def dies(self, data: Any) -> None:
        if self.living:
            who = data.draw(st.sampled_from(self.living))
            self.living.remove(who)
            self.dying.append(who)
            self._happens(ag.ProcessDied(who, "killed by SIGKILL"))

    @rule(data=st.data())
    def goes(self, data: Any) -> None:
        if self.dying:
            who = data.draw(st.sampled_from(self.dying))
            self.dying.remove(who)
            self._happens(ag.ProcessGone(who))

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self._happens(msg.TimePassed())

    @rule()
    def agent_is_replaced(self) -> None:
        """The next one has nothing but the record."""
        image = json.loads(json.dumps(self.machine.image()))
        self.machine = NodeProcesses(DetectorLimits(), LIMITS)
        self.machine.restore(image, self.now)
        assert self.machine.image() == image

    @invariant()
    def is_sound(self) -> None:
        self.machine.validate()

    @invariant()
    def each_end_is_reported_once(self) -> None:
        assert len(self.ended) == len(set(self.ended))

    @invariant()
    def nobody_lives_whom_the_machine_does_not_know(self) -> None:
        assert {*self.spawns, *self.living, *self.dying} == set(self.machine.processes)


TestAnyNode = AnyNode.TestCase
TestAnyNode.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# ------------------------------------------------------------------ checkpoints without a coordinator


def written(step: int, stage: int = 0, share: tuple[int, int] = (0, 1)) -> ag.ProcessSpoke:
    part = msg.PartWritten(task="t", step=step, stage=stage, attempt=1, part={}, share=share)
    return ag.ProcessSpoke(msg.Sender("t", Worker(0, stage), 1), part)


def test_what_no_coordinator_commits_is_committed_by_the_agent_of_the_first_part() -> None:
    machine = NodeProcesses(DetectorLimits(), AgentLimits(commit_s=10.0, commit_alone_s=1.0))
    machine.handle(ag.OrderGiven(OPEN), 0.0)
    for stage in (0, 1):
        start = msg.StartProcess(task="t", worker=Worker(0, stage), incarnation=1, slot=stage)
        machine.handle(ag.OrderGiven(start), 0.0)
        machine.handle(ag.ProcessSpawned(msg.Sender("t", Worker(0, stage), 1)), 0.0)
    machine.handle(written(5, stage=1), 1.0)
    machine.handle(written(5, share=(1, 2)), 1.0)
    assert machine.due_at() is None  # another node looks after it
    machine.handle(written(5), 1.0)
    machine.handle(written(10), 4.0)
    sealed = ev.StepSealed(step=12, stage=0, attempt=1, microbatches=4, executed=12)
    machine.handle(
        ag.ProcessSpoke(msg.Sender("t", Worker(0, 0), 1), msg.TaskEvent(task="t", event=sealed)), 5.0
    )
    assert machine.due_at() == 11.0
    look = ag.WorkOnDisk(ag.CommitWhole("t", msg.run_of("s"), 12))
    assert machine.handle(msg.TimePassed(), 11.0) == [look]
    assert machine.due_at() is None  # until it is answered
    machine.handle(ag.PartialsLooked("t", (10,)), 12.0)
    assert machine.due_at() == 22.0
    assert machine.handle(msg.TimePassed(), 22.0) == [look]
    machine.handle(ag.PartialsLooked("t", committed=True), 23.0)
    assert machine.due_at() is None
    machine.handle(written(15), 24.0)  # no coordinator has committed what was there: it is away
    assert machine.due_at() == 25.0
    assert machine.handle(ag.AgentEnds(), 24.5) == [look]  # who comes after it may know nothing of the task
    assert machine.handle(ag.AgentEnds(), 24.6) == []
