"""The words between the coordinator and the world: what happens to nodes and tasks, what nodes are told.

    person ──► TaskSubmitted, CancelRequested, DrainRequested …  ┐
    agent  ──► FromNode(number, what its workers did)            ├──► Coordinator ──► Dispatch(number, order)
    clock  ──► NodeFellSilent, TimePassed                        ┘              └──► Think, Record, TaskEnded

Both directions between a node and the coordinator are numbered, from 1 for each life of the agent (`boot`).
Whoever hears a number again ignores it, and whoever comes back says up to where it has heard: so a crash or a
cut between journal and wire neither loses nor doubles anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep.core.words.actions import (
    ComputePlan,
    CopyState,
    InterruptWorkers,
    RecordStep,
    ResumeStep,
    StopFeeding,
)
from everstep.core.words.events import Event
from everstep.core.words.ops import Worker
from everstep.core.words.shape import Shape

# ------------------------------------------------------------------ how patient to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Budgets, back-off and windows of the coordinator's remedies."""

    restarts_per_node: int = 2  # of one place on one machine, before the machine is suspected
    restarts_per_place: int = 3  # in all, where there is no other machine
    backoff_first_s: float = 0.0
    backoff_s: float = 1.0
    backoff_most_s: float = 60.0
    forget_after_s: float = 3600.0  # a failure older than this no longer counts
    mends_before_restart: int = 3  # of one link
    isolation_s: float = 600.0
    isolations_before_lemon: int = 2
    lonely_silence_s: float = 30.0  # a silent node nobody else can speak for is given up after this
    awaited_silence_s: float = 10.0  # one that owes a ledger; an agent may be looking for us
    rejoin_after_steps: int = 0
    checkpoint_retries: int = 6  # of reading a task's checkpoints, with back-off; then the task fails


# ------------------------------------------------------------------ what a node reports


class Sender(NamedTuple):
    """The process a report comes from; see `core.cluster.fences`."""

    task: str
    worker: Worker
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent:
    """Something happened to a task's worker, or its recovery has an answer."""

    task: str
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound:
    """The newest whole checkpoint of a task, 0 if there is none."""

    task: str
    step: int
    refused: tuple[str, ...] = ()
    search: int = 1  # the number of the search


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUnusable:
    """A task's checkpoints give no step to start from. `passing`: it may be otherwise later."""

    task: str
    because: str
    passing: bool
    search: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWritten:
    """One stage's part of a checkpoint lies in the folder, or on the shelf of a node: in its memory.

    `part` is for the one who commits or loads it.
    """

    task: str
    step: int
    stage: int
    attempt: int  # at this step
    part: Any
    shelf: str | None = None  # the node
    share: tuple[int, int] = (0, 1)  # which of how many parts of the stage this is


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
    """A worker has loaded its state from memory: how much of it was on its own node, how much elsewhere."""

    task: str
    worker: Worker
    step: int
    bytes_here: int
    bytes_elsewhere: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOverdue:
    """A worker's op takes longer than it should, as its agent sees it; see `core.faults.detector`."""

    task: str
    worker: Worker
    incarnation: int
    doing: str
    busy: bool
    stopped: bool  # the kernel says so
    elapsed_s: float
    expected_s: float
    step: int
    active_s: float = 0.0  # of that time its threads ran, or waited for a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMoved:
    """A worker that was overdue has gone on: it was slow, not hung."""

    task: str
    worker: Worker
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMended:
    """A connection between two live workers broke and was opened again."""

    task: str
    worker: Worker
    peer: Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesReported:
    """How long ops take on a worker, in seconds by kind. For the scheduler, and for who looks for slowness.

    `times` are smoothed; `ops` are those since the last telling: how many, and their own seconds together.
    """

    task: str
    worker: Worker
    times: Mapping[str, float]
    incarnation: int = 0
    step: int = 0
    ops: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    seconds: float = 0.0  # since the last telling


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkFound:
    """Messages between these two take longer than elsewhere, or than before, as their rings say."""

    task: str
    worker: Worker
    peer: Worker
    because: str
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkEnded:
    task: str
    worker: Worker
    peer: Worker
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpoke:
    """A line of the kernel's log that names a device's fault."""

    text: str


NodeReport = (
    TaskEvent
    | SlowLinkFound
    | SlowLinkEnded
    | CheckpointFound
    | CheckpointUnusable
    | PartWritten
    | StateFetched
    | OpOverdue
    | WorkerMoved
    | LinkMended
    | TimesReported
    | KernelSpoke
)


# ------------------------------------------------------------------ what happens to the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class FromNode:
    """A node's report. `number` counts up in one life of its agent."""

    node: str
    boot: str
    number: int
    report: NodeReport
    sender: Sender | None = None  # None: the agent itself


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent is there: for the first time, again after a cut (same `boot`), or restarted (another)."""

    node: str
    boot: str
    slots: int
    host: str
    shelf_port: int = 0  # where other nodes reach its shelf; 0: nowhere


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFellSilent:
    node: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """Its agent ended in good order, and its workers with it."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmitRequested:
    """A person, or a health check, says this node is fit again."""

    node: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSubmitted:
    """`job` is opaque here: agents hand it to workers. By `secret` the task's workers know each other."""

    task: str
    job: Any
    shape: Shape
    steps: int
    secret: str
    weight: float = 1.0
    has_checkpoints: bool = False
    script: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # scripted ones, for demonstrations


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpauseRequested:
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """At most this many workers from now on."""

    task: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeRequested:
    """Another shape from the next step boundary on. `job`: the same one, in that shape."""

    task: str
    job: Any
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswered:
    """The scheduler's answer to `Think`, or its wish for a new schedule."""

    task: str
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentChosen:
    """The planner's answer to `ChooseAssignment`: how many workers each task shall have."""

    version: int
    workers: Mapping[str, int]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlownessFound:
    """A worker takes `factor` times as long as it should. Told again when the factor has become another."""

    task: str
    worker: Worker
    incarnation: int
    factor: float
    since_step: int
    because: str
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlownessEnded:
    task: str
    worker: Worker
    incarnation: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    """How patient to be from now on, and whether a planner is asked. An event like any other: what was
    decided under another policy must be replayed under that one.
    """

    patience: Patience
    planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Something was put off until now."""


ClusterEvent = (
    FromNode
    | NodeJoined
    | NodeFellSilent
    | NodeLeft
    | DrainRequested
    | ReadmitRequested
    | TaskSubmitted
    | CancelRequested
    | PauseRequested
    | UnpauseRequested
    | ResizeRequested
    | ReshapeRequested
    | PlanAnswered
    | AssignmentChosen
    | SlownessFound
    | SlownessEnded
    | PolicySet
    | TimePassed
)


# ------------------------------------------------------------------ what a node is told


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask:
    """Workers of this task will come to this node: what they need to know."""

    task: str
    job: Any
    secret: str
    script: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProcess:
    task: str
    worker: Worker
    incarnation: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillProcess:
    task: str
    worker: Worker
    incarnation: int


class MemoryAddress(NamedTuple):
    """The memory of a node, as other nodes reach it."""

    node: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyWorker:
    """Pass this on to a worker. `book`: where every worker of the task can be reached. `shelf`: where it
    puts copies of its state; `leaves`: whether it leaves one behind when its shape ends, for a peer on its
    node may do so; `kept`: the state it is to restore, where that is in memory.
    """

    task: str
    worker: Worker
    words: InterruptWorkers | ResumeStep | CopyState | StopFeeding
    book: tuple[tuple[Worker, str, int], ...] = ()
    shelf: MemoryAddress | None = None
    leaves: bool = True
    kept: tuple[tuple[MemoryAddress, Any], ...] = ()  # shelf, part


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMemory:
    """Workers of this task, on other nodes, will put copies of their states here."""

    task: str
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopies:
    """States of this task older than this step are not needed any more."""

    task: str
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTask:
    """End this task's workers: `gently` lets them finish the update and the checkpoint in hand."""

    task: str
    gently: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOnly:
    """End every worker that is not one of these: they were given up while this node was away."""

    keep: tuple[tuple[str, Worker, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoint:
    task: str
    job: Any
    known: int = 0  # a step that was committed: the newest cannot be older
    search: int = 1  # to be said again in the answer: an answer to an earlier search does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    task: str
    step: int
    parts: tuple[Any, ...]


Order = (
    OpenTask
    | StartProcess
    | KillProcess
    | NotifyWorker
    | OpenMemory
    | DropCopies
    | CloseTask
    | KeepOnly
    | FindCheckpoint
    | CommitCheckpoint
)


# ------------------------------------------------------------------ what the coordinator decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    node: str
    number: int
    order: Order
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class Think:
    """Have the scheduler answer; its answer comes back as `PlanAnswered`."""

    task: str
    question: ComputePlan
    because: str
    slow: Mapping[Worker, float] = field(default_factory=dict)  # workers that take so many times as long
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseAssignment:
    """Have the planner say how many workers each task gets; its answer comes back as `AssignmentChosen`."""

    version: int
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    task: str
    record: RecordStep
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClosed:
    number: int
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    task: str
    state: str  # finished, failed, cancelled
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReshaped:
    """The task's workers of its old shape are gone; it begins anew in this one, where it was."""

    task: str
    shape: Shape
    because: str
    cause: int = 0  # the number of the event it follows from


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    node: str
    state: str
    because: str
    cause: int = 0  # the number of the event it follows from


ClusterAction = (
    Dispatch | Think | ChooseAssignment | RecordRow | IncidentClosed | TaskEnded | TaskReshaped | NodeChanged
)
