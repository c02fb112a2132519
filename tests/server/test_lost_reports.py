"""Steps that were done, and whose reports were lost: with a node that died while no coordinator was there."""

from dataclasses import replace
from typing import Any

from everstep.core.cluster.task import TaskState
from everstep.drive.driver import Handled
from everstep.drive.ports import HandledEvent
from everstep.drive.step_rows import StepRows, rows_document, rows_from
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.server import views
from everstep.server.record import ClusterRecord
from everstep.server.views import task_row
from tests.support.fake_cluster import FakeCluster


class Recorded(FakeCluster):
    """With rows of steps, as pages show them."""

    def __init__(self) -> None:
        self.record = ClusterRecord()
        super().__init__(nodes={"a": 1, "b": 1})
        self.record.machine = self.coordinator
        self.submit(shape=Shape(1, 2, 2), steps=20, has_checkpoints=True)
        for _ in range(12):
            self.seal()

    def handled(self, one: HandledEvent) -> None:
        super().handled(one)
        self.record.machine = self.coordinator
        self.record.handled(one)

    def told(self) -> dict[str, Any]:
        return views.task(self.record, self.coordinator.tasks["t"])


def test_a_task_that_ends_with_a_checkpoint_beyond_its_rows_tells_which_have_none() -> None:
    """Two storms on real processes: the reports of the last steps were lost with a node that was given up,
    or with the coordinator's journal; 16 of 240 microbatches were counted, and 58 of 60 steps.
    """
    for paused, because in ((False, "completed all 20 steps"), (True, "step 20 is already the end")):
        cluster = Recorded()
        cluster.crew.on_disk = 20
        if paused:
            cluster.hear(msg.PauseRequested(task="t"))
            cluster.seal()
        cluster.exits(Worker(0, 1), "killed by SIGKILL")
        if paused:
            cluster.hear(msg.UnpauseRequested(task="t"))
        told = cluster.told()
        assert because in told["because"]
        assert (told["state"], told["step"]) == ("finished", 20)
        assert told["microbatches"] == {"issued": 40, "committed": 40}
        assert told["rows_lost"] == [[len(told["rows"]) + 1, 20]]


def test_steps_that_are_done_again_have_rows_again() -> None:
    cluster = Recorded()
    cluster.crew.on_disk = 16
    cluster.exits(Worker(0, 1), "killed by SIGKILL")
    cluster.seal()
    assert cluster.told()["rows_lost"] == [[13, 16]]
    assert cluster.told()["step"] == 17
    again = rows_from(rows_document(cluster.record.steps["t"]))
    assert again.lost == [(13, 16)]
    recorded = [action for action in cluster.actions if isinstance(action, msg.RecordRow)]
    again.add(replace(recorded[0].record, step=15), 1.0)
    assert again.lost == [(13, 14)]


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
