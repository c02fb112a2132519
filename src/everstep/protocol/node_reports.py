"""What an agent reports to the coordinator: about the workers of its node, checkpoints, links and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep.protocol.events import Event
from everstep.protocol.ops import Worker


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
    loss: float | None = None  # of that step, where the checkpoint says it


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUnusable:
    """A task's checkpoints give no step to start from. `passing`: it may be otherwise later."""

    task: str
    because: str
    passing: bool
    search: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWritten:
    """One stage's part of a checkpoint is in the directory, or in the memory of a node.

    `part` is for the one who commits or loads it.
    """

    task: str
    step: int
    stage: int
    attempt: int  # at this step
    part: Any
    memory_of: str | None = None  # the node, for a copy in memory
    share: tuple[int, int] = (0, 1)  # which of how many parts of the stage this is


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A state was not saved: a worker could not write its part, or an agent could not commit the whole."""

    task: str
    step: int
    attempt: int  # at this step
    because: str
    memory_of: str | None = None  # the node whose memory was to keep it; None: on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRead:
    """A part of a state that a worker could not read from the memory of a node."""

    part: int  # its number among the parts of the state
    node: str
    because: str
    then: str = ""  # the node that it was read from instead; empty: no holder was left


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFetched:
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
    unanswered_s: float = 0.0  # it only waits, and for so long it has not taken an order
    shard: int | None = None  # of the worker: the others wait for this one


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
    carriers: Mapping[str, str] = field(default_factory=dict)  # by peer: the transport of tensors to it
    shard_waits: tuple[float, ...] = ()  # seconds inside collectives of each of its shards
    sent: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """By peer on another machine, since the last telling: bytes acknowledged, and for how many seconds some
    were on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkFound:
    """Messages between these two take longer than elsewhere, or than before: their rings say so, or, between
    machines, the rate of what was acknowledged.
    """

    task: str
    worker: Worker
    peer: Worker
    because: str
    evidence: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkEnded:
    """Messages between these two are as fast as usual again."""

    task: str
    worker: Worker
    peer: Worker
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpoke:
    """A line of the kernel's log that names a device's fault. `slots`: those of the device, if known."""

    text: str
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveNoticed:
    """The node has a notice that it will be taken away, as spot instances get."""

    leaves_in_s: float
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFreed:
    """A process that outlived SIGKILL has ended after all: its slot can be used again."""

    slot: int


NodeReport = (
    TaskEvent
    | SlowLinkFound
    | SlowLinkEnded
    | CheckpointFound
    | CheckpointUnusable
    | PartWritten
    | SaveFailed
    | StateFetched
    | OpOverdue
    | WorkerMoved
    | LinkMended
    | TimesReported
    | KernelSpoke
    | SlotFreed
    | LeaveNoticed
)
