"""Who is there and who has which slot: nodes, tasks, and the first-fit rule that gives slots to tasks.

A slot is taken from the moment a worker is placed on it until its process is known to be gone, or its node
is. So no slot is ever owned twice, also while a worker moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from everstep.core.cluster.node_states import ADMIN, LIVENESS, NodeAdmin, NodeLiveness, NodeState, shown
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Lived
from everstep.core.words.actions import ComputePlan, StartWorker
from everstep.core.words.cluster_messages import MemoryAddress, OpOverdue, Order
from everstep.core.words.lifecycle import move
from everstep.core.words.ops import Worker
from everstep.core.words.shape import Shape


@dataclass(slots=True, kw_only=True)
class Node:
    name: str
    boot: str
    slots: int
    host: str
    admin: NodeAdmin = NodeAdmin.UP
    admin_because: str = "it joined"
    admin_since: float = 0.0
    liveness: NodeLiveness = NodeLiveness.HEARD
    liveness_because: str = "it joined"
    liveness_since: float = 0.0
    heard: int = 0  # the last report of this boot
    sent: int = 0  # the last order to this boot
    pending: list[tuple[int, Order, str]] = field(default_factory=list)  # orders it may not have got
    opened: set[str] = field(default_factory=set)  # tasks it knows of
    shelving: set[str] = field(default_factory=set)  # tasks whose copies it may keep
    isolations: list[float] = field(default_factory=list)
    shelf_port: int = 0

    @property
    def state(self) -> NodeState:
        """The one word that is shown."""
        return shown(self.admin, self.liveness)

    @property
    def because(self) -> str:
        return self.liveness_because if self._shows_liveness else self.admin_because

    @property
    def since(self) -> float:
        return self.liveness_since if self._shows_liveness else self.admin_since

    @property
    def _shows_liveness(self) -> bool:
        """Of a node that is up the last change is told."""
        if self.state is NodeState.UP:
            return self.liveness_since >= self.admin_since
        return self.liveness is not NodeLiveness.HEARD

    @property
    def reachable(self) -> bool:
        """Not given up: its workers count."""
        return self.liveness in (NodeLiveness.HEARD, NodeLiveness.SILENT)

    def set_admin(self, new: NodeAdmin, because: str, now: float) -> None:
        self.admin = move(ADMIN, self.admin, new, f"node {self.name}")
        self.admin_because, self.admin_since = because, now

    def set_liveness(self, new: NodeLiveness, because: str, now: float) -> None:
        self.liveness = move(LIVENESS, self.liveness, new, f"node {self.name}")
        self.liveness_because, self.liveness_since = because, now

    @property
    def shelf(self) -> MemoryAddress:
        return MemoryAddress(self.name, self.host, self.shelf_port)


class TaskState(StrEnum):
    WAITING = "waiting"  # for slots
    SEARCHING = "searching"  # for its newest checkpoint
    RUNNING = "running"
    ENDING = "ending"  # its workers are asked to go
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


OVER = frozenset({TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED})


@dataclass(slots=True)
class Seat:
    """Where a worker sits."""

    node: str
    slot: int
    incarnation: int = 0  # 0: no process yet
    address: tuple[str, int] | None = None
    leaving: str = ""  # why it was asked to go, if it was


@dataclass(slots=True)
class WrittenParts:
    """What of a checkpoint lies in its folder: of each stage, by how many share it, which part."""

    attempt: int = 0  # at that step: parts of two attempts are not one checkpoint
    stages: dict[int, dict[int, dict[int, Any]]] = field(default_factory=dict)

    def add(self, stage: int, share: tuple[int, int], part: Any) -> None:
        index, count = share
        self.stages.setdefault(stage, {}).setdefault(count, {})[index] = part

    def whole(self, stages: int) -> tuple[Any, ...] | None:
        """All parts, if no stage lacks one."""
        found: list[Any] = []
        for stage in range(stages):
            by_count = self.stages.get(stage, {})
            counts = [count for count, written in by_count.items() if len(written) == count]
            if not counts:
                return None
            written = by_count[min(counts)]
            found += [written[index] for index in sorted(written)]
        return tuple(found)


@dataclass(slots=True)
class KeptState:
    """A step's state in the memory of nodes: of every stage of the shape it had then, who holds a copy."""

    stages: int
    attempt: int = 0
    copies: dict[int, dict[str, Any]] = field(default_factory=dict)  # stage -> node -> part

    @property
    def whole(self) -> bool:
        return all(self.copies.get(stage) for stage in range(self.stages))


@dataclass(slots=True)
class Fetched:
    """What all workers together loaded from memory to go on from a step, and how long the slowest took."""

    bytes_here: int = 0
    bytes_elsewhere: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NextShape:
    """What a task becomes once its workers of today are gone."""

    job: Any
    shape: Shape


@dataclass(slots=True, kw_only=True)
class Task:
    name: str
    job: Any
    shape: Shape
    steps: int
    secret: str
    weight: float
    has_checkpoints: bool
    script: tuple[str, ...]
    faults: tuple[str, ...]
    submitted_at: float
    state: TaskState = TaskState.WAITING
    because: str = "no slot was given to it yet"
    after: TaskState = TaskState.FINISHED  # what it is once its workers are gone
    after_because: str = ""
    most: int | None = None  # workers it may have; None: as many as its shape
    seats: dict[Worker, Seat] = field(default_factory=dict)
    recovery: Recovery | None = None
    question: ComputePlan | None = None  # asked and not answered
    not_before: dict[Worker, float] = field(default_factory=dict)  # when a place may start again
    held: dict[Worker, StartWorker] = field(default_factory=dict)  # starts that wait for that
    failures: dict[Worker, list[float]] = field(default_factory=dict)  # on its present node
    last_words: dict[Worker, tuple[int, str]] = field(default_factory=dict)  # incarnation, what it raised
    overdue: dict[Worker, OpOverdue] = field(default_factory=dict)
    mends: dict[str, list[float]] = field(default_factory=dict)  # per link
    slow: dict[Worker, float] = field(default_factory=dict)  # takes so many times as long as it should
    planned_slow: dict[Worker, float] = field(default_factory=dict)  # what the last schedule was asked with
    parts: dict[int, WrittenParts] = field(default_factory=dict)  # by step: checkpoints being written
    recorded: int = 0
    lived: Lived = field(default_factory=Lived)  # before it was paused or took another shape
    on_disk: int = 0  # the step of the newest checkpoint that is known
    search: int = 0  # the number of the last search for it
    searches: int = 0  # in a row that failed
    search_at: float | None = None  # when it is looked for again
    kept: dict[int, KeptState] = field(default_factory=dict)  # by step: states in memory
    kept_step: int | None = None  # the newest of them that is whole and on record
    next_shape: NextShape | None = None
    fetched: dict[int, Fetched] = field(default_factory=dict)  # by step: what its last moves moved

    def wanted(self) -> int:
        places = self.shape.replicas * self.shape.stages
        return places if self.most is None else min(places, max(self.most, self.shape.stages))


class Roster:
    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.tasks: dict[str, Task] = {}

    def taken(self) -> set[tuple[str, int]]:
        return {(seat.node, seat.slot) for task in self.tasks.values() for seat in task.seats.values()}

    def free(self) -> list[tuple[str, int]]:
        taken = self.taken()
        return [
            (node.name, slot)
            for node in self.nodes.values()
            if node.state is NodeState.UP
            for slot in range(node.slots)
            if (node.name, slot) not in taken
        ]

    def on_node(self, name: str) -> list[tuple[Task, Worker]]:
        return [
            (task, worker)
            for task in self.tasks.values()
            for worker, seat in task.seats.items()
            if seat.node == name
        ]

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
        if _uncovered(task, task.seats.keys()) > len(free):
            return []
        seated: list[Worker] = []
        while free and empty and len(task.seats) < task.wanted():
            worker = min(empty, key=lambda w: (_replicas_of(task, w.stage), w.replica, w.stage))
            node, slot = min(free, key=lambda place: _unease(task, worker, place[0]))
            task.seats[worker] = Seat(node, slot)
            free.remove((node, slot))
            empty.remove(worker)
            seated.append(worker)
        return seated

    def validate(self) -> None:
        owned = [(seat.node, seat.slot) for task in self.tasks.values() for seat in task.seats.values()]
        assert len(owned) == len(set(owned)), "a slot is owned twice"
        for task in self.tasks.values():
            assert not (task.state in OVER and task.seats), f"{task.name} is over and holds slots"
            for worker, seat in task.seats.items():
                node = self.nodes[seat.node]
                assert node.reachable, f"{task.name} {worker} sits on {node.name}, which is gone"
                assert 0 <= seat.slot < node.slots


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
    kept = task.kept.get(task.kept_step or 0)
    if kept is None:
        return 0.0
    low, high = stage / task.shape.stages, (stage + 1) / task.shape.stages
    shared = (
        min(high, (s + 1) / kept.stages) - max(low, s / kept.stages)
        for s, holders in kept.copies.items()
        if node in holders
    )
    return round(sum(max(0.0, part) for part in shared), 9)
