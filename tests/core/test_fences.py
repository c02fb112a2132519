"""Reports of a process that was given up do not count, whatever it says and whenever it is heard."""

from __future__ import annotations

import pytest

from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.task import TaskState
from everstep.core.task.owed import Shape
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.work import Ledger
from tests.support.fake_cluster import FakeCluster

W00, W01 = Worker(0, 0), Worker(0, 1)


def restarted_elsewhere(at_step: int = 3) -> FakeCluster:
    """The whole task is on node a, which falls silent and is given up; the task starts again on b."""
    cluster = FakeCluster(nodes={"a": 2})
    cluster.submit(shape=Shape(1, 2, 2), steps=99)
    for _ in range(at_step):
        cluster.seal()
    cluster.silence("a")
    cluster.join("b")
    cluster.wait(cluster.coordinator.patience.cut_silence_s + 1.0)
    assert cluster.coordinator.nodes["a"].state is NodeState.GONE
    task = cluster.coordinator.tasks["t"]
    assert {seat.node for seat in task.seats.values()} == {"b"}
    cluster.seal()
    return cluster


def sealed(step: int, stage: int, attempt: int) -> ev.StepSealed:
    return ev.StepSealed(step=step, stage=stage, attempt=attempt, microbatches=2, executed=6)


def late(cluster: FakeCluster, report: msg.NodeReport, worker: Worker, incarnation: int = 1) -> None:
    """Node a is heard again, in its old boot."""
    cluster.numbers["a"] += 1
    event = msg.FromNode(
        node="a",
        boot="1",
        number=cluster.numbers["a"],
        report=report,
        sender=msg.Sender("t", worker, incarnation),
    )
    cluster.hear(event)


def test_steps_of_a_node_that_was_given_up_are_not_on_record_when_it_is_back() -> None:
    cluster = restarted_elsewhere()
    recovery = cluster.coordinator.tasks["t"].recovery
    assert recovery is not None
    recorded, attempt = recovery.recorded, recovery.attempt_of(2)
    cluster.join("a")
    for step in range(1, 56):
        for worker in (W00, W01):
            for of in (attempt - 1, attempt):
                event = sealed(step, worker.stage, of)
                late(cluster, msg.TaskEvent(task="t", event=event), worker)
    assert recovery.recorded == recorded
    assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING
    cluster.seal()
    assert recovery.recorded == recorded + 1


LATE = [
    ev.WorkerStarted(worker=W00, incarnation=1, address=("a", 1)),
    ev.WorkerExited(worker=W00, incarnation=1, reason="killed by SIGKILL"),
    ev.WorkerRaised(worker=W00, incarnation=1, error="ValueError", where="step 1 0F0"),
    ev.LedgerReported(worker=W00, epoch=2, ledger=Ledger(step=50)),
    sealed(2, 0, 2),
    ev.UpdateInvalidated(worker=W00, step=1, norm=9.0, attempt=2),
    ev.StateCopied(worker=W00, incarnation=1, transfer=1, state_step=50),
    ev.WorkerResumed(worker=W00, epoch=2, at=0.0),
    ev.RestoreFailed(worker=W00, incarnation=1, step=0),
    ev.CheckpointCommitted(step=50),
    ev.StopRequested(because="an agent has no business to say this"),
]
LATE_REPORTS = [
    msg.PartWritten(task="t", step=2, stage=0, attempt=2, part={}),
    msg.PartWritten(task="t", step=2, stage=0, attempt=2, part={}, memory_of="a"),
    msg.StateFetched(task="t", worker=W00, step=2, bytes_here=1, bytes_elsewhere=1, seconds=1.0),
    msg.LinkMended(task="t", worker=W00, peer=W01),
    msg.WorkerMoved(task="t", worker=W00, incarnation=1),
    msg.OpOverdue(
        task="t",
        worker=W00,
        incarnation=1,
        doing="0F0",
        busy=True,
        stopped=True,
        elapsed_s=9.0,
        expected_s=0.1,
        step=2,
    ),
    *(msg.TaskEvent(task="t", event=event) for event in LATE),
]


@pytest.mark.parametrize("report", LATE_REPORTS, ids=lambda r: type(getattr(r, "event", r)).__name__)
def test_no_report_of_a_process_that_was_given_up_changes_anything(report: msg.NodeReport) -> None:
    from everstep.core.cluster.snapshot import freeze

    cluster = restarted_elsewhere()
    cluster.join("a")
    coordinator = cluster.coordinator

    def state() -> dict[str, object]:
        frozen = freeze(coordinator)
        return {"tasks": frozen["tasks"], "incidents": frozen["incidents"]}

    before, heard = state(), coordinator.nodes["a"].heard
    said = len(cluster.actions)
    late(cluster, report, W00)
    assert coordinator.nodes["a"].heard == heard + 1, "it is heard, so that its agent need not say it again"
    assert state() == before
    assert cluster.actions[said:] == []
    late(cluster, report, W00, incarnation=2)  # the right number, from a node where it is not
    assert state() == before


def test_a_worker_speaks_for_itself_only() -> None:
    cluster = FakeCluster(nodes={"a": 4})
    cluster.submit()
    exited = ev.WorkerExited(worker=W01, incarnation=1, reason="killed by SIGKILL")
    cluster.says("a", msg.TaskEvent(task="t", event=exited), msg.Sender("t", W00, 1))
    cluster.says("a", msg.TaskEvent(task="t", event=exited), None)
    assert cluster.coordinator.tasks["t"].seats[W01].incarnation == 1
    assert not cluster.coordinator.log.incidents


def test_seals_and_parts_of_a_step_that_was_taken_back_do_not_count() -> None:
    """A worker lives on through the loss of another stage: its words from before are of an old attempt."""
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1})
    cluster.submit(shape=Shape(1, 2, 2), steps=99)
    task = cluster.coordinator.tasks["t"]
    assert task.recovery is not None
    for _ in range(3):
        cluster.seal()
    before = task.recovery.attempt_of(4)
    cluster.exits(W01, "killed by SIGKILL")
    assert task.recovery.recorded == 0
    assert task.seats[W00].incarnation == 1, "this one was not restarted"
    cluster.report("t", W00, msg.TaskEvent(task="t", event=sealed(4, 0, before)))
    part = msg.PartWritten(task="t", step=4, stage=0, attempt=before, part={"old": 1})
    cluster.report("t", W00, part)
    assert task.recovery._book.sealed == {}
    assert task.checkpoints.parts == {}
    now = task.recovery.attempt_of(4)
    cluster.report("t", W00, msg.PartWritten(task="t", step=4, stage=0, attempt=now, part={"new": 1}))
    assert task.checkpoints.parts[4].attempt == now
