"""A pause that is taken back leaves no task behind, whenever that is."""

from __future__ import annotations

import pytest

from everstep.core.cluster.task import TaskState
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster


def paused(*, after: str) -> FakeCluster:
    """A task that is asked to pause, and goes on again after so much of that."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.submit(shape=Shape(2, 2, 2), steps=40, has_checkpoints=True)
    cluster.seal()
    task = cluster.coordinator.tasks["t"]
    if after == "its step has ended, and a node with workers of it is not heard":
        cluster.cut.add("b")
    cluster.hear(msg.PauseRequested(task="t"))
    if after != "the request":
        cluster.hear(msg.PauseRequested(task="t"))  # at once
        wanted = TaskState.PAUSED if after == "the pause" else TaskState.ENDING
        assert task.state is wanted
    cluster.hear(msg.UnpauseRequested(task="t"))
    return cluster


@pytest.mark.parametrize(
    "after",
    ["the request", "its step has ended, and a node with workers of it is not heard", "the pause"],
)
def test_a_pause_that_is_taken_back_does_not_hold(after: str) -> None:
    cluster = paused(after=after)
    for node in sorted(cluster.cut):
        cluster.join(node, 2, boot="2")
    for _ in range(3):
        cluster.wait(1.0)
    task = cluster.coordinator.tasks["t"]
    assert task.state is TaskState.RUNNING, task.because
    assert len(task.seats) == 4
