"""New code for a running task: it stays if it holds, and the job before comes back if it does not."""

from __future__ import annotations

import math

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.cluster.task import Ending, Task, TaskState
from everstep.core.cluster.trial import Trial
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.core.fake_cluster import FakeCluster

OLD, NEW = {"job": "t"}, {"job": "t", "code": "new"}


def updated(**limits: float) -> tuple[FakeCluster, Task]:
    """At step 2, by the new job's workers."""
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), memory_port=7)
    cluster.submit(steps=99)
    cluster.seal()
    shape = cluster.coordinator.tasks["t"].shape
    cluster.hear(msg.UpdateRequested(task="t", job=NEW, shape=shape, steps=6, by="alice", **limits))
    task = cluster.coordinator.tasks["t"]
    assert task.job == OLD, "until the step boundary"
    leave(cluster, 2)
    assert task.job == NEW
    assert task.state is TaskState.RUNNING
    return cluster, task


def leave(cluster: FakeCluster, step: int) -> None:
    """The task's workers end the step they are in, and others come."""
    cluster.leave_in_memory(step)
    cluster.seal()


def test_an_update_that_holds_stays() -> None:
    cluster, task = updated(most_loss=1.25, most_step_s=1e9)
    for _ in range(5):
        cluster.seal()
        assert task.trial is not None
    cluster.seal()
    assert task.trial is None
    assert task.updated == "the update by alice stays after 6 steps on trial"
    assert task.job == NEW
    assert task.progress.recorded == 8
    assert not cluster.coordinator.log.incidents


def test_a_worker_that_raises_before_its_first_step_brings_the_old_job_back_and_no_step_is_lost() -> None:
    cluster, task = updated()
    seat = task.seats[Worker(0, 1)]
    raised = ev.WorkerRaised(
        worker=Worker(0, 1), incarnation=seat.incarnation, error="NameError: tensr", where="building"
    )
    cluster.report("t", Worker(0, 1), msg.TaskEvent(task="t", event=raised))
    assert task.job == OLD
    assert task.state is TaskState.RUNNING
    assert task.trial is None
    assert task.updated == "the update by alice is rolled back: worker 0:1 raised NameError: tensr"
    assert task.progress.recorded == 2
    assert task.recovery is not None
    assert task.recovery.recorded == 2
    cluster.seal()
    assert task.progress.recorded == 3


def test_a_worker_that_is_killed_before_its_first_step_brings_the_old_job_back() -> None:
    cluster, task = updated()
    cluster.exits(Worker(1, 0), "killed by SIGSEGV")
    assert task.job == OLD
    assert "worker 1:0 ended before its first step: killed by SIGSEGV" in task.updated
    cluster.seal()
    assert task.progress.recorded == 3


def test_a_death_after_the_first_step_is_healed_as_any_other() -> None:
    cluster, task = updated()
    cluster.seal()
    cluster.exits(Worker(1, 0), "killed by SIGKILL")
    assert task.job == NEW
    assert task.trial is not None


@pytest.mark.parametrize(
    ("losses", "because"),
    [
        ([math.nan], "the loss is nan"),
        ([1.0, 1.2, 1.4, 1.6, 1.8], "the loss is 1.4 on average, above 1.25"),
    ],
)
def test_a_loss_that_leaves_its_band_brings_the_old_job_back_at_a_step_boundary(
    losses: list[float], because: str
) -> None:
    cluster, task = updated(most_loss=1.25)
    for loss in losses:
        assert task.trial is not None
        cluster.seal(loss=loss)
    assert task.trial is None
    assert task.updated == f"the update by alice is rolled back: {because}"
    assert task.job == NEW, "until the step boundary"
    leave(cluster, task.progress.recorded + 1)
    assert task.job == OLD
    assert task.state is TaskState.RUNNING


def test_gradients_that_are_not_finite_bring_the_old_job_back_though_the_loss_is_in_its_band() -> None:
    """Such steps are skipped, so the loss stayed where it was, and the update stayed for good."""
    cluster, task = updated(most_loss=1.25)
    for squares in (1.0, math.inf, math.nan, math.inf, math.inf, math.inf):
        assert task.trial is not None
        cluster.seal(sum_of_squares=squares)
    because = "the gradients of 5 steps in a row were not finite"
    assert task.updated == f"the update by alice is rolled back: {because}"


def test_a_task_that_would_fail_on_trial_goes_back_instead() -> None:
    cluster, task = updated()
    cluster.seal()
    failing = Ending(state=TaskState.FAILED, because="two workers raised ValueError at one op")
    cluster.coordinator._tasks.end(task, failing, Moment(cluster.now, 99))
    assert task.ending is not None
    assert task.ending.state is TaskState.WAITING
    assert task.next_shape is not None
    assert task.next_shape.job == OLD
    assert task.updated == f"the update by alice is rolled back: {failing.because}"


def test_steps_that_take_longer_leave_the_band_by_their_median() -> None:
    def judged(seconds: list[float]) -> str:
        request = msg.UpdateRequested(task="t", job={}, shape=Shape(1, 1, 1), steps=20, most_step_s=1.5)
        trial, at = Trial(job={}, shape=Shape(1, 1, 1), request=request), 0.0
        for duration in seconds:
            at += duration
            if because := trial.recorded([1.0], at):
                return because
        return ""

    assert judged([60.0, 1, 1, 1, 1, 1]) == "", "the first holds the start"
    assert judged([60.0, 1, 1, 9, 9, 1, 1]) == ""
    assert judged([1.0, 2, 2, 2, 2]) == "", "four are not enough"
    assert judged([1.0, 2, 2, 2, 2, 2]) == "a step takes 2 s, more than 1.5 s"


def test_a_snapshot_keeps_a_trial() -> None:
    cluster, task = updated(most_loss=2.0)
    cluster.seal()
    again = Coordinator()
    thaw(again, freeze(cluster.coordinator))
    assert digest(again) == digest(cluster.coordinator)
    assert again.tasks["t"].trial == task.trial
