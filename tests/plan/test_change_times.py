"""What changes of a task take: measured here, else in other tasks, else as the model says."""

from __future__ import annotations

import pytest

from everstep.core.cluster.task import Fetched, KeptState
from everstep.plan.ask import choose
from everstep.plan.change_times import AGREE_S, START_S, TRANSITION_S, change_times, copying_s
from everstep.plan.measured import ENOUGH_STEPS, Measurements
from everstep.plan.offers import ChangeTimes, TimeSource
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

HERE, THERE = Shape(2, 2, 6), Shape(4, 1, 3)


def two_tasks() -> FakeCluster:
    cluster = FakeCluster(nodes=dict.fromkeys("abcdefgh", 1), memory_port=7)
    for name in ("t", "other"):
        cluster.submit(name, shape=HERE, steps=400, least_stages=1, most_stages=8)
    return cluster


def changed(seconds: float, copying: float | None = None, *, task: str = "other") -> Measurements:
    """The other task has taken another shape, which stopped it for so long; its steps take 1 s."""
    found = Measurements()
    for at in range(ENOUGH_STEPS + 1):
        found.stepped(task, HERE, 4, float(at))
    found.reshaped(task, copying)
    found.stepped(task, THERE, 4, ENOUGH_STEPS + 1.0 + seconds)
    return found


def times(cluster: FakeCluster, measured: Measurements) -> ChangeTimes:
    tasks = cluster.coordinator.tasks
    return change_times(tasks["t"], tasks.values(), cluster.coordinator.log, measured)


def keep(cluster: FakeCluster, size: int) -> None:
    copies = cluster.coordinator.tasks["t"].copies
    copies.newest, copies.states[1] = 1, KeptState(stages=1, copies={0: {"a": {"bytes": size}}})


def test_a_task_that_never_changed_its_shape_takes_the_time_of_others_that_did() -> None:
    """The guess of 3.2 s and more stood where other tasks had measured a tenth of that."""
    cluster = two_tasks()
    guess = times(cluster, Measurements())
    assert guess.reshape_from is TimeSource.MODEL
    assert guess.reshape_s == pytest.approx(START_S + TRANSITION_S)
    found = times(cluster, changed(0.3))
    assert found.reshape_from is TimeSource.OTHERS
    assert found.reshape_s == pytest.approx(0.3)


def test_a_task_that_is_over_has_not_measured_in_vain() -> None:
    measured = changed(0.3)
    measured.ended("other")
    assert times(two_tasks(), measured).reshape_s == pytest.approx(0.3)


def test_its_own_measurement_comes_first() -> None:
    measured = changed(0.3)
    measured.of("t").reshape_s = 4.0
    found = times(two_tasks(), measured)
    assert (found.reshape_s, found.reshape_from) == (4.0, TimeSource.OWN)


def test_copying_goes_with_the_bytes_and_the_rest_does_not() -> None:
    cluster = two_tasks()
    keep(cluster, 2 * 10**9)
    other = cluster.coordinator.tasks["other"]
    other.copies.fetched[1] = Fetched(bytes_elsewhere=2 * 10**9, seconds=1.0)  # by two stages: 1e9 per second
    assert copying_s(cluster.coordinator.tasks["t"], cluster.coordinator.tasks.values()) == 2.0
    found = times(cluster, changed(0.8, 0.5))
    assert found.copy_s == 2.0
    assert found.reshape_s == pytest.approx(2.0 + 0.3)


def test_it_takes_no_less_than_it_takes_to_agree() -> None:
    assert times(two_tasks(), changed(0.0)).reshape_s == AGREE_S


def test_the_step_that_ends_a_change_is_not_part_of_it() -> None:
    """In a shape that was never measured, it takes what was promised of it."""
    measured = Measurements()
    for at in range(ENOUGH_STEPS + 1):
        measured.stepped("t", HERE, 4, float(at))
    measured.promised("t", 2.0)
    measured.reshaped("t")
    measured.stepped("t", THERE, 4, ENOUGH_STEPS + 0.5 + 0.3)
    assert measured.of("t").reshape_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (Measurements(), "5 s, an estimate, as no task has made one"),
        (changed(0.3), "0.3 s, as those of other tasks took"),
        (changed(0.3, task="t"), "0.3 s, as its last one took"),
    ],
)
def test_an_explained_plan_says_where_the_time_is_from(measured: Measurements, says: str) -> None:
    cluster = two_tasks()
    cluster.hear(msg.NodeLeft(node="d"))
    answer = choose(cluster.coordinator, 1, "node d is gone", measured=measured)
    reshapes = [o for o in answer.weighed if o.task == "t" and o.what.startswith("change shape")]
    assert reshapes
    assert f"(change of shape: {says})" in reshapes[0].because
