"""What a worker and its agent say to each other, over a Unix socket of their machine.

    worker ──► WorkerHello, then WorkerReports      the agent numbers these and passes them on
    agent  ──► WorkerOrders                         most are the coordinator's, passed on as they are

The words are the coordinator's own: a report is said once, by the worker it is about, and nothing on its way
has to know its fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.protocol.cluster_messages import (
    LinkMended,
    NotifyWorker,
    PartWritten,
    SaveFailed,
    StateFetched,
    TaskEvent,
    TimesReported,
)
from everstep.protocol.ops import Worker

PROTOCOL = 3  # raised when a message changes in a way that an older program would misread
SAVING = "saving"  # what a beacon shows of a worker that hands over or writes a state


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHello:
    """A process calls its agent: which one it is."""

    task: str
    worker: Worker
    incarnation: int
    pid: int
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class OrderTaken:
    """The worker has taken one more of the coordinator's orders. For the agent only: a worker that waits and
    yet takes no order is hung.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEnded:
    """One of a worker's shards is gone, and so the worker is. For its agent, which says why it ended."""

    task: str
    worker: Worker
    incarnation: int
    shard: int
    how: str  # killed by SIGKILL


WorkerReport = OrderTaken | TaskEvent | PartWritten | SaveFailed | StateFetched | TimesReported | LinkMended
FromWorker = WorkerHello | WorkerReport | ShardEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWorker:
    """Leave. `gently`: first finish the update, the checkpoint and the copies in hand."""

    gently: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantFaults:
    """These faults and no others from now on, for demonstrations."""

    faults: tuple[str, ...]


WorkerOrder = NotifyWorker | EndWorker | PlantFaults
