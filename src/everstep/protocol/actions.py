"""What is to be done. Imperative, frozen; each has its reason, the sentence that logs and screens show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.worker_messages import Place, Resume, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a process for this place."""

    worker: Worker
    incarnation: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptWorkers:
    """Finish the op in hand, report a ledger, wait."""

    workers: tuple[Worker, ...]
    epoch: int
    because: str


@dataclass(frozen=True, slots=True)
class BrokenStep:
    """A step that a worker is in: which places take no part, and what is done, as (host, kinds) per place."""

    dead: frozenset[Worker]
    done: Mapping[Place, tuple[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan:
    """Order the ops that are owed in each broken step, and find the schedule that repeats after them."""

    epoch: int
    broken: Mapping[int, BrokenStep]
    dead: frozenset[Worker]  # from the first whole step on
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeStep:
    """Continue with these ops."""

    worker: Worker
    order: Resume
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """`source` sends its state to `joiner`, and then every further step."""

    source: Worker
    joiner: Worker
    incarnation: int  # of the joiner
    transfer: int  # its number
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFeeding:
    """`source` sends no further steps to `joiner`."""

    source: Worker
    joiner: Worker
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStep:
    """All stages have sealed this step: it is part of the run for good."""

    step: int
    epoch: int
    attempt: int
    losses: tuple[tuple[Microbatch, float], ...]
    norm: float
    microbatches_committed: int
    replayed_elsewhere: int
    because: str
    scores: Scores = ()  # of an evaluation of the step before
    trains: bool = True  # False: the closing step, which only evaluates


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseIncident:
    incident: Incident
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishTask:
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishShape:
    """The last step of this shape is sealed: its workers leave their states behind and go."""

    step: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailTask:
    because: str


Action = (
    StartWorker
    | InterruptWorkers
    | ComputePlan
    | ResumeStep
    | CopyState
    | StopFeeding
    | RecordStep
    | CloseIncident
    | FinishTask
    | FinishShape
    | FailTask
)
