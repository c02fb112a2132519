"""A coordinator whose journal is new, or was put back from a copy, meets agents that have done more than it
knows: every order counts, and every worker is adopted or ended in words.
"""

from __future__ import annotations

from everstep.core.agent import agent_messages as ag
from everstep.core.agent.agent import AgentState, LeaveLine, LineOpened, OrderHeard
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import freeze, thaw
from everstep.core.cluster.task import TaskState
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

W00, W01 = Worker(0, 0), Worker(0, 1)


def begun(journal: str = "first") -> msg.JournalBegun:
    return msg.JournalBegun(journal=journal, version="1", because="it is new")


def submitted(task: str) -> msg.TaskSubmitted:
    return msg.TaskSubmitted(task=task, job={}, shape=Shape(1, 2, 2), steps=10, secret="s")


class Node:
    """A real agent's machine, without processes."""

    def __init__(self) -> None:
        self.state = AgentState()
        self.did: list[object] = []

    def meets(self, coordinator: Coordinator, *, now: float) -> list[str]:
        """It joins; the orders that it ignores."""
        self.state.handle(LineOpened(0, 0, coordinator.policy.journal), now)
        return self.carries_out(coordinator.handle(self.hello(), now), now=now)

    def hello(self) -> msg.NodeJoined:
        facts = {task: facts.epoch for task, facts in self.state.processes.facts.items()}
        return msg.NodeJoined(
            node="a",
            boot="b",
            slots=4,
            host="h",
            journal=self.state.journal,
            done=self.state.done,
            runs=tuple(tuple(run) for run in self.state.processes.runs()),
            epochs=facts,
        )

    def carries_out(self, actions: list[msg.ClusterAction], *, now: float) -> list[str]:
        ignored = []
        for action in actions:
            if isinstance(action, msg.Dispatch):
                before = self.state.done
                did = self.state.handle(OrderHeard(action.number, action.order, 0), now)
                self.did += did
                if self.state.done == before:
                    ignored.append(type(action.order).__name__)
                for one in did:
                    if isinstance(one, ag.Spawn):
                        sender = msg.Sender(one.order.task, one.order.worker, one.order.incarnation)
                        self.state.handle(ag.ProcessSpawned(sender), now)
        return ignored


def test_a_coordinator_that_starts_with_nothing_is_obeyed_and_ends_what_it_does_not_know() -> None:
    """Its first orders had numbers that the agent had done: they were ignored, and old workers went on."""
    node, first = Node(), Coordinator()
    first.handle(begun(), 0.0)
    assert node.meets(first, now=1.0) == []
    assert node.carries_out(first.handle(submitted("old"), 1.0), now=1.0) == []
    assert len(node.state.processes.runs()) == 2
    second = Coordinator()
    second.handle(begun("second"), 2.0)
    node.did.clear()
    hello = node.hello()
    actions = second.handle(hello, 3.0)
    node.state.handle(LineOpened(0, 0, "second"), 3.0)
    assert node.carries_out(actions, now=3.0) == []
    told = [one for one in node.did if isinstance(one, ag.PassOn) and isinstance(one.order, msg.EndWorker)]
    assert [one.order for one in told] == [msg.EndWorker(gently=True)] * 2  # not killed: they may be saving
    assert node.carries_out(second.handle(submitted("new"), 4.0), now=4.0) == []
    (incident,) = second.log.incidents
    assert incident.what == "the records of node a and of this coordinator disagree"
    assert "workers of old end" in incident.remedies[-1].outcome


def hello_of(cluster: FakeCluster, node: str, *, more: int = 0) -> msg.NodeJoined:
    """What the agent of this node says of what it runs. `more`: orders that a journal has lost."""
    known, tasks = cluster.coordinator.nodes[node], cluster.coordinator.tasks
    runs = [
        (name, worker, actor.incarnation)
        for (name, worker), actor in cluster.crew.actors.items()
        if actor.node == node
    ]
    epochs = {name: task.epoch for name, task in tasks.items()}
    return msg.NodeJoined(
        node=node, boot="1", slots=2, host=node, done=known.sent + more, runs=tuple(runs), epochs=epochs
    )


def put_back(cluster: FakeCluster, frozen: dict) -> Coordinator:  # type: ignore[type-arg]
    older = Coordinator()
    thaw(older, frozen)
    cluster.coordinator = older
    return older


def test_workers_that_an_older_journal_knows_are_adopted() -> None:
    cluster = FakeCluster()
    cluster.submit(steps=40)
    cluster.seal()
    frozen = freeze(cluster.coordinator)
    hellos = [hello_of(cluster, node, more=7) for node in "ab"]
    older = put_back(cluster, frozen)
    actions = [action for hello in hellos for action in older.handle(hello, 9.0)]
    orders = [action.order for action in actions if isinstance(action, msg.Dispatch)]
    assert {type(order) for order in orders} == {msg.KeepOnly}
    task = older.tasks["t"]
    assert task.state is TaskState.RUNNING
    assert sorted(run for order in orders for run in order.keep) == sorted(  # type: ignore[attr-defined]
        ("t", worker, seat.incarnation) for worker, seat in task.seats.items()
    )
    assert all("adopted" in incident.remedies[-1].outcome for incident in older.log.incidents)
    assert [action.number for action in actions if isinstance(action, msg.Dispatch)] == [
        hello.done + 1 for hello in hellos
    ]
    older.validate()


def test_a_task_whose_workers_know_more_than_the_journal_begins_again_with_new_numbers() -> None:
    cluster = FakeCluster()
    cluster.submit(steps=40)
    cluster.seal()
    frozen = freeze(cluster.coordinator)
    cluster.exits(W01, "killed by SIGKILL")  # and is back, with another incarnation and epochs
    cluster.seal()
    cluster.seal()
    hellos = [hello_of(cluster, node) for node in "ab"]
    seen = max(run[2] for hello in hellos for run in hello.runs)
    epoch = max(hello.epochs["t"] for hello in hellos)
    older = put_back(cluster, frozen)
    assert older.tasks["t"].epoch < epoch
    orders: list[object] = []
    for hello in hellos:
        found = older.handle(hello, 9.0)
        older.validate()
        orders += [action.order for action in found if isinstance(action, msg.Dispatch)]
    keeps = [order for order in orders if isinstance(order, msg.KeepOnly)]
    assert all(not keep.keep for keep in keeps)  # every one of them ends
    task = older.tasks["t"]
    assert task.state is TaskState.RUNNING
    starts = [order for order in orders if isinstance(order, msg.StartProcesses | msg.StartProcess)]
    assert starts
    assert task.epoch >= epoch
    assert all(seat.incarnation > seen for seat in task.seats.values())
    assert any("begin again" in incident.remedies[-1].outcome for incident in older.log.incidents)


def test_terms_are_compared_within_one_journal_only() -> None:
    """etcd made anew counts terms from 1: every agent refused it until it was restarted with its workers."""
    agent = AgentState()
    agent.handle(LineOpened(1203, 0, "first"), 0.0)
    (left,) = agent.handle(LineOpened(7, 0, "first"), 1.0)
    assert isinstance(left, LeaveLine)  # deposed
    assert agent.handle(LineOpened(1, 0, "second"), 2.0) == []
    assert (agent.journal, agent.term) == ("second", 1)


def test_reports_of_an_unknown_kind_are_counted_and_shown_once() -> None:
    cluster = FakeCluster()
    for number in range(1, 100):
        cluster.coordinator.handle(msg.ReportUnknown(node="a", report=number, what="Later"), 1.0)
    for kind in range(50):
        cluster.coordinator.handle(msg.ReportUnknown(node="a", report=100 + kind, what=f"K{kind}"), 1.0)
    node = cluster.coordinator.nodes["a"]
    assert (node.heard, node.unknown["Later"], sum(node.unknown.values())) == (149, 99, 149)
    assert len(node.unknown) <= 21
    assert len(cluster.coordinator.log.incidents) <= 21
