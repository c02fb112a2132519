"""Networks of nodes, measured in pairs: the node that all bad pairs have in common is named."""

import json
import random
from collections import deque
from itertools import pairwise

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.network_checks import GATHER_S, MOST_S, PAIR_S
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.snapshot import freeze, thaw
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.storms.mutants import planted
from tests.support.fake_cluster import FakeCluster


class Network:
    """Answers the orders to measure. `bad`: what a pair with this node finds."""

    def __init__(self, **bad: dict[str, object]) -> None:
        self.cluster = FakeCluster(nodes={})
        self.cluster.crew.pairs = self.measured
        self.bad, self.rng, self.asked = bad, random.Random(7), []

    def measured(self, node: str, order: msg.MeasurePair) -> msg.PairMeasured | None:
        self.asked.append((node, order.peer))
        noise = self.rng.lognormvariate(0, 0.1)
        found = {"out_mb_s": 900 * noise, "in_mb_s": 1000 * noise, "answer_ms": 0.2 * noise}
        for name in (node, order.peer):
            change = dict(self.bad.get(name, {}))
            if change.pop("silent", False):
                return None
            if "ahead_s" in change:
                ahead = float(str(change.pop("ahead_s")))
                found["clock_off_s"] = ahead if name == node else -ahead
            found |= change  # type: ignore[arg-type]
        return msg.PairMeasured(peer=order.peer, key=order.key, **found)  # type: ignore[arg-type]

    def join(self, *names: str, port: int = 7, boot: str = "1") -> None:
        for name in names:
            self.cluster.numbers.setdefault(name, 0)
            self.cluster.hear(
                msg.NodeJoined(node=name, boot=boot, slots=2, host=name, pair_port=port, checks_network=True)
            )

    def wait(self, seconds: float) -> None:
        for _ in range(int(2 * seconds) + 1):
            self.cluster.wait(0.5)

    def state(self, name: str) -> NodeState:
        return self.cluster.coordinator.nodes[name].state

    def incidents(self) -> list[tuple[str | None, str]]:
        log = self.cluster.coordinator.log.incidents
        return [(i.node, i.verdict.kind if i.verdict else "") for i in log]


def test_a_node_that_is_checked_has_a_timer_and_without_it_that_is_seen() -> None:
    def due() -> list[float]:
        network = Network()
        network.join("a")
        coordinator = network.cluster.coordinator
        assert coordinator.nodes["a"].state is NodeState.CHECKING
        assert coordinator.nodes["a"].pairs_at is not None
        return [at for times in coordinator.timers().values() for at in times]

    assert due()
    with planted("no_timer_of_network_check"):
        assert not due()


def test_every_node_is_measured_with_two_others_before_it_gets_workers() -> None:
    network = Network()
    network.join("a", "b", "c", "d", "e")
    network.wait(GATHER_S)
    assert {network.state(name) for name in "abcde"} == {NodeState.UP}
    peers = {name: {n for pair in network.asked if name in pair for n in pair} - {name} for name in "abcde"}
    assert all(len(found) >= 2 for found in peers.values()), peers
    assert not network.incidents()
    network.cluster.coordinator.validate()
    assert "MB/s" in network.cluster.coordinator.nodes["a"].because


def test_a_node_gets_no_workers_while_its_network_is_measured() -> None:
    network = Network(new={"silent": True})
    network.join("a", "b", "c", "d")
    network.wait(GATHER_S)
    network.join("new")
    assert network.state("new") is NodeState.CHECKING
    network.cluster.submit(shape=Shape(5, 2, 1))
    assert "new" not in {seat.node for seat in network.cluster.coordinator.tasks["t"].seats.values()}


BAD = {
    "no connection": {"error": "no answer in time"},
    "other bytes": {"error": "other bytes arrived than were sent"},
    "a tenth of the rate": {"out_mb_s": 95.0, "in_mb_s": 95.0},
    "one direction is slow": {"in_mb_s": 95.0},
    "late": {"answer_ms": 100.0},
    "packets are lost": {"resent": 0.05},
    "its agent does not answer": {"silent": True},
}


@pytest.mark.parametrize("what", BAD)
def test_the_node_that_is_bad_with_every_peer_is_named_and_no_other(what: str) -> None:
    network = Network()
    network.join("a", "b", "c", "d", "e")
    network.wait(GATHER_S)
    network.bad["new"] = BAD[what]
    network.join("new")
    network.wait(2 * PAIR_S + 1)
    assert network.state("new") is NodeState.ISOLATED
    assert {network.state(name) for name in "abcde"} == {NodeState.UP}
    assert network.incidents() == [("new", "unfit node")]
    because = network.cluster.coordinator.nodes["new"].because
    assert "network to" in because


@pytest.mark.parametrize("what", BAD)
def test_a_bad_node_among_many_that_join_together_is_named(what: str) -> None:
    network = Network(c=BAD[what])
    network.join("a", "b", "c", "d", "e", "f")
    network.wait(MOST_S + PAIR_S + 1)
    assert network.state("c") is NodeState.ISOLATED
    assert {network.state(name) for name in "abdef"} == {NodeState.UP}
    assert network.incidents() == [("c", "unfit node")]


def test_a_peer_whose_network_has_become_bad_is_named_and_not_the_node_that_joins() -> None:
    network = Network()
    network.join("a", "b", "c", "d", "e")
    network.wait(GATHER_S)
    network.bad["a"] = BAD["a tenth of the rate"]
    network.join("new")
    network.wait(MOST_S)
    assert network.state("new") is NodeState.UP
    assert network.state("a") is NodeState.ISOLATED
    assert network.incidents() == [("a", "unfit node")]


def test_a_bad_pair_of_two_nodes_names_neither_of_them() -> None:
    network = Network(b={"error": "no answer in time"})
    network.join("a", "b")
    network.wait(MOST_S + 1)
    assert (network.state("a"), network.state("b")) == (NodeState.UP, NodeState.UP)
    assert {kind for _, kind in network.incidents()} == {"marked node"}


def test_a_clock_that_is_off_is_marked_with_the_difference() -> None:
    network = Network(c={"ahead_s": 30.0})
    network.join("a", "b", "c", "d")
    network.wait(GATHER_S)
    assert network.state("c") is NodeState.UP
    assert network.incidents() == [("c", "marked node")]
    verdict = network.cluster.coordinator.log.incidents[0].verdict
    assert verdict is not None
    assert "30 s ahead of" in verdict.because


def test_a_node_alone_is_admitted_after_a_moment() -> None:
    network = Network()
    network.join("a")
    assert network.state("a") is NodeState.CHECKING
    network.wait(GATHER_S + 0.1)
    assert network.state("a") is NodeState.UP
    assert "no other node" in network.cluster.coordinator.nodes["a"].because


def test_an_isolated_node_is_measured_before_it_is_readmitted() -> None:
    network = Network()
    network.join("a", "b", "c", "d")
    network.wait(GATHER_S)
    text = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    network.cluster.says("a", msg.KernelSpoke(text=text, slots=()), None)
    before = len(network.asked)
    network.bad["a"] = BAD["no connection"]
    network.wait(network.cluster.coordinator.patience.isolation_s + MOST_S + 5)
    assert len(network.asked) > before
    assert network.state("a") in (NodeState.ISOLATED, NodeState.LEMON)


def test_a_node_that_dies_while_it_is_measured_blames_no_peer() -> None:
    network = Network(new={"silent": True})
    network.join("a", "b", "c", "d")
    network.wait(GATHER_S)
    network.join("new")
    network.cluster.hear(msg.NodeLeft(node="new"))
    network.wait(MOST_S + PAIR_S)
    assert not network.incidents()
    assert {network.state(name) for name in "abcd"} == {NodeState.UP}
    network.bad.clear()
    network.join("new", boot="2")
    network.wait(GATHER_S)
    assert network.state("new") is NodeState.UP


def test_a_hundred_nodes_join_at_once_and_none_is_refused() -> None:
    network = Network()
    names = [f"n{number}" for number in range(100)]
    network.join(*names)
    network.wait(MOST_S + 1)
    assert {network.state(name) for name in names} == {NodeState.UP}
    assert not network.incidents()
    keys = [tuple(sorted(pair)) for pair in network.asked]
    assert all(one != other for one, other in pairwise(sorted(keys))), "a pair was measured twice"


def slow_between(
    victim: str, *, nodes: str = "abc", rate: float = 9.0, is_suspected: bool = False
) -> Network:
    """Two replicas, each on a node of its own: all slow links are between these two."""
    network = Network()
    network.cluster = FakeCluster(nodes={}, planned=True)
    network.cluster.crew.pairs = network.measured
    for name in nodes:
        network.cluster.numbers.setdefault(name, 0)
        network.cluster.hear(msg.NodeJoined(node=name, boot="1", slots=2, host=name, pair_port=7))
    network.cluster.submit(shape=Shape(2, 2, 2), steps=100_000)
    network.cluster.seal()
    seats = network.cluster.coordinator.tasks["t"].seats
    assert {seat.node for seat in seats.values()} == {"a", "b"}
    known = network.cluster.thinking.measured.of("t")
    known.last = (2, 2, 4)
    known.steps = {known.last: deque([0.5] * 5 + [2.0] * 3)}
    network.bad[victim] = {"out_mb_s": rate, "in_mb_s": rate}
    one, other = Worker(0, 0), Worker(1, 0)
    if is_suspected:
        links = ((one, other), (other, one))
        network.cluster.hear(msg.LinksSuspected(task="t", links=links, because="1 of 10 MB/s"))
    else:
        network.cluster.hear(msg.SlowLinkFound(task="t", worker=one, peer=other, because="1 of 10 MB/s"))
    return network


@pytest.mark.parametrize("is_suspected", [False, True])
@pytest.mark.parametrize("victim", ["a", "b"])
def test_of_the_two_ends_of_all_slow_links_the_one_that_is_slow_with_a_third_node_is_named(
    victim: str, is_suspected: bool
) -> None:
    network = slow_between(victim, is_suspected=is_suspected)
    assert {frozenset(pair) for pair in network.asked} == {frozenset("ac"), frozenset("bc")}
    links = [i for i in network.cluster.coordinator.log.incidents if "link" in i.what]
    assert {i.node for i in links} == {victim}
    assert f"it is the network of {victim}" in " ".join(e.text for i in links for e in i.evidence)
    seats = network.cluster.coordinator.tasks["t"].seats.values()
    assert {seat.node for seat in seats if not seat.leaving} == {"a", "b", "c"} - {victim}
    assert network.state(victim) is NodeState.ISOLATED
    network.cluster.coordinator.validate()


def test_neither_end_is_named_where_no_third_node_is_there_or_both_are_as_fast() -> None:
    for suspected in (False, True):
        alone = slow_between("a", nodes="ab", is_suspected=suspected)
        even = slow_between("a", rate=700.0, is_suspected=suspected)
        for network in (alone, even):
            _no_node_is_blamed(network)
            assert bool(network.incidents()) is not suspected


def _no_node_is_blamed(network: Network) -> None:
    assert {network.state(name) for name in "ab"} == {NodeState.UP}
    assert not any(seat.leaving for seat in network.cluster.coordinator.tasks["t"].seats.values())


def test_suspected_links_outlive_a_restart_and_are_forgotten_when_they_are_calm() -> None:
    """Nobody is there to measure with; who comes later must not name a node for what is over."""
    network = slow_between("a", nodes="ab", is_suspected=True)
    again = Coordinator()
    thaw(again, json.loads(json.dumps(freeze(network.cluster.coordinator))))
    one, other = Worker(0, 0), Worker(1, 0)
    links = ((one, other), (other, one))
    speeds = network.cluster.coordinator.tasks["t"].speeds
    assert again.tasks["t"].speeds.suspected == speeds.suspected == links
    for worker, peer in links:
        network.cluster.hear(msg.SlowLinkEnded(task="t", worker=worker, peer=peer, because="calm"))
    assert speeds.suspected == ()
