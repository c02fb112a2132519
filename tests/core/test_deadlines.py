"""No state without a deadline: what is not answered is asked for again, or given up, with an incident.

Before, each of these waited without end. That no other state does, the storms check (`storm/waits.py`).
"""

from collections.abc import Callable
from typing import Any

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.task import Task, TaskState
from everstep.core.task.states import Copying, Entering
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.core.test_failed_saves import W00, W01, incident, orders, task_of, trains, write
from tests.core.test_lives import Cluster as Scripts
from tests.storms.agent_mutants import NOT_IN_STORMS, TIMER_MUTANTS
from tests.storms.waits import without_timer
from tests.support.fake_cluster import FakeCluster


def test_a_search_that_a_node_does_not_answer_is_made_on_another_one() -> None:
    """A hung mount on one node: the task was `searching` for ever."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.crew.hung_disks.add("a")
    cluster.submit(shape=Shape(2, 2, 2), has_checkpoints=True)
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.SEARCHING
    assert task.checkpoints.searcher == "a"
    cluster.wait(599.0)
    assert task.state is TaskState.SEARCHING
    cluster.wait(2.0)
    assert "tried again in 1 s" in task.because
    cluster.wait(2.0)
    assert task.checkpoints.searcher == "b"
    assert task.state is TaskState.RUNNING


def test_a_search_that_no_node_answers_fails_the_task_with_a_reason() -> None:
    cluster = FakeCluster(nodes={"a": 2})
    cluster.crew.hung_disks.add("a")
    cluster.submit(shape=Shape(1, 2, 2), has_checkpoints=True)
    for _ in range(20):
        cluster.wait(700.0)
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.FAILED
    assert "node a has not answered the search for checkpoints" in task.because


def test_a_search_that_reads_every_byte_has_more_time() -> None:
    cluster = FakeCluster(nodes={"a": 2})
    cluster.crew.hung_disks.add("a")
    cluster.submit(shape=Shape(1, 2, 2), has_checkpoints=True)
    task = cluster.coordinator.tasks["t"]
    assert task.checkpoints.searched_at is not None
    task.checkpoints.failed_loads = 1
    assert task.checkpoints.search_due_at(msg.Patience()) == [task.checkpoints.searched_at + 6000.0]


def test_a_commit_that_is_not_answered_costs_a_save_and_not_the_end_of_the_task() -> None:
    """Storage that hangs: a finished task was `ending` for ever."""
    cluster = trains(steps=2)
    cluster.crew.commits = False
    write(cluster, 2, W00, W01)
    cluster.seal()
    cluster.wait(599.0)
    assert task_of(cluster).state is TaskState.RUNNING
    cluster.wait(2.0)
    assert task_of(cluster).state is TaskState.FINISHED
    assert "has not committed step 2 within 600 s" in task_of(cluster).because
    assert incident(cluster).closed
    assert task_of(cluster).checkpoints.commit_asked_at == {}


def test_a_last_state_that_is_never_written_is_not_waited_for_without_end() -> None:
    cluster = trains(steps=2, sealed=2)
    cluster.wait(599.0)
    assert task_of(cluster).state is TaskState.RUNNING
    cluster.wait(2.0)
    assert task_of(cluster).state is TaskState.FINISHED
    assert "its last state is not saved (its last part was not written)" in task_of(cluster).because


def test_a_commit_that_is_answered_late_counts() -> None:
    cluster = trains(steps=9, sealed=2)
    cluster.crew.commits = False
    write(cluster, 1, W00, W01)
    (commit,) = orders(cluster, msg.CommitCheckpoint)
    cluster.wait(601.0)
    assert not incident(cluster).closed
    cluster.crew.commits = True
    cluster.crew.obey("a", commit)
    cluster.wait(1.0)
    assert incident(cluster).closed
    assert task_of(cluster).protected == 1


def test_a_new_worker_that_never_gets_the_state_of_a_peer_is_started_again() -> None:
    """A link that swallows everything between a source and a joiner: it never joined."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.submit(shape=Shape(2, 2, 2))
    cluster.seal()
    recovery = cluster.coordinator.tasks["t"].managed
    assert recovery is not None
    joiner = Worker(1, 1)
    cluster.crew.copies = False
    cluster.exits(joiner, "killed by SIGKILL")
    assert isinstance(recovery.places[joiner], Copying)
    first = cluster.coordinator.tasks["t"].seats[joiner].incarnation
    cluster.wait(1799.0)
    assert cluster.coordinator.tasks["t"].seats[joiner].incarnation == first
    cluster.crew.copies = True
    cluster.wait(2.0)
    cluster.wait(10.0)
    assert cluster.coordinator.tasks["t"].seats[joiner].incarnation > first
    assert isinstance(recovery.places[joiner], Entering)
    assert cluster.coordinator.tasks["t"].starts.copying == {}


def waits_for_a_node() -> Coordinator:
    """A script that has two nodes and would take a third."""
    scripts = Scripts(2)
    scripts.submit(least=2, most=3)
    return scripts.machine


def waits_for_checks() -> Coordinator:
    """A node whose time of isolation is over, and which does not answer when it is checked."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    node = cluster.coordinator.nodes["a"]
    cluster.says("a", msg.KernelSpoke(text="NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off"), None)
    assert node.state == "isolated"
    cluster.cut.add("a")
    cluster.wait(msg.Patience().isolation_s + 1.0)
    assert node.check_asked_at is not None
    return cluster.coordinator


WAITING = (waits_for_a_node, waits_for_checks)


@pytest.mark.parametrize(("what", "machine"), list(zip(NOT_IN_STORMS, WAITING, strict=True)))
def test_a_timer_that_no_storm_needs_is_missed_where_it_is_removed(
    what: str, machine: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine()
    assert found.timers()[what]
    assert list(without_timer(found)) == []
    right = Coordinator.timers_of
    monkeypatch.setattr(Coordinator, "timers_of", lambda self, task: {**right(self, task), what: []})
    found.handle(
        msg.JournalBegun(journal="j", version="1", because="what was found before does not count"), 0
    )
    assert list(without_timer(found)) != []


def test_every_timer_has_a_mutant() -> None:
    assert len(TIMER_MUTANTS) + len(NOT_IN_STORMS) == len(Coordinator().timers())


def test_a_report_of_progress_reads_the_timers_of_its_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event read those of all tasks: with 300 of them, half a millisecond each."""
    cluster = FakeCluster(nodes={f"n{number}": 4 for number in range(6)})
    for number in range(6):
        cluster.submit(f"t{number}", steps=12)
    cluster.seal("t3")
    read: list[str] = []
    right = Coordinator.timers_of

    def timers_of(self: Coordinator, task: Task | None) -> Any:
        read.extend([] if task is None else [task.name])
        return right(self, task)

    monkeypatch.setattr(Coordinator, "timers_of", timers_of)
    monkeypatch.setattr(Coordinator, "validate", lambda self: None)
    cluster.seal("t3")
    assert set(read) == {"t3"}
    cluster.exits(Worker(0, 0), "SIGKILL", "t3")  # a process that is gone may free slots for any task
    assert len(set(read)) == 6
