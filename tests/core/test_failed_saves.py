"""What the coordinator and an agent decide about states that cannot be saved."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everstep.core.cluster.checkpoints import NOT_COPIED, NOT_SAVED, UNSAVED
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.cluster.task import Task, TaskState
from everstep.core.faults.detector import DetectorLimits, Glance, ProgressWatch
from everstep.core.worker.control import raised_for
from everstep.errors import DeviceError, UserError
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Incident
from everstep.protocol.messages import LOADING, SAVING
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

W00, W01 = Worker(0, 0), Worker(0, 1)
FULL = "OSError: [Errno 28] No space left on device"


def trains(*, steps: int = 9, sealed: int = 1) -> FakeCluster:
    cluster = FakeCluster()
    cluster.submit(steps=steps, has_checkpoints=True)
    for _ in range(sealed):
        cluster.seal()
    return cluster


def task_of(cluster: FakeCluster) -> Task:
    return cluster.coordinator.tasks["t"]


def attempt(cluster: FakeCluster, step: int) -> int:
    recovery = task_of(cluster).recovery
    return 1 if recovery is None else recovery.attempt_of(step)


def write(cluster: FakeCluster, step: int, *workers: Worker) -> None:
    for worker in workers:
        part = msg.PartWritten(
            task="t", step=step, stage=worker.stage, attempt=attempt(cluster, step), part="p"
        )
        cluster.report("t", worker, part)


def fails(cluster: FakeCluster, step: int, worker: Worker, *, memory_of: str | None = None) -> None:
    failed = msg.SaveFailed(
        task="t", step=step, attempt=attempt(cluster, step), because=FULL, memory_of=memory_of
    )
    cluster.report("t", worker, failed)


def orders(cluster: FakeCluster, kind: type) -> list[msg.Order]:
    dispatched = (action for action in cluster.actions if isinstance(action, msg.Dispatch))
    return [action.order for action in dispatched if isinstance(action.order, kind)]


def incident(cluster: FakeCluster) -> Incident:
    (found,) = cluster.coordinator.log.incidents
    return found


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (msg.Unsaved.STORAGE_IS_SILENT, "remote storage error"),
        (msg.Unsaved.NO_MEMORY, "host out of memory"),
    ],
)
def test_why_a_state_is_not_saved_is_a_value_and_no_sentence_of_ours_is_read(
    reason: msg.Unsaved, kind: str
) -> None:
    cluster = trains()
    failed = msg.SaveFailed(task="t", step=1, attempt=1, because="worded in another way", reason=reason)
    cluster.report("t", W01, failed)
    verdict = incident(cluster).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.because) == (kind, "worded in another way")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(UserError("a"), "exception in user code"), (DeviceError("a"), "cuda error"), (KeyError("a"), None)],
)
def test_what_everstep_itself_raised_is_judged_by_its_class(error: Exception, kind: str | None) -> None:
    cluster = trains()
    cluster.raises(W01, "worded in another way", raised_for=raised_for(error))
    verdict = incident(cluster).verdict
    assert verdict is not None
    assert verdict.kind == (kind or "exception in user code")


def test_a_failed_save_is_one_incident_and_what_was_written_is_removed() -> None:
    cluster = trains(sealed=3)
    write(cluster, 1, W00)
    fails(cluster, 1, W01)
    fails(cluster, 2, W00)
    assert [getattr(order, "step", 0) for order in orders(cluster, msg.DiscardPartial)] == [1, 2]
    assert incident(cluster).what == NOT_SAVED
    assert not incident(cluster).stops_training
    assert len(incident(cluster).evidence) == 2
    assert task_of(cluster).state is TaskState.RUNNING
    assert task_of(cluster).checkpoints.num_failed == 2


def test_a_part_that_comes_after_its_peer_failed_is_removed_too() -> None:
    cluster = trains()
    fails(cluster, 1, W01)
    write(cluster, 1, W00, W01)
    assert orders(cluster, msg.CommitCheckpoint) == []
    assert len(orders(cluster, msg.DiscardPartial)) == 3


def test_the_next_checkpoint_that_is_saved_closes_the_incident() -> None:
    cluster = trains(sealed=2)
    fails(cluster, 1, W01)
    write(cluster, 2, W00, W01)
    assert incident(cluster).closed
    assert task_of(cluster).protected == 2
    assert task_of(cluster).checkpoints.failing == ""


def test_a_copy_that_does_not_fit_into_memory_is_an_incident_of_its_own() -> None:
    cluster = trains()
    fails(cluster, 1, W01, memory_of="b")
    assert incident(cluster).what == NOT_COPIED
    assert orders(cluster, msg.DiscardPartial) == []


def test_a_task_is_not_finished_before_its_last_state_is_committed() -> None:
    cluster = trains(steps=2)
    cluster.crew.commits = False
    write(cluster, 2, W00, W01)
    cluster.seal()
    assert task_of(cluster).state is TaskState.RUNNING
    assert "its last state is being saved" in task_of(cluster).because
    node = task_of(cluster).checkpoints.committing[2]
    cluster.says(node, msg.TaskEvent(task="t", event=ev.CheckpointCommitted(step=2)), None)
    assert task_of(cluster).state is TaskState.FINISHED
    assert task_of(cluster).protected == 2


def test_whoever_dies_while_the_last_state_is_written_leaves_others_who_write_it() -> None:
    """The task was over with the last seal: a part that its worker did not live to write was missing, and the
    newest checkpoint was an old one.
    """
    cluster = trains(steps=2, sealed=2)
    write(cluster, 2, W01)
    cluster.exits(W00, "killed by SIGKILL")
    assert task_of(cluster).state is TaskState.RUNNING
    write(cluster, 2, Worker(1, 0))
    assert task_of(cluster).state is TaskState.FINISHED
    assert task_of(cluster).protected == 2


def test_workers_that_are_interrupted_after_the_last_step_go_on_and_write_it() -> None:
    """Seen once in a hundred runs on a busy machine: whoever had caught up just then interrupted the others,
    and paused workers left at once, with a state that nobody had written.
    """
    cluster = trains(steps=2)
    cluster.crew.ledgers = False
    cluster.exits(W00, "killed by SIGKILL")
    cluster.seal()
    assert task_of(cluster).progress.recorded == 2
    assert task_of(cluster).state is TaskState.RUNNING
    assert len(cluster.resumes()) == 4
    cluster.crew.answer()
    assert len(cluster.resumes()) == 7
    write(cluster, 2, Worker(1, 0), W01)
    assert task_of(cluster).state is TaskState.FINISHED
    assert task_of(cluster).protected == 2


def test_a_last_state_is_not_given_up_while_workers_heal() -> None:
    """A state that may be wrong counts as broken, and is computed again."""
    cluster = trains(steps=2, sealed=2)
    cluster.crew.ledgers = False
    cluster.exits(W00, "killed by SIGKILL")
    fails(cluster, 2, W01)
    assert task_of(cluster).state is TaskState.RUNNING
    for _ in range(3):
        cluster.wait(601.0)
        due_at = cluster.coordinator.due_at()
        assert due_at is None or due_at > cluster.now, "the clock does not strike again and again"
    assert task_of(cluster).state is TaskState.RUNNING
    cluster.crew.answer()
    assert task_of(cluster).state is TaskState.FINISHED
    assert UNSAVED in task_of(cluster).because


def test_a_last_state_that_is_lost_is_trained_again() -> None:
    """Of the state of step 1 there is a checkpoint."""
    cluster = trains(steps=3)
    write(cluster, 1, W00, W01)
    cluster.crew.on_disk = 1
    for _ in range(2):
        cluster.seal()
    for worker in (W00, Worker(1, 0)):
        cluster.exits(worker, "killed by SIGKILL")
    assert task_of(cluster).progress.held is None
    for _ in range(2):
        cluster.seal()
    write(cluster, 3, W00, W01)
    assert task_of(cluster).state is TaskState.FINISHED
    assert task_of(cluster).protected == 3


def test_a_task_whose_last_commit_fails_says_so_and_finishes() -> None:
    cluster = trains(steps=2)
    cluster.crew.commits = False
    write(cluster, 2, W00, W01)
    cluster.seal()
    node = task_of(cluster).checkpoints.committing[2]
    cluster.says(node, msg.SaveFailed(task="t", step=2, attempt=0, because=FULL), None)
    assert task_of(cluster).state is TaskState.FINISHED
    assert "its last state is not saved" in task_of(cluster).because
    assert incident(cluster).closed


def test_a_commit_that_is_late_does_not_close_the_incident_of_a_newer_state() -> None:
    """Seen on a busy machine: the failed save of step 2 was two incidents."""
    cluster = trains(sealed=2)
    cluster.crew.commits = False
    write(cluster, 1, W00, W01)
    fails(cluster, 2, W00)
    node = task_of(cluster).checkpoints.committing[1]
    committed = ev.CheckpointCommitted(step=1)
    cluster.says(node, msg.TaskEvent(task="t", event=committed), None)
    assert not incident(cluster).closed
    assert task_of(cluster).checkpoints.failing == FULL


def test_a_last_state_that_several_workers_cannot_save_is_one_incident() -> None:
    """The second failure came when the task was ending, and its incident was closed."""
    cluster = trains(sealed=2)
    fails(cluster, 2, W00)
    cluster.cut = {"a", "b"}  # its workers are slow to leave
    for _ in range(2):
        cluster.hear(msg.PauseRequested(task="t"))  # the second time: at once
    assert task_of(cluster).state is TaskState.ENDING
    cluster.cut = set()
    fails(cluster, 2, W01)
    assert len(incident(cluster).evidence) == 2


def test_a_node_lost_while_it_commits_does_not_keep_the_task_from_ending() -> None:
    cluster = trains(steps=2)
    cluster.crew.commits = False
    write(cluster, 2, W00, W01)
    cluster.seal()
    cluster.hear(msg.NodeLeft(node=task_of(cluster).checkpoints.committing[2]))
    assert task_of(cluster).state is TaskState.FINISHED
    assert "was lost while it committed" in task_of(cluster).because


def test_parts_that_come_while_a_task_pauses_are_committed() -> None:
    """Its recovery is gone by then; they were ignored."""
    cluster = trains(sealed=2)
    cluster.cut = {"a", "b"}  # its workers are slow to leave
    cluster.hear(msg.PauseRequested(task="t"))
    cluster.hear(msg.PauseRequested(task="t"))  # at once
    cluster.cut = set()
    write(cluster, 2, W00, W01)
    assert task_of(cluster).checkpoints.newest == 2


@pytest.mark.parametrize("doing", [SAVING, LOADING])
def test_a_state_that_is_written_or_read_is_never_taken_for_a_hang(doing: str) -> None:
    """It was billed to the op before it."""
    watch = ProgressWatch(DetectorLimits())
    watch.expects("t", W00, {"F": 0.01})
    for age in range(0, 4000, 40):
        glance = Glance(moment=1, step=1, busy=True, doing=doing, age_s=float(age))
        assert watch.look("t", W00, 1, glance, stopped=False, now=float(age)) is None


def test_what_a_cancelled_task_has_half_written_is_removed() -> None:
    """Found by a storm: two incomplete checkpoints stayed for ever."""
    cluster = trains(sealed=2)
    write(cluster, 2, W00)
    cluster.hear(msg.CancelRequested(task="t"))
    assert task_of(cluster).state is TaskState.CANCELLED
    assert orders(cluster, msg.DiscardPartial) == [msg.DiscardPartial(task="t", step=10)]


# ------------------------------------------------------------------ workers are held until a state is safe


def held(**more: Any) -> FakeCluster:
    """It was asked to pause, and has stopped after a step that is not saved yet."""
    cluster = FakeCluster(**more)
    cluster.submit(steps=99, has_checkpoints=True)
    cluster.seal()
    cluster.hear(msg.PauseRequested(task="t"))
    while task_of(cluster).progress.held is None:
        cluster.seal()
    return cluster


def test_a_pause_holds_the_workers_until_the_state_is_on_disk() -> None:
    """31 steps, no part ever written: "paused", protected 0, resumed at step 1."""
    cluster = held()
    task, step = task_of(cluster), task_of(cluster).progress.recorded
    cluster.wait(60)
    assert task.state is TaskState.RUNNING
    assert len(cluster.crew.actors) == 4, "they have the only copy"
    write(cluster, step, W00, W01)
    assert task.state is TaskState.PAUSED
    assert task.checkpoints.newest == step
    assert not cluster.coordinator.log.incidents


def test_a_worker_that_hangs_while_others_hold_a_state_is_called_hung() -> None:
    """Six storms (`--moves`, `--plans`; seed 700500 is one): nothing was looked at until the save's time was
    up, ten minutes later.
    """
    cluster = held()
    for worker in (W00, Worker(1, 0), Worker(1, 1)):
        cluster.overdue(worker, doing="Finished", busy=False, elapsed_s=60.0)
    assert not cluster.coordinator.log.incidents, "they have nothing to do"
    cluster.overdue(W01, doing="1U", busy=True, elapsed_s=60.0)
    (incident,) = cluster.coordinator.log.incidents
    assert incident.workers == [W01]
    assert "hung in 1U" in incident.evidence[0].text


def test_a_worker_that_holds_a_state_and_takes_no_order_is_called_hung() -> None:
    """A storm (`--moves`): all were interrupted while they held a state, one was asleep, and its ledger was
    waited for without end.
    """
    cluster = held()
    cluster.overdue(W01, doing="Finished", busy=False, elapsed_s=60.0, unanswered_s=60.0)
    (incident,) = cluster.coordinator.log.incidents
    assert incident.workers == [W01]
    assert "has not taken an order" in incident.evidence[0].text


def test_a_task_whose_state_cannot_be_saved_is_not_paused_and_trains_on() -> None:
    """With a full disk there was an incident, and its steps were lost all the same."""
    cluster = held()
    task, step = task_of(cluster), task_of(cluster).progress.recorded
    write(cluster, step, W00)
    fails(cluster, step, W01)
    assert task.state is TaskState.RUNNING
    assert "could not be made safe (OSError: [Errno 28] No space left on device)" in task.because
    assert task.because.endswith("so it keeps running")
    assert "it was not stopped" in [one.what for one in cluster.coordinator.log.incidents]
    for _ in range(3):
        cluster.seal()
    assert task.progress.recorded == step + 3
    assert [actor.incarnation for actor in cluster.crew.actors.values()] == [1] * 4, "the same processes"
    cluster.hear(msg.PauseRequested(task="t"))
    while task.progress.held is None:
        cluster.seal()
    cluster.save(task.progress.recorded)
    assert task.state is TaskState.PAUSED, "there is room again"


def test_storage_that_hangs_does_not_hold_workers_without_end() -> None:
    cluster = held()
    limit_s = cluster.coordinator.patience.disk_answer_s
    due_at = cluster.coordinator.due_at()
    assert due_at is not None
    assert due_at <= cluster.now + limit_s
    cluster.wait(limit_s + 1)
    assert task_of(cluster).state is TaskState.RUNNING
    assert f"not saved within {limit_s:.0f} s" in task_of(cluster).because
    cluster.seal()


def test_a_pause_by_force_does_not_wait() -> None:
    cluster = held()
    cluster.hear(msg.PauseRequested(task="t", force=True))
    assert task_of(cluster).state is TaskState.PAUSED


def test_a_worker_that_dies_while_a_state_is_held_costs_another_step() -> None:
    """It may have been the one that writes: a storm's survivors waited for its part for ten minutes."""
    cluster = held()
    task, step = task_of(cluster), task_of(cluster).progress.recorded
    cluster.exits(W00, "killed by SIGKILL")
    assert task.state is TaskState.RUNNING
    assert task.progress.held is None
    while task.progress.held is None:
        cluster.seal()
    assert task.progress.recorded == step + 1
    write(cluster, step + 1, Worker(1, 0), W01)
    assert task.state is TaskState.PAUSED


def test_a_shape_that_ends_is_left_once_each_stage_is_in_two_memories() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), memory_port=7)
    cluster.submit(steps=99)
    cluster.seal()
    task = task_of(cluster)
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 2, 4)))
    cluster.copy_to_memory(2, away=False)  # one of each stage
    cluster.seal()
    assert task.shape == Shape(2, 2, 2)
    assert task.progress.held is not None
    cluster.leave_in_memory(2)
    assert task.shape == Shape(1, 2, 4)
    assert task.state is TaskState.RUNNING


def test_a_held_state_is_in_a_snapshot() -> None:
    cluster = held()
    fresh = Coordinator()
    thaw(fresh, json.loads(json.dumps(freeze(cluster.coordinator))))
    assert fresh.tasks["t"].progress.held == task_of(cluster).progress.held
    assert digest(fresh) == digest(cluster.coordinator)


def test_workers_that_hold_a_state_are_not_called_hung() -> None:
    """They say that they wait: after the third time all would be restarted, and the state be lost."""
    cluster = held()
    for _ in range(5):
        for worker in sorted(task_of(cluster).seats):
            cluster.overdue(worker)
        cluster.wait(10)
    assert not cluster.coordinator.log.incidents
    assert [actor.incarnation for actor in cluster.crew.actors.values()] == [1] * 4


def test_a_worker_that_joins_has_no_state_to_leave() -> None:
    """Seed 940007 of the storms: its copy was waited for."""
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), memory_port=7)
    cluster.submit(steps=99)
    cluster.seal()
    task = task_of(cluster)
    cluster.crew.copies = False  # a joiner stays one
    cluster.exits(W00, "killed by SIGKILL")
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 2, 4)))
    step = task.progress.recorded + 1
    for worker in (Worker(1, 0), W01, Worker(1, 1)):
        node = task.seats[worker].node
        part = msg.PartWritten(
            task="t",
            step=step,
            stage=worker.stage,
            attempt=attempt(cluster, step),
            part={"file": "p"},
            memory_of=node,
        )
        cluster.report("t", worker, part)
    assert W00 in task.seats
    cluster.crew.copies = True
    for stage in (0, 1):
        sealed = ev.StepSealed(
            step=step, stage=stage, attempt=attempt(cluster, step), microbatches=4, executed=12
        )
        cluster.report("t", Worker(1, stage), msg.TaskEvent(task="t", event=sealed))
    assert task.shape == Shape(1, 2, 4)
