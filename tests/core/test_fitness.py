"""Checks of nodes: who is admitted, marked or kept out, by its figures and those of its peers."""

import random

import pytest

from everstep.core.cluster.node_states import NodeState
from everstep.core.faults.fitness import WEEK_S, judge_checks, kept_with, run_of
from everstep.protocol import messages as msg
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster

USUAL = {"compute cpu fp32": 400.0, "memory cpu": 12.0, "disk": 900.0, "network": 25.0}


def results(
    scale: float = 1.0, rng: random.Random | None = None, **failed: str
) -> tuple[msg.CheckResult, ...]:
    """As a healthy node finds them, with the noise that machines have."""
    found = [
        msg.CheckResult(
            check=check,
            state="passed",
            says="",
            figures={"rate": usual * scale * (rng.lognormvariate(0, 0.1) if rng else 1.0)},
        )
        for check, usual in USUAL.items()
    ]
    return (
        *found,
        *(msg.CheckResult(check=c.replace("_", " "), state="failed", says=s) for c, s in failed.items()),
    )


def breaks(cluster: FakeCluster, node: str) -> None:
    text = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    cluster.says(node, msg.KernelSpoke(text=text, slots=()), None)


def join(cluster: FakeCluster, node: str, found: tuple[msg.CheckResult, ...]) -> NodeState:
    cluster.crew.checks[node] = found
    cluster.numbers.setdefault(node, 0)
    cluster.hear(msg.NodeJoined(node=node, boot="1", slots=2, host=node, checks=found))
    return cluster.coordinator.nodes[node].state


def test_two_hundred_healthy_nodes_join_and_none_is_refused_or_marked() -> None:
    rng, cluster = random.Random(4), FakeCluster(nodes={})
    for number in range(200):
        assert join(cluster, f"n{number}", results(rng=rng)) is NodeState.UP
    assert not cluster.coordinator.log.incidents
    cluster.coordinator.validate()


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        (results(compute_cpu_bf16="3 of 5 products are wrong"), NodeState.ISOLATED, "3 of 5 products"),
        (results(memory_cuda="7 words were changed"), NodeState.ISOLATED, "7 words"),
        (results(ecc_0="GPU 0 has 2 uncorrected ECC errors"), NodeState.ISOLATED, "uncorrected ECC"),
        (results(command_mine="exit code 1: broken"), NodeState.ISOLATED, "exit code 1"),
        (results(shared_memory="12 MiB free in /dev/shm"), NodeState.UP, "12 MiB"),
        (results(kernel_log="the kernel says: Xid 79"), NodeState.UP, "Xid 79"),
        (results(scale=0.4), NodeState.UP, "rate 160; the median of 6 peers is 400"),
        (results(scale=0.2), NodeState.ISOLATED, "rate 80; the median of 6 peers is 400"),
    ],
)
def test_an_unfit_node_gets_no_workers_and_a_doubtful_one_is_marked(
    found: tuple[msg.CheckResult, ...], state: NodeState, said: str
) -> None:
    cluster = FakeCluster(nodes={})
    for number in range(6):
        join(cluster, f"n{number}", results())
    assert join(cluster, "new", found) is state
    (incident,) = cluster.coordinator.log.incidents
    assert incident.node == "new"
    assert incident.verdict is not None
    assert said in incident.verdict.because
    assert incident.verdict.kind == ("unfit node" if state is NodeState.ISOLATED else "marked node")
    cluster.submit(shape=Shape(7, 2, 1))
    there = {seat.node for seat in cluster.coordinator.tasks["t"].seats.values()}
    assert ("new" in there) == (state is NodeState.UP)
    # A line that was cut changes nothing: its checks were judged when it began.
    cluster.hear(msg.NodeJoined(node="new", boot="1", slots=2, host="new", checks=found))
    assert len(cluster.coordinator.log.incidents) == 1


def test_an_isolated_node_is_checked_before_it_is_readmitted() -> None:
    cluster = FakeCluster(nodes={})
    for name in "abcd":
        join(cluster, name, results())
    cluster.submit(shape=Shape(2, 2, 1))
    node = cluster.coordinator.nodes["a"]
    isolation_s = cluster.coordinator.patience.isolation_s
    cluster.crew.checks["a"] = results(compute_cpu_fp32="1 of 9 products are wrong")
    breaks(cluster, "a")
    assert node.state is NodeState.ISOLATED
    cluster.wait(isolation_s + 1)
    assert node.state is NodeState.ISOLATED
    assert "1 of 9 products are wrong" in node.because
    cluster.crew.checks["a"] = results()
    cluster.wait(isolation_s + 1)
    assert node.state is NodeState.UP
    assert node.because == "its time of isolation is over and it passes its checks"


def test_an_isolated_node_that_does_not_answer_is_readmitted_after_a_while() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abc", 2))
    node = cluster.coordinator.nodes["a"]
    breaks(cluster, "a")
    cluster.cut.add("a")
    cluster.wait(cluster.coordinator.patience.isolation_s + 1)
    assert node.state is NodeState.ISOLATED
    cluster.wait(121)
    assert node.state is NodeState.UP


def test_figures_are_kept_for_weeks_and_a_node_is_compared_with_itself() -> None:
    runs = []
    for day in range(100):
        runs = kept_with(runs, run_of(results(), day * 86_400.0))
    assert len(runs) == 8
    assert runs[0].at < runs[-1].at - 6 * WEEK_S
    found = judge_checks(results(scale=0.4), runs, [])
    assert len(found.marked) == len(USUAL)
    assert "earlier checks of it" in found.marked[0]
    assert judge_checks(results(scale=0.8), runs, []) == judge_checks(results(), [], [])


def of_gpu(slots: tuple[int, ...], says: str = "", scale: float = 1.0) -> tuple[msg.CheckResult, ...]:
    """A node of two GPUs; one of them is bad if it `says` so, or slow."""
    return tuple(
        msg.CheckResult(
            check=f"compute cuda:{slot} bf16",
            state="failed" if says and slot in slots else "passed",
            says=says,
            figures={"products per second": 900.0 * (scale if slot in slots else 1.0)},
            gpu=f"GPU-{slot}",
            slots=(slot,),
        )
        for slot in range(2)
    )


@pytest.mark.parametrize(("says", "scale"), [("3 of 9 products are wrong", 1.0), ("", 0.2)])
def test_a_bad_gpu_costs_its_slot_and_not_its_node(says: str, scale: float) -> None:
    cluster = FakeCluster(nodes={})
    for name in "abcd":
        join(cluster, name, of_gpu(()))
    assert join(cluster, "new", of_gpu((1,), says, scale)) is NodeState.UP
    node = cluster.coordinator.nodes["new"]
    assert set(node.isolated_slots) == {1}
    (incident,) = cluster.coordinator.log.incidents
    assert incident.what == "slot 1 of node new fails its checks"
    assert incident.remedies[-1].what == "isolate the slot"
    cluster.submit(shape=Shape(5, 2, 1))
    seats = cluster.coordinator.tasks["t"].seats.values()
    assert [seat.slot for seat in seats if seat.node == "new"] == [0]
    cluster.coordinator.validate()


def test_a_node_all_of_whose_gpus_are_bad_is_isolated() -> None:
    cluster = FakeCluster(nodes={})
    assert join(cluster, "new", of_gpu((0, 1), "9 of 9 products are wrong")) is NodeState.ISOLATED


def test_an_isolated_slot_is_checked_before_it_gets_workers_again() -> None:
    cluster = FakeCluster(nodes={})
    for name in "abcd":
        join(cluster, name, of_gpu(()))
    cluster.crew.checks["a"] = of_gpu((1,), "1 of 9 products is wrong")
    node, isolation_s = cluster.coordinator.nodes["a"], cluster.coordinator.patience.isolation_s
    text = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    cluster.says("a", msg.KernelSpoke(text=text, slots=(1,)))
    assert set(node.isolated_slots) == {1}
    cluster.wait(isolation_s + 1)
    assert set(node.isolated_slots) == {1}, "it fails its check"
    assert node.state is NodeState.UP
    cluster.crew.checks["a"] = of_gpu(())
    cluster.wait(isolation_s + 1)
    assert not node.isolated_slots


def test_the_slots_of_a_node_that_does_not_answer_are_back_after_a_while() -> None:
    cluster = FakeCluster(nodes=dict.fromkeys("abc", 2))
    node = cluster.coordinator.nodes["a"]
    text = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    cluster.says("a", msg.KernelSpoke(text=text, slots=(1,)))
    cluster.cut.add("a")
    cluster.wait(cluster.coordinator.patience.isolation_s + 1)
    assert node.isolated_slots
    cluster.wait(121)
    assert not node.isolated_slots


def test_other_versions_than_the_peers_have_mark_a_node() -> None:
    cluster = FakeCluster(nodes={})

    def with_torch(version: str) -> tuple[msg.CheckResult, ...]:
        return (msg.CheckResult(check="versions", state="passed", says="", facts={"torch": version}),)

    for name in "abcd":
        assert join(cluster, name, with_torch("2.11")) is NodeState.UP
    assert join(cluster, "new", with_torch("2.12")) is NodeState.UP
    (incident,) = cluster.coordinator.log.incidents
    assert incident.verdict is not None
    assert incident.verdict.because == "torch is 2.12; 4 of 4 peers have 2.11"
