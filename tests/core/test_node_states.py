"""What is wanted of a node and whether it is heard are two things."""

from __future__ import annotations

import pytest

from everstep.core.cluster.node_states import ADMIN, LIVENESS, NodeAdmin, NodeLiveness, NodeState, shown
from everstep.core.cluster.roster import Node
from everstep.errors import InternalError
from everstep.protocol import messages as msg
from tests.support.fake_cluster import FakeCluster

LOST = "NVRM: GPU has fallen off the bus"
OUT = {
    "draining": lambda cluster: cluster.hear(msg.DrainRequested(node="a")),
    "isolated": lambda cluster: cluster.hear(
        msg.FromNode(
            node="a", boot="1", number=99, report=msg.KernelSpoke(text="NVRM: GPU has fallen off the bus")
        )
    ),
    "lemon": lambda cluster: cluster.coordinator.nodes["a"].set_admin(NodeAdmin.LEMON, "as a start", 0.0),
}


def on_node_a() -> FakeCluster:
    """One worker on a, which the others can live without, and room elsewhere."""
    cluster = FakeCluster(nodes={"a": 1, "b": 4})
    cluster.submit()
    cluster.seal()
    return cluster


@pytest.mark.parametrize("admin", OUT)
def test_a_node_that_dies_while_it_is_out_is_given_up(admin: str) -> None:
    cluster = on_node_a()
    cluster.cut.add("a")  # its death is not told
    OUT[admin](cluster)
    node = cluster.coordinator.nodes["a"]
    assert node.admin == admin
    seated = [w for w, seat in cluster.coordinator.tasks["t"].seats.items() if seat.node == "a"]
    assert seated, "its worker has not ended yet"
    cluster.silence("a")
    peer = next(w for w, seat in cluster.coordinator.tasks["t"].seats.items() if seat.node == "b")
    cluster.overdue(peer, busy=False)
    assert node.state is NodeState.GONE
    assert node.admin == admin
    assert all(seat.node == "b" for seat in cluster.coordinator.tasks["t"].seats.values())
    step = cluster.coordinator.tasks["t"].progress.recorded
    cluster.seal()
    assert cluster.coordinator.tasks["t"].progress.recorded == step + 1
    cluster.hear(msg.ReadmitRequested(node="a", by="an operator"))
    assert node.state is NodeState.GONE, "to be readmitted does not bring it back"
    assert not any(seat.node == "a" for seat in cluster.coordinator.tasks["t"].seats.values())
    cluster.join("a", slots=1, boot="2")
    assert node.state is NodeState.UP


@pytest.mark.parametrize("boot", ["1", "2"])
def test_an_operator_s_drain_lasts_through_silence_and_reboot(boot: str) -> None:
    cluster = on_node_a()
    cluster.hear(msg.DrainRequested(node="a"))
    cluster.silence("a")
    assert cluster.coordinator.nodes["a"].state is NodeState.SILENT
    cluster.wait(31.0)
    cluster.join("a", slots=1, boot=boot)
    assert cluster.coordinator.nodes["a"].state is NodeState.DRAINING
    assert ("a", 0) not in cluster.coordinator.roster.free()
    cluster.hear(msg.ReadmitRequested(node="a", by="an operator"))
    assert cluster.coordinator.nodes["a"].state is NodeState.UP


def test_a_fault_does_not_undo_a_drain_when_its_isolation_is_over() -> None:
    cluster = on_node_a()
    cluster.cut.add("a")
    cluster.hear(msg.DrainRequested(node="a"))
    cluster.cut.discard("a")
    worker = next(w for w, seat in cluster.coordinator.tasks["t"].seats.items() if seat.node == "a")
    cluster.raises(worker, "CUDA error: uncorrectable ECC error encountered")
    cluster.wait(601.0)
    assert cluster.coordinator.nodes["a"].state is NodeState.DRAINING


def test_an_isolated_node_may_be_drained_and_then_stays_out() -> None:
    cluster = on_node_a()
    OUT["isolated"](cluster)
    cluster.hear(msg.DrainRequested(node="a"))
    cluster.wait(10_000.0)
    assert cluster.coordinator.nodes["a"].state is NodeState.DRAINING


def test_an_idle_node_that_dies_is_given_up_too() -> None:
    cluster = FakeCluster(nodes={"a": 1})
    cluster.silence("a")
    cluster.wait(31.0)
    assert cluster.coordinator.nodes["a"].state is NodeState.GONE
    assert cluster.coordinator.due_at() is None


def test_only_transitions_of_the_tables_are_made() -> None:
    for admin, after in ADMIN.items():
        for new in NodeAdmin:
            node = Node(name="a", boot="1", slots=1, host="a", admin=admin)
            if new in after:
                node.set_admin(new, "asked", 1.0)
                assert node.admin is new
            else:
                with pytest.raises(InternalError, match=f"{admin} cannot become {new}"):
                    node.set_admin(new, "asked", 1.0)
    with pytest.raises(InternalError, match="gone cannot become silent"):
        Node(name="a", boot="1", slots=1, host="a", liveness=NodeLiveness.GONE).set_liveness(
            NodeLiveness.SILENT, "seen", 1.0
        )
    assert set(LIVENESS) == set(NodeLiveness)


def test_one_word_is_shown_and_death_comes_first() -> None:
    assert shown(NodeAdmin.DRAINING, NodeLiveness.HEARD) is NodeState.DRAINING
    for admin in NodeAdmin:
        assert shown(admin, NodeLiveness.GONE) is NodeState.GONE
    assert shown(NodeAdmin.UP, NodeLiveness.HEARD) is NodeState.UP


def test_a_persons_drain_of_a_node_that_leaves_anyway_lasts_when_it_is_back() -> None:
    """Whose word it was was read from a sentence, which the notice had written."""
    cluster = FakeCluster(nodes={"a": 2, "b": 2})
    cluster.hear(msg.LeaveAnnounced(node="b", leaves_in_s=60.0, by="the cloud"))
    cluster.wait(31.0)
    node = cluster.coordinator.nodes["b"]
    assert node.admin is NodeAdmin.DRAINING
    cluster.hear(msg.DrainRequested(node="b", by="ann"))
    cluster.join("b", boot="2")
    assert node.admin is NodeAdmin.DRAINING
    cluster.hear(msg.ReadmitRequested(node="b", by="ann"))
    cluster.hear(msg.LeaveAnnounced(node="b", leaves_in_s=60.0, by="the cloud"))
    cluster.wait(31.0)
    cluster.join("b", boot="3")
    assert node.admin is NodeAdmin.UP, "nobody's word keeps it out"
