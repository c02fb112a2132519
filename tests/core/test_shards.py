"""A worker with shards takes as many slots, all on one node; the planner counts in workers."""

import pytest

from everstep.protocol import messages as msg
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import EndWorker
from everstep.protocol.shape import Shape
from everstep.protocol.shard_messages import ShardTakes, ToShard
from tests.support.fake_cluster import FakeCluster


@pytest.mark.parametrize("planned", [False, True])
def test_the_shards_of_a_worker_are_on_one_node(planned: bool) -> None:
    cluster = FakeCluster(nodes={"a": 3, "b": 3, "c": 1}, planned=planned)
    cluster.submit(shape=Shape(2, 2, 2, shards=2))
    seats = cluster.coordinator.tasks["t"].seats
    assert sorted((seat.node, seat.slots) for seat in seats.values()) == [("a", (0, 1)), ("b", (0, 1))]
    started = [a.order for a in cluster.actions if isinstance(a, msg.Dispatch)]
    starts = [order for order in started if isinstance(order, msg.StartProcess)]
    assert all(order.more_slots == (1,) for order in starts)
    assert len(starts) == 2


def test_a_node_with_too_few_slots_for_one_worker_is_not_used() -> None:
    cluster = FakeCluster(nodes={"a": 1, "b": 1, "c": 1, "d": 1})
    cluster.submit(shape=Shape(1, 1, 2, shards=2))
    assert not cluster.coordinator.tasks["t"].seats
    cluster.join("e", slots=2)
    assert [seat.node for seat in cluster.coordinator.tasks["t"].seats.values()] == ["e"]


def test_two_tasks_never_share_a_slot() -> None:
    cluster = FakeCluster(nodes={"a": 4, "b": 4}, planned=True)
    cluster.submit("one", Shape(1, 1, 2, shards=2))
    cluster.submit("two", Shape(3, 1, 2, shards=2))
    taken = [
        (seat.node, slot)
        for task in cluster.coordinator.tasks.values()
        for seat in task.seats.values()
        for slot in seat.slots
    ]
    assert len(taken) == len(set(taken)) == 8


def test_what_shards_say_survives_the_wire() -> None:
    message = ShardTakes(event=EndWorker(gently=True), now=2.5)
    assert list(Unpacker(ToShard).feed(pack(message))) == [message]
