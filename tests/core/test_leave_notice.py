"""A node that is announced to leave: its workers move, or train on and leave in time."""

from __future__ import annotations

import json

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.snapshot import digest, freeze, thaw
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster


def announce(cluster: FakeCluster, node: str, seconds: float) -> None:
    cluster.hear(msg.LeaveAnnounced(node=node, leaves_in_s=seconds, by="an operator"))


def nodes_of(cluster: FakeCluster) -> set[str]:
    return {seat.node for seat in cluster.coordinator.tasks["t"].seats.values() if not seat.leaving}


def trained(nodes: dict[str, int], steps: int = 3) -> FakeCluster:
    cluster = FakeCluster(nodes=nodes, planned=True, memory_port=7)
    cluster.submit(shape=Shape(2, 2, 6), steps=40)
    for _ in range(steps):
        cluster.wait(1.0)
        cluster.seal()
    return cluster


def decided(cluster: FakeCluster) -> list[str]:
    return [event.because for event in cluster.heard if isinstance(event, msg.AssignmentChosen)]


def test_workers_move_to_free_slots_at_once() -> None:
    cluster = trained({"a": 2, "b": 2, "c": 2})
    gone = min(nodes_of(cluster))
    announce(cluster, gone, 120.0)
    cluster.wait(1.0)
    assert cluster.coordinator.nodes[gone].state is NodeState.DRAINING
    assert gone not in nodes_of(cluster)
    assert len(cluster.coordinator.tasks["t"].seats) == 4
    assert any(f"node {gone}" in because and "leaves in 120 s" in because for because in decided(cluster))


def test_without_free_slots_they_train_on_until_shortly_before() -> None:
    cluster = trained({"a": 2, "b": 2})
    announce(cluster, "b", 120.0)
    cluster.wait(80.0)
    assert cluster.coordinator.nodes["b"].state is NodeState.UP
    assert "b" in nodes_of(cluster)
    cluster.seal()
    cluster.wait(11.0)
    assert cluster.coordinator.nodes["b"].state is NodeState.DRAINING
    assert "leaves in" in cluster.coordinator.nodes["b"].because
    assert nodes_of(cluster) == {"a"}


def test_of_a_short_notice_half_is_left_for_leaving() -> None:
    cluster = trained({"a": 2, "b": 2})
    announce(cluster, "b", 10.0)
    cluster.wait(4.0)
    assert cluster.coordinator.nodes["b"].state is NodeState.UP
    cluster.wait(1.5)
    assert cluster.coordinator.nodes["b"].state is NodeState.DRAINING


def test_an_agents_own_notice_counts_like_an_operators() -> None:
    cluster = trained({"a": 2, "b": 2, "c": 2})
    gone = min(nodes_of(cluster))
    cluster.says(gone, msg.LeaveNoticed(leaves_in_s=60.0, by="the notice in spot.json"), None)
    assert cluster.coordinator.nodes[gone].state is NodeState.DRAINING


def test_what_could_not_be_made_safe_trains_to_the_end() -> None:
    cluster = FakeCluster(nodes={"a": 2}, planned=True)
    cluster.submit(shape=Shape(1, 2, 6), steps=40, has_checkpoints=False)
    for _ in range(3):
        cluster.wait(1.0)
        cluster.seal()
    announce(cluster, "a", 60.0)
    cluster.wait(59.0)
    assert cluster.coordinator.nodes["a"].state is NodeState.UP
    assert len(cluster.coordinator.tasks["t"].seats) == 2


def test_a_notice_is_withdrawn_by_readmitting() -> None:
    cluster = trained({"a": 2, "b": 2})
    announce(cluster, "b", 60.0)
    cluster.hear(msg.ReadmitRequested(node="b", by="an operator"))
    cluster.wait(120.0)
    assert cluster.coordinator.nodes["b"].state is NodeState.UP


def test_a_notice_is_in_snapshots() -> None:
    cluster = trained({"a": 2, "b": 2})
    announce(cluster, "b", 60.0)
    again = Coordinator()
    thaw(again, json.loads(json.dumps(freeze(cluster.coordinator))))
    assert digest(again) == digest(cluster.coordinator)
    assert again.nodes["b"].drain_at == cluster.coordinator.nodes["b"].drain_at is not None


def test_the_planner_counts_on_the_node_only_until_it_leaves() -> None:
    """A change of shape that would pay in a minute is not made for a node that leaves in ten seconds."""
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), planned=True, memory_port=7)
    cluster.submit(shape=Shape(2, 2, 6), steps=40, least_stages=1, most_stages=8)
    for _ in range(4):
        cluster.wait(1.0)
        cluster.seal()
    announce(cluster, "c", 10.0)
    cluster.hear(msg.NodeLeft(node="d"))
    chosen = [event for event in cluster.heard if isinstance(event, msg.AssignmentChosen)][-1]
    assert not chosen.wishes


def told_to_end(cluster: FakeCluster, node: str) -> None:
    notice = msg.LeaveNoticed(leaves_in_s=25.0, by="its agent was told to end by SIGTERM", at_once=True)
    cluster.says(node, notice, None)


def test_workers_of_an_agent_that_is_told_to_end_do_not_wait_for_its_last_moment() -> None:
    cluster = trained({"a": 2, "b": 2})
    told_to_end(cluster, "b")
    assert cluster.coordinator.nodes["b"].state is NodeState.DRAINING
    assert nodes_of(cluster) == {"a"}
    cluster.hear(msg.NodeLeft(node="b"))
    assert cluster.coordinator.nodes["b"].state is NodeState.LEFT
    assert cluster.coordinator.log.incidents == []


def test_where_all_nodes_are_told_to_end_at_once_each_stage_keeps_a_worker_until_its_state_is_safe() -> None:
    """Each node saw another replica, on a node whose worker was on its way out already: `scancel` lost the
    steps since the last checkpoint.
    """
    cluster = FakeCluster(nodes=dict.fromkeys("abcd", 1), memory_port=7)
    cluster.submit(shape=Shape(2, 2, 2), has_checkpoints=True)
    cluster.seal()
    notice = msg.LeaveNoticed(leaves_in_s=25.0, by="its agent was told to end by SIGTERM", at_once=True)
    for node in "abcd":
        cluster.cut.add(node)  # what it does about it is not known yet
        cluster.arrives(node, notice)
    seats = cluster.coordinator.tasks["t"].seats
    assert {worker.stage for worker, seat in seats.items() if not seat.leaving} == {0, 1}


def test_they_leave_also_where_nothing_can_be_made_safe() -> None:
    """The agent would use up its grace for nothing."""
    cluster = FakeCluster(nodes={"a": 2}, planned=True)
    cluster.submit(shape=Shape(1, 2, 6), steps=40, has_checkpoints=False)
    for _ in range(3):
        cluster.wait(1.0)
        cluster.seal()
    told_to_end(cluster, "a")
    assert cluster.coordinator.nodes["a"].state is NodeState.DRAINING
    assert nodes_of(cluster) == set()


def test_a_node_that_left_as_announced_is_up_when_its_agent_is_started_again() -> None:
    """A restarted agent would otherwise wait for an operator. What an operator drained, stays drained."""
    cluster = trained({"a": 2, "b": 2, "c": 2})
    told_to_end(cluster, "b")
    cluster.hear(msg.DrainRequested(node="c"))
    for name in ("b", "c"):
        cluster.hear(msg.NodeLeft(node=name))
        cluster.hear(msg.NodeJoined(node=name, boot="second", slots=2, host="x"))
    assert cluster.coordinator.nodes["b"].state is NodeState.UP
    assert cluster.coordinator.nodes["c"].state is NodeState.DRAINING
