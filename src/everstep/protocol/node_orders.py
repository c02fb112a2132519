"""What the coordinator orders an agent to do: tasks opened and closed, processes, messages for workers,
memory, checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from everstep.protocol.actions import CopyState, InterruptWorkers, ResumeStep, StopFeeding
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """Where a task's checkpoints are."""

    base: str  # a relative folder is seen from here
    folder: str  # or a URL
    keep: int  # older ones are removed
    start_over: bool = False  # continue without checkpoints that cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNeeds:
    """What an agent needs to know of a job; the job itself is for workers alone."""

    device: str = "cpu"
    threads: int = 1  # of each worker
    modules: tuple[str, ...] = ()  # to import before workers are forked
    log: str | None = None  # folder for what workers print
    checkpoints: CheckpointFolder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask:
    """Workers of this task will come to this node: what they need to know."""

    task: str
    job: Any  # handed to workers as it is
    secret: str
    script: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    shape: Shape | None = None  # None, also below: the coordinator or its journal is of the version before
    needs: TaskNeeds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProcess:
    """Start a process for this worker in this slot."""

    task: str
    worker: Worker
    incarnation: int
    slot: int
    more_slots: tuple[int, ...] = ()  # of its other shards


@dataclass(frozen=True, slots=True, kw_only=True)
class KillProcess:
    """End this process at once."""

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
    """Pass this on to a worker. `book`: where every worker of the task can be reached. `copy_to`: where
    it puts copies of its state; `copy_at_end`: whether it leaves one on its own node when its shape ends (a
    peer on its node may do so); `copy_away`: that one goes to `copy_to` too, because its node is to be
    emptied; `copies`: the state it restores, where that is in memory; `other_holders`: of every part of it
    the other nodes that have it, in the order in which they are asked if a read fails.
    """

    task: str
    worker: Worker
    words: InterruptWorkers | ResumeStep | CopyState | StopFeeding
    book: tuple[tuple[Worker, str, int], ...] = ()
    copy_to: MemoryAddress | None = None
    copy_at_end: bool = True
    copy_away: bool = False
    copies: tuple[tuple[MemoryAddress, Any], ...] = ()  # whose memory, part
    other_holders: tuple[tuple[tuple[MemoryAddress, Any], ...], ...] = ()


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
    """Look for the newest checkpoint of this task that can be used."""

    task: str
    job: Any  # for agents of the version before
    known: int = 0  # a step that was committed: the newest cannot be older
    search: int = 1  # to be said again in the answer: an answer to an earlier search does not count
    needs: TaskNeeds | None = None  # None: as in OpenTask


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """All parts of this step are written: make them a checkpoint."""

    task: str
    step: int
    parts: tuple[Any, ...]
    attempt: int = 0  # to be said again if it fails
    loss: float | None = None  # of this step


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardPartial:
    """Remove what was written of a checkpoint that will not be complete. `keep`: steps being written."""

    task: str
    step: int
    keep: tuple[int, ...] = ()


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
    | DiscardPartial
)
