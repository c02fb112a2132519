"""Whose memory keeps whose state: the tier between a live replica and the disk.

Each node has a memory store that outlives the workers on it. Every few steps one worker of each stage puts a
copy of its state into the store of a node that has no worker of that stage, so that one node's loss never
takes a stage's last replica and its copy together (GEMINI's placement, for pipelines). When a shape ends, its
workers leave their states in the stores of their own nodes, and the workers of the next shape take what they
need from there, each byte from the nearest copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeLiveness, NodeState
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import KeptState, Task
from everstep.protocol.ops import Worker
from everstep.protocol.work import MemoryAddress, PartHolder

MOST_KEPT = 3  # states of a task, where none of them is on two nodes
MOST_ASKED = 4  # holders of a part, by one worker in one attempt


_Place = tuple[int, str, str]  # number in its rack, rack, node


def _interleaved(nodes: Mapping[str, Node]) -> dict[str, _Place]:
    """Where each node is in the ring. Nodes whose rack is not known are in the order of their names."""
    known, places = dict[str, int](), dict[str, _Place]()
    for name in sorted(nodes):
        if rack := nodes[name].rack:
            known[rack] = known.get(rack, -1) + 1
        places[name] = (known.get(rack, 0), rack, name)
    return places


class _Ring:
    def __init__(self, places: Iterable[_Place]) -> None:
        self.places = sorted(places)
        number = len(self.places)
        self._elsewhere = list(range(number))  # for each: the next one in another rack, or itself
        if len({rack for _, rack, _ in self.places}) > 1:
            found = 0
            for turn in range(2 * number - 1, -1, -1):  # twice around: the first time the end is not known
                at, following = turn % number, (turn + 1) % number
                if self.places[following][1] != self.places[at][1]:
                    found = following
                self._elsewhere[at] = found

    def after(self, own: _Place) -> str:
        """Of the nodes after this place the first in another rack, else the first; empty: there is none."""
        if not self.places:
            return ""
        at = bisect_right(self.places, own) % len(self.places)
        if own[1] and own[1] == self.places[at][1]:
            at = self._elsewhere[at]
        name = self.places[at][2]
        return "" if name == own[2] else name


class Keepers:
    """Where copies of a task's workers go: to the next node in the ring that has no worker of their stage, or
    to the next one where all have; of these, to one in another rack. Asked for thousands of workers at once.

    The ring takes one node of each rack in turn, so that neighbours are in different racks and the copies of
    a rack are spread over all others.
    """

    def __init__(self, roster: Roster, task: Task) -> None:
        self._nodes, self._task = roster.nodes, task
        self._places = _interleaved(roster.nodes)
        up = (node for node in roster.nodes.values() if node.memory_port and node.state is NodeState.UP)
        self._ring = _Ring(self._places[node.name] for node in up)
        self._at: list[set[str]] = [set() for _ in range(task.shape.stages)]
        for worker, seat in task.seats.items():
            self._at[worker.stage].add(seat.node)
        self._without: dict[int, _Ring] = {}  # by stage: of the ring, the nodes without it
        self._addresses: dict[str, MemoryAddress | None] = {}

    def of(self, worker: Worker) -> Node:
        return self._nodes[self.after(self._task.seats[worker].node, worker.stage)]

    def after(self, own: str, stage: int) -> str:
        """The node that keeps the copy of a worker of this stage on node `own`."""
        if stage not in self._without:
            there = self._at[stage]
            self._without[stage] = _Ring(place for place in self._ring.places if place[2] not in there)
        return self._without[stage].after(self._places[own]) or self._ring.after(self._places[own]) or own

    def address(self, node: str) -> MemoryAddress | None:
        if node not in self._addresses:
            self._addresses[node] = self._nodes[node].memory
        return self._addresses[node]


def copied_at_end(here: Iterable[Worker]) -> set[Worker]:
    """Of a task's workers on a node, those that leave their state behind: one of each stage."""
    first: dict[int, Worker] = {}
    for worker in here:
        known = first.setdefault(worker.stage, worker)
        if worker < known:
            first[worker.stage] = worker
    return set(first.values())


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
) -> tuple[tuple[PartHolder, ...], ...]:
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
