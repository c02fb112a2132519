"""What is wanted of a node and whether it is heard are two things."""

from __future__ import annotations

import pytest

from everstep.core.cluster.node_states import ADMIN, LIVENESS, NodeAdmin, NodeLiveness, NodeState, shown
from everstep.core.cluster.roster import Node
from everstep.core.words import cluster_messages as msg
from everstep.errors import InternalError
from tests.core.drama import Drama

LOST = "NVRM: GPU has fallen off the bus"
OUT = {
    "draining": lambda drama: drama.hear(msg.DrainRequested(node="a")),
    "isolated": lambda drama: drama.hear(
        msg.FromNode(
            node="a", boot="1", number=99, report=msg.KernelSpoke(text="NVRM: GPU has fallen off the bus")
        )
    ),
    "lemon": lambda drama: drama.coordinator.nodes["a"].set_admin(NodeAdmin.LEMON, "as a start", 0.0),
}


def on_node_a() -> Drama:
    """One worker on a, which the others can live without, and room elsewhere."""
    drama = Drama(nodes={"a": 1, "b": 4})
    drama.submit()
    drama.seal()
    return drama


@pytest.mark.parametrize("admin", OUT)
def test_a_node_that_dies_while_it_is_out_is_given_up(admin: str) -> None:
    drama = on_node_a()
    drama.cut.add("a")  # its death is not told
    OUT[admin](drama)
    node = drama.coordinator.nodes["a"]
    assert node.admin == admin
    seated = [w for w, seat in drama.coordinator.tasks["t"].seats.items() if seat.node == "a"]
    assert seated, "its worker has not ended yet"
    drama.silence("a")
    peer = next(w for w, seat in drama.coordinator.tasks["t"].seats.items() if seat.node == "b")
    drama.overdue(peer, busy=False)
    assert node.state is NodeState.GONE
    assert node.admin == admin
    assert all(seat.node == "b" for seat in drama.coordinator.tasks["t"].seats.values())
    step = drama.coordinator.tasks["t"].progress.recorded
    drama.seal()
    assert drama.coordinator.tasks["t"].progress.recorded == step + 1
    drama.hear(msg.ReadmitRequested(node="a", by="an operator"))
    assert node.state is NodeState.GONE, "to be readmitted does not bring it back"
    assert not any(seat.node == "a" for seat in drama.coordinator.tasks["t"].seats.values())
    drama.join("a", slots=1, boot="2")
    assert node.state is NodeState.UP


@pytest.mark.parametrize("boot", ["1", "2"])
def test_an_operator_s_drain_lasts_through_silence_and_reboot(boot: str) -> None:
    drama = on_node_a()
    drama.hear(msg.DrainRequested(node="a"))
    drama.silence("a")
    assert drama.coordinator.nodes["a"].state is NodeState.SILENT
    drama.wait(31.0)
    drama.join("a", slots=1, boot=boot)
    assert drama.coordinator.nodes["a"].state is NodeState.DRAINING
    assert ("a", 0) not in drama.coordinator.roster.free()
    drama.hear(msg.ReadmitRequested(node="a", by="an operator"))
    assert drama.coordinator.nodes["a"].state is NodeState.UP


def test_a_fault_does_not_undo_a_drain_when_its_isolation_is_over() -> None:
    drama = on_node_a()
    drama.cut.add("a")
    drama.hear(msg.DrainRequested(node="a"))
    drama.cut.discard("a")
    worker = next(w for w, seat in drama.coordinator.tasks["t"].seats.items() if seat.node == "a")
    drama.raises(worker, "CUDA error: uncorrectable ECC error encountered")
    drama.wait(601.0)
    assert drama.coordinator.nodes["a"].state is NodeState.DRAINING


def test_an_isolated_node_may_be_drained_and_then_stays_out() -> None:
    drama = on_node_a()
    OUT["isolated"](drama)
    drama.hear(msg.DrainRequested(node="a"))
    drama.wait(10_000.0)
    assert drama.coordinator.nodes["a"].state is NodeState.DRAINING


def test_an_idle_node_that_dies_is_given_up_too() -> None:
    drama = Drama(nodes={"a": 1})
    drama.silence("a")
    drama.wait(31.0)
    assert drama.coordinator.nodes["a"].state is NodeState.GONE
    assert drama.coordinator.due_at() is None


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
