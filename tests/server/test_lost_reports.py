"""Steps that were done, and whose reports were lost: with a node that died while no coordinator was there."""

from everstep.core.cluster.task import TaskState
from everstep.drive.driver import Handled
from everstep.drive.step_rows import StepRows
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from everstep.server.record import ClusterRecord
from everstep.server.views import task_row
from tests.core.fake_cluster import FakeCluster


def test_a_task_whose_last_steps_were_never_reported_has_counted_all_its_microbatches() -> None:
    """A storm on real processes: 60 steps were done, 42 reported, and 168 of 240 microbatches counted: the
    newest state was that of the last step, so no worker was asked to go on.
    """
    cluster = FakeCluster(nodes={"a": 1})
    cluster.submit(shape=Shape(1, 1, 4), steps=60)
    task = cluster.coordinator.tasks["t"]
    record = ClusterRecord()
    record.machine = cluster.coordinator
    record.steps["t"] = StepRows(first=1, last=42, committed=168)
    task.progress.recovery, task.progress.recorded = None, 60
    ended = msg.TaskEnded(task="t", state=TaskState.FINISHED, because="completed all 60 steps", cause=1)
    record.handled(Handled(number=9, at=1.0, event=None, actions=[ended], replayed=False))
    counted = task_row(record, task)["microbatches"]
    assert counted == {"issued": 240, "committed": 240}
