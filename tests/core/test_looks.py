"""Before all workers go back to a kept state, the checkpoint folder is looked at: a checkpoint may have been
committed while the coordinator was away, or by a node that died before it could report it.
"""

from everstep.core.task.states import Running
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

W00, W01 = Worker(0, 0), Worker(0, 1)


def trained(steps: int = 12) -> FakeCluster:
    cluster = FakeCluster(nodes={"a": 1, "b": 1})
    cluster.submit(shape=Shape(1, 2, 2), steps=400, has_checkpoints=True)
    for _ in range(steps):
        cluster.seal()
    return cluster


def looks(cluster: FakeCluster) -> list[msg.FindCheckpoint]:
    orders = [getattr(action, "order", None) for action in cluster.actions]
    return [order for order in orders if isinstance(order, msg.FindCheckpoint) and order.live]


def committed(cluster: FakeCluster, step: int) -> None:
    cluster.says("a", msg.TaskEvent(task="t", event=ev.CheckpointCommitted(step=step)), None)


def test_all_go_back_to_the_newest_checkpoint_of_the_folder_not_of_the_journal() -> None:
    """A node with all workers lost power; 395 steps that it had saved were trained again."""
    cluster = trained()
    committed(cluster, 5)
    cluster.crew.on_disk = 400 - 10
    cluster.exits(W01, "killed by SIGKILL")
    task = cluster.coordinator.tasks["t"]
    assert task.recovery is not None
    assert isinstance(task.recovery.phase, Running)
    assert (task.recovery.recorded, task.checkpoints.newest) == (390, 390)
    (look,) = looks(cluster)
    assert (look.known, look.run) == (5, msg.run_of("s"))
    cluster.seal()
    assert task.recovery.recorded == 391


def test_a_checkpoint_of_the_last_step_finishes_the_task() -> None:
    cluster = trained()
    cluster.crew.on_disk = 400
    cluster.exits(W01, "killed by SIGKILL")
    assert cluster.coordinator.tasks["t"].state == "finished"


def test_a_folder_that_does_not_answer_is_not_waited_for_without_end() -> None:
    cluster = trained()
    committed(cluster, 5)
    unanswered = ev.CheckpointsLooked(search=1, step=99)
    cluster.crew.looks = False
    cluster.exits(W01, "killed by SIGKILL")
    task = cluster.coordinator.tasks["t"]
    assert task.managed is not None
    assert not isinstance(task.managed.phase, Running)
    cluster.says("a", msg.TaskEvent(task="t", event=unanswered), None)  # to an earlier search
    assert not isinstance(task.managed.phase, Running)
    cluster.wait(31.0)
    assert isinstance(task.managed.phase, Running)
    assert task.managed.recorded == 5


def test_a_commit_that_is_reported_before_the_last_seal_of_its_step_counts() -> None:
    cluster = trained(steps=4)
    committed(cluster, 5)
    task = cluster.coordinator.tasks["t"]
    assert task.managed is not None
    assert (task.checkpoints.newest, task.managed.checkpoint) == (0, 0)
    cluster.seal()
    assert (task.checkpoints.newest, task.managed.checkpoint) == (5, 5)


def test_a_commit_without_an_order_ends_the_orders_of_earlier_ones() -> None:
    cluster = trained(steps=4)
    cluster.crew.commits = False
    for worker in (W00, W01):
        part = msg.PartWritten(task="t", step=3, stage=worker.stage, attempt=1, part={"name": str(worker)})
        cluster.report("t", worker, part)
    task = cluster.coordinator.tasks["t"]
    assert task.checkpoints.committing
    committed(cluster, 4)
    assert not task.checkpoints.committing
