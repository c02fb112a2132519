"""Whose memory keeps whose state: the tier between a live replica and the disk.

Each node has a memory store that outlives the workers on it. Every few steps one worker of each stage puts a
copy of its state into the store of a node that has no worker of that stage, so that one node's loss never
takes a stage's last replica and its copy together (GEMINI's placement, for pipelines). When a shape ends, its
workers leave their states in the stores of their own nodes, and the workers of the next shape take what they
need from there, each byte from the nearest copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeLiveness, NodeState
from everstep.core.cluster.task import KeptState, Task
from everstep.protocol.messages import MemoryAddress
from everstep.protocol.ops import Worker

MOST_KEPT = 3  # states of a task, where none of them is on two nodes
MOST_ASKED = 4  # holders of a part, by one worker in one attempt


def memory_for(nodes: Mapping[str, Node], task: Task, worker: Worker) -> MemoryAddress:
    """Where this worker's copies go: the next node in the ring, one without its stage if there is one."""
    own = task.seats[worker].node
    ring = sorted(nodes)
    here = ring.index(own)
    others = [
        nodes[name]
        for name in ring[here + 1 :] + ring[:here]
        if nodes[name].state is NodeState.UP and nodes[name].memory_port
    ]
    with_stage = {seat.node for w, seat in task.seats.items() if w.stage == worker.stage}
    apart = [node for node in others if node.name not in with_stage]
    return (apart or others or [nodes[own]])[0].memory


def copies_at_end(task: Task, worker: Worker) -> bool:
    """One worker of a stage on each node leaves its state behind."""
    node = task.seats[worker].node
    return worker == min(w for w, seat in task.seats.items() if w.stage == worker.stage and seat.node == node)


def whole_steps(task: Task) -> list[int]:
    """The steps on record whose states are whole, oldest first."""
    return sorted(
        step for step, kept in task.copies.states.items() if kept.whole and step <= task.progress.recorded
    )


def needed_from(nodes: Mapping[str, Node], task: Task) -> int:
    """States older than this are not needed: a newer one survives any node's loss, or there are enough."""
    doors = sum(node.memory_port > 0 and node.state is NodeState.UP for node in nodes.values())
    whole = whole_steps(task)
    safe = [
        step
        for step in whole
        if all(len(holders) >= min(2, doors) for holders in task.copies.states[step].copies.values())
    ]
    return max([0, *safe, *(step + 1 for step in whole[:-MOST_KEPT])])


def copies_for(
    nodes: Mapping[str, Node], kept: KeptState, worker: Worker, own: str
) -> tuple[tuple[tuple[MemoryAddress, Any], ...], ...]:
    """Of every stage the copies in the order in which they are asked for: that of the worker's own node
    first, then the readers are spread over the holders. A silent node may be dead: it is asked after those
    that are heard. A node of which a read failed is asked last.
    """
    found = []
    for stage in range(kept.stages):
        everyone = sorted(kept.copies[stage])
        heard = [name for name in everyone if nodes[name].liveness is NodeLiveness.HEARD]
        turn = (worker.replica + worker.stage) % len(heard or everyone)
        silent = [name for name in everyone if name not in heard]
        in_turn = [*heard[turn:], *heard[:turn], *silent] if heard else [*silent[turn:], *silent[:turn]]
        holders = sorted(in_turn, key=lambda name: (kept.failed_reads.get(name, 0), name != own))
        found.append(tuple((nodes[name].memory, kept.copies[stage][name]) for name in holders[:MOST_ASKED]))
    return tuple(found)
