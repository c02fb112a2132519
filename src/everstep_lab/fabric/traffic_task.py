"""A training job as a fabric's studies see it, and its flows, from its shape and its placement.

A task of replicas × stages × shards moves, in each step:

    phase      flows                                                          bytes of one flow, per step
    pipeline   worker (k, s) to (k, s+1) and back                             boundary bytes × microbatches
    reduce     per stage and shard a ring (or two trees) over the replicas    ring: 2 (n-1)/n × gradient bytes
               or from every replica to every other, as Everstep's engine     direct: 2/n × gradient bytes

Phases of one task take turns; tasks know nothing of each other, so what one sends can meet anything another
does. The edges of a ring advance together: a ring is as fast as its slowest edge, which is why the flows of
one ring carry one `group`. A message may be cut over several connections (`parts`, queue pairs in RDMA's
words): they are flows of their own, each with its share.

In a fabric file:

    [[task]]
    name = "gpt", replicas = 2, stages = 1, gradient_bytes = 1e9, workers = ["h1", "h2:0"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from everstep.errors import UserError
from everstep.fabric.document import check_fields, number, required
from everstep.fabric.flows import Endpoint, Flow
from everstep.fabric.topology import Topology

Slot = tuple[int, int, int]  # replica, stage, shard
Algorithm = Literal["ring", "tree", "direct"]
_TASK = (
    *("name", "replicas", "stages", "shards", "parts", "microbatches", "gradient_bytes", "boundary_bytes"),
    *("weight", "algorithm", "compute_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficTask:
    """A training job as the fabric sees it."""

    name: str
    replicas: int
    stages: int
    placement: Mapping[Slot, Endpoint]
    gradient_bytes: float  # of one shard of one stage
    boundary_bytes: float = 0.0  # of one microbatch between two stages, one shard
    microbatches: int = 1
    shards: int = 1
    parts: int = 1
    weight: float = 1.0
    algorithm: Algorithm = "ring"
    compute_s: float = 0.0  # of a step, while nothing is sent

    def __post_init__(self) -> None:
        if min(self.replicas, self.stages, self.shards, self.microbatches, self.parts) < 1:
            raise UserError(f"task {self.name}: replicas, stages, shards, microbatches, parts must be ≥ 1.")
        if self.weight <= 0:
            raise UserError(f"task {self.name}: weight must be more than 0.")
        missing = [slot for slot in self.slots() if slot not in self.placement]
        if missing:
            raise UserError(
                f"task {self.name}: no place for replica {missing[0][0]}, stage {missing[0][1]}, "
                f"shard {missing[0][2]}; list as many workers as replicas × stages × shards."
            )

    def slots(self) -> list[Slot]:
        return [
            (k, s, h) for k in range(self.replicas) for s in range(self.stages) for h in range(self.shards)
        ]


def flows_of(task: TrafficTask) -> tuple[Flow, ...]:
    """All flows of one step that leave a node; those within one are not the fabric's."""
    found = [*_pipeline(task), *_reduce(task)]
    return tuple(flow for flow in found if flow.source[0] != flow.target[0] and flow.bytes > 0)


def _pipeline(task: TrafficTask) -> list[Flow]:
    flows = []
    for k, s, h in task.slots():
        if s + 1 < task.stages:
            here, there = task.placement[k, s, h], task.placement[k, s + 1, h]
            total = task.boundary_bytes * task.microbatches
            flows += _cut(task, "pipeline", f"down {k}.{s}.{h}", here, there, total)
            flows += _cut(task, "pipeline", f"up {k}.{s}.{h}", there, here, total)
    return flows


def _reduce(task: TrafficTask) -> list[Flow]:
    if task.replicas == 1:
        return []
    edges = _EDGES[task.algorithm](task.replicas)
    flows = []
    for s in range(task.stages):
        for h in range(task.shards):
            for one, other, fraction in edges:
                here, there = task.placement[one, s, h], task.placement[other, s, h]
                total = fraction * task.gradient_bytes
                edge = f"{one}-{other}"
                flows += _cut(task, "reduce", f"reduce {s}.{h}", here, there, total, edge)
    return flows


def _cut(
    task: TrafficTask,
    phase: str,
    group: str,
    here: Endpoint,
    there: Endpoint,
    total: float,
    edge: str = "",
) -> list[Flow]:
    return [
        Flow(
            name=" ".join(x for x in (task.name, group, edge, f"#{part}" if task.parts > 1 else "") if x),
            task=task.name,
            phase=phase,
            group=f"{task.name} {group}",
            source=here,
            target=there,
            bytes=total / task.parts,
            weight=task.weight,
        )
        for part in range(task.parts)
    ]


def ring(count: int) -> list[tuple[int, int, float]]:
    """Edges of a ring all-reduce: each carries 2 (n-1)/n of the tensor."""
    return [(i, (i + 1) % count, 2 * (count - 1) / count) for i in range(count)]


def direct(count: int) -> list[tuple[int, int, float]]:
    """Every replica owns a chunk: all send it their part of it, and it sends the sum to all."""
    return [(i, j, 2 / count) for i in range(count) for j in range(count) if i != j]


def double_tree(count: int) -> list[tuple[int, int, float]]:
    """Two binary trees, each over half of the tensor, up and down.

    The second is the first with the ranks turned by one, so that few ranks are inside both.
    """
    edges: dict[tuple[int, int], float] = {}
    for turn in range(2):
        for child in range(1, count):
            one, other = (child + turn) % count, ((child - 1) // 2 + turn) % count
            for edge in ((one, other), (other, one)):
                edges[edge] = edges.get(edge, 0.0) + 0.5
    return [(one, other, share) for (one, other), share in edges.items()]


_EDGES = {"ring": ring, "tree": double_tree, "direct": direct}


def place(
    workers: Sequence[Endpoint], *, replicas: int, stages: int, shards: int = 1
) -> dict[Slot, Endpoint]:
    """A list of places, replica by replica, in it stage by stage, in it shard by shard."""
    slots = [(k, s, h) for k in range(replicas) for s in range(stages) for h in range(shards)]
    return dict(zip(slots, workers, strict=False))


def tasks_from(document: Mapping[str, Any], topology: Topology) -> list[TrafficTask]:
    rows = document.get("task", [])
    if not rows:
        raise UserError("there is no [[task]]: add one with name, replicas, stages, gradient_bytes, workers.")
    tasks = [_task(row, topology) for row in rows]
    if len({task.name for task in tasks}) != len(tasks):
        raise UserError("two [[task]] entries have one name; rename one.")
    return tasks


def _task(row: Mapping[str, Any], topology: Topology) -> TrafficTask:
    name = str(required(row, "name", "[[task]]"))
    where = f"task {name}"
    check_fields(row, where, (*_TASK, "workers"))
    workers = [_endpoint(text, where, topology) for text in required(row, "workers", where)]
    replicas, stages = int(required(row, "replicas", where)), int(required(row, "stages", where))
    shards = int(row.get("shards", 1))
    if row.get("algorithm", "ring") not in ("ring", "tree", "direct"):
        raise UserError(f"{where}: algorithm {row['algorithm']!r} is not ring, tree or direct.")
    fields = {key: value for key, value in row.items() if key not in ("workers",)}
    for key in ("gradient_bytes", "boundary_bytes", "weight", "compute_s"):
        if key in fields:
            fields[key] = number(fields[key], f"{key} of {where}")
    required(row, "gradient_bytes", where)
    return TrafficTask(**fields, placement=place(workers, replicas=replicas, stages=stages, shards=shards))


def _endpoint(text: object, where: str, topology: Topology) -> Endpoint:
    node, _, nic = str(text).partition(":")
    if node not in topology.by_node:
        raise UserError(
            f"{where}: worker {text!r} is on no node of fabric {topology.name}; see its [[node]]."
        )
    num_nics = 1 + max(port.nic for port in topology.by_node[node].ports)
    if nic and (not nic.isdigit() or int(nic) >= num_nics):
        raise UserError(f"{where}: worker {text!r}: {node} has NICs 0 to {num_nics - 1}.")
    return node, int(nic or 0)
