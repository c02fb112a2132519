"""Who is there and who has which slot: nodes, tasks, and the first-fit rule that gives slots to tasks.

A slot is taken from the moment a worker is placed on it until its process is known to be gone, or its node
is. So no slot is ever owned twice, also while a worker moves.

A task may have 16,384 workers, so nothing here walks over all seats to answer a question about one node or
one stage. The roster is the only one that adds and removes seats, and keeps beside them

    of a node    its free slots, and the seats that each task has there
    of a task    the replicas of each stage that have a seat, and those that have none

`node_changed` must follow every change of a node; `validate` compares all of it with what the seats say.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin, NodeLiveness, NodeState
from everstep.core.cluster.stages import load_at
from everstep.core.cluster.task import OVER, Seat, Task
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape


class Roster:
    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.tasks: dict[str, Task] = {}
        self._order: dict[str, int] = {}  # of nodes, as they came
        self._num_came = 0
        self._gone: set[str] = set()  # nodes
        self._timed: dict[str, Node] = {}  # about which something is to be decided at some time
        self._free: dict[str, list[int]] = {}  # ascending; of the nodes that take workers and have one
        self._num_free = 0
        self._seated: dict[str, _Seated] = {}  # by task
        self._tasks_at: dict[str, dict[str, int]] = {}  # node -> task -> its number of seats there

    # -------------------------------------------------------------- who is there

    def add_node(self, node: Node) -> None:
        self.nodes[node.name] = node
        self._num_came += 1
        self._order[node.name] = self._num_came
        self.node_changed(node)

    def drop_node(self, name: str) -> None:
        """It was gone, and is forgotten."""
        node = self.nodes.pop(name)
        assert not node.reachable, f"{name} is not gone"
        del self._order[name]
        self._gone.discard(name)
        self._timed.pop(name, None)
        self._tasks_at.pop(name, None)

    def add_task(self, task: Task) -> None:
        self.tasks[task.name] = task
        seats, task.seats = task.seats, {}
        for worker, seat in seats.items():
            self._put(task, self._seats(task), worker, seat)

    def drop_task(self, name: str) -> None:
        """It was over, and is forgotten."""
        assert not self.tasks[name].seats, f"{name} holds slots"
        del self.tasks[name]
        self._seated.pop(name, None)

    def node_changed(self, node: Node) -> None:
        """Its state, its slots or the times at which something is due are others now."""
        name = node.name
        self._num_free -= len(self._free.pop(name, ()))
        if node.state is NodeState.UP:
            taken = {slot for _, seat in self._seats_at(name) for slot in seat.slots}
            free = [slot for slot in range(node.slots) if slot not in taken | node.unusable]
            if free:
                self._free[name] = free
                self._num_free += len(free)
        if node.reachable:
            self._gone.discard(name)
        else:
            self._gone.add(name)
        if _is_timed(node):
            self._timed[name] = node
        else:
            self._timed.pop(name, None)

    # -------------------------------------------------------------- questions

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_gone(self) -> int:
        return len(self._gone)

    @property
    def num_taken(self) -> int:
        return sum(len(seat.slots) for task in self.tasks.values() for seat in task.seats.values())

    def free(self) -> list[tuple[str, int]]:
        return [(name, slot) for name in self._nodes_with_room(1) for slot in self._free[name]]

    def on_node(self, name: str) -> list[tuple[Task, Worker]]:
        return [(task, worker) for task in self.tasks_on_node(name) for worker in self.seats_on(task, name)]

    def tasks_on_node(self, name: str) -> list[Task]:
        """Those that were submitted first come first."""
        there = self._tasks_at.get(name, {})
        if len(there) <= 1:
            return [self.tasks[task] for task in there]
        return [task for task in self.tasks.values() if task.name in there]

    def seats_on(self, task: Task, node: str) -> Mapping[Worker, Seat]:
        seated = self._seated.get(task.name)
        return {} if seated is None else seated.at.get(node, {})

    def nodes_of(self, task: Task) -> Iterable[str]:
        seated = self._seated.get(task.name)
        return () if seated is None else seated.at

    def timed_nodes(self) -> list[Node]:
        """Those that are silent, isolated or about to leave."""
        return sorted(self._timed.values(), key=lambda node: self._order[node.name])

    def is_heard(self, name: str) -> bool:
        return self.nodes[name].liveness is NodeLiveness.HEARD

    def at_slots(self, node: str, slots: tuple[int, ...]) -> list[str]:
        """Who is at these slots of a node, in words; for evidence about a device."""
        seats = {
            seat.slot: f"worker {worker} of {task.name}"
            for task in self.tasks_on_node(node)
            for worker, seat in self.seats_on(task, node).items()
        }
        return [f"the device is slot {slot} of {node}: {seats.get(slot, 'free')}" for slot in slots]

    def can_do_without(self, name: str, slots: tuple[int, ...] | None = None) -> bool:
        """Would every task with workers on this node, or on these slots of it, still have, or find, a worker
        for each stage?
        """
        needed = []
        for task in self.tasks_on_node(name):
            here = Counter(
                worker.stage
                for worker, seat in self.seats_on(task, name).items()
                if slots is None or not set(slots).isdisjoint(seat.slots)
            )
            replicas = self._seats(task).replicas
            lacking = sum(replicas[stage] <= here[stage] for stage in range(task.shape.stages))
            if task.is_script:
                lacking = max(0, task.least - len(task.seats) + here[0])
            needed += [task.shape.shards] * lacking
        if slots is not None:
            left = ([s for s in free if node != name or s not in slots] for node, free in self._free.items())
            return _have_room(map(len, left), needed)
        free = [len(slots) for node, slots in self._free.items() if node != name] if needed else []
        return _have_room(free, needed) and any(
            n.name != name and n.state is NodeState.UP for n in self.nodes.values()
        )

    # -------------------------------------------------------------- seats

    def seat_workers(self, task: Task) -> list[Worker]:
        """Give free slots to places of this task that have none, in the order that keeps it safest.

        Stages without any worker come first, then the busiest (`stages.py`). A worker prefers a node that has
        no other replica of its stage, so that one node's loss leaves a live copy; then one whose memory has
        most of its state; then one where its own replica already is, to keep its neighbours near. Nothing is
        given unless every stage then has a worker, and a task that starts has as many as its user wants.
        """
        shards = task.shape.shards
        if len(task.seats) >= task.wanted() or self._num_free < shards:
            return []  # asked at every change of the cluster, by every task: most lack nothing
        seated = self._seats(task)
        uncovered = seated.replicas.count(0)
        lacking = max(uncovered, (task.least if task.seats else task.starts_with) - len(task.seats))
        if lacking > 0 and not _have_room(map(len, self._free.values()), [shards] * lacking):
            return []
        choice = _NodeChoice(self, task)

        def need(stage: int) -> tuple[float, int, int, int]:
            live = seated.replicas[stage]
            return -load_at(task, stage, live), live, seated.vacant[stage][0], stage

        stages = [need(stage) for stage, vacant in enumerate(seated.vacant) if vacant]
        heapify(stages)
        found: list[Worker] = []
        missing = task.wanted() - len(task.seats)
        while stages and len(found) < missing:
            _, _, replica, stage = stages[0]
            worker = Worker(replica, stage)
            node = choice.best_for(worker)
            if node is None:
                break
            slots = self._free[node][:shards]
            more = tuple(slots[1:]) if shards > 1 else ()
            self._put(task, seated, worker, Seat(node, slots[0], more=more))
            choice.seated(worker, node)
            found.append(worker)
            if seated.vacant[stage]:
                heapreplace(stages, need(stage))
            else:
                heappop(stages)
        return found

    def unseat(self, task: Task, worker: Worker) -> Seat:
        """Its process is gone, or never was."""
        seat = task.seats[worker]
        del _own(task)[worker]
        self._seats(task).remove(worker, seat.node)
        there = self._tasks_at[seat.node]
        there[task.name] -= 1
        if not there[task.name]:
            del there[task.name]
        node = self.nodes.get(seat.node)
        if node is not None:
            self.node_changed(node)
        return seat

    def _put(self, task: Task, seated: _Seated, worker: Worker, seat: Seat) -> None:
        _own(task)[worker] = seat
        seated.add(worker, seat)
        there = self._tasks_at.setdefault(seat.node, {})
        there[task.name] = there.get(task.name, 0) + 1
        free = self._free.get(seat.node)
        if free is not None:
            before = len(free)
            if not seat.more and free[0] == seat.slot:  # most of thousands
                del free[0]
            else:
                slots = seat.slots
                free[:] = [slot for slot in free if slot not in slots]
            self._num_free -= before - len(free)
            if not free:
                del self._free[seat.node]

    def _seats(self, task: Task) -> _Seated:
        """Of a task that has taken another shape it begins with nothing: it had no seats between them."""
        seated, shape = self._seated.get(task.name), task.shape
        if seated is None or (seated.shape is not shape and seated.shape != shape):
            assert seated is None or not seated.at, f"{task.name} changes its shape and holds slots"
            seated = self._seated[task.name] = _Seated(shape)
        return seated

    def _seats_at(self, name: str) -> Iterable[tuple[Worker, Seat]]:
        for task in self._tasks_at.get(name, ()):
            yield from self._seated[task].at[name].items()

    def _nodes_with_room(self, slots: int) -> list[str]:
        """Nodes with so many free slots, in the order in which they came."""
        return sorted(
            (n for n, free in self._free.items() if len(free) >= slots), key=self._order.__getitem__
        )

    def has_room(self, node: str, slots: int) -> bool:
        return len(self._free.get(node, ())) >= slots

    def has_spare(self, slots: int) -> bool:
        """Could a worker be moved now, without taking another one's place?"""
        return any(len(free) >= slots for free in self._free.values())

    def has_room_for(self, task: Task) -> bool:
        """Could it begin again on slots that are free now?"""
        shards = task.shape.shards
        return sum(len(free) // shards for free in self._free.values()) >= task.starts_with

    def validate(self) -> None:
        owned: dict[str, set[int]] = {}
        for task in self.tasks.values():
            assert not (task.state in OVER and task.seats), f"{task.name} is over and holds slots"
            for worker, seat in task.seats.items():
                node = self.nodes[seat.node]
                assert node.reachable, f"{task.name} {worker} sits on {node.name}, which is gone"
                assert all(0 <= slot < node.slots for slot in seat.slots)
                assert len(seat.slots) == task.shape.shards or task.next_shape is not None
                taken = owned.setdefault(seat.node, set())
                assert taken.isdisjoint(seat.slots), "a slot is owned twice"
                taken.update(seat.slots)
            self._validate_seats(task)
        for node in self.nodes.values():
            taken = owned.get(node.name, set()) | node.unusable
            up = node.state is NodeState.UP
            free = [slot for slot in range(node.slots) if slot not in taken] if up else []
            assert self._free.get(node.name, []) == free, f"free slots of {node.name}"
            assert (node.name in self._timed) == _is_timed(node), f"times of {node.name}"
            assert (node.name in self._gone) != node.reachable, f"is {node.name} gone?"
        assert self._num_free == sum(map(len, self._free.values()))

    def _validate_seats(self, task: Task) -> None:
        at: dict[str, dict[Worker, Seat]] = {}
        for worker, seat in task.seats.items():
            at.setdefault(seat.node, {})[worker] = seat
        if task.name not in self._seated:
            assert not at, f"{task.name} has seats that are not counted"
            return
        if not at and self._seated[task.name].shape != task.shape:
            return  # it has taken another one
        seated = self._seats(task)
        assert seated.at == at, f"seats of {task.name} by node"
        assert all(there.get(task.name, 0) == len(at.get(n, ())) for n, there in self._tasks_at.items())
        for stage in range(task.shape.stages):
            empty = [k for k in range(task.shape.replicas) if Worker(k, stage) not in task.seats]
            assert sorted(seated.vacant[stage]) == empty, f"empty places of {task.name}, stage {stage}"
            assert seated.replicas[stage] == task.shape.replicas - len(empty)


class _Seated:
    """What the roster keeps of one task's seats."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.at: dict[str, dict[Worker, Seat]] = {}  # by node, in the order in which they were given
        self.replicas = [0] * shape.stages
        self.vacant = [list(range(shape.replicas)) for _ in range(shape.stages)]  # heaps

    def add(self, worker: Worker, seat: Seat) -> None:
        self.at.setdefault(seat.node, {})[worker] = seat
        self.replicas[worker.stage] += 1
        vacant = self.vacant[worker.stage]
        if vacant[0] == worker.replica:
            heappop(vacant)
        else:  # a snapshot is read
            vacant.remove(worker.replica)
            heapify(vacant)

    def remove(self, worker: Worker, node: str) -> None:
        del self.at[node][worker]
        if not self.at[node]:
            del self.at[node]
        self.replicas[worker.stage] -= 1
        heappush(self.vacant[worker.stage], worker.replica)


class _NodeChoice:
    """The best node for a worker of one task, while its seats are given.

    By (replicas of its stage there, less of its state there, fewer of its own replica there, when it came).
    Where its own replica is, there are few nodes: they are compared one by one. Of all others the best is on
    top of a heap, one heap per stage. What is on the heap can only have become worse, so it is corrected when
    it comes to the top.
    """

    def __init__(self, roster: Roster, task: Task) -> None:
        self._roster, self._task = roster, task
        self._shards = task.shape.shards
        self._nodes = roster._nodes_with_room(self._shards)
        self._heaps: dict[int, list[tuple[int, float, int, str]]] = {}
        self._of_replica: dict[int, dict[str, int]] = {}  # its workers by node
        self._of_stage: dict[int, dict[str, int]] = {}
        self._kept: dict[int, dict[str, float]] = {}

    def best_for(self, worker: Worker) -> str | None:
        top = self._top(worker.stage)
        if top is None:
            return None
        where = self._where(worker.replica)
        if not where or (len(where) == 1 and top in where):
            return top
        near = [n for n in where if self._roster.has_room(n, self._shards)]
        if not near or near == [top]:
            return top
        return min((top, *near), key=lambda node: self._unease(worker, node))

    def seated(self, worker: Worker, node: str) -> None:
        for counts in (self._where(worker.replica), self._where_stage(worker.stage)):
            counts[node] = counts.get(node, 0) + 1

    def _unease(self, worker: Worker, node: str) -> tuple[int, float, int, int]:
        return (
            self._where_stage(worker.stage).get(node, 0),
            -self._state_there(worker.stage).get(node, 0.0),
            -self._where(worker.replica).get(node, 0),
            self._roster._order[node],
        )

    def _top(self, stage: int) -> str | None:
        if stage not in self._heaps:
            self._heaps[stage] = [self._entry(stage, node) for node in self._nodes]
            heapify(self._heaps[stage])
        heap, free, there = self._heaps[stage], self._roster._free, self._where_stage(stage)
        while heap:
            replicas, _, _, node = heap[0]
            if len(free.get(node, ())) < self._shards:
                heappop(heap)
            elif there.get(node, 0) == replicas:
                return node
            else:
                heapreplace(heap, self._entry(stage, node))
        return None

    def _entry(self, stage: int, node: str) -> tuple[int, float, int, str]:
        replicas = self._where_stage(stage).get(node, 0)
        return replicas, -self._state_there(stage).get(node, 0.0), self._roster._order[node], node

    def _where(self, replica: int) -> dict[str, int]:
        """The nodes where this replica is, with the number of its workers."""
        found = self._of_replica.get(replica)
        if found is None:
            workers = [Worker(replica, stage) for stage in range(self._task.shape.stages)]
            seats = self._task.seats
            found = self._of_replica[replica] = dict(Counter(seats[w].node for w in workers if w in seats))
        return found

    def _where_stage(self, stage: int) -> dict[str, int]:
        found = self._of_stage.get(stage)
        if found is None:
            seats = self._task.seats.items()
            found = self._of_stage[stage] = dict(Counter(seat.node for w, seat in seats if w.stage == stage))
        return found

    def _state_there(self, stage: int) -> dict[str, float]:
        """How much of a stage's state is in each node's memory, as a part of the model: stages are cut
        evenly.
        """
        if stage not in self._kept:
            self._kept[stage] = _in_memory(self._task, stage)
        return self._kept[stage]


def _in_memory(task: Task, stage: int) -> dict[str, float]:
    kept = task.copies.states.get(task.copies.newest or 0)
    if kept is None:
        return {}
    shares: dict[str, float] = {}
    low, high = stage / task.shape.stages, (stage + 1) / task.shape.stages
    for s in range(int(low * kept.stages), min(kept.stages, int(high * kept.stages) + 1)):
        part = min(high, (s + 1) / kept.stages) - max(low, s / kept.stages)
        for node in kept.copies.get(s, ()) if part > 0 else ():
            shares[node] = shares.get(node, 0.0) + part
    return {node: round(share, 9) for node, share in shares.items()}


def _own(task: Task) -> dict[Worker, Seat]:
    """A task's seats, to be changed: by the roster alone."""
    seats = task.seats
    assert isinstance(seats, dict)
    return seats


def _is_timed(node: Node) -> bool:
    return (
        node.liveness is NodeLiveness.SILENT
        or node.admin is NodeAdmin.ISOLATED
        or bool(node.isolated_slots)
        or node.drain_at is not None
        or node.pairs_at is not None
    )


def _have_room(free: Iterable[int], wanted: list[int]) -> bool:
    """Is there room for groups of so many slots, each on one node? The largest first, where it fits best."""
    left = sorted(free) if wanted else []
    for size in sorted(wanted, reverse=True):
        fitting = bisect_left(left, size)
        if fitting == len(left):
            return False
        insort(left, left.pop(fitting) - size)
    return True
