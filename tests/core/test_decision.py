"""The coordinator acts on the planner's decision by itself, and keeps to what an operator has set."""

from __future__ import annotations

import json

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.core.cluster.task import TaskState
from everstep.plan.measured import ENOUGH_STEPS
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

ANY_STAGES = {"least_stages": 1, "most_stages": 8}
STEPS_BEFORE = ENOUGH_STEPS + 1  # the time of the first one is not measured


def workers(cluster: FakeCluster, name: str) -> int:
    return len(cluster.coordinator.tasks[name].seats)


def decided(cluster: FakeCluster) -> list[msg.AssignmentChosen]:
    return [event for event in cluster.heard if isinstance(event, msg.AssignmentChosen)]


def lose(cluster: FakeCluster, *nodes: str) -> None:
    for node in nodes:
        cluster.crew.lose(node)
        cluster.hear(msg.NodeLeft(node=node))


def three_of_four() -> FakeCluster:
    """A task of 2 x 2 that may take any shape, on four nodes of one slot; one of them is lost."""
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), planned=True, memory_port=7)
    cluster.submit(shape=Shape(2, 2, 6), steps=40, **ANY_STAGES)
    for _ in range(STEPS_BEFORE):
        cluster.wait(1.0)
        cluster.seal()
    lose(cluster, "d")
    return cluster


def test_an_operators_size_binds_the_planner_until_it_is_released() -> None:
    cluster = FakeCluster(planned=True)
    cluster.submit()
    cluster.hear(msg.ResizeRequested(task="t", workers=2))
    assert workers(cluster, "t") == 2
    cluster.join("c")
    assert workers(cluster, "t") == 2, "a new node is no reason to forget it"
    cluster.hear(msg.ResizeReleased(task="t"))
    assert workers(cluster, "t") == 4


def test_a_heavy_task_that_lost_a_stage_takes_the_slots_of_a_light_one_and_gives_them_back() -> None:
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1}, planned=True)
    cluster.submit("heavy", Shape(1, 2, 4), weight=3.0, steps=40, has_checkpoints=False)
    cluster.submit("light", Shape(1, 1, 4), weight=1.0, steps=40)
    cluster.seal("heavy")
    cluster.seal("light")
    lost = cluster.coordinator.tasks["heavy"].seats[Worker(0, 1)].node
    lose(cluster, lost)
    cluster.copy_to_memory(2, away=False, name="light")
    cluster.seal("light")
    assert workers(cluster, "heavy") == 2
    assert cluster.coordinator.tasks["light"].state is TaskState.WAITING
    cluster.seal("heavy")
    cluster.join(lost, 1, boot="2")
    assert workers(cluster, "heavy") == 2
    assert cluster.coordinator.tasks["light"].state is TaskState.RUNNING


def test_a_change_of_shape_is_made_once_staying_has_cost_as_much_and_not_before() -> None:
    cluster = three_of_four()
    task, chosen = cluster.coordinator.tasks["t"], decided(cluster)[-1]
    assert task.next_shape is None
    assert chosen.wishes["t"] == Shape(3, 1, 4)
    assert chosen.review_s is not None
    assert 0.5 < chosen.review_s < 60
    cluster.wait(chosen.review_s / 2)
    assert task.next_shape is None
    cluster.wait(chosen.review_s / 2 + 0.1)
    assert task.next_shape is not None, "nothing else has happened: now it pays"
    cluster.copy_to_memory(STEPS_BEFORE + 1, away=False)
    cluster.seal()
    assert (task.shape, workers(cluster, "t")) == (Shape(3, 1, 4), 3)
    assert task.job["replicas"] == 3
    cluster.seal()
    assert not [i for i in cluster.coordinator.log.incidents if not i.closed]


def test_a_node_that_is_back_before_the_change_has_paid_leaves_the_shape_as_it_is() -> None:
    cluster = three_of_four()
    task = cluster.coordinator.tasks["t"]
    cluster.wait(0.2)
    cluster.join("d", 1, boot="2")
    cluster.seal()
    cluster.wait(600.0)
    assert decided(cluster)[-1].wishes == {}
    assert (task.shape, workers(cluster, "t")) == (Shape(2, 2, 6), 4)


def test_a_shape_an_operator_has_set_is_kept() -> None:
    cluster = three_of_four()
    cluster.hear(msg.ReshapeRequested(task="t", job={}, shape=Shape(1, 2, 12)))
    cluster.copy_to_memory(STEPS_BEFORE + 1, away=False)
    cluster.seal()
    task = cluster.coordinator.tasks["t"]
    assert task.shape == Shape(1, 2, 12)
    cluster.wait(600.0)
    assert (task.next_shape, decided(cluster)[-1].wishes) == (None, {})
    cluster.hear(msg.ResizeReleased(task="t"))
    assert decided(cluster)[-1].wishes, "now the planner may use the third slot"


def test_every_task_shows_what_it_could_have_done_and_why_it_did_not() -> None:
    chosen = decided(three_of_four())[-1]
    whats = [(option.what, option.chosen) for option in chosen.weighed]
    assert whats[0] == ("change shape to 3x1", True)
    assert ("continue with rerouting", False) in whats
    assert all(option.because for option in chosen.weighed)
    behind = [option.behind for option in chosen.weighed]
    assert behind == sorted(behind)
    assert behind[0] == 0 < behind[1]


def test_a_wish_and_an_operators_bounds_are_in_the_snapshot() -> None:
    cluster = three_of_four()
    cluster.hear(msg.ResizeRequested(task="t", workers=3))
    again = Coordinator()
    thaw(again, json.loads(json.dumps(freeze(cluster.coordinator))))
    assert digest(again) == digest(cluster.coordinator)
    assert again.tasks["t"].bounds.workers == 3
    assert again.due_at() == cluster.coordinator.due_at()


def test_after_the_loss_of_one_slot_of_a_node_fewer_shards_are_weighed_and_taken_where_they_pay() -> None:
    """Four workers of two shards on two nodes of four slots. Without one slot, three of them are left on
    six of seven slots; with one shard each, seven workers use all of them.
    """

    def lost_one(**more: int) -> FakeCluster:
        cluster = FakeCluster(nodes={"a": 4, "b": 4}, planned=True, memory_port=7)
        cluster.submit(shape=Shape(4, 1, 7, shards=2), steps=400, **ANY_STAGES, **more)
        for _ in range(4):
            cluster.wait(1.0)
            cluster.seal()
        seat = cluster.coordinator.tasks["t"].seats[Worker(0, 0)]
        cluster.exits(Worker(0, 0), "killed by SIGKILL", stuck=True)
        cluster.says(seat.node, msg.SlotFreed(slot=seat.slots[1]), None)
        return cluster

    cluster = lost_one(least_shards=1, most_shards=2)
    chosen = decided(cluster)[-1]
    assert chosen.wishes["t"].shards == 1
    assert {row.shape for row in chosen.weighed} >= {"4x1x2", "7x1"}
    kept = decided(lost_one(least_shards=2, most_shards=2))[-1]
    assert all(shape.shards == 2 for shape in kept.wishes.values()), "its memory may not suffice for one"
    assert kept.workers["t"] == 3, "two of the three slots left on the node are one worker"


def test_a_slot_that_is_too_few_for_a_worker_counts_for_workers_of_fewer_shards() -> None:
    """Two workers of two shards. A node comes back with one slot of two: three slots are one worker and a
    slot of no use, or three workers of one shard.
    """
    cluster = FakeCluster(nodes={"a": 2, "b": 2}, planned=True, memory_port=7)
    more = {"least_shards": 1, "most_shards": 2, **ANY_STAGES}
    cluster.submit(shape=Shape(2, 1, 3, shards=2), steps=400, **more)
    for _ in range(5):
        cluster.wait(1.0)
        cluster.seal()
    cluster.silence("a")
    cluster.wait(3.0)
    cluster.join("a", slots=1, boot="2")
    assert str(decided(cluster)[-1].wishes["t"]) == "3x1"
    for _ in range(15):
        cluster.wait(1.0)
        cluster.seal()
    assert str(cluster.coordinator.tasks["t"].shape) == "3x1"
    assert workers(cluster, "t") == 3


@pytest.mark.parametrize(("most", "given"), [(0, 6), (3, 3), (4, 4)])
def test_a_task_gets_no_more_workers_than_its_job_asks_for(most: int, given: int) -> None:
    """A job of 3 x 1 on six slots was given the shape 6 x 1, unasked."""
    cluster = FakeCluster(nodes={"a": 3, "b": 3}, planned=True, memory_port=7)
    cluster.submit(shape=Shape(3, 1, 4), steps=400, most_workers=most, **ANY_STAGES)
    for _ in range(2 * STEPS_BEFORE):
        cluster.wait(30.0)
        cluster.seal()
    chosen = decided(cluster)[-1]
    wish = chosen.wishes.get("t", cluster.coordinator.tasks["t"].shape)
    assert wish.replicas * wish.stages == given


def test_workers_change_their_stage_where_one_stage_has_lost_three() -> None:
    """8 x 2 with three dead at stage 0: five and eight took 13 rounds of 64 microbatches, six and six 11.
    It stayed at five and eight.
    """
    nodes = [f"n{i}" for i in range(16)]
    cluster = FakeCluster(nodes=dict.fromkeys(nodes, 1), planned=True)
    cluster.submit(shape=Shape(8, 2, 8), steps=400)
    task = cluster.coordinator.tasks["t"]
    cluster.seal()
    lose(cluster, *(task.seats[Worker(replica, 0)].node for replica in range(3)))
    assert decided(cluster)[-1].spread == (), "a burst: the next loss is expected before it pays"
    for _ in range(60):
        cluster.wait(1.0)
        cluster.seal()
    stages = [sum(w.stage == s for w in task.staying()) for s in (0, 1)]
    assert min(stages) == 6, stages
    assert [d.spread for d in decided(cluster)].count(("t",)) == 1, "once is enough"
    assert task.state is TaskState.RUNNING
    cluster.coordinator.validate()


def test_a_task_starts_with_as_many_workers_as_its_user_wants_or_waits() -> None:
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1}, planned=True)
    cluster.submit(shape=Shape(4, 1, 2), steps=40, least_workers=4)
    assert workers(cluster, "t") == 0
    assert cluster.coordinator.tasks["t"].state is TaskState.WAITING
    cluster.submit("small", Shape(3, 1, 4), steps=40)
    assert workers(cluster, "small") == 3  # they are not held back for the one that cannot use them
    cluster.join("d", 1)
    cluster.join("e", 1)
    assert workers(cluster, "t") == 4
    assert workers(cluster, "small") == 1


def test_a_task_below_its_minimum_keeps_its_workers_until_others_need_them() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), planned=True, memory_port=7)
    cluster.submit(shape=Shape(4, 1, 2), steps=40, least_workers=4)
    cluster.seal()
    lose(cluster, "d")
    assert workers(cluster, "t") == 3
    assert cluster.coordinator.tasks["t"].state is TaskState.RUNNING
    assert "t has too few workers (3), and others may take their slots" in decided(cluster)[-1].because
    cluster.submit("other", Shape(3, 1, 4), steps=40)
    cluster.copy_to_memory(2, away=False)
    cluster.seal()
    assert workers(cluster, "other") == 3
    assert cluster.coordinator.tasks["t"].state is TaskState.WAITING


def test_an_operator_may_give_a_task_fewer_than_its_user_wanted() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), planned=True)
    cluster.submit(shape=Shape(4, 1, 2), steps=40, least_workers=4)
    cluster.hear(msg.ResizeRequested(task="t", workers=2))
    assert workers(cluster, "t") == 2
