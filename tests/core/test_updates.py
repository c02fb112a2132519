"""New code for a running task, from the next step boundary on."""

from __future__ import annotations

from everstep.core.cluster.task import Task, TaskState
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from tests.support.fake_cluster import FakeCluster

OLD, NEW = {"job": "t"}, {"job": "t", "code": "new"}


def updated() -> tuple[FakeCluster, Task]:
    """At step 2, by the new job's workers."""
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), memory_port=7)
    cluster.submit(steps=99)
    cluster.seal()
    task = cluster.coordinator.tasks["t"]
    cluster.hear(msg.UpdateRequested(task="t", job=NEW, shape=task.shape, by="alice"))
    assert task.job == OLD, "until the step boundary"
    cluster.leave_in_memory(2)
    cluster.seal()
    return cluster, task


def test_the_new_job_goes_on_from_the_same_state_and_no_step_is_done_twice() -> None:
    cluster, task = updated()
    assert task.job == NEW
    assert task.state is TaskState.RUNNING
    assert task.progress.recorded == 2
    cluster.seal()
    assert task.progress.recorded == 3
    assert not cluster.coordinator.log.incidents


def test_a_death_after_an_update_is_healed_as_any_other() -> None:
    cluster, task = updated()
    cluster.exits(Worker(1, 0), "killed by SIGKILL")
    assert task.job == NEW
    assert task.state is TaskState.RUNNING
