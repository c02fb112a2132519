"""What has happened. Past tense, frozen, small; `core` machines take these and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.protocol.ops import Microbatch, Op, Worker
from everstep.protocol.worker_messages import Ledger, Place, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """A process for this place is up, has built its layers and can be reached."""

    worker: Worker
    incarnation: int
    address: tuple[str, int] | None = None  # where its peers reach it


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A process is gone: killed, crashed, or it raised and ended. `done_ops`: what its beacon last said."""

    worker: Worker
    incarnation: int
    reason: str
    done_ops: int = 0
    planned: bool = False  # it was asked to go: no incident
    killed_at: float | None = None  # where that is known, as in a demo
    stuck: bool = False  # it outlives SIGKILL: it counts as gone, and its slot is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRaised:
    """A worker reports an exception of its own; its exit follows."""

    worker: Worker
    incarnation: int
    error: str
    where: str  # the op it was in, as text: "step 7 1F0.3"
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReported:
    """What an interrupted worker has done."""

    worker: Worker
    epoch: int
    ledger: Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComputed:
    """The scheduler's answer to `ComputePlan`."""

    epoch: int
    lists: Mapping[int, Mapping[Worker, tuple[Op, ...]]]  # per broken step
    steady: Mapping[Worker, tuple[Op, ...]]
    hosts: Mapping[int, Mapping[Place, int]]  # per broken step, where it is not the home
    steady_hosts: Mapping[Place, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSealed:
    """One stage's sum of one step is in the hands of every live peer."""

    step: int
    stage: int
    attempt: int  # at this step: a seal of a step that was taken back does not count
    microbatches: int
    executed: int
    losses: tuple[tuple[Microbatch, float], ...] = ()
    sum_of_squares: float = 0.0
    scores: Scores = ()  # of an evaluation that this step carried


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateInvalidated:
    """A worker updated eagerly, and the norm of all stages says it should not have."""

    worker: Worker
    step: int
    norm: float
    attempt: int  # of the step after it, so that a late report is known as such


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopied:
    """A joining worker holds the whole state of a transfer."""

    worker: Worker
    incarnation: int
    transfer: int  # its number, as the order to copy has it
    state_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResumed:
    """A worker has run its first op of this epoch. `at` is on the clock that `handle` is given."""

    worker: Worker
    epoch: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChanged:
    """Ops take other times than the schedule was made for."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesGranted:
    """These places have a slot from now on, and no others. `clean`: earlier failures are forgotten."""

    places: frozenset[Worker]
    clean: frozenset[Worker] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStalled:
    """All workers wait for each other and none is at fault: a message got lost."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The checkpoint of this step is complete on disk."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKept:
    """The newest step whose whole state is in the memory of nodes; None: there is none, or none any more."""

    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesLost:
    """The node that was to keep copies of the state is gone: they must go elsewhere."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed:
    """A worker was to load a state from memory, and no holder of a part could be read. What it tried is in
    its `StateFetched`.
    """

    worker: Worker
    incarnation: int
    step: int
    epoch: int = 0  # of the order to load it; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksFilled:
    """Sharded states: a worker has the state of every chunk that it is a holder of."""

    worker: Worker
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """This shape ends after the last step that a worker is in now. `final`: and the task with it. `saves`:
    its last state is also saved as a checkpoint, where the task has checkpoints.
    """

    because: str
    final: bool = False
    saves: bool = False


Event = (
    WorkerStarted
    | WorkerExited
    | WorkerRaised
    | LedgerReported
    | PlanComputed
    | StepSealed
    | UpdateInvalidated
    | StateCopied
    | WorkerResumed
    | ProfileChanged
    | PlacesGranted
    | TrainingStalled
    | CheckpointCommitted
    | StateKept
    | CopiesLost
    | RestoreFailed
    | ChunksFilled
    | StopRequested
)
