"""What happens on a node, as its agent's machine hears it, and what the machine asks its shell to do."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.faults.detector import Glance
from everstep.protocol.messages import (
    AnswerPair,
    CheckNode,
    CommitCheckpoint,
    DiscardPartial,
    DropCopies,
    FindCheckpoint,
    MeasurePair,
    NodeReport,
    OpenMemory,
    OpenTask,
    Order,
    ProbeLinks,
    RankOrder,
    Sender,
    ShardEnded,
    StartProcess,
    TimePassed,
    WorkerOrder,
    WorkerReport,
)

DiskOrder = FindCheckpoint | CommitCheckpoint | DiscardPartial


@dataclass(frozen=True, slots=True)
class CommitWhole:
    """Of the agent to itself: commit what this run has written and no coordinator has ordered to commit.
    `sealed`: the newest step that a worker here has sealed.
    """

    task: str
    run: str
    sealed: int


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class OrderGiven:
    """An order of the coordinator, to be carried out now."""

    order: Order


@dataclass(frozen=True, slots=True)
class ProcessSpawned:
    """The fork server has made the process. Number and start time together are of this one alone."""

    sender: Sender
    pid: int = 0
    born: int = 0  # in clock ticks since the machine has started


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """There is no such process. `server_died`: the fork server is gone, and another may succeed."""

    sender: Sender
    because: str
    server_died: bool = False


@dataclass(frozen=True, slots=True)
class ProcessGreeted:
    """The process has called: it can be spoken to."""

    sender: Sender


@dataclass(frozen=True, slots=True)
class ProcessSpoke:
    sender: Sender
    report: WorkerReport | ShardEnded


@dataclass(frozen=True, slots=True)
class ProcessMisspoke:
    """It said what is not a report: nothing it says can be relied on."""

    sender: Sender
    because: str


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The first sign of its death, with what its beacon showed last. The kernel may still be clearing up."""

    sender: Sender
    reason: str
    done_ops: int = 0
    step: int = 0  # 0: not known
    killed_at: float | None = None  # where that is known, as in a demo


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """Nothing is left of it: its memory and its device are free."""

    sender: Sender


@dataclass(frozen=True, slots=True)
class PartialsLooked:
    """`CommitWhole` is done; these steps of the task are still not committed."""

    task: str
    left: tuple[int, ...] = ()
    committed: bool = False  # something was


@dataclass(frozen=True, slots=True)
class AgentEnds:
    """What is whole on disk and not committed has to be now: nobody here will look later."""


@dataclass(frozen=True, slots=True)
class Glanced:
    """One look at a process's beacon. `stopped`, `active_s`: what the kernel says, where it was asked.
    `shard`: the one of the worker's processes that this is about, where the others wait for it.
    """

    sender: Sender
    glance: Glance
    stopped: bool = False
    active_s: float = 0.0
    shard: int | None = None


ProcessEvent = (
    OrderGiven
    | ProcessSpawned
    | SpawnFailed
    | ProcessGreeted
    | ProcessSpoke
    | ProcessMisspoke
    | ProcessDied
    | ProcessGone
    | PartialsLooked
    | AgentEnds
    | Glanced
    | TimePassed
)

# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class Spawn:
    """Have the task's fork server make this process; `ProcessSpawned` or `SpawnFailed` follows.

    `fresh_server`: the one there is has died, so start another first.
    """

    order: StartProcess
    fresh_server: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL."""

    sender: Sender


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send this to the process. If it has not called yet, or is dying, nothing happens."""

    sender: Sender
    order: WorkerOrder | RankOrder


@dataclass(frozen=True, slots=True)
class SendToCoordinator:
    """To the coordinator. `sender` None: the agent speaks for itself."""

    report: NodeReport
    sender: Sender | None


@dataclass(frozen=True, slots=True)
class UseMemory:
    """Let a task's workers keep copies of their states in this node's memory, or drop old ones."""

    order: OpenTask | OpenMemory | DropCopies


@dataclass(frozen=True, slots=True)
class RunChecks:
    """Is this node fit to train? In a process of its own; the answer goes to the coordinator."""

    order: CheckNode


@dataclass(frozen=True, slots=True)
class CheckPair:
    """Measure the network to another node, beside the loop, or let it be measured."""

    order: MeasurePair | AnswerPair


@dataclass(frozen=True, slots=True)
class WorkOnDisk:
    """May take long, so beside the loop; what it answers is reported."""

    order: DiskOrder | CommitWhole


@dataclass(frozen=True, slots=True)
class ProbeFromHere:
    """Try to connect, beside the loop; who was reached is reported."""

    order: ProbeLinks


AgentAction = (
    Spawn | Kill | PassOn | SendToCoordinator | UseMemory | RunChecks | CheckPair | WorkOnDisk | ProbeFromHere
)
