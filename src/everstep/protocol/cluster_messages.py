"""The messages of the coordinator: what happens to nodes and tasks, and what it decides.

    operator ──► TaskSubmitted, CancelRequested, DrainRequested …  ┐
    agent    ──► FromNode(number, report)                          ├─► Coordinator ─► Dispatch(number, order)
    clock    ──► NodeFellSilent, TimePassed                        ┘              └─► Think, TaskEnded …

Both directions of a node's line are numbered, from 1 for each life of the agent (`boot`). What was received
before is ignored; after a reconnection each side says how far it is, so nothing is lost or doubled. Reports
are in `node_reports`, orders in `node_orders`, decisions in `cluster_actions`; all are exported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep.protocol.cluster_actions import (
    ChooseAssignment,
    ClusterAction,
    Dispatch,
    IncidentClosed,
    NodeChanged,
    RecordRow,
    TaskEnded,
    TaskReshaped,
    Think,
)
from everstep.protocol.decisions import WeighedOption
from everstep.protocol.events import Event
from everstep.protocol.facts import OpsTook
from everstep.protocol.node_orders import (
    CloseTask,
    CommitCheckpoint,
    DiscardPartial,
    DropCopies,
    FindCheckpoint,
    KeepOnly,
    KillProcess,
    MemoryAddress,
    NotifyWorker,
    OpenMemory,
    OpenTask,
    Order,
    StartProcess,
    TaskNeeds,
)
from everstep.protocol.node_reports import (
    CheckpointFound,
    CheckpointUnusable,
    KernelSpoke,
    LeaveNoticed,
    LinkMended,
    NodeReport,
    OpOverdue,
    PartWritten,
    SaveFailed,
    Sender,
    SlotFreed,
    SlowLinkEnded,
    SlowLinkFound,
    StateFetched,
    TaskEvent,
    TimesReported,
    WorkerMoved,
)
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape

__all__ = [
    "AssignmentChosen",
    "CancelRequested",
    "CheckpointFound",
    "CheckpointUnusable",
    "ChooseAssignment",
    "CloseTask",
    "ClusterAction",
    "ClusterEvent",
    "CommitCheckpoint",
    "DiscardPartial",
    "Dispatch",
    "DrainRequested",
    "DropCopies",
    "FindCheckpoint",
    "FinishRequested",
    "FromNode",
    "IncidentClosed",
    "KeepOnly",
    "KernelSpoke",
    "KillProcess",
    "LeaveNoticed",
    "LinkMended",
    "MemoryAddress",
    "NodeChanged",
    "NodeFellSilent",
    "NodeJoined",
    "NodeLeft",
    "NodeReport",
    "NotifyWorker",
    "OpOverdue",
    "OpenMemory",
    "OpenTask",
    "Order",
    "PartWritten",
    "Patience",
    "PauseRequested",
    "PlanAnswered",
    "PolicySet",
    "ReadmitRequested",
    "RecordRow",
    "ReshapeRequested",
    "ResizeRequested",
    "SaveFailed",
    "Sender",
    "SlotFreed",
    "SlowLinkEnded",
    "SlowLinkFound",
    "SlownessEnded",
    "SlownessFound",
    "StartProcess",
    "StateFetched",
    "TaskEnded",
    "TaskEvent",
    "TaskReshaped",
    "TaskSubmitted",
    "Think",
    "TimePassed",
    "TimesReported",
    "UnpauseRequested",
    "WorkerMoved",
]

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
    lonely_silence_s: float = 30.0  # a silent node that no other node can speak for is given up after this
    awaited_silence_s: float = 10.0  # one that owes a ledger; an agent may be looking for us
    start_silence_s: float = 3.0  # one on which a worker was to start, and nothing trains
    rejoin_after_steps: int = 0
    checkpoint_retries: int = 6  # of reading a task's checkpoints, with back-off; then the task fails


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
    memory_port: int = 0  # where other nodes reach its memory store; 0: nowhere


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
    """An operator wants a node emptied. A task that would lose steps makes its state safe first, at the end
    of its step. `force`: at once, whatever is lost.
    """

    node: str
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadmitRequested:
    """A person, or a health check, says this node is fit again."""

    node: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPromised:
    """An operator, or a repair system, says when this node will be back."""

    node: str
    back_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAnnounced:
    """This node will be taken away: an operator, or the provider of a spot instance, says when."""

    node: str
    leaves_in_s: float
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
    least_stages: int = 0  # the planner may cut the model into so many stages …
    most_stages: int = 0  # … up to so many; 0: it keeps the shape
    least_shards: int = 0  # where that pays, workers may have so few shards …
    most_shards: int = 0  # … up to so many, in divisors of these; 0: as many as now
    script: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # scripted ones, for demonstrations
    closes: bool = False  # after the last step follows one that only evaluates
    needs: TaskNeeds | None = None  # None: submitted to the version before


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequested:
    """Train to the end of the step it is in, save that state, and be finished."""

    task: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpauseRequested:
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """At most this many workers from now on, until an operator releases it."""

    task: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeReleased:
    """The planner may choose workers and shape again."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshapeRequested:
    """Another shape from the next step boundary on, kept until an operator releases it. `job`: the same one,
    in that shape.
    """

    task: str
    job: Any
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswered:
    """The scheduler's answer to `Think`, or its wish for a new schedule."""

    task: str
    event: Event


class ChosenShape(NamedTuple):
    """Another shape for a task, and its job in that shape."""

    job: Any
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentChosen:
    """The planner's answer to `ChooseAssignment`: how many workers each task shall have, and in which shape.

    `shapes`: changes of shape, now. `wishes`: changes that would pay if nothing else happened; they are made
    once staying has cost as much as the change would, which is when `review_s` have passed. `losses`: what
    staying costs those tasks per second. `gains`: by how much changes of shape were expected to be faster.
    """

    version: int
    workers: Mapping[str, int]
    because: str
    shapes: Mapping[str, ChosenShape] = field(default_factory=dict)
    wishes: Mapping[str, Shape] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    review_s: float | None = None
    weighed: tuple[WeighedOption, ...] = ()
    is_prepared: bool = False  # the answer was thought of before it was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SlownessFound:
    """A worker takes `factor` times as long as it should. Reported again when the factor has changed.

    `ops` are the values behind `evidence`, in the same order; `paces` are those of all workers.
    """

    task: str
    worker: Worker
    incarnation: int
    factor: float
    since_step: int
    because: str
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()
    ops: tuple[OpsTook, ...] = ()
    paces: Mapping[Worker, float] = field(default_factory=dict)


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
    | RepairPromised
    | LeaveAnnounced
    | TaskSubmitted
    | CancelRequested
    | FinishRequested
    | PauseRequested
    | UnpauseRequested
    | ResizeRequested
    | ResizeReleased
    | ReshapeRequested
    | PlanAnswered
    | AssignmentChosen
    | SlownessFound
    | SlownessEnded
    | SlowLinkFound
    | SlowLinkEnded
    | PolicySet
    | TimePassed
)
