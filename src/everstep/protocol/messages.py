"""The messages of coordinator, agents and workers, by wire: what happens to the cluster, what nodes report,
what they are ordered, what is decided, and what a worker and its agent say to each other.

    operator ──► TaskSubmitted, CancelRequested, DrainRequested …  ┐
    agent    ──► FromNode(number, report)                          ├─► Coordinator ─► Dispatch(number, order)
    clock    ──► NodeFellSilent, TimePassed                        ┘              └─► Think, TaskEnded …

Both directions of a node's line are numbered, from 1 for each life of the agent (`boot`). What was received
before is ignored; after a reconnection each side says how far it is, so nothing is lost or doubled.

    worker ──► WorkerHello, then WorkerReports      the agent numbers these and passes them on
    agent  ──► WorkerOrders                         most are the coordinator's, passed on as they are

A worker and its agent talk over a Unix socket of their machine, in the coordinator's own words: a report is
said once, by the worker it is about, and nothing on its way has to know its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from everstep.protocol.actions import Action, ComputePlan, Notice, RecordStep
from everstep.protocol.events import Event
from everstep.protocol.held import KeeperOrder, RankWord, Record
from everstep.protocol.incidents import OpsTook
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.table import (
    AGENT,
    ATTEMPT,
    COMMIT,
    OPERATOR,
    PAIR,
    PROBE,
    PROTOCOL,
    SEARCH,
    WORKER,
    Json,
    message,
)
from everstep.protocol.work import EpochFacts, FactChanges, OwnOrders, StateDirections
from everstep.protocol.work import MemoryAddress as MemoryAddress

# What a beacon shows of a worker that hands over or writes a state, or reads one: that takes what it takes.
SAVING, LOADING = "saving", "loading a state"
AWAITS_STATE = "a snapshot of a peer's state"  # of one that was ordered to wait for it

# ------------------------------------------------------------------ the wires


class NodeEvent:
    """About a node that has joined before; else it does not count."""

    __slots__ = ()
    node: str


class TaskRequest:
    """About a task that was submitted before; else it does not count."""

    __slots__ = ()
    task: str


class OtherEvent:
    """About neither, or it brings a node or a task."""

    __slots__ = ()


ClusterEvent = NodeEvent | TaskRequest | OtherEvent
"""What happens to the cluster, in the order of the coordinator's journal."""


class OwnReport:
    """Of an agent, about its node."""

    __slots__ = ()


class TaskReport:
    """About a task, by an agent or by one of its workers."""

    __slots__ = ()
    task: str


class RankReport:
    """About the ranks that one node runs for a script task: said by their keeper, the process that starts and
    watches them. It holds a worker's place, so a node's ranks are one worker of the task.
    """

    __slots__ = ()
    task: str
    worker: Worker
    incarnation: int
    life: int


NodeReport = OwnReport | TaskReport | RankReport
"""What an agent reports, about its node or for one of its workers."""


class NodeOrder:
    """To an agent, which carries it out or passes it on to its workers."""

    __slots__ = ()


class RankOrder:
    """To the keeper of a node's ranks, as the task's recovery decides it; its agent passes it on."""

    __slots__ = ()
    worker: Worker
    incarnation: int
    life: int
    because: str


Order = NodeOrder | RankOrder
"""What the coordinator orders an agent to do."""


class ClusterAction:
    """What the coordinator decides: orders to nodes, questions to scheduler and planner, what is recorded."""

    __slots__ = ()
    because: str
    cause: int  # the number of the event it follows from


class WorkerReport:
    """What a worker's process says to its agent after its hello."""

    __slots__ = ()


class WorkerCall:
    """What a worker's process says to its agent before that, or one of its shards at its end."""

    __slots__ = ()


FromWorker = WorkerCall | WorkerReport


class WorkerOrder:
    """What an agent says to a worker's process."""

    __slots__ = ()


class LineWord:
    """Between a worker's process and its agent, about their line alone. Reports and orders are counted on it;
    these are not.
    """

    __slots__ = ()


# ------------------------------------------------------------------ what nodes report


class Sender(NamedTuple):
    """The process a report comes from; see `core.cluster.fences`."""

    task: str
    worker: Worker
    incarnation: int


@message(by=(WORKER, AGENT), says="an event of task {task}")
class TaskEvent(TaskReport, WorkerReport):
    """Something happened to a task's worker, or its recovery has an answer."""

    task: str
    event: Event


@message(by=AGENT, fences=(SEARCH,), says="the newest checkpoint of {task} is of step {step}")
class CheckpointFound(TaskReport):
    """The newest whole checkpoint of a task, 0 if there is none."""

    task: str
    step: int
    refused: tuple[str, ...] = ()
    search: int = 1  # the number of the search
    loss: float | None = None  # of that step, where the checkpoint says it
    compiled: bool | None = False  # were the layers of the run that wrote it? None: it is none of ours


@message(by=AGENT, fences=(SEARCH,), says="the checkpoints of {task} cannot be used: {because}")
class CheckpointUnusable(TaskReport):
    """A task's checkpoints give no step to start from. `passing`: it may be otherwise later."""

    task: str
    because: str
    passing: bool
    search: int = 1


@message(by=WORKER, fences=(ATTEMPT,), says="stage {stage} of {task} has written its state of step {step}")
class PartWritten(TaskReport, WorkerReport):
    """One stage's part of a checkpoint is in the directory, or in the memory of a node.

    `part` is its label (name, sizes, hash): the description is a file beside it, for the one who commits or
    loads it. A description grows with the model; a report does not.
    """

    task: str
    step: int
    stage: int
    attempt: int  # at this step
    part: Json
    memory_of: str | None = None  # the node, for a copy in memory
    share: tuple[int, int] = (0, 1)  # which of how many parts of the stage this is


class Unsaved(StrEnum):
    """Why a state was not saved, where Everstep itself found it out. Else the error's text is read."""

    UNKNOWN = "unknown"
    STORAGE_IS_SILENT = "storage is silent"  # no byte was written for a time
    NO_MEMORY = "no memory"  # a copy takes more than a node may give


@message(
    by=(WORKER, AGENT),
    fences=(ATTEMPT, COMMIT),
    says="the state of {task} after step {step} was not saved: {because}",
)
class SaveFailed(TaskReport, WorkerReport):
    """A state was not saved: a worker could not write its part, or an agent could not commit the whole."""

    task: str
    step: int
    attempt: int  # at this step
    because: str
    memory_of: str | None = None  # the node whose memory was to keep it; None: on disk
    reason: Unsaved = Unsaved.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRead:
    """A part of a state that a worker could not read from the memory of a node."""

    part: int  # its number among the parts of the state
    node: str
    because: str
    then: str = ""  # the node that it was read from instead; empty: no holder was left


@message(by=WORKER, says="worker {worker} of {task} has loaded the state of step {step}")
class StateFetched(TaskReport, WorkerReport):
    """A worker has loaded its state from memory, or tried to: how much of it was on its own node, how much
    elsewhere, and which reads failed.
    """

    task: str
    worker: Worker
    step: int
    bytes_here: int
    bytes_elsewhere: int
    seconds: float
    failed: tuple[FailedRead, ...] = ()


@message(by=WORKER, fleeting=True, says="worker {worker} of {task} is overdue in {doing}")
class OpOverdue(TaskReport):
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
    unanswered_s: float = 0.0  # it only waits, and for so long it has not taken an order
    shard: int | None = None  # of the worker: the others wait for this one


@message(by=WORKER, fleeting=True, says="worker {worker} of {task} makes progress again")
class WorkerMoved(TaskReport):
    """A worker that was overdue has gone on: it was slow, not hung."""

    task: str
    worker: Worker
    incarnation: int


@message(by=WORKER, says="worker {worker} of {task} has reopened its link to {peer}")
class LinkMended(TaskReport, WorkerReport):
    """A connection between two live workers broke and was opened again."""

    task: str
    worker: Worker
    peer: Worker
    error: str = ""  # by which it broke, as far as that is known


@message(by=WORKER, says="worker {worker} of {task} cannot reach {peer} since {down_s:.1f} s")
class LinkDown(TaskReport, WorkerReport):
    """A connection to a peer broke, and another one could not be opened. If one can later, `LinkMended`."""

    task: str
    worker: Worker
    peer: Worker
    address: tuple[str, int]  # where the peer was tried: it may be another process by now
    down_s: float  # seconds since it broke: clocks of machines differ
    error: str = ""


@message(by=AGENT, fences=(PROBE,), says="node {node} has probed links of {task}; not reached: {unreached}")
class LinksProbed(TaskReport):
    """Which of the nodes that it was asked to probe this node can reach on the data network."""

    task: str
    reached: tuple[str, ...]
    unreached: tuple[str, ...]


@message(by=WORKER, fleeting=True, says="worker {worker} of {task} reports its times")
class TimesReported(TaskReport, WorkerReport):
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
    carriers: Mapping[str, str] = field(default_factory=dict)  # by peer: the transport of tensors to it
    shard_waits: tuple[float, ...] = ()  # seconds inside collectives of each of its shards
    sent: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """By peer on another machine, since the last telling: bytes acknowledged, and for how many seconds some
    were on their way."""


@message(says="the link between workers {worker} and {peer} of {task} is slow")
class SlowLinkFound(TaskRequest):
    """Between these two, on two machines, less is acknowledged per second than elsewhere, or than before."""

    task: str
    worker: Worker
    peer: Worker
    because: str
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()


@message(says="the link between workers {worker} and {peer} of {task} is no longer slow")
class SlowLinkEnded(TaskRequest):
    """Messages between these two are as fast as usual again."""

    task: str
    worker: Worker
    peer: Worker
    because: str


@message(says="links of {task} may be slow: {because}")
class LinksSuspected(TaskRequest):
    """All links of a task on two machines are slower than usual: either a network, or busy machines."""

    task: str
    links: tuple[tuple[Worker, Worker], ...]
    because: str


@message(by=AGENT, says="the kernel of node {node} says: {text}")
class KernelSpoke(OwnReport):
    """A line of the kernel's log that names a device's fault. `slots`: those of the device, if known."""

    text: str
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What one check of a node has found."""

    check: str
    state: str  # passed, warning, failed
    says: str
    figures: Mapping[str, float] = field(default_factory=dict)  # larger is better
    facts: Mapping[str, str] = field(default_factory=dict)  # to be the same on all nodes
    gpu: str = ""  # it is about this one alone: its UUID, or its PCI address
    slots: tuple[int, ...] = ()  # of that GPU; none: it is about the node


@message(by=AGENT, says="node {node} was checked: {because}")
class NodeChecked(OwnReport):
    """The answer to `CheckNode`. No results: the checks did not run."""

    results: tuple[CheckResult, ...]
    because: str  # why it was checked


@message(
    by=AGENT,
    fences=(PAIR,),
    says="node {node} has measured the network between it and {peer}",
)
class PairMeasured(OwnReport):
    """The answer to `MeasurePair`, as seen from the node that measured."""

    peer: str
    key: str
    out_mb_s: float = 0.0
    in_mb_s: float = 0.0
    answer_ms: float = 0.0  # the median time until an answer
    clock_off_s: float = 0.0  # by so much its clock is ahead of the peer's
    resent: float = 0.0  # the share of packets that were sent again
    error: str = ""  # why there are no figures


@message(by=AGENT, says="node {node} leaves in {leaves_in_s:.0f} s, says {by}")
class LeaveNoticed(OwnReport):
    """The node will be taken away, as spot instances are, or its agent was told to end. `at_once`: its
    workers leave now and not as late as possible.
    """

    leaves_in_s: float
    by: str
    at_once: bool = False


@message(by=AGENT, says="slot {slot} of node {node} is free again")
class SlotFreed(OwnReport):
    """A process that outlived SIGKILL has ended after all: its slot can be used again."""

    slot: int


# ------------------------------------------------------------------ script tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRules:
    """A script task: what its ranks run, on how many nodes, and when they are started again."""

    command: tuple[str, ...]  # a script and its arguments, or -m and a module, or a program
    run_id: str
    folder: str  # where ranks are started; a relative path of the command is seen from here
    ranks: int = 1  # per node
    least: int = 1  # nodes
    most: int = 1
    is_program: bool = False  # the command is no Python
    max_restarts: int = 3  # after failures; a node that is lost or comes does not count
    hang_after_s: float | None = None
    grace_s: float = 5.0  # from SIGTERM to SIGKILL
    join_s: float = 5.0  # with enough nodes to begin, so long for more that are on their way
    preload: tuple[str, ...] = ("auto",)  # loaded once per node; auto: what the script imports; none
    port: int = 0  # of the store; 0: a free one for each life
    logs: str = ""  # folder of files per rank; empty: the agent chooses
    role: str = "default"  # ROLE_NAME
    hidden: Mapping[int, int] = field(default_factory=dict)  # by local rank: 1 stdout, 2 stderr, 3 both
    has_own_device: bool = False  # each rank sees one GPU, and is local rank 0 (--virtual-local-rank)
    snapshots: str = ""  # folder that all nodes see, to which states in memory are drained; empty: none
    hold: str = "auto"  # survivors wait for a replacement. auto: if the script names everstep; on; off
    unit: int = 0  # ranks next to each other that hold one replica; 0: as its parameters say
    copy_every: int = 10  # snapshots from one copy in memory to the next
    standby: str = "none"  # parked: each node has a process with its GPU open for the next replacement
    exact: bool = False  # sums over ranks are exact (`everstep.exact`)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Where a rank is, for who looks for the one that the others wait for."""

    rank: int
    at: str  # train.py:17 in load
    is_inside_torch: bool
    entered: Mapping[str, int] = field(default_factory=dict)  # by process group: its last collective
    kinds: Mapping[str, str] = field(default_factory=dict)  # of these: nccl:all_reduce
    doing: str = ""  # torch's all_reduce
    step: int | None = None  # as it said last
    is_busy: bool = False  # it uses a CPU
    stack: str = ""  # its functions, innermost first; empty: unknown, or they change from moment to moment
    num_ops: int = 0  # collectives and messages so far, by the flight recorder
    launched: Mapping[str, int] = field(default_factory=dict)  # operations by communicator, by NCCL's RAS
    completed: Mapping[str, int] = field(default_factory=dict)  # the same, by NCCL's Inspector
    trouble: str = ""  # what NCCL's RAS says of it: does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """When a rank entered some of the last collectives of one process group; all ranks tell the same ones."""

    rank: int
    group: str
    entered: Mapping[int, float]  # by number, in seconds; by the device: minus the time it was inside
    step_s: float  # about: the longest usual time between two of them
    is_by_device: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """What one rank has put into its node's memory of a state of the script."""

    size: int
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """One file of a state, and the nodes that have it."""

    name: str
    file: SnapshotFile
    holders: tuple[tuple[str, int], ...]  # their addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSnapshot:
    """A state of the script that the ranks of a life begin with."""

    step: int
    files: tuple[KeptFile, ...]


@message(by=WORKER, says="no rank of {task} runs on {node}; {worker} can begin a life")
class RanksIdle(RankReport, WorkerReport):
    """A node has no rank of this task: it is ready, or all that ran in `life` have ended. `address`: where
    the store of the next life would be, if it were on this node.
    """

    task: str
    worker: Worker
    incarnation: int
    life: int
    address: tuple[str, int]
    codes: Mapping[int, int] = field(default_factory=dict)  # by rank; negative: a signal
    order: int = 0  # of this node among those of the task: ranks are numbered along it
    memory: tuple[str, int] | None = None  # where other nodes read the states that are kept here
    can_hold: bool = False  # the script, as it is on this node, asks for it


@message(by=WORKER, says="the ranks of {task} on {node} have started, life {life}")
class RanksStarted(RankReport, WorkerReport):
    """All ranks of a life that belong to this node run."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    pids: Mapping[int, int] = field(default_factory=dict)  # by rank


@message(by=WORKER, says="rank {rank} of {task}: {what}")
class RankFailed(RankReport, WorkerReport):
    """A rank has raised, or ended with a code that is not 0, or is stopped: the first sign of it."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    rank: int
    what: str  # rank 3 raised OSError: no disk at train.py:17 in load
    source: str  # exception, exit or progress
    text: str  # from which the fault is judged
    code: int = 1
    ago_s: float = 0.0  # since it happened
    evidence: tuple[str, ...] = ()
    traceback: str = ""
    program_error: str = ""  # by which Python says that the program is wrong; empty: it does not
    lost_snapshot: int | None = None  # the state of this step could not be read
    finished: tuple[int, ...] = ()  # ranks of this node that had ended with code 0 by then


@message(by=WORKER, says="the process of rank {rank} of {task} is gone: {reason}")
class RankGone(RankReport, WorkerReport):
    """In a life whose ranks are held. `records`: what it, or its predecessor, wrote down at its snapshots."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    rank: int
    code: int
    reason: str
    records: tuple[Record, ...] = ()


@message(by=WORKER, says="ranks of {task} on {node} say where they are")
class RanksSaid(RankReport, WorkerReport):
    """Of a life whose ranks are held, in the order in which they said it."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    said: tuple[RankWord, ...]


@message(by=WORKER, fleeting=True, says="the ranks of {task} on {node} make no progress for {still_s:.1f} s")
class RanksStill(RankReport, WorkerReport):
    """None of them has entered a collective, written anything or told a step for so long; nor used a CPU, if
    it has no process group.
    """

    task: str
    worker: Worker
    incarnation: int
    life: int
    still_s: float
    tells_steps: bool = False  # it is by these that they are late, whatever else they do


@message(by=WORKER, fleeting=True, says="the ranks of {task} on {node} make progress again")
class RanksMoved(RankReport, WorkerReport):
    """What was said to stand still does not any more."""

    task: str
    worker: Worker
    incarnation: int
    life: int


@message(by=WORKER, says="where the ranks of {task} on {node} are")
class RanksLocated(RankReport, WorkerReport):
    """The answer to `LocateRanks`."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    positions: tuple[RankPosition, ...]
    finished: tuple[int, ...] = ()  # ranks of this node that have ended with code 0


@message(by=WORKER, says="ranks {ranks} of {task} on {node} have come to the end of their script")
class RanksLeft(RankReport, WorkerReport):
    """They will end with code 0, and have left their process groups: who waits for them waits in vain."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    ranks: tuple[int, ...]


@message(by=WORKER, fleeting=True, says="when the ranks of {task} on {node} entered collectives")
class RanksPaced(RankReport, WorkerReport):
    """From their flight recorders, every minute at most: a slow rank is the one that the others wait for."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    paces: tuple[RankPace, ...]


@message(by=WORKER, fleeting=True, says="{task} is at step {step}, says rank {rank}")
class RankProgressed(RankReport, WorkerReport):
    """The script has called `everstep.progress`. At most about once per second and node."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    rank: int
    step: int
    tokens: int | None = None  # since the script began
    is_saved: bool = False  # the script can continue from this step


@message(by=WORKER, says="{node} has its part of the state of {task} after step {step}")
class SnapshotTaken(RankReport, WorkerReport):
    """All ranks of this node have handed over their part of a state (`everstep.snapshot`)."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    step: int
    files: Mapping[str, SnapshotFile]  # by name; none where other ranks have all of it


@message(by=WORKER, says="{node} has a copy of the state of {task} after step {step}")
class SnapshotCopied(RankReport, WorkerReport):
    """The answer to `CopySnapshot`."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    step: int
    owner: Worker
    failed: str = ""


@message(by=WORKER, says="{node} has written its part of the state of {task} after step {step} to disk")
class SnapshotDrained(RankReport, WorkerReport):
    """The answer to `DrainSnapshot`."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    step: int
    failed: str = ""


@message(says="write the state of {task} after step {step} on {node} to disk")
class DrainSnapshot(Action, RankOrder):
    """From the node's memory to the folder of the task, meanwhile."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    step: int
    names: tuple[str, ...]
    because: str


@message(says="copy the state of {task} after step {step} to {node}")
class CopySnapshot(Action, RankOrder):
    """Read the files of another node, so that two have them."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    step: int
    owner: Worker
    files: tuple[KeptFile, ...]
    because: str


@message(says="begin life {life} of {task} on {node}")
class BeginLife(Action, RankOrder):
    """Start the ranks of this node."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    group: int  # GROUP_RANK
    first_rank: int
    num_groups: int
    world: int
    restarts: int  # after failures, so far
    master: tuple[str, int]
    hosts_store: bool
    because: str
    restore: KeptSnapshot | None = None  # what `everstep.restore` gives
    unit: int = 0  # its ranks are held; so many of them hold one replica. 0: they are not


@message(says="end life {life} of {task} on {node}")
class EndLife(Action, RankOrder):
    """SIGTERM to every rank, then SIGKILL to the group of what is left; `RanksIdle` follows."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    grace_s: float
    because: str


@message(says="hold, replace or resume ranks of {task} on {node}")
class OrderRanks(Action, RankOrder):
    """What the healing of a held script asks of this node's ranks, in this order."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    orders: tuple[KeeperOrder, ...]
    because: str


@message(says="locate the ranks of {task} on {node}")
class LocateRanks(Action, RankOrder):
    """Collect stacks and records of collectives; `RanksLocated` follows."""

    task: str
    worker: Worker
    incarnation: int
    life: int
    because: str


# ------------------------------------------------------------------ what nodes are ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """Where a task's checkpoints are."""

    base: str  # a relative folder is seen from here
    folder: str  # or a URL
    keep: int  # older ones are removed
    start_over: bool = False  # continue without checkpoints that cannot be used
    interval: int = 0  # steps between two of them; 0: not said


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNeeds:
    """What an agent needs to know of a job; the job itself is for workers alone."""

    device: str = "cpu"
    threads: int = 1  # of each worker
    modules: tuple[str, ...] = ()  # to import before workers are forked
    log: str | None = None  # folder for what workers print
    checkpoints: CheckpointFolder | None = None
    python: tuple[str, ...] = ()  # the command that starts Python for its workers; empty: the agent's


@message(says="prepare task {task} on {node}")
class OpenTask(NodeOrder):
    """Workers of this task will come to this node: what they need to know."""

    task: str
    job: Json  # handed to workers as it is
    secret: str
    shape: Shape
    needs: TaskNeeds
    script: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    ranks: RankRules | None = None  # of a script task; None: a managed one
    owner: str = ""  # who submitted it


@message(says="start worker {worker} of {task} on {node}")
class StartProcess(NodeOrder):
    """Start a process for this worker in this slot."""

    task: str
    worker: Worker
    incarnation: int
    slot: int
    more_slots: tuple[int, ...] = ()  # of its other shards


@message(says="stop worker {worker} of {task} on {node}")
class KillProcess(NodeOrder):
    """End this process at once."""

    task: str
    worker: Worker
    incarnation: int


@message(says="start workers of {task} on {node}")
class StartProcesses(NodeOrder):
    """Several at once."""

    task: str
    starts: tuple[StartProcess, ...]


@message(says="pause the workers of {task} on {node}, epoch {epoch}")
class InterruptTask(NodeOrder):
    """These workers finish the op in hand, report their ledgers, and wait."""

    task: str
    epoch: int
    workers: tuple[Worker, ...]
    because: str


class WorkerResume(NamedTuple):
    """What one worker of a node is told beside the facts."""

    worker: Worker
    own: OwnOrders
    states: StateDirections


@message(says="resume the workers of {task} on {node}")
class ResumeTask(NodeOrder):
    """A new epoch: these workers go on. An agent that knows the facts of the epoch before is sent only the
    `news` since then, any other one all facts.
    """

    task: str
    facts: EpochFacts | None
    news: FactChanges | None
    workers: tuple[WorkerResume, ...]


@message(says="notify worker {worker} of {task} on {node}")
class NotifyWorker(NodeOrder, WorkerOrder):
    """Pass this on to a worker. `book`: where peers it needs for that can be reached."""

    task: str
    worker: Worker
    words: Notice
    book: tuple[tuple[Worker, str, int], ...] = ()


@message(says="reserve memory for copies of {task} on {node}")
class OpenMemory(NodeOrder):
    """Workers of this task, on other nodes, will put copies of their states here."""

    task: str
    secret: str
    owner: str = ""  # as in OpenTask


@message(says="drop old memory copies of {task} on {node}")
class DropCopies(NodeOrder):
    """States of this task older than this step are not needed any more."""

    task: str
    before: int


@message(says="stop the workers of {task} on {node}")
class CloseTask(NodeOrder):
    """End this task's workers: `gently` lets them finish the update and the checkpoint in hand."""

    task: str
    gently: bool


@message(says="reconcile the workers on {node}")
class KeepOnly(NodeOrder):
    """End every worker that is not one of these: they were given up while this node was away."""

    keep: tuple[tuple[str, Worker, int], ...]


@message(says="search checkpoints of {task} on {node}")
class FindCheckpoint(NodeOrder):
    """Look for the newest checkpoint of this task that can be used."""

    task: str
    needs: TaskNeeds
    known: int = 0  # a step that was committed: the newest cannot be older
    search: int = 1  # to be said again in the answer: an answer to an earlier search does not count
    verify: bool = False  # all bytes: a worker could not load it
    run: str = ""  # `run_of` its secret: what this run has written is committed where it is whole
    live: bool = False  # the task runs; answered by CheckpointsLooked
    owner: str = ""  # as in OpenTask


@message(says="commit a checkpoint of {task} on {node}")
class CommitCheckpoint(NodeOrder):
    """All parts of this step are written: make them a checkpoint."""

    task: str
    step: int
    parts: tuple[Json, ...]
    attempt: int = 0  # to be said again if it fails
    loss: float | None = None  # of this step
    last: bool = False  # no later one will be committed in its place: tried again if the disk refuses


@message(says="check node {node}: {because}")
class CheckNode(NodeOrder):
    """Run the checks of `everstep check`, and those of the node's own, in at most 20 s."""

    because: str


@message(says="measure the network between {node} and {peer}")
class MeasurePair(NodeOrder):
    """Measure the network to this node, which was sent `AnswerPair` with the same key."""

    peer: str
    host: str
    port: int
    key: str


@message(says="let {peer} measure the network to {node}")
class AnswerPair(NodeOrder):
    """Answer the node that brings this key, once."""

    peer: str
    key: str


@message(says="probe links of {task} from {node}")
class ProbeLinks(NodeOrder):
    """Two other nodes cannot reach each other: which of them can this one reach? By node: an address."""

    task: str
    addresses: dict[str, tuple[str, int]]


@message(says="remove an incomplete checkpoint of {task} on {node}")
class DiscardPartial(NodeOrder):
    """Remove what was written of a checkpoint that will not be complete. `keep`: steps being written."""

    task: str
    step: int
    keep: tuple[int, ...] = ()


# ------------------------------------------------------------------ how patient to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Budgets, back-off and windows of the coordinator's remedies."""

    restarts_per_node: int = 2  # of one place on one machine, before the machine is suspected
    restarts_per_place: int = 3  # in all, where there is no other machine
    backoff_first_s: float = 0.0
    backoff_s: float = 1.0
    backoff_most_s: float = 60.0
    long_life_s: float = 30.0  # of a process, after which its end is one of many, and it is replaced at once
    forget_after_s: float = 3600.0  # a failure older than this no longer counts
    mends_before_restart: int = 3  # of one link
    isolation_s: float = 600.0
    isolations_before_lemon: int = 2  # of a slot; of a node statistics decide
    lonely_silence_s: float = 30.0  # a silent node that no other node can speak for is given up after this
    cut_silence_s: float = (
        180.0  # one of a task that trains, of which no node is heard, if others could run it
    )
    awaited_silence_s: float = 10.0  # one that owes a ledger; an agent may be looking for us
    replaced_s: float = 15.0  # for another agent to come, where workers outlive theirs
    start_silence_s: float = 3.0  # one on which a worker was to start, and nothing trains
    first_start_s: float = 1800.0  # a process that never reports, of a task none of whose workers has started
    start_s: float = 120.0  # one of a task whose other workers have started; or, if that is longer:
    start_factor: float = 5.0  # times as long as their longest start
    first_copy_s: float = 1800.0  # of a state, from a peer to a new worker, while no other copy took longer
    links_settle_s: float = 2.0  # from the first broken link to the verdict: others may break meanwhile
    disk_answer_s: float = 600.0  # a search for checkpoints, or a commit, that a node does not answer
    look_s: float = 30.0  # for a look at the folder of a task that goes back
    verify_factor: float = 10.0  # times as long for a search that reads every byte
    rejoin_after_steps: int = 0
    checkpoint_retries: int = 6  # of reading a task's checkpoints, with back-off; then the task fails


# ------------------------------------------------------------------ what the planner weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedOption:
    """One thing a task could do, while all others get what the plan gives them.

    Amounts are in the work of one worker in one second, times the task's weight.
    """

    task: str
    what: str  # continue with rerouting, change shape to 4x1 …
    workers: int
    shape: str  # 2x2; empty: none
    throughput: float  # in the work of one worker
    transition_s: float
    earns: float  # until the next event
    pays: float  # for the change
    behind: float  # how much less it is worth than the chosen option
    chosen: bool
    because: str


# ------------------------------------------------------------------ what happens to the cluster

AN_OPERATOR = "an operator"  # every caller with the cluster's one token; other callers have names


@message(by=AGENT, says="node {node} reports")
class FromNode(OtherEvent):
    """A node's report. `number` counts up in one life of its agent."""

    node: str
    boot: str
    number: int
    report: NodeReport
    sender: Sender | None = None  # None: the agent itself


@message(by=AGENT, says="node {node} joined")
class NodeJoined(OtherEvent):
    """An agent is there: for the first time, again after a cut (same `boot`), or restarted (another)."""

    node: str
    boot: str
    slots: int
    host: str
    memory_port: int = 0  # where other nodes reach its memory store; 0: nowhere
    checks: tuple[CheckResult, ...] = ()  # that its agent has run before it joined
    pair_port: int = 0  # where other nodes measure the network to it; 0: nowhere
    checks_network: bool = False  # it is to get no workers before its network is checked
    journal: str = ""  # the id of the journal whose orders it has carried out; empty: of none, or not said
    done: int = 0  # the last of those orders
    runs: tuple[tuple[str, Worker, int], ...] = ()  # its processes: task, worker, incarnation
    epochs: Mapping[str, int] = field(default_factory=dict)  # by task: of the last facts it knows
    alone_s: float = 0.0  # so long its workers wait for another agent when this one is gone
    rack: str = ""  # what it shares power or a switch with others in; empty: not said
    cannot_compile: str = ""  # why torch.compile cannot work for its GPUs; empty: it can, or not said


@message(says="the journal {journal} is kept by version {version}: {because}")
class JournalBegun(OtherEvent):
    """The journal has this id from now on. Agents that followed another one are reconciled when they join."""

    journal: str
    version: str  # of Everstep: the code that has decided what follows
    because: str


@message(says="a report of node {node} is not understood: {what}")
class ReportUnknown(NodeEvent):
    """It counts as heard, or it would be sent again without end. A later version may have said it."""

    node: str
    report: int  # its number
    what: str


@message(says="node {node} fell silent")
class NodeFellSilent(NodeEvent):
    """No heartbeat of this node has come for so long."""

    node: str
    silent_s: float
    closed: bool = (
        False  # its system has closed the agent's connection: the machine lives, its agent does not
    )


@message(by=AGENT, says="node {node} left")
class NodeLeft(NodeEvent):
    """Its agent ended in good order, and its workers with it."""

    node: str


@message(by=OPERATOR, says="{by} drains node {node}")
class DrainRequested(NodeEvent):
    """An operator wants a node emptied. A task that would lose steps makes its state safe first, at the end
    of its step. `force`: at once, whatever is lost.
    """

    node: str
    force: bool = False
    by: str = AN_OPERATOR


@message(by=OPERATOR, says="node {node} is readmitted by {by}")
class ReadmitRequested(NodeEvent):
    """A person, or a health check, says this node is fit again."""

    node: str
    by: str


@message(by=OPERATOR, says="node {node} leaves in {leaves_in_s:.0f} s, says {by}")
class LeaveAnnounced(NodeEvent):
    """This node will be taken away: an operator, or the provider of a spot instance, says when."""

    node: str
    leaves_in_s: float
    by: str


def run_of(secret: str) -> str:
    """What a task's checkpoints say of whose they are: known to all who know the secret, and no secret."""
    return sha256(f"checkpoints of {secret}".encode()).hexdigest()[:16]


@message(by=OPERATOR, says="{owner} submits task {task}")
class TaskSubmitted(OtherEvent):
    """`job` is opaque here: agents hand it to workers. By `secret` the task's workers know each other."""

    task: str
    job: Json
    shape: Shape
    steps: int
    secret: str
    weight: float = 1.0
    has_checkpoints: bool = False
    least_stages: int = 0  # the planner may cut the model into so many stages …
    most_stages: int = 0  # … up to so many; 0: it keeps the shape
    most_workers: int = 0  # the planner gives it no more by itself; 0: as many as pay off
    least_workers: int = 0  # with fewer it is worth nothing to the planner; 0: one per stage
    least_shards: int = 0  # where that pays, workers may have so few shards …
    most_shards: int = 0  # … up to so many, in divisors of these; 0: as many as now
    script: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # scripted ones, for demonstrations
    closes: bool = False  # after the last step follows one that only evaluates
    needs: TaskNeeds = field(default_factory=TaskNeeds)
    owner: str = AN_OPERATOR
    ranks: RankRules | None = None  # of a script task; None: a managed one
    on_nan: str = "skip"  # what follows a step with a NaN that is the same again: skip, pause
    on_spike: str = "skip"  # the same of a loss far above those before it
    votes_on_all: bool = False  # replicas check each other's numbers in every step
    compile_because: str = ""  # why `job.compile` was chosen so; empty: the job said it


@message(by=OPERATOR, says="{by} cancels task {task}")
class CancelRequested(TaskRequest):
    """End the task now; its state is not saved."""

    task: str
    by: str = AN_OPERATOR


@message(by=OPERATOR, says="task {task} is to finish early")
class FinishRequested(TaskRequest):
    """Train to the end of the step it is in, save that state, and be finished."""

    task: str
    because: str


@message(by=OPERATOR, says="{by} pauses task {task}")
class PauseRequested(TaskRequest):
    """End its workers after the step they are in, once its state is saved; the task keeps its place."""

    task: str
    by: str = AN_OPERATOR
    force: bool = False  # at once, whatever is saved


@message(by=OPERATOR, says="{by} resumes task {task}")
class UnpauseRequested(TaskRequest):
    """Train again from where it was paused."""

    task: str
    by: str = AN_OPERATOR


@message(by=OPERATOR, says="{by} resizes task {task} to {workers} workers")
class ResizeRequested(TaskRequest):
    """At most this many workers from now on, until an operator releases it."""

    task: str
    workers: int
    by: str = AN_OPERATOR


@message(by=OPERATOR, says="{by} lets the planner choose the size of task {task}")
class ResizeReleased(TaskRequest):
    """The planner may choose workers and shape again."""

    task: str
    by: str = AN_OPERATOR


@message(by=OPERATOR, says="{by} changes the shape of task {task}")
class ReshapeRequested(TaskRequest):
    """Another shape from the next step boundary on, kept until an operator releases it. `job`: the same one,
    in that shape.
    """

    task: str
    job: Json
    shape: Shape
    by: str = AN_OPERATOR


@message(by=OPERATOR, says="{by} updates task {task}")
class UpdateRequested(TaskRequest):
    """Another job, mostly one with other code, from the next step boundary on."""

    task: str
    job: Json
    shape: Shape
    by: str = AN_OPERATOR


@message(says="the scheduler answers for task {task}")
class PlanAnswered(TaskRequest):
    """The scheduler's answer to `Think`, or its wish for a new schedule."""

    task: str
    event: Event


@message(says="no plan could be computed: {because}")
class PlanFailed(OtherEvent):
    """The scheduler of a task, or the planner (task: empty), has raised or does not answer. A plain plan
    follows.
    """

    task: str
    because: str


class ChosenShape(NamedTuple):
    """Another shape for a task, and its job in that shape."""

    job: Json
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedWorker:
    """A worker that shall leave its slot, with `others` that are slow too; with `node` all workers of it,
    whose link is slow. `stops`: a stage has no other worker, so the task begins again, with its state safe.
    """

    worker: Worker
    because: str
    node: str = ""
    others: tuple[Worker, ...] = ()
    stops: bool = False


@message(says="the planner allocates the slots")
class AssignmentChosen(OtherEvent):
    """The planner's answer to `ChooseAssignment`: how many workers each task shall have, and in which shape.

    `shapes`: changes of shape, now. `wishes`: changes of shape that are made later, if nothing else happens.
    `review_s`: when the planner is to be asked again, though nothing has happened. `costs`: of each stage of
    a task, where they differ. `spread`: tasks whose stages have lost unevenly, and of whom live workers shall
    change their stage.
    `moved`: tasks of which a slow worker, or all workers of a node with a slow link, shall go to free slots.
    """

    version: int
    workers: Mapping[str, int]
    because: str
    shapes: Mapping[str, ChosenShape] = field(default_factory=dict)
    wishes: Mapping[str, Shape] = field(default_factory=dict)
    costs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    spread: tuple[str, ...] = ()
    moved: Mapping[str, MovedWorker] = field(default_factory=dict)
    review_s: float | None = None
    weighed: tuple[WeighedOption, ...] = ()


@message(says="worker {worker} of {task} is slow")
class SlownessFound(TaskRequest):
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


@message(says="worker {worker} of {task} is no longer slow")
class SlownessEnded(TaskRequest):
    """This worker is as fast as it should be again."""

    task: str
    worker: Worker
    incarnation: int
    because: str


@message(says="the policy is set")
class PolicySet(OtherEvent):
    """How patient to be from now on, and whether a planner is asked. An event like any other: what was
    decided under another policy must be replayed under that one.
    """

    patience: Patience
    planned: bool


@message(says="{what} is set aside: {error}")
class EventSetAside(OtherEvent):
    """Handling this entry of the journal failed twice, and this takes the entry's place; or a report is too
    large to be one.
    """

    number: int  # 0: it never was an entry
    what: str  # the name of its class
    error: str
    node: str = ""  # if a node reported it: it is not to be sent again
    report: int = 0  # its number


@message(says="a waiting time is over")
class TimePassed(OtherEvent):
    """Something was put off until now."""


# ------------------------------------------------------------------ what is decided


@message(says="order {number} to node {node}")
class Dispatch(ClusterAction):
    """Send this order to a node."""

    node: str
    number: int
    order: Order
    because: str
    cause: int = 0  # the number of the event it follows from


@message(says="task {task}: reschedule the rest of the step")
class Think(ClusterAction):
    """Have the scheduler answer; its answer comes back as `PlanAnswered`."""

    task: str
    question: ComputePlan
    because: str
    slow: Mapping[Worker, float] = field(default_factory=dict)  # workers that take so many times as long
    cause: int = 0  # the number of the event it follows from


@message(says="ask the planner to allocate the slots")
class ChooseAssignment(ClusterAction):
    """Have the planner say how many workers each task gets; its answer comes back as `AssignmentChosen`."""

    version: int
    because: str
    cause: int = 0  # the number of the event it follows from


@message(says="record step {record.step} of {task}")
class RecordRow(ClusterAction):
    """Write down a step that is complete."""

    task: str
    record: RecordStep
    because: str
    cause: int = 0  # the number of the event it follows from


@message(says="incident {number} is closed")
class IncidentClosed(ClusterAction):
    """An incident is over."""

    number: int
    because: str
    cause: int = 0  # the number of the event it follows from


@message(says="task {task} is {state}")
class TaskEnded(ClusterAction):
    """A task has ended."""

    task: str
    state: str  # finished, failed, cancelled
    because: str
    cause: int = 0  # the number of the event it follows from


@message(says="task {task} changes its shape")
class TaskReshaped(ClusterAction):
    """The task's workers of its old shape are gone; it continues in this one from the same step."""

    task: str
    shape: Shape
    because: str
    cause: int = 0  # the number of the event it follows from


@message(says="node {node} is {state}")
class NodeChanged(ClusterAction):
    """A node is in another state."""

    node: str
    state: str
    because: str
    cause: int = 0  # the number of the event it follows from


# ------------------------------------------------------------------ a worker and its agent


@message(by=WORKER, says="worker {worker} of {task} calls")
class WorkerHello(WorkerCall):
    """A process calls its agent: which one it is."""

    task: str
    worker: Worker
    incarnation: int
    pid: int
    protocol: int = PROTOCOL
    heard: int = 0  # orders that it has had; more than 0: it calls again, and its agent may be another one


@message(by=AGENT, says="{number} reports are on record")
class ReportsHeard(LineWord):
    """So many reports of this process will not be lost with the agent: they need not be kept for the next."""

    number: int


@message(by=WORKER, says="{number} orders were received")
class OrdersHeard(LineWord):
    """So many orders have reached this process: its agent need not keep them."""

    number: int


@message(by=WORKER, says="an order was taken")
class OrderTaken(WorkerReport):
    """The worker has taken one more of the coordinator's orders. For the agent only: a worker that waits and
    yet takes no order is hung.
    """


@message(by=WORKER, says="shard {shard} of worker {worker} of {task} ended: {how}")
class ShardEnded(WorkerCall):
    """One of a worker's shards is gone, and so the worker is. For its agent, which says why it ended."""

    task: str
    worker: Worker
    incarnation: int
    shard: int
    how: str  # killed by SIGKILL


@message(by=AGENT, says="resume")
class ResumeWorker(WorkerOrder):
    """A new epoch, for one worker: all facts, or the news since the epoch that it knows."""

    task: str
    worker: Worker
    facts: EpochFacts | FactChanges
    own: OwnOrders
    states: StateDirections


@message(by=AGENT, says="leave")
class EndWorker(WorkerOrder):
    """Leave. `gently`: first finish the update, the checkpoint and the copies in hand."""

    gently: bool


@message(by=AGENT, says="plant faults")
class PlantFaults(WorkerOrder):
    """These faults and no others from now on, for demonstrations."""

    faults: tuple[str, ...]
