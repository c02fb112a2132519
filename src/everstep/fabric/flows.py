"""Who sends how much to whom, and when: the flows of a task, from its shape and its placement.

A task of replicas × stages × shards moves, in each step:

    phase      flows                                                          bytes of one flow, per step
    pipeline   worker (k, s) to (k, s+1) and back                             boundary bytes × microbatches
    reduce     per stage and shard a ring (or two trees) over the replicas    ring: 2 (n-1)/n × gradient bytes
               or from every replica to every other, as Everstep's engine     direct: 2/n × gradient bytes

Phases of one task take turns; tasks know nothing of each other, so what one sends can meet anything another
does. The edges of a ring advance together: a ring is as fast as its slowest edge, which is why the flows of
one ring carry one `group`. A message may be cut over several connections (`parts`, queue pairs in RDMA's
words): they are flows of their own, each with its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from everstep.errors import UserError

Endpoint = tuple[str, int]  # node, NIC
Slot = tuple[int, int, int]  # replica, stage, shard
Algorithm = Literal["ring", "tree", "direct"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes from one NIC to another in every step. Flows of one phase run at the same time."""

    name: str
    task: str
    phase: str
    group: str
    source: Endpoint
    target: Endpoint
    bytes: float
    weight: float = 1.0
    plane: int | None = None  # where its sender's port must be, if that was decided outside
    sender: Slot | None = None  # the worker that sends it


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


def connection_name(task: str, sender: str, host: str, port: int) -> str:
    """The flow of a worker's connection to where a peer listens: a peer that is started again listens
    elsewhere, and the flow to it is another one.
    """
    return f"{task} {sender} to {host}:{port}"


def flows_of(task: TrafficTask) -> tuple[Flow, ...]:
    """All flows of one step that leave a node; those within one are not the fabric's."""
    found = [*_pipeline(task), *_reduce(task)]
    return tuple(flow for flow in found if flow.source[0] != flow.target[0] and flow.bytes > 0)


def engine_flows(tasks: Iterable[TrafficTask]) -> list[Flow]:
    """Of tasks that Everstep's engine trains, whatever collective their rows name."""
    return [flow for task in tasks for flow in flows_of(replace(task, algorithm="direct"))]


def _pipeline(task: TrafficTask) -> list[Flow]:
    flows = []
    for k, s, h in task.slots():
        if s + 1 < task.stages:
            here, there = task.placement[k, s, h], task.placement[k, s + 1, h]
            total = task.boundary_bytes * task.microbatches
            flows += _cut(task, "pipeline", f"down {k}.{s}.{h}", (k, s, h), here, there, total)
            flows += _cut(task, "pipeline", f"up {k}.{s}.{h}", (k, s + 1, h), there, here, total)
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
                flows += _cut(task, "reduce", f"reduce {s}.{h}", (one, s, h), here, there, total, edge)
    return flows


def _cut(
    task: TrafficTask,
    phase: str,
    group: str,
    sender: Slot,
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
            sender=sender,
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
