"""After a restart agents come back one after the other; who is still on the way is not dead."""

from __future__ import annotations

from everstep.core.faults.detector import Heartbeats
from everstep.server.returns import RETURN_S, Returns


class Coming:
    """Three nodes that a coordinator knew before it was restarted, at second 0."""

    def __init__(self) -> None:
        self.hearts = Heartbeats(patience_s=1.0)
        self.returns = Returns(self.hearts)
        self.returns.expect("abc", 0.0)

    def joins(self, node: str, now: float) -> None:
        self.hearts.heard(node, now)
        self.returns.came(node)

    def silent(self, now: float) -> set[str]:
        self.returns.wait(now)
        return {node for node, _ in self.hearts.fell_silent(now)}


def test_nobody_is_silent_while_several_are_still_on_their_way() -> None:
    nodes = Coming()
    assert nodes.silent(3.0) == set()
    nodes.joins("a", 3.5)
    assert nodes.silent(4.0) == set(), "b and c are still missing"


def test_the_last_one_missing_is_silent_as_soon_as_any_other_node_would_be() -> None:
    nodes = Coming()
    assert nodes.silent(3.0) == set()
    nodes.joins("a", 3.5)
    nodes.joins("b", 3.5)
    assert nodes.silent(3.6) == set()
    nodes.joins("a", 4.5)
    nodes.joins("b", 4.5)
    assert nodes.silent(4.7) == {"c"}


def test_two_that_never_come_are_silent_in_the_end() -> None:
    nodes = Coming()
    for second in range(1, int(RETURN_S) + 1):
        nodes.joins("a", second)
        assert nodes.silent(second) == set()
    nodes.joins("a", RETURN_S + 2)
    assert nodes.silent(RETURN_S + 2) == {"b", "c"}
