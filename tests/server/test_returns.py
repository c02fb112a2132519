"""After a restart agents come back one after the other; who is still on the way is not dead."""

from __future__ import annotations

from everstep.core.faults.detector import Heartbeats
from everstep.node.agent import RETRY_MOST_S
from everstep.server.term import LAST_S, RETURN_S, Returns


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


def test_the_last_one_missing_is_waited_for_while_it_may_sleep_before_it_tries_again() -> None:
    """It was given up after a second, in which an agent that was refused twice does not even knock."""
    nodes = Coming()
    assert nodes.silent(3.0) == set()
    for tenth in range(35, 65, 5):
        nodes.joins("a", tenth / 10)
        nodes.joins("b", tenth / 10)
        assert nodes.silent(tenth / 10) == set()
    for tenth in range(65, 80, 5):
        nodes.joins("a", tenth / 10)
        nodes.joins("b", tenth / 10)
    assert nodes.silent(7.8) == {"c"}


def test_the_last_one_missing_is_not_waited_for_much_longer_than_that() -> None:
    assert (RETRY_MOST_S * 1.25) < LAST_S < 2 * RETRY_MOST_S


def test_two_that_never_come_are_silent_in_the_end() -> None:
    nodes = Coming()
    for second in range(1, int(RETURN_S) + 1):
        nodes.joins("a", second)
        assert nodes.silent(second) == set()
    nodes.joins("a", RETURN_S + 2)
    assert nodes.silent(RETURN_S + 2) == {"b", "c"}
