"""Who cannot reach whom: the node whose data network is dead is named and left, healthy ones are not.

Before, workers said nothing of peers that they could not reach: all waited, all were restarted in the same
places, and in the end healthy nodes were isolated, whichever came first.
"""

import contextlib
import socket
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.cluster.node_states import NodeState
from everstep.core.faults.reachability import cut_off, pair_of
from everstep.node import worker_processes
from everstep.node.worker_processes import probed
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

NODES = "abcdefgh"


# ------------------------------------------------------------------ what pairs have in common


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ("", ""),
        ("ab", ""),  # one pair: either end
        ("ab bc", "b"),
        ("ab bc bd", "b"),
        ("ab cd", ""),  # two pairs that have nothing in common
        ("ab bc ca", ""),  # everyone and no one
        ("ax ay bx by cx cy xy", "xy"),  # two of five nodes are cut off
        ("ax ay bx by", ""),  # two equal halves of a network
        ("ax ay", "a"),
        ("ab bc cd", ""),  # a chain: b and c explain it, and so could others
    ],
)
def test_the_node_that_all_bad_pairs_have_in_common_is_cut_off(pairs: str, named: str) -> None:
    assert cut_off([pair_of(*pair) for pair in pairs.split()]) == tuple(named)


@given(st.sets(st.sampled_from(NODES), min_size=1, max_size=3), st.data())
def test_whatever_part_of_the_pairs_is_known_no_pair_of_healthy_nodes_is_needed(
    dead: set[str], data: st.DataObject
) -> None:
    """All pairs with a dead end, of eight nodes: exactly the dead ones. Of some of them: never all nodes."""
    everything = [pair for pair in combinations(NODES, 2) if dead & set(pair)]
    assert cut_off(everything) == tuple(sorted(dead))
    some = data.draw(st.lists(st.sampled_from(everything), unique=True))
    found = cut_off(some)
    assert 2 * len(found) < len({node for pair in some for node in pair}) or not found


# ------------------------------------------------------------------ what the coordinator does


def trains(nodes: str = "abcd", slots: int = 1, shape: Shape | None = None) -> FakeCluster:
    cluster = FakeCluster(nodes=dict.fromkeys(nodes, slots))
    cluster.submit(shape=shape or Shape(2, 2, 2))
    cluster.seal()
    return cluster


def at(cluster: FakeCluster, node: str) -> Worker:
    seats = cluster.coordinator.tasks["t"].seats
    return next(worker for worker, seat in seats.items() if seat.node == node)


def down(cluster: FakeCluster, one: str, other: str, **more: object) -> None:
    """The worker on one node cannot reach the one on another."""
    worker, peer = at(cluster, one), at(cluster, other)
    address = cluster.coordinator.tasks["t"].seats[peer].address
    assert address is not None
    facts = {"worker": worker, "peer": peer, "address": address, "down_s": 3.0, "error": "timed out"}
    cluster.report("t", worker, msg.LinkDown(task="t", **facts | more))


def states(cluster: FakeCluster) -> dict[str, str]:
    return {name: str(node.state) for name, node in cluster.coordinator.nodes.items()}


def probes(cluster: FakeCluster) -> dict[str, msg.ProbeLinks]:
    sent = [action for action in cluster.actions if isinstance(action, msg.Dispatch)]
    return {action.node: action.order for action in sent if isinstance(action.order, msg.ProbeLinks)}


def test_the_node_that_two_others_cannot_reach_is_isolated_with_the_reason() -> None:
    cluster = trains("abcde")
    down(cluster, "a", "b")
    down(cluster, "c", "b")
    down(cluster, "b", "d")
    assert set(states(cluster).values()) == {NodeState.UP}, "others may break meanwhile"
    cluster.wait(2.1)
    assert states(cluster) == {"a": "up", "b": "isolated", "c": "up", "d": "up", "e": "up"}
    (incident,) = [i for i in cluster.coordinator.log.incidents if "data network" in i.what]
    assert (incident.label, incident.node) == ("SEV1 network adapter error", "b")
    assert incident.closed
    assert "a, c, d cannot reach b on the data network" in incident.verdict.because
    assert any("timed out" in evidence.text for evidence in incident.evidence)
    assert "b" not in {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()}
    assert cluster.coordinator.tasks["t"].failures.times == {} or not any(
        cluster.coordinator.tasks["t"].failures.times.values()
    )


def test_connections_of_a_worker_that_was_asked_to_go_accuse_no_node() -> None:
    """A storm (`--roles`, seed 990079): a worker was ended to change its stage, its peers said so before its
    agent did, and its node was isolated.
    """
    cluster = trains("abcde")
    task, worker = cluster.coordinator.tasks["t"], at(cluster, "b")
    cluster.cut.add("b")  # that its worker has ended is not known yet
    staffing = cluster.coordinator._failures._staffing
    staffing.ask_to_go(task, worker, "it changes its stage", Moment(cluster.now, cluster.coordinator.events))
    down(cluster, "a", "b")
    down(cluster, "c", "b")
    cluster.wait(2.1)
    assert states(cluster)["b"] == "up"
    assert not [i for i in cluster.coordinator.log.incidents if "data network" in i.what]


def test_nodes_that_lose_power_together_do_not_accuse_the_one_that_talked_to_them() -> None:
    """Storms (`--roles`, seed 991044 and others): their silence was noticed after links were judged, and the
    node that had reported its broken links to them was isolated.
    """
    cluster = trains("abcde")
    cluster.cut |= {"b", "c"}
    down(cluster, "a", "b")
    down(cluster, "a", "c")
    cluster.wait(2.1)
    assert sorted(probes(cluster)) == ["b", "c"], "do they still answer?"
    for node in "bc":
        cluster.hear(msg.NodeFellSilent(node=node, silent_s=2.0))
    cluster.wait(8.0)
    assert states(cluster)["a"] == "up"
    assert not [i for i in cluster.coordinator.log.incidents if "data network" in i.what]


def test_a_node_that_cannot_reach_others_is_isolated_once_two_of_them_have_answered() -> None:
    cluster = trains("abcde")
    down(cluster, "a", "b")
    down(cluster, "a", "c")
    cluster.wait(2.1)
    cluster.says("b", msg.LinksProbed(task="t", reached=("a", "c"), unreached=()), None)
    cluster.wait(1.0)
    assert states(cluster)["a"] == "up", "one word is missing"
    cluster.says("c", msg.LinksProbed(task="t", reached=("b",), unreached=("a",)), None)
    cluster.wait(0.1)
    assert states(cluster)["a"] == "isolated"


def test_a_node_that_never_answers_is_asked_once_and_not_waited_for() -> None:
    cluster = trains("abcde")
    down(cluster, "a", "b")
    down(cluster, "a", "c")
    cluster.wait(2.1)
    cluster.says("b", msg.LinksProbed(task="t", reached=(), unreached=("a",)), None)
    for _ in range(6):
        cluster.wait(2.1)
    sent = [action for action in cluster.actions if isinstance(action, msg.Dispatch)]
    assert sorted(action.node for action in sent if isinstance(action.order, msg.ProbeLinks)) == ["b", "c"]
    assert cluster.coordinator.tasks["t"].failures.links.judge_at is None
    assert states(cluster)["a"] == "up"


def test_one_pair_is_probed_from_other_nodes_and_the_one_they_do_not_reach_is_isolated() -> None:
    cluster = trains("abc", slots=2)
    pair = sorted({seat.node for seat in cluster.coordinator.tasks["t"].seats.values()})
    (third,) = set("abc") - set(pair)
    down(cluster, *pair)
    cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}
    assert {node: sorted(order.addresses) for node, order in probes(cluster).items()} == {third: pair}
    cluster.says(third, msg.LinksProbed(task="t", reached=(pair[0],), unreached=(pair[1],)), None)
    cluster.wait(2.1)
    assert states(cluster)[pair[1]] == "isolated"
    assert states(cluster)[pair[0]] == states(cluster)[third] == "up"


def test_a_drained_node_says_which_end_of_a_pair_is_cut_off() -> None:
    """Workers moved from it to a node whose data network is dead. No node was asked, and none was named."""
    cluster = trains("abc", slots=2)
    stays, leaves = sorted({seat.node for seat in cluster.coordinator.tasks["t"].seats.values()})
    (dead,) = set("abc") - {stays, leaves}
    cluster.hear(msg.DrainRequested(node=leaves))
    assert {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()} == {stays, dead}
    down(cluster, stays, dead)
    cluster.wait(2.1)
    assert list(probes(cluster)) == [leaves]
    cluster.says(leaves, msg.LinksProbed(task="t", reached=(stays,), unreached=(dead,)), None)
    cluster.wait(2.1)
    named = [i.node for i in cluster.coordinator.log.incidents if "cut off from the data network" in i.what]
    assert named == [dead]


def all_wait(cluster: FakeCluster) -> None:
    """Every worker waits for what the other replica of its stage would send."""
    for worker in cluster.coordinator.tasks["t"].seats:
        peer = 1 - worker.replica
        overdue = msg.OpOverdue(
            task="t",
            worker=worker,
            incarnation=1,
            doing=f"P[2 stage {worker.stage} {peer}>{worker.replica}]",
            busy=False,
            stopped=False,
            elapsed_s=6.0,
            expected_s=0.5,
            step=2,
        )
        cluster.report("t", worker, overdue)


def test_where_all_wait_the_nodes_try_each_other_and_the_one_that_is_cut_off_is_isolated() -> None:
    """On two real networks: connections over the dead one were opened again before they ended, all workers
    were restarted after 16 s, and the first node whose worker ended was named.
    """
    cluster = trains("abc", slots=2)
    pair = sorted({seat.node for seat in cluster.coordinator.tasks["t"].seats.values()})
    (third,) = set("abc") - set(pair)
    cut, healthy = pair
    all_wait(cluster)
    assert {node: sorted(order.addresses) for node, order in probes(cluster).items()} == {
        cut: [healthy],
        healthy: [cut],
        third: pair,
    }
    for node, unreached in ((healthy, (cut,)), (third, (cut,)), (cut, (healthy,))):
        assert set(states(cluster).values()) == {NodeState.UP}
        cluster.says(node, msg.LinksProbed(task="t", reached=(), unreached=unreached), None)
    cluster.wait(0.1)
    assert states(cluster) == {cut: "isolated", healthy: "up", third: "up"}
    (incident,) = [i for i in cluster.coordinator.log.incidents if "data network" in i.what]
    assert incident.node == cut
    assert f"node {third} cannot connect to {cut}" in [evidence.text for evidence in incident.evidence]
    bad = cluster.coordinator.tasks["t"].failures.links
    assert (bad.probed, bad.awaited, bad.concerned) == ({}, set(), ())


def test_what_a_probe_found_is_forgotten_where_not_all_answer() -> None:
    """Else it would speak against a node long after."""
    cluster = trains("abc", slots=2)
    pair = sorted({seat.node for seat in cluster.coordinator.tasks["t"].seats.values()})
    all_wait(cluster)
    cluster.says(pair[0], msg.LinksProbed(task="t", reached=(), unreached=(pair[1],)), None)
    cluster.wait(6.1)
    bad = cluster.coordinator.tasks["t"].failures.links
    assert (bad.probed, bad.awaited, bad.concerned, bad.judge_at) == ({}, set(), (), None)
    assert set(states(cluster).values()) == {NodeState.UP}


def test_where_all_wait_and_all_nodes_reach_each_other_no_node_is_named() -> None:
    cluster = trains("abc", slots=2)
    for _ in range(3):  # then all workers are restarted
        all_wait(cluster)
        for node in "abc":
            cluster.says(node, msg.LinksProbed(task="t", reached=(), unreached=()), None)
        cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}
    stalls = [i for i in cluster.coordinator.log.incidents if i.what == "all workers wait"]
    assert [i.remedies[-1].what for i in stalls][-1] == "restart all workers of the task"
    assert {i.node for i in stalls} == {""}


def test_a_pair_that_others_reach_is_left_alone_and_probed_once() -> None:
    cluster = trains("abc", slots=2)
    pair = sorted({seat.node for seat in cluster.coordinator.tasks["t"].seats.values()})
    (third,) = set("abc") - set(pair)
    down(cluster, *pair)
    cluster.wait(2.1)
    cluster.says(third, msg.LinksProbed(task="t", reached=tuple(pair), unreached=()), None)
    cluster.wait(2.1)
    down(cluster, pair[1], pair[0])
    cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}
    assert len(probes(cluster)) == 1


def test_two_equal_halves_of_a_network_name_no_node() -> None:
    cluster = trains("abcdef")
    for one, other in ("ac", "ad", "bc", "bd"):
        down(cluster, one, other)
    cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}


def test_what_is_said_of_a_process_that_is_gone_does_not_count() -> None:
    """Peers of a dead worker cannot reach it either, and say so before they hear of its death."""
    cluster = trains("abcde")
    down(cluster, "a", "b")
    down(cluster, "c", "b")
    cluster.exits(at(cluster, "b"), "killed by SIGKILL")
    cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}


def test_an_address_of_an_earlier_process_does_not_count() -> None:
    cluster = trains("abcde")
    for one in "acd":
        down(cluster, one, "b", address=("b", 9))
    cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}
    assert cluster.coordinator.tasks["t"].failures.links.links == []


def test_a_silent_node_is_judged_by_its_silence_alone() -> None:
    cluster = trains("abcde")
    for one in "acd":
        down(cluster, one, "b")
    cluster.silence("b")
    cluster.wait(2.1)
    assert states(cluster)["b"] == "silent"


def test_links_that_work_again_do_not_count() -> None:
    cluster = trains("abcde")
    for one in "acd":
        down(cluster, one, "b")
        mended = msg.LinkMended(task="t", worker=at(cluster, one), peer=at(cluster, "b"))
        cluster.report("t", at(cluster, one), mended)
    cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}


def test_a_node_that_cannot_be_done_without_is_named_once() -> None:
    cluster = trains("abc", shape=Shape(1, 3, 2))
    down(cluster, "a", "b")
    down(cluster, "c", "b")
    cluster.wait(2.1)
    down(cluster, "b", "a")
    cluster.wait(2.1)
    assert set(states(cluster).values()) == {NodeState.UP}
    (incident,) = [i for i in cluster.coordinator.log.incidents if "data network" in i.what]
    assert incident.node == "b"
    assert incident.remedies[-1].what == "none: an operator can help"


# ------------------------------------------------------------------ what an agent does


def test_a_probe_says_which_nodes_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is refused is an answer: the process is gone, its machine is reached."""
    monkeypatch.setattr(worker_processes, "PROBE_S", 0.3)
    with contextlib.ExitStack() as undo:
        listening = [undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)) for _ in "abc"]
        there, gone, deaf = (each.getsockname() for each in listening)
        listening[1].close()
        for _ in range(2):  # the kernel drops what comes after these: as a dead network does
            waiting = undo.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(deaf)
        order = msg.ProbeLinks(task="t", addresses={"a": there, "b": gone, "c": deaf})
        assert probed(order) == msg.LinksProbed(task="t", reached=("a", "b"), unreached=("c",))
