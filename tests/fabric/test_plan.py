"""The traffic of all tasks, planned from where their workers are."""

from dataclasses import replace

import pytest

from everstep.core.worker.slices import SMALL
from everstep.protocol import actions as act
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.work import EpochFacts, Send
from everstep_fabric.document import routes_document, routes_from
from everstep_fabric.plan import TrafficPlan, pairs_of, routed
from everstep_fabric.topology import FabricNode, Link, Port, Switch, Topology
from tests.core.scenario import Scenario
from tests.support.fake_cluster import FakeCluster

NODES = ("a", "b", "c", "d")


class Overheard(Scenario):
    """The state machines of all workers; which of them sends tensors to which."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: set[tuple[Worker, Worker]] = set()

    def _send(self, worker: Worker, command: Send) -> None:
        if command.parcel.what not in SMALL:
            self.sent.add((worker, Worker(command.replica, command.stage)))
        super()._send(worker, command)


def fabric(spines: int = 4) -> Topology:
    """A leaf for every node, and every leaf with a cable to every spine; a node's address is its name."""
    return Topology(
        name="test",
        nodes=tuple(
            FabricNode(name=n, ports=(Port(nic=0, plane=0, leaf=f"l{n}", gbps=40.0, address=n),))
            for n in NODES
        ),
        leaves=tuple(Switch(name=f"l{n}") for n in NODES),
        spines=tuple(Switch(name=f"s{i}") for i in range(spines)),
        fabric_links=tuple(
            Link(sender=one, receiver=other, gbps=10.0)
            for n in NODES
            for i in range(spines)
            for one, other in ((f"l{n}", f"s{i}"), (f"s{i}", f"l{n}"))
        ),
    )


def planned(plan: TrafficPlan, cluster: FakeCluster) -> set[tuple[str, str, str]]:
    """Task, sender's node and receiver's node of every flow, after a look at the cluster."""
    flows = plan.changed(cluster.coordinator.tasks)
    assert flows is not None
    plan.took(routed(plan.topology, plan.routing, flows))
    return {(flow.task, flow.source[0], flow.target[0]) for flow in flows}


class Told(Overheard):
    facts: EpochFacts

    def _perform(self, action: act.Action) -> None:
        if isinstance(action, act.ResumeWorkers):
            self.facts = action.facts
        super()._perform(action)


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("death", ["", "0:1", "1:0", "2:2"])
def test_the_pairs_are_those_that_the_engine_makes_also_with_a_dead_worker(death: str, per_node: int) -> None:
    """Between nodes gradients go once per node: flows of all pairs of replicas were planned, and the plan
    waited for bytes that never came.
    """
    engine = Told()
    engine.obey(f"task replicas=4 stages=3 microbatches=2 steps=6 per_node={per_node}")
    engine.obey("run until step 1 is recorded")
    if death:
        engine.obey(f"kill {death}")
        engine.obey("run until step 4 is recorded")
    engine.sent.clear()
    engine.obey("run to the end")
    book = {w: (f"node {w.replica // per_node}", 1) for w in Shape(4, 3, 2).workers()}
    assert engine.sent == pairs_of(replace(engine.facts, book=book))


def test_tasks_that_come_go_and_move_are_planned_together_and_few_flows_move() -> None:
    cluster, plan = FakeCluster(nodes=dict.fromkeys(NODES, 2)), TrafficPlan(fabric())
    cluster.submit("t", Shape(2, 2, 2))
    first = planned(plan, cluster)
    assert {task for task, _, _ in first} == {"t"}
    assert plan.changed(cluster.coordinator.tasks) is None, "nothing has changed"
    before = dict(plan.routing.by_name) if plan.routing is not None else {}
    cluster.submit("u", Shape(2, 2, 2))
    both = planned(plan, cluster)
    assert {task for task, _, _ in both} == {"t", "u"}
    assert plan.routing is not None
    assert {name: plan.routing.by_name[name] for name in before} == before, "those of t stay"
    cluster.hear(msg.CancelRequested(task="t", by="test"))
    assert {task for task, _, _ in planned(plan, cluster)} == {"u"}


def test_a_worker_that_is_replaced_on_another_node_takes_its_flows_with_it() -> None:
    cluster, plan = FakeCluster(nodes={"a": 1, "b": 1, "c": 1}), TrafficPlan(fabric())
    cluster.submit("t", Shape(2, 1, 2))
    assert planned(plan, cluster) == {("t", "a", "b"), ("t", "b", "a")}
    cluster.hear(msg.NodeLeft(node="b"))
    assert planned(plan, cluster) == {("t", "a", "c"), ("t", "c", "a")}


def test_flows_count_by_what_workers_have_sent_and_are_planned_again_once_that_is_known() -> None:
    cluster, plan = FakeCluster(nodes={"a": 1, "b": 1}), TrafficPlan(fabric())
    cluster.submit("t", Shape(2, 1, 2))
    planned(plan, cluster)
    for worker, peer, count in ((Worker(0, 0), "1:0", 800), (Worker(1, 0), "0:0", 200)):
        told = msg.TimesReported(task="t", worker=worker, times={}, seconds=2.0, sent={peer: (count, 1.0)})
        assert plan.changed(cluster.coordinator.tasks) is None
        plan.learn(told)
    flows = plan.changed(cluster.coordinator.tasks)
    assert flows is not None
    assert [(flow.source[0], flow.bytes) for flow in flows] == [("a", 400.0), ("b", 100.0)]


def test_gradients_go_once_per_node_and_no_flow_is_planned_that_no_worker_sends() -> None:
    """12 replicas on 4 nodes made 108 flows, of which 36 exist; the others counted with the mean of those,
    and a second plan "once bytes are known" never came."""
    cluster, plan = FakeCluster(nodes=dict.fromkeys(NODES, 3)), TrafficPlan(fabric())
    cluster.submit("t", Shape(12, 1, 1))
    flows = plan.changed(cluster.coordinator.tasks)
    assert flows is not None
    assert len(flows) == 36


def test_workers_outside_of_the_fabric_are_left_to_the_hashes() -> None:
    cluster, plan = FakeCluster(nodes={"a": 1, "x": 1}), TrafficPlan(fabric())
    cluster.submit("t", Shape(2, 1, 2))
    assert planned(plan, cluster) == set()


def test_routes_are_read_back_as_they_were_planned() -> None:
    cluster, plan = FakeCluster(nodes=dict.fromkeys(NODES, 1)), TrafficPlan(fabric())
    cluster.submit("t", Shape(2, 2, 2))
    planned(plan, cluster)
    assert plan.routing is not None
    read = routes_from(routes_document(plan.routing))
    assert read.by_name == plan.routing.by_name
    assert read.flows == plan.routing.flows
