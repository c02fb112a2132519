"""Lemons by statistics: how often a healthy node is called one, and how soon a bad one is."""

import random

import pytest

from everstep.core.cluster.node_states import NodeState
from everstep.core.faults.gray import (
    DAY_S,
    FALSE_ALARMS,
    HOUR_S,
    KINDS,
    GrayRecord,
    Peers,
    at_least,
    judge_gray,
)
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

NODES, WEEKS = 64, 4
CORRECTED = "EDAC MC0: 1 CE memory read error on CPU_SrcID#0"


def cluster(rng: random.Random, rates: list[dict[str, float]]) -> dict[int, float]:
    """Each node's events over four weeks, at its own rates per day: when was it first called a lemon?"""
    records = [GrayRecord(since=0.0) for _ in rates]
    events = []
    for node, of_kinds in enumerate(rates):
        for kind, rate in of_kinds.items():
            at = rng.expovariate(rate) if rate else float("inf")
            while at < 7 * WEEKS:
                events.append((at * DAY_S, node, kind))
                at += rng.expovariate(rate)
    found: dict[int, float] = {}
    total = dict.fromkeys(KINDS, 0)
    for at, node, kind in sorted(events):
        record = records[node]
        if not record.note(kind, at):
            continue
        total[kind] += 1
        mine = len(record.events[kind])
        if mine > 1 and node not in found:
            others = Peers(len(rates) - 1, total[kind] - mine, (len(rates) - 1) * at / DAY_S)
            if judge_gray(kind, record, others, at) is not None:
                found[node] = at
    return found


@pytest.mark.parametrize("clusters", [4, pytest.param(80, marks=pytest.mark.slow)])
def test_healthy_nodes_are_called_lemons_less_often_than_stated(clusters: int) -> None:
    """Clusters of 64 nodes for four weeks; 80 are 20,480 node-weeks. The true rates are up to ten times the
    prior's or a tenth of it, and nodes of a cluster differ by a third from each other.
    """
    rng, alarms, node_weeks = random.Random(7), 0, 0
    for _ in range(clusters):
        usual = {kind: 10 ** rng.uniform(-1, 1) / days for kind, days in KINDS.items()}
        rates = [{kind: rate * rng.uniform(0.75, 1.33) for kind, rate in usual.items()} for _ in range(NODES)]
        alarms += len(cluster(rng, rates))
        node_weeks += NODES * WEEKS
    assert alarms / node_weeks <= FALSE_ALARMS, f"{alarms} in {node_weeks} node-weeks"


def test_nodes_with_twenty_times_the_rate_of_their_peers_are_found_within_four_weeks() -> None:
    rng = random.Random(11)
    rates = [{kind: 3 / days for kind, days in KINDS.items()} for _ in range(NODES)]
    for bad, kind in enumerate(KINDS):
        rates[bad][kind] *= 20
    assert cluster(rng, rates).keys() == set(range(len(KINDS)))


def test_few_events_are_no_surprise_where_peers_have_many() -> None:
    """A storm with one gray node: the sum of a tail that begins far below its peak ended at its first term,
    and healthy nodes were lemons with p = 4e-21.
    """
    assert at_least(2, shape=258.0, odds=0.19) > 0.999
    now = 25 * DAY_S
    record = GrayRecord(since=0.0)
    for at in (now / 2, now):
        record.note("corrected error", at)
    assert judge_gray("corrected error", record, Peers(4, 257, 102.0), now) is None


def test_two_isolations_within_an_hour_make_a_lemon_and_two_in_a_month_do_not() -> None:
    peers = [GrayRecord(since=0.0) for _ in range(3)]
    now = 28 * DAY_S
    for gap, is_lemon in ((HOUR_S / 2, True), (20 * DAY_S, False)):
        record = GrayRecord(since=0.0)
        record.note("isolation", now - gap)
        record.note("isolation", now)
        found = judge_gray("isolation", record, Peers.of(peers, "isolation", now), now)
        assert (found is not None) == is_lemon
        assert found is None or "2 times isolation within 1.0 hours; 3 peers had 0" in found.because


def test_what_all_nodes_do_makes_no_lemon() -> None:
    """A network that flaps for everybody."""
    records = [GrayRecord(since=0.0) for _ in range(8)]
    for day in range(20):
        for record in records:
            for hour in range(6):
                record.note("mended link", day * DAY_S + 2 * hour * HOUR_S)
    usual = Peers.of(records[1:], "mended link", 20 * DAY_S)
    assert judge_gray("mended link", records[0], usual, 20 * DAY_S) is None


def test_a_record_is_bounded_and_one_fault_that_speaks_often_counts_once() -> None:
    record = GrayRecord(since=0.0)
    assert [record.note("corrected error", second) for second in range(0, 7200, 600)].count(True) == 2
    for hour in range(3000):
        record.note("mended link", hour * 1.5 * HOUR_S)
    assert len(record.events["mended link"]) <= 28 * 24 / 1.5 + 1


@pytest.mark.parametrize(
    ("count", "shape", "odds"), [(1, 1.0, 0.3), (4, 1.0, 0.05), (3, 6.0, 0.2), (9, 2.5, 0.6)]
)
def test_the_tail_is_that_of_the_distribution(count: int, shape: float, odds: float) -> None:
    """Against a rate that is drawn, and events that are drawn at that rate."""
    rng, hits, runs = random.Random(1), 0, 5_000
    for _ in range(runs):
        rate = rng.gammavariate(shape, odds / (1 - odds))
        events, left = 0, rng.expovariate(1.0)
        while left < rate and events < count:
            events, left = events + 1, left + rng.expovariate(1.0)
        hits += events >= count
    expected = at_least(count, shape=shape, odds=odds)
    assert abs(hits / runs - expected) < 4 * (expected / runs) ** 0.5 + 1e-4


@pytest.mark.parametrize("flawed", ["a", "abcde"])
def test_a_node_that_corrects_errors_all_day_is_kept_out_unless_all_do(flawed: str) -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abcde", 2))
    cluster.submit(shape=Shape(2, 2, 2))
    for _ in range(12):
        cluster.wait(2 * HOUR_S)
        for node in flawed:
            cluster.says(node, msg.KernelSpoke(text=CORRECTED, slots=()), None)
    found = {name for name, node in cluster.coordinator.nodes.items() if node.state is NodeState.LEMON}
    assert found == ({"a"} if flawed == "a" else set())
    if found:
        (incident,) = cluster.coordinator.log.incidents
        assert incident.verdict is not None
        assert incident.verdict.kind == "gray failure"
        assert "times corrected error within" in incident.evidence[0].text
        cluster.hear(msg.ReadmitRequested(node="a", by="an operator"))
        assert cluster.coordinator.nodes["a"].state is NodeState.UP
    cluster.coordinator.validate()
