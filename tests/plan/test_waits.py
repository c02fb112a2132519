"""A change of shape waits until nothing has come or gone for as long as it takes to pay for itself."""

from __future__ import annotations

import pytest

from everstep.plan.ask import LONGEST_WAIT_S, next_event_s
from everstep.plan.measured import ENOUGH_STEPS
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

ANY_STAGES = {"least_stages": 1, "most_stages": 8}


def cluster_of(*, steps_before: int, step_s: float = 1.0) -> FakeCluster:
    """A task of 2 x 2 that may take any shape; one of its four nodes is lost after so many steps."""
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), planned=True, memory_port=7)
    cluster.submit(shape=Shape(2, 2, 6), steps=400, **ANY_STAGES)
    for _ in range(steps_before):
        cluster.wait(step_s)
        cluster.seal()
    cluster.crew.lose("d")
    cluster.hear(msg.NodeLeft(node="d"))
    return cluster


def decided(cluster: FakeCluster) -> list[msg.AssignmentChosen]:
    return [event for event in cluster.heard if isinstance(event, msg.AssignmentChosen)]


def test_a_task_whose_steps_are_not_measured_yet_keeps_its_shape_however_long_a_step_takes() -> None:
    """One step is no measurement. The wait alone would be over within it."""
    cluster = cluster_of(steps_before=1, step_s=100.0)
    task, chosen = cluster.coordinator.tasks["t"], decided(cluster)[-1]
    assert chosen.wishes
    assert chosen.review_s is not None
    cluster.wait(chosen.review_s + 0.1)
    assert task.next_shape is None
    assert decided(cluster)[-1].review_s is not None, "it is looked at again"


def test_once_enough_steps_are_measured_the_change_is_made() -> None:
    cluster = cluster_of(steps_before=1)
    task = cluster.coordinator.tasks["t"]
    made_after = None
    for step in range(60):
        cluster.wait(1.0)
        if made_after is None and task.next_shape is not None:
            made_after = step
            cluster.copy_to_memory(step + 2, away=False)
        cluster.seal()
    assert made_after is not None
    assert made_after >= ENOUGH_STEPS - 1
    assert task.shape == Shape(3, 1, 4)


def test_a_change_that_takes_long_to_pay_for_itself_waits_for_a_bounded_time() -> None:
    cluster = cluster_of(steps_before=8)
    task = cluster.coordinator.tasks["t"]
    cluster.thinking.measured.of("t").reshape_s = 5000.0
    cluster.hear(msg.NodeJoined(node="x", boot="1", slots=0, host="127.0.0.1"))
    chosen = decided(cluster)[-1]
    assert chosen.wishes
    assert chosen.review_s == pytest.approx(LONGEST_WAIT_S, abs=0.1)
    cluster.wait(LONGEST_WAIT_S - 1)
    assert task.next_shape is None
    cluster.wait(2)
    assert task.next_shape is not None


@pytest.mark.parametrize(
    ("seen", "now", "expected", "elapsed"),
    [
        ([], 100.0, 1e6, 100.0),
        ([50.0], 100.0, 1e6, 100.0),
        ([50.0, 60.0, 70.0], 100.0, 50.0, 100.0),
        ([float(second) for second in range(0, 300, 3)], 300.0, 24.0 / 6, 24.0),
        ([float(second) for second in range(0, 300, 3)], 3600.0, 3324.0 / 6, 3324.0),
        ([50.0, 51.0], 2e6, 1e6, 2e6),
    ],
)
def test_many_failures_outweigh_the_published_rate_and_calm_outweighs_them(
    seen: list[float], now: float, expected: float, elapsed: float
) -> None:
    assert next_event_s(1e6, seen, 0.0, now) == pytest.approx((expected, elapsed))


def test_where_failures_come_every_few_seconds_no_shape_is_changed() -> None:
    """The same loss is worth a change where it is the only one."""
    cluster = cluster_of(steps_before=8)
    assert decided(cluster)[-1].wishes
    cluster.join("d", 1, boot="2")
    for number in range(3, 40):
        cluster.wait(1.0)
        cluster.crew.lose("d")
        cluster.hear(msg.NodeLeft(node="d"))
        cluster.seal()
        cluster.join("d", 1, boot=str(number))
        cluster.seal()
    cluster.hear(msg.NodeLeft(node="d"))
    assert not decided(cluster)[-1].wishes
    assert not decided(cluster)[-1].shapes


@pytest.mark.parametrize("most_stages", [3, 4, 6, 8])
def test_while_one_task_waits_for_its_shape_no_other_takes_one_instead(most_stages: int) -> None:
    """Nine slots, and three tasks without a measured step. Where a change of one had to wait, the best plan
    without it gave another one a shape, at once.
    """
    cluster = FakeCluster(nodes=dict.fromkeys("abc", 3), planned=True, memory_port=7)
    kinds = (("heavy", Shape(2, 2, 2), 4.0), ("middle", Shape(2, 1, 2), 2.0), ("light", Shape(1, 2, 4), 1.0))
    for name, shape, weight in kinds:
        stages = {"least_stages": shape.stages, "most_stages": most_stages}
        cluster.submit(name, shape, steps=200, weight=weight, **stages)
    before = dict(decided(cluster)[-1].workers)
    for _ in range(30):
        cluster.wait(1.0)
    assert not [chosen.shapes for chosen in decided(cluster) if chosen.shapes]
    assert any(chosen.wishes for chosen in decided(cluster)), "else nothing was held back"
    assert before == {"heavy": 4, "middle": 2, "light": 2}
    assert decided(cluster)[-1].workers == before
