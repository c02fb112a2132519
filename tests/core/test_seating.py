"""Seats are given as the rule says, worker by worker and node by node, though no longer by trying all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.task import KeptState, Seat, Task
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from tests.support.fake_cluster import FakeCluster


def by_trying_all(roster: Roster, task: Task) -> dict[Worker, Seat]:
    """The rule, word for word: for every place every free slot is looked at."""
    taken = {(s.node, slot) for t in roster.tasks.values() for s in t.seats.values() for slot in s.slots}
    free = [
        (node.name, slot)
        for node in roster.nodes.values()
        if node.admin is NodeAdmin.UP
        for slot in range(node.slots)
        if (node.name, slot) not in taken and slot not in node.lost_slots
    ]
    seats, shards = dict(task.seats), task.shape.shards
    empty = [w for w in task.shape.workers() if w not in seats]
    room = Counter(node for node, _ in free)
    uncovered = task.shape.stages - len({w.stage for w in seats})
    if not empty or len(seats) >= task.wanted() or not _have_room(room, [shards] * uncovered):
        return seats
    while empty and len(seats) < task.wanted():
        roomy = [place for place in free if room[place[0]] >= shards]
        if not roomy:
            break
        replicas = Counter(w.stage for w in seats)
        worker = min(empty, key=lambda w: (replicas[w.stage], w.replica, w.stage))

        def unease(place: tuple[str, int], me: Worker = worker) -> tuple[int, float, int]:
            there = [w for w, seat in seats.items() if seat.node == place[0]]
            return (
                sum(w.stage == me.stage for w in there),
                -_state_there(task, me.stage, place[0]),
                -sum(w.replica == me.replica for w in there),
            )

        node, _ = min(roomy, key=unease)
        slots = [slot for name, slot in free if name == node][:shards]
        seats[worker] = Seat(node, slots[0], more=tuple(slots[1:]))
        free = [place for place in free if place[0] != node or place[1] not in slots]
        room[node] -= shards
        empty.remove(worker)
    return seats


def _have_room(free: Mapping[str, int], wanted: list[int]) -> bool:
    left = sorted(free.values())
    for size in sorted(wanted, reverse=True):
        fitting = next((i for i, count in enumerate(left) if count >= size), None)
        if fitting is None:
            return False
        left[fitting] -= size
        left.sort()
    return True


def _state_there(task: Task, stage: int, node: str) -> float:
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


def new_task(chance: random.Random, name: str) -> Task:
    shape = Shape(chance.randint(1, 5), chance.randint(1, 5), 2, shards=chance.choice([1, 1, 1, 2, 3]))
    request = msg.TaskSubmitted(task=name, job={}, shape=shape, steps=9, secret="s")
    return Task(request=request, submitted_at=0.0)


def new_copies(chance: random.Random, roster: Roster, task: Task) -> None:
    """A state in the memory of some nodes, of a shape with as many stages or others."""
    task.copies.newest = 3
    kept = task.copies.states[3] = KeptState(chance.randint(1, 6))
    for stage in range(kept.stages):
        for node in chance.sample(sorted(roster.nodes), chance.randint(0, min(3, len(roster.nodes)))):
            kept.copies.setdefault(stage, {})[node] = {}


@pytest.mark.parametrize("seed", range(150))
def test_seats_are_those_of_the_rule_that_tries_all(seed: int) -> None:
    chance = random.Random(seed)
    roster = Roster()
    for number in range(chance.randint(1, 9)):
        roster.add_node(Node(name=f"n{number}", boot="b", slots=chance.randint(1, 6), host="h"))
    for number in range(chance.randint(1, 3)):
        roster.add_task(new_task(chance, f"t{number}"))
    for _ in range(25):
        task = chance.choice(list(roster.tasks.values()))
        match chance.randrange(7):
            case 0 if task.seats:
                roster.unseat(task, chance.choice(list(task.seats)))
            case 1:
                task.most = chance.choice([None, 0, chance.randint(1, 12)])
            case 2:
                node = chance.choice(list(roster.nodes.values()))
                node.lost_slots = {slot for slot in range(node.slots) if chance.random() < 0.2}
                node.lost_slots -= {s for w, seat in _at(roster, node.name) for s in seat.slots}
                roster.node_changed(node)
            case 3:
                node = chance.choice(list(roster.nodes.values()))
                node.admin = NodeAdmin.UP if node.admin is NodeAdmin.DRAINING else NodeAdmin.DRAINING
                roster.node_changed(node)
            case 4:
                new_copies(chance, roster, task)
            case 5:
                name = f"late{len(roster.nodes)}"
                roster.add_node(Node(name=name, boot="b", slots=chance.randint(1, 6), host="h"))
            case _:
                expected = by_trying_all(roster, task)
                before = list(task.seats)
                seated = roster.seat_workers(task)
                assert dict(task.seats) == expected
                assert list(task.seats) == list(expected) == before + seated
        roster.validate()


def _at(roster: Roster, node: str) -> list[tuple[Worker, Seat]]:
    return [(w, seat) for t in roster.tasks.values() for w, seat in t.seats.items() if seat.node == node]


@pytest.mark.parametrize("seed", range(40))
def test_whether_a_node_can_be_spared_is_known_without_looking_at_all_seats(seed: int) -> None:
    chance = random.Random(seed)
    roster = Roster()
    for number in range(chance.randint(1, 6)):
        roster.add_node(Node(name=f"n{number}", boot="b", slots=chance.randint(1, 4), host="h"))
    for number in range(2):
        roster.add_task(new_task(chance, f"t{number}"))
        roster.seat_workers(roster.tasks[f"t{number}"])
    for name in roster.nodes:
        free = Counter(node for node, _ in roster.free() if node != name)
        needed = []
        for task in roster.tasks.values():
            if any(seat.node == name for seat in task.seats.values()):
                elsewhere = {w.stage for w, seat in task.seats.items() if seat.node != name}
                needed += [task.shape.shards] * (task.shape.stages - len(elsewhere))
        assert roster.can_do_without(name) == (_have_room(free, needed) and len(roster.nodes) > 1)
        here = [(t.name, w) for t in roster.tasks.values() for w, s in t.seats.items() if s.node == name]
        assert [(task.name, worker) for task, worker in roster.on_node(name)] == here


@pytest.mark.parametrize("seed", range(40))
def test_the_workers_that_a_smaller_task_gives_up_are_those_of_the_fullest_stages(seed: int) -> None:
    """One by one: of a stage with the most workers, the highest replica; never the last of a stage."""
    chance = random.Random(seed)
    shape = Shape(chance.randint(1, 5), chance.randint(1, 4), 2)
    cluster = FakeCluster(nodes={f"n{k}": chance.randint(1, 3) for k in range(chance.randint(2, 8))})
    cluster.submit(shape=shape)
    task = cluster.coordinator.tasks["t"]
    left = list(task.seats)
    wanted = max(shape.stages, chance.randint(1, 20))
    while len(left) > wanted:
        of = Counter(w.stage for w in left)
        crowded = [w for w in left if of[w.stage] > 1]
        if not crowded:
            break
        left.remove(max(crowded, key=lambda w: (of[w.stage], w.replica)))
    if task.seats:
        cluster.hear(msg.ResizeRequested(task="t", workers=wanted))
        assert set(task.seats) == set(left)
