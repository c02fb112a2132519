"""Fabrics larger than a laptop, and the experiments of C4P on them.

C4P's testbed: 16 nodes of 8 GPUs, 8 NICs a node, each 2 × 200 Gbit/s, leaf and spine, NVLink feeding a NIC
with at most 362 Gbit/s. This is from memory, and so is every figure of C4P beside ours: the paper was not at
hand. How many uplinks a leaf has there we do not know; one experiment loses "one of 8", so 8 is the model's
value, and it is a parameter because hashing depends on it. A collective is a ring over one job's nodes for
every NIC index, each edge two connections (queue pairs), one a port if planned well.

`bus_gbps` is what nccl-tests calls bus bandwidth per NIC: what the slowest edge of the job's rings sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from everstep.errors import UserError
from everstep.fabric.allocate import allocate
from everstep.fabric.fairness import LinkUsage, max_min
from everstep.fabric.flows import Flow
from everstep.fabric.routing import Routing
from everstep.fabric.topology import Ints, Topology, clos
from everstep_lab.fabric.policies import ecmp
from everstep_lab.fabric.simulate import simulate
from everstep_lab.fabric.traffic_task import TrafficTask, flows_of, place
from everstep_lab.plan.hardware import GPUS
from everstep_lab.plan.models import PRESETS, ModelFigures
from everstep_lab.plan.stacks import MEGATRON_2021
from everstep_lab.plan.throughput import PlannedCut, step_time

NVLINK_GBPS = 362.0


def c4p_testbed(*, oversubscription: float = 1.0, uplinks: int = 8) -> Topology:
    """Two groups of 8 nodes; in each two leaves, one a plane; spines join the planes."""
    down = 8 * 8 * 200.0
    return clos(
        name="c4p",
        nodes=16,
        nics=8,
        planes=2,
        port_gbps=200.0,
        nodes_per_leaf=8,
        spines=uplinks,
        uplink_gbps=down / uplinks / oversubscription,
        nic_gbps=NVLINK_GBPS,
        cross_planes=True,
    )


def gpu_fabric(*, gpus: int = 4096, spines: int = 64) -> Topology:
    """GPUs / 8 nodes, 8 dual-port NICs each, two planes apart, 8 nodes under a leaf, 1:1."""
    if gpus % 64:
        raise UserError(f"gpus is {gpus}; make it a multiple of 64 (8 nodes of 8 under a leaf).")
    return clos(
        name=f"gpu{gpus}",
        nodes=gpus // 8,
        nics=8,
        planes=2,
        port_gbps=200.0,
        nodes_per_leaf=8,
        spines=spines,
        uplink_gbps=64 * 200.0 / spines,
        nic_gbps=NVLINK_GBPS,
    )


def all_reduce_job(name: str, nodes: Sequence[str], *, parts: int = 2, nbytes: float = 1e9) -> TrafficTask:
    """One ring a NIC index over these nodes."""
    workers = [(node, nic) for node in nodes for nic in range(8)]
    return TrafficTask(
        name=name,
        replicas=len(nodes),
        stages=1,
        shards=8,
        parts=parts,
        gradient_bytes=nbytes,
        placement=place(workers, replicas=len(nodes), stages=1, shards=8),
    )


def eight_jobs(*, parts: int = 2) -> list[TrafficTask]:
    """Each on two nodes of different groups, so that all of it crosses the spines."""
    return [all_reduce_job(f"job{j}", [f"n{j}", f"n{j + 8}"], parts=parts) for j in range(8)]


def one_job(*, parts: int = 2) -> list[TrafficTask]:
    """All 16 nodes in one ring a NIC, from group to group and back."""
    return [all_reduce_job("job", [f"n{i // 2 + 8 * (i % 2)}" for i in range(16)], parts=parts)]


def large_task(*, gpus: int, microbatches: int = 16) -> TrafficTask:
    """Shards 8 × stages 8 × replicas: a replica's stages under one leaf, its rings across all of them."""
    replicas = gpus // 64
    return TrafficTask(
        name="large",
        replicas=replicas,
        stages=8,
        shards=8,
        parts=2,
        microbatches=microbatches,
        gradient_bytes=700e6,
        boundary_bytes=25e6,
        placement={
            (k, s, h): (f"n{k * 8 + s}", h) for k in range(replicas) for s in range(8) for h in range(8)
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model of C4P's evaluation on its 128 GPUs, in its published shape; `remembered` is its gain there."""

    model: ModelFigures
    replicas: int
    stages: int
    shards: int
    remembered: str

    def task(self, sequences: int) -> TrafficTask:
        """`sequences` per replica and step. Compute is of the throughput model; gradients are reduced in bf16
        after the last backward, by a ring of nodes for every NIC.
        """
        model = replace(self.model, batch=self.replicas * sequences)
        cut = PlannedCut(stages=self.stages, shards=self.shards, microbatch=1, recompute="selective")
        took = step_time(model, GPUS["H100"], _STACK, cut, np.array([float(self.replicas)]))
        nodes_per_stage = 16 // self.stages
        places = {
            (k, s, h): (f"n{k * self.stages + s}", h)
            for k in range(nodes_per_stage)
            for s in range(self.stages)
            for h in range(8)
        }
        return TrafficTask(
            name=model.name,
            replicas=nodes_per_stage,
            stages=self.stages,
            shards=8,
            parts=2,
            gradient_bytes=2 * model.parameters / self.stages / 8,
            placement=places,
            compute_s=float((took.total - took.reduce)[0]),
        )

    def step_s(self, sequences: int, chance: np.random.Generator | None) -> float:
        """Of a step on C4P's testbed, hashed by chance or planned."""
        task, topology = self.task(sequences), c4p_testbed()
        flows = flows_of(task)
        routing = allocate(topology, flows) if chance is None else ecmp(topology, flows, chance)
        return simulate(routing, [task], num_steps=1).step_seconds(task.name)[0]


_STACK = replace(MEGATRON_2021, schedule="1f1b", sequence_parallel=True, fused_attention=True)
C4P_MODELS = (
    TrainedModel(
        model=ModelFigures(
            name="gpt-22b", layers=48, hidden=6144, heads=64, vocab=51200, sequence=2048, batch=1
        ),
        replicas=16,
        stages=1,
        shards=8,
        remembered="+15.95 %",
    ),
    TrainedModel(
        model=ModelFigures(
            name="llama-7b",
            layers=32,
            hidden=4096,
            heads=32,
            vocab=32000,
            sequence=2048,
            batch=1,
            feed_forward=11008,
            gated=True,
            tied=False,
        ),
        replicas=128,
        stages=1,
        shards=1,
        remembered="+14.1 %",
    ),
    TrainedModel(model=PRESETS["gpt3-175b"], replicas=2, stages=8, shards=8, remembered="about 0"),
)


def flows_of_all(tasks: Sequence[TrafficTask]) -> list[Flow]:
    return [flow for task in tasks for flow in flows_of(task)]


def bus_gbps(routing: Routing, *, split: str = "static") -> dict[str, float]:
    """Of each job, the rate of the slowest edge of its rings.

    `static`: an edge's connections carry equal shares, and a ring has one pace, so it is as fast as its
    slowest connection allows. `dynamic`: the faster connection of an edge gets more; an edge is the sum of
    its own.
    """
    flows = routing.flows
    edges = {key: n for n, key in enumerate(dict.fromkeys((f.group, f.source, f.target) for f in flows))}
    edge_of = np.array([edges[f.group, f.source, f.target] for f in flows])
    rings = {key: n for n, key in enumerate(dict.fromkeys(f.group for f in flows))}
    ring_of = np.array([rings[f.group] for f in flows])
    parts = np.bincount(edge_of)[edge_of]
    feed = np.array([routing.topology.by_node[f.source[0]].nic_gbps or np.inf for f in flows]) / parts
    members: Ints = ring_of if split == "static" else np.arange(len(flows))
    count = len(rings) if split == "static" else len(flows)
    ceiling = np.full(count, np.inf)
    np.minimum.at(ceiling, members, feed if split == "static" else feed * parts)
    rates = max_min(
        LinkUsage.of(routing.paths, members, np.ones(len(flows)), count), routing.topology.capacity, ceiling
    )
    edge_rate = np.minimum(np.bincount(edge_of, weights=rates[members]), _edge_feed(routing, edge_of))
    found: dict[str, float] = {}
    for number, flow in enumerate(flows):
        found[flow.task] = min(found.get(flow.task, np.inf), float(edge_rate[edge_of[number]]))
    return found


def _edge_feed(routing: Routing, edge_of: Ints) -> np.ndarray:
    feed = np.full(int(edge_of.max()) + 1, np.inf)
    for number, flow in enumerate(routing.flows):
        feed[edge_of[number]] = routing.topology.by_node[flow.source[0]].nic_gbps or np.inf
    return feed


def spines_planned_ports_hashed(planned: Routing, chance: np.random.Generator) -> Routing:
    """The plan's spines, but ports chosen by hash at both ends: what dual-port balance alone is worth."""
    topology = planned.topology
    rows = []
    for number, flow in enumerate(planned.flows):
        spine = topology.links[int(planned.paths[number][1])].receiver
        paths = topology.paths(flow.source, flow.target)
        same = [topology.links[int(p[1])].receiver == spine for p in paths]
        options = paths[same]
        rows.append(options[chance.integers(len(options))])
    return Routing(topology=topology, flows=planned.flows, paths=np.array(rows), because="ports by hash")


def rehash_broken(topology: Topology, before: Routing, chance: np.random.Generator) -> Routing:
    """What switches do when an uplink dies: its flows are hashed onto the others; the rest stays."""
    hashed = ecmp(topology, before.flows, chance)
    alive = topology.alive(before.paths)
    paths = np.where(alive[:, None], before.paths, hashed.paths)
    return Routing(topology=topology, flows=before.flows, paths=paths, because="broken flows hashed again")
