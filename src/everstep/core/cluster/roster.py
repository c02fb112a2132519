"""Who is there and who has which slot: nodes, tasks, and the first-fit rule that gives slots to tasks.

A slot is taken from the moment a worker is placed on it until its process is known to be gone, or its node
is. So no slot is ever owned twice, also while a worker moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeLiveness, NodeState
from everstep.core.cluster.task import OVER, Seat, Task
from everstep.protocol.ops import Worker


class Roster:
    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.tasks: dict[str, Task] = {}

    def taken(self) -> set[tuple[str, int]]:
        return {
            (seat.node, slot)
            for task in self.tasks.values()
            for seat in task.seats.values()
            for slot in seat.slots
        }

    def free(self) -> list[tuple[str, int]]:
        taken = self.taken()
        return [
            (node.name, slot)
            for node in self.nodes.values()
            if node.state is NodeState.UP
            for slot in range(node.slots)
            if (node.name, slot) not in taken and slot not in node.lost_slots
        ]

    def on_node(self, name: str) -> list[tuple[Task, Worker]]:
        return [
            (task, worker)
            for task in self.tasks.values()
            for worker, seat in task.seats.items()
            if seat.node == name
        ]

    def tasks_on_node(self, name: str) -> list[Task]:
        return list({task.name: task for task, _ in self.on_node(name)}.values())

    def is_heard(self, name: str) -> bool:
        return self.nodes[name].liveness is NodeLiveness.HEARD

    def at_slots(self, node: str, slots: tuple[int, ...]) -> list[str]:
        """Who is at these slots of a node, in words; for evidence about a device."""
        seats = {
            seat.slot: f"worker {worker} of {task.name}"
            for task in self.tasks.values()
            for worker, seat in task.seats.items()
            if seat.node == node
        }
        return [f"the device is slot {slot} of {node}: {seats.get(slot, 'free')}" for slot in slots]

    def can_do_without(self, name: str) -> bool:
        """Would every task with workers on this node still have, or find, a worker for each stage?"""
        free = Counter(node for node, _ in self.free() if node != name)
        needed = []
        for task in self.tasks_on_node(name):
            elsewhere = {w.stage for w, seat in task.seats.items() if seat.node != name}
            needed += [task.shape.shards] * (task.shape.stages - len(elsewhere))
        return _have_room(free, needed) and any(
            n.name != name and n.state is NodeState.UP for n in self.nodes.values()
        )

    def seat_workers(self, task: Task) -> list[Worker]:
        """Give free slots to places of this task that have none, in the order that keeps it safest.

        Stages without any worker come first. A worker prefers a node that has no other replica of its stage,
        so that one node's loss leaves a live copy; then one whose memory has most of its state; then one
        where its own replica already is, to keep its neighbours near. Nothing is given unless every stage
        then has a worker.
        """
        empty = [w for w in task.shape.workers() if w not in task.seats]
        if not empty or len(task.seats) >= task.wanted():
            return []  # asked at every change of the cluster, by every task: most lack nothing
        free = self.free()
        shards = task.shape.shards
        room = Counter(node for node, _ in free)
        if not _have_room(room, [shards] * _uncovered(task, task.seats.keys())):
            return []
        seated: list[Worker] = []
        while empty and len(task.seats) < task.wanted():
            roomy = [place for place in free if room[place[0]] >= shards]  # its shards are on one node
            if not roomy:
                break
            worker = min(empty, key=lambda w: (_replicas_of(task, w.stage), w.replica, w.stage))
            node, _ = min(roomy, key=lambda place: _unease(task, worker, place[0]))
            slots = [slot for name, slot in free if name == node][:shards]
            task.seats[worker] = Seat(node, slots[0], more=tuple(slots[1:]))
            free = [place for place in free if place[0] != node or place[1] not in slots]
            room[node] -= shards
            empty.remove(worker)
            seated.append(worker)
        return seated

    def validate(self) -> None:
        owned = [
            (seat.node, slot)
            for task in self.tasks.values()
            for seat in task.seats.values()
            for slot in seat.slots
        ]
        assert len(owned) == len(set(owned)), "a slot is owned twice"
        for task in self.tasks.values():
            assert not (task.state in OVER and task.seats), f"{task.name} is over and holds slots"
            for worker, seat in task.seats.items():
                node = self.nodes[seat.node]
                assert node.reachable, f"{task.name} {worker} sits on {node.name}, which is gone"
                assert all(0 <= slot < node.slots for slot in seat.slots)
                assert len(seat.slots) == task.shape.shards or task.next_shape is not None


def _have_room(free: Mapping[str, int], wanted: list[int]) -> bool:
    """Is there room for groups of so many slots, each on one node? The largest first, where it fits best."""
    left = sorted(free.values())
    for size in sorted(wanted, reverse=True):
        fitting = next((i for i, count in enumerate(left) if count >= size), None)
        if fitting is None:
            return False
        left[fitting] -= size
        left.sort()
    return True


def _uncovered(task: Task, seated: Iterable[Worker]) -> int:
    return task.shape.stages - len({worker.stage for worker in seated})


def _replicas_of(task: Task, stage: int) -> int:
    return sum(worker.stage == stage for worker in task.seats)


def _unease(task: Task, worker: Worker, node: str) -> tuple[int, float, int]:
    there = [w for w, seat in task.seats.items() if seat.node == node]
    return (
        sum(w.stage == worker.stage for w in there),
        -_state_there(task, worker.stage, node),
        -sum(w.replica == worker.replica for w in there),
    )


def _state_there(task: Task, stage: int, node: str) -> float:
    """How much of a stage's state is in a node's memory, as a part of the model: stages are cut evenly."""
    kept = task.copies.states.get(task.copies.newest or 0)
    if kept is None:
        return 0.0
    low, high = stage / task.shape.stages, (stage + 1) / task.shape.stages
    shared = (
        min(high, (s + 1) / kept.stages) - max(low, s / kept.stages)
        for s, holders in kept.copies.items()
        if node in holders
    )
    return round(sum(max(0.0, part) for part in shared), 9)
