"""A task as the coordinator knows it, in parts: each is changed by the one class its comment names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from everstep.core.cluster.lives import Lives
from everstep.core.faults.detector import OverdueReports
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Lived
from everstep.protocol.actions import ComputePlan, StartWorker
from everstep.protocol.events import WorkerRaised
from everstep.protocol.lifecycle import move
from everstep.protocol.messages import Patience, TaskSubmitted
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.table import Json
from everstep.protocol.work import EpochFacts, WrittenParts


class TaskState(StrEnum):
    WAITING = "waiting"  # for slots
    SEARCHING = "searching"  # for its newest checkpoint
    RUNNING = "running"  # it has workers, and a recovery that decides about them
    ENDING = "ending"  # its workers are asked to go
    PAUSED = "paused"  # an operator resumes it
    FINISHED = "finished"  # all its steps are done
    FAILED = "failed"  # nothing would help it
    CANCELLED = "cancelled"  # by an operator


OVER = frozenset({TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED})

TASK: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.WAITING: frozenset({TaskState.SEARCHING, TaskState.RUNNING, TaskState.ENDING}),
    TaskState.SEARCHING: frozenset(
        {TaskState.SEARCHING, TaskState.WAITING, TaskState.RUNNING, TaskState.ENDING}
    ),
    TaskState.RUNNING: frozenset({TaskState.ENDING}),
    TaskState.ENDING: frozenset({TaskState.WAITING, TaskState.PAUSED}) | OVER,
    TaskState.PAUSED: frozenset({TaskState.WAITING, TaskState.ENDING}),
    TaskState.FINISHED: frozenset(),
    TaskState.FAILED: frozenset(),
    TaskState.CANCELLED: frozenset(),
}


@dataclass(slots=True)
class Seat:
    """The slot of a worker, and the process in it."""

    node: str
    slot: int
    incarnation: int = 0  # 0: no process yet
    address: tuple[str, int] | None = None
    leaving: str = ""  # why it was asked to go, if it was
    more: tuple[int, ...] = ()  # the slots of its other shards

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot, *self.more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a task becomes once its workers are gone."""

    state: TaskState
    because: str
    gently: bool = False  # its workers may finish the update and the checkpoint in hand


@dataclass(frozen=True, slots=True)
class NextShape:
    """What a task is to be once its workers of today are gone."""

    job: Json
    shape: Shape


@dataclass(slots=True)
class SkipCount:
    """Steps of this run, and those of them without an update. `SkippedSteps` changes it."""

    recorded: int = 0
    total: int = 0
    in_a_row: int = 0


@dataclass(slots=True)
class Progress:
    """The task's recovery, and what is known of its steps. `Training` changes it."""

    recovery: Recovery | Lives | None = None  # `Lives`: of a script task
    question: ComputePlan | None = None  # asked and not answered
    facts: EpochFacts | None = None  # of the last epoch that was ordered: lines send changes to it
    recorded: int = 0
    lived: Lived = field(default_factory=Lived)  # before it was paused or took another shape
    skips: SkipCount = field(default_factory=SkipCount)
    losses: dict[int, float] = field(default_factory=dict)  # of the last steps, for their checkpoints
    held: HeldState | None = None


@dataclass(frozen=True, slots=True)
class HeldState:
    """All workers have stopped after this step and wait until its state is safe."""

    step: int
    because: str  # why they stopped
    since: float
    is_broken: bool = False  # by a new epoch: whoever was to write it may be gone
    ending: Ending | None = None  # the state is the task's last: what becomes of it. None: of this shape


@dataclass(slots=True)
class HeldStarts:
    """Starts that are put off, and those under way: until the process reports, and until it has the state of
    a peer. `Training` changes it.
    """

    not_before: dict[Worker, float] = field(default_factory=dict)
    waiting: dict[Worker, StartWorker] = field(default_factory=dict)
    under_way: dict[Worker, float] = field(default_factory=dict)  # when each was ordered, the first one first
    longest_s: float = 0.0  # that a start of this task took
    copying: dict[Worker, float] = field(default_factory=dict)  # since when, the first one first
    longest_copy_s: float = 0.0
    ready: dict[Worker, float] = field(default_factory=dict)  # since when it could work

    def put_off_until(self) -> list[float]:
        return [self.not_before[worker] for worker in self.waiting]

    def late_at(self, patience: Patience) -> list[float]:
        first = next(iter(self.under_way.values()), None)
        return [] if first is None else [first + self.limit_s(patience)]

    def copy_late_at(self, patience: Patience) -> list[float]:
        first = next(iter(self.copying.values()), None)
        return [] if first is None else [first + self.copy_limit_s(patience)]

    def ordered(self, worker: Worker, now: float) -> None:
        self.under_way.pop(worker, None)
        self.under_way[worker] = now

    def arrived(self, worker: Worker, now: float) -> None:
        self.ready[worker] = now
        since = self.under_way.pop(worker, None)
        if since is not None:
            self.longest_s = max(self.longest_s, now - since)

    def limit_s(self, patience: Patience) -> float:
        """What a start may take: the task's other starts say what is usual."""
        if not self.longest_s:
            return patience.first_start_s
        return max(patience.start_s, patience.start_factor * self.longest_s)

    def copies(self, worker: Worker, now: float) -> None:
        self.ready.pop(worker, None)
        self.copying.pop(worker, None)
        self.copying[worker] = now

    def copied(self, worker: Worker, now: float) -> None:
        self.ready[worker] = now
        since = self.copying.pop(worker, None)
        if since is not None:
            self.longest_copy_s = max(self.longest_copy_s, now - since)

    def copy_limit_s(self, patience: Patience) -> float:
        return max(patience.first_copy_s, patience.start_factor * self.longest_copy_s)

    def late_copies(self, now: float, patience: Patience) -> list[Worker]:
        limit_s = self.copy_limit_s(patience)
        return list(takewhile(lambda worker: self.copying[worker] + limit_s <= now, self.copying))

    def lived_s(self, worker: Worker, now: float) -> float:
        """A process that hangs while it starts, or while it gets its state, has not lived."""
        return now - self.ready.get(worker, now)

    def forget(self, worker: Worker) -> None:
        """Its process is gone."""
        self.under_way.pop(worker, None)
        self.copying.pop(worker, None)
        self.ready.pop(worker, None)

    def forget_all(self) -> None:
        self.waiting.clear()
        self.under_way.clear()
        self.copying.clear()
        self.ready.clear()

    def late(self, now: float, patience: Patience) -> list[Worker]:
        limit_s = self.limit_s(patience)
        return list(takewhile(lambda worker: self.under_way[worker] + limit_s <= now, self.under_way))

    def take_due(self, now: float) -> list[StartWorker]:
        due = [worker for worker in self.waiting if self.not_before[worker] <= now]
        return [self.waiting.pop(worker) for worker in due]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLink:
    """Two processes, of which the first could not open a connection to the second."""

    worker: Worker
    incarnation: int
    peer: Worker
    peer_incarnation: int
    error: str


@dataclass(slots=True)
class BadLinks:
    """Who cannot reach whom. `Failures` changes it."""

    links: list[BadLink] = field(default_factory=list)
    judge_at: float | None = None  # when it is decided what they have in common
    probed: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by node that was asked: not reached
    awaited: set[str] = field(default_factory=set)  # those of them that have not answered
    concerned: tuple[str, ...] = ()  # nodes that were probed because all workers wait
    probed_until: float = 0.0  # what is not answered by then is not waited for
    told: set[str] = field(default_factory=set)  # nodes that could not be left: said once

    def forget_probes(self) -> None:
        self.probed.clear()
        self.awaited.clear()
        self.concerned = ()


@dataclass(slots=True)
class FailureHistory:
    """What has gone wrong with its workers. `Failures` changes it."""

    times: dict[Worker, list[float]] = field(default_factory=dict)  # on its present node
    short_lives: dict[Worker, int] = field(default_factory=dict)  # in a row: the last of its processes
    raised: dict[Worker, WorkerRaised] = field(default_factory=dict)  # by it last
    unfit: dict[Worker, int] = field(default_factory=dict)  # the incarnation that must not take part
    ended: dict[Worker, int] = field(default_factory=dict)  # the incarnation that was ended with all others
    retries: dict[str, list[float]] = field(default_factory=dict)  # in place, per link
    overdue: OverdueReports = field(default_factory=OverdueReports)
    links: BadLinks = field(default_factory=BadLinks)


@dataclass(slots=True)
class CheckpointProgress:
    """Checkpoints on disk: the newest one known, those being written. `Checkpoints` changes it."""

    newest: int = 0  # step
    search: int = 0  # the number of the last search for it
    searcher: str = ""  # the node that was asked
    failed_searches: int = 0  # in a row
    failed_loads: int = 0  # since a checkpoint was committed
    search_at: float | None = None  # when it is looked for again
    searched_at: float | None = None  # when the searcher was asked, until it answers
    parts: dict[int, WrittenParts] = field(default_factory=dict)  # by step
    committing: dict[int, str] = field(default_factory=dict)  # step -> the node that commits it
    ahead: int = 0  # committed, and not recorded yet: counts as soon as it is
    commit_asked_at: dict[int, float] = field(default_factory=dict)  # of each of them
    broken: dict[int, int] = field(default_factory=dict)  # step -> its attempt that will not be complete
    num_failed: int = 0  # saves, in all
    failing: str = ""  # why the last save failed; empty: it did not
    uncopied: int = 0  # the last step whose state a node's memory did not take
    uncopied_because: str = ""

    def search_due_at(self, patience: Patience) -> list[float]:
        """When the node that was asked for the newest checkpoint has not answered in time."""
        if self.searched_at is None:
            return []
        reads_all = self.failed_loads > 0
        return [self.searched_at + patience.disk_answer_s * (patience.verify_factor if reads_all else 1.0)]

    def is_saving(self, recorded: int, interval: int) -> bool:
        """Is a state being written, as the last step on record and the interval say?"""
        due = recorded - recorded % interval if interval else 0
        return bool(self.parts or self.committing) or (due > self.newest and due not in self.broken)

    def commits_due_at(self, patience: Patience) -> list[float]:
        return [at + patience.disk_answer_s for at in self.commit_asked_at.values()]


@dataclass(slots=True)
class KeptState:
    """A step's state in the memory of nodes: per stage of the shape it had then, the nodes with a copy. Where
    states are sharded, per chunk of every stage.
    """

    stages: int
    attempt: int = 0
    copies: dict[int, dict[str, Json]] = field(default_factory=dict)  # stage -> node -> part
    failed_reads: dict[str, int] = field(default_factory=dict)  # by node: workers that could not read a copy
    failed_in: set[int] = field(default_factory=set)  # epochs in which a worker could not load it

    @property
    def whole(self) -> bool:
        return all(self.copies.get(stage) for stage in range(self.stages))


@dataclass(slots=True)
class Fetched:
    """What all workers together loaded from memory to resume from a step; the time of the slowest."""

    bytes_here: int = 0
    bytes_elsewhere: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class CopyProgress:
    """States in the memory of nodes. `MemoryCopies` changes it."""

    states: dict[int, KeptState] = field(default_factory=dict)  # by step
    newest: int | None = None  # the newest step that is whole and on record
    fetched: dict[int, Fetched] = field(default_factory=dict)  # by step: what its last moves moved


@dataclass(slots=True)
class Speeds:
    """Slow workers, and how many times as long as usual they take. `Slowness` changes it."""

    slow: dict[Worker, float] = field(default_factory=dict)
    awaited: dict[Worker, float] = field(default_factory=dict)  # the same, of scripts: others wait for them
    planned: dict[Worker, float] = field(default_factory=dict)  # what the last schedule was asked with
    # links that may be slow, until their nodes are compared with a third one; why
    suspected: tuple[tuple[Worker, Worker], ...] = ()
    suspected_because: str = ""


@dataclass(slots=True)
class Bounds:
    """What an operator has set for this task; the planner keeps to it until it is released."""

    workers: int | None = None
    is_shape_kept: bool = False


@dataclass(slots=True, kw_only=True)
class Task:
    """`Tasks` changes its state; `Roster` adds and removes seats, `Training` and `Staffing` change them."""

    request: TaskSubmitted
    submitted_at: float
    state: TaskState = TaskState.WAITING
    because: str = "no slot was given to it yet"
    ending: Ending | None = None  # while it is ending
    next_shape: NextShape | None = None
    ended_at: float = 0.0  # once it is over
    after_stop: TaskState = TaskState.WAITING  # its state once it has stopped before its last step
    leaves: str = ""  # the drained node for which alone it stops
    most: int | None = None  # workers the planner gives it; None: as many as its shape; 0: it waits
    bounds: Bounds = field(default_factory=Bounds)
    stage_costs: tuple[float, ...] = ()  # of each stage over the largest; empty: alike, or not measured
    seats: Mapping[Worker, Seat] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    starts: HeldStarts = field(default_factory=HeldStarts)
    failures: FailureHistory = field(default_factory=FailureHistory)
    checkpoints: CheckpointProgress = field(default_factory=CheckpointProgress)
    copies: CopyProgress = field(default_factory=CopyProgress)
    speeds: Speeds = field(default_factory=Speeds)

    @property
    def name(self) -> str:
        return self.request.task

    @property
    def job(self) -> Json:
        return self.request.job

    @property
    def shape(self) -> Shape:
        return self.request.shape

    @property
    def steps(self) -> int:
        return self.request.steps

    @property
    def weight(self) -> float:
        return self.request.weight

    @property
    def recovery(self) -> Recovery | Lives | None:
        return self.progress.recovery

    @property
    def lives(self) -> Lives | None:
        """Of a script task that has begun."""
        recovery = self.progress.recovery
        return recovery if isinstance(recovery, Lives) else None

    @property
    def managed(self) -> Recovery | None:
        """The recovery of a task on our engine that has begun."""
        recovery = self.progress.recovery
        return recovery if isinstance(recovery, Recovery) else None

    @property
    def is_script(self) -> bool:
        return self.request.ranks is not None

    @property
    def least(self) -> int:
        """Workers without which it does nothing."""
        return self.shape.stages if self.request.ranks is None else self.request.ranks.least

    @property
    def starts_with(self) -> int:
        """Workers without which it is not started: the user's number, or an operator's if smaller."""
        places = self.shape.replicas * self.shape.stages
        most = places if self.bounds.workers is None else min(places, self.bounds.workers)
        return max(self.least, min(self.request.least_workers, most))

    @property
    def epoch(self) -> int:
        return self.recovery.epoch if self.recovery is not None else self.progress.lived.epoch

    @property
    def next_step(self) -> int:
        """The first step that is not on record, 0 before training has begun."""
        return self.recovery.recorded + 1 if self.recovery is not None else 0

    @property
    def protected(self) -> int:
        """The newest step whose state outlives all its workers: on disk, or in the memory of nodes."""
        on_disk = self.recovery.checkpoint if self.recovery is not None else 0
        return max(on_disk, self.checkpoints.newest, self.copies.newest or 0)

    def enter(self, state: TaskState, because: str) -> None:
        """The only way to change its state."""
        self.state = move(TASK, self.state, state, f"task {self.name}")
        self.because = because

    def wanted(self) -> int:
        """Workers it may have."""
        most, limit, shape = self.most, self.bounds.workers, self.request.shape
        if most == 0:
            return 0
        places = shape.replicas * shape.stages
        if most is not None and most < places:
            places = most
        if limit is not None and limit < places:
            places = limit
        return max(self.least, places)

    @property
    def has_every_stage(self) -> bool:
        return len({worker.stage for worker in self.seats}) == self.shape.stages

    def staying(self) -> frozenset[Worker]:
        """The workers that have a seat and were not asked to go."""
        return frozenset(worker for worker, seat in self.seats.items() if not seat.leaving)
