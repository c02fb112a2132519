"""What has happened to a task. Past tense, frozen, small; `core.task.recovery` takes these only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.protocol.ops import Microbatch, OpLists, Worker
from everstep.protocol.parcels import Scores
from everstep.protocol.table import (
    AGENT,
    ATTEMPT,
    COMMIT,
    EPOCH,
    INCARNATION,
    NEXT_ATTEMPT,
    SEARCH,
    WORKER,
    message,
)
from everstep.protocol.work import Ledger, Place, SuspectedStep


class Event:
    """Reported by a worker of the task or by an agent, or made by the coordinator itself."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsesKernels:
    """Which of the fast kernels that round in their own way a worker does not use, and on which device."""

    device: str = ""
    without: tuple[str, ...] = ()


@message(by=WORKER, fences=(INCARNATION,), says="worker {worker} of {task} has started")
class WorkerStarted(Event):
    """A process for this place is up, has built its layers and can be reached."""

    worker: Worker
    incarnation: int
    address: tuple[str, int] | None = None  # where its peers reach it
    sums: str = ""  # how it sums gradients, where versions differ in it
    kernels: UsesKernels = UsesKernels()  # where all of a stage must use the same


@message(by=WORKER, fences=(INCARNATION,), says="worker {worker} of {task} exited: {reason}")
class WorkerExited(Event):
    """A process is gone: killed, crashed, or it raised. `done_ops`, `step`: what its beacon last said."""

    worker: Worker
    incarnation: int
    reason: str
    done_ops: int = 0
    step: int = 0  # 0: not known
    planned: bool = False  # it was asked to go: no incident
    killed_at: float | None = None  # where that is known, as in a demo
    stuck: bool = False  # it outlives SIGKILL: it counts as gone, and its slot is lost


@message(says="workers of {task} are gone at once")
class WorkersExited(Event):
    """Those of a node, or of several: one change of membership."""

    exits: tuple[WorkerExited, ...]


class RaisedFor(StrEnum):
    """Why a worker raised, where Everstep itself did and knows. Else its text is read (`core.faults`)."""

    UNKNOWN = "unknown"
    INPUT = "input"  # a UserError, which says itself what is wrong
    DEVICE = "device"  # a DeviceError


@message(by=WORKER, says="worker {worker} of {task} raised {error}")
class WorkerRaised(Event):
    """A worker reports an exception of its own; its exit follows."""

    worker: Worker
    incarnation: int
    error: str
    where: str  # the op it was in, as text: "step 7 1F0.3"
    traceback: str = ""
    raised_for: RaisedFor = RaisedFor.UNKNOWN


@message(by=WORKER, fences=(EPOCH,), says="worker {worker} of {task} reports its ledger, epoch {epoch}")
class LedgerReported(Event):
    """What an interrupted worker has done."""

    worker: Worker
    epoch: int
    ledger: Ledger


@message(fences=(EPOCH,), says="task {task} has a new schedule, epoch {epoch}")
class PlanComputed(Event):
    """The scheduler's answer to `ComputePlan`."""

    epoch: int
    lists: Mapping[int, OpLists]  # per broken step
    steady: OpLists
    hosts: Mapping[int, Mapping[Place, int]]  # per broken step, where it is not the home
    steady_hosts: Mapping[Place, int] = field(default_factory=dict)


@message(by=WORKER, fences=(ATTEMPT,), says="stage {stage} of {task} has sealed step {step}")
class StepSealed(Event):
    """One stage's sum of one step is in the hands of every live peer."""

    step: int
    stage: int
    attempt: int  # at this step: a seal of a step that was taken back does not count
    microbatches: int
    executed: int
    losses: tuple[tuple[Microbatch, float], ...] = ()
    sum_of_squares: float = 0.0
    scores: Scores = ()  # of an evaluation that this step carried
    voted: bool = False  # peers have computed a share of it again, with the same bits


@message(
    by=WORKER,
    fences=(NEXT_ATTEMPT,),
    says="worker {worker} of {task} must undo the update of step {step}",
)
class UpdateInvalidated(Event):
    """A worker updated eagerly, and the norm of all stages says it should not have."""

    worker: Worker
    step: int
    norm: float
    attempt: int  # of the step after it, so that a late report is known as such


INPUTS = ("input", "input as sent", "gradient in", "gradient in as sent")  # what a vote is computed from


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRun:
    """One computation of what two workers differ in. `whole`: the hash of all of it; `hashes`: of those parts
    of it that are not the same in all computations, by name, and of its inputs.
    """

    worker: Worker
    incarnation: int
    whole: str
    hashes: Mapping[str, str] = field(default_factory=dict)


@message(
    by=WORKER,
    fences=(EPOCH,),
    says="worker {worker} of {task} computed other bits than worker {host} in step {step}",
)
class VoteDiffered(Event):
    """A worker has computed a peer's microbatch again, or compared its state with the peer's, and the bits
    differ. It waits for a verdict: the step cannot be sealed before.

    `runs`: in order, what host, checker and a third worker, if there is one, computed from the same inputs;
    the first run of the host is the one that its sum holds.
    """

    worker: Worker
    host: Worker
    epoch: int
    step: int
    microbatch: Microbatch | None  # None: states differ
    runs: tuple[VoteRun, ...]


@message(by=WORKER, fences=(EPOCH,), says="worker {worker} of {task} holds step {found.step}: {because}")
class StepSuspected(Event):
    """A worker has found a NaN, or a loss far above those of the steps before, and holds the sum back."""

    worker: Worker
    epoch: int
    found: SuspectedStep
    because: str


@message(says="task {task}: what was odd in step {step} came from data or model")
class ReplayJudged(Event):
    """A step had the same numbers when it was computed again, so the data or the model are the cause."""

    step: int


@message(says="task {task} continues: {because}")
class VotesSettled(Event):
    """No worker has to go because of a vote. `go_on`: whether there are to be further votes."""

    because: str
    go_on: bool


@message(says="task {task} goes back to a verified state: {because}")
class StateDoubted(Event):
    """Steps after the last one that was voted on may hold wrong numbers: they are done again."""

    because: str


@message(by=WORKER, fences=(INCARNATION,), says="worker {worker} of {task} has copied its state")
class StateCopied(Event):
    """A joining worker holds the whole state of a transfer."""

    worker: Worker
    incarnation: int
    transfer: int  # its number, as the order to copy has it
    state_step: int


@message(by=WORKER, fences=(EPOCH,), says="worker {worker} of {task} runs ops again, epoch {epoch}")
class WorkerResumed(Event):
    """A worker has run its first op of this epoch. `at` is on the clock that `handle` is given."""

    worker: Worker
    epoch: int
    at: float


@message(says="task {task}: {because}")
class ProfileChanged(Event):
    """Ops take other times than the schedule was made for."""

    because: str


@message(says="task {task} has slots for {places}")
class PlacesGranted(Event):
    """These places have a slot from now on, and no others. `clean`: earlier failures are forgotten."""

    places: frozenset[Worker]
    clean: frozenset[Worker] = frozenset()


@message(says="task {task} is stalled: {because}")
class TrainingStalled(Event):
    """All workers wait for each other and none is at fault: a message got lost."""

    because: str


@message(by=AGENT, fences=(COMMIT,), says="the checkpoint of step {step} of {task} is committed")
class CheckpointCommitted(Event):
    """The checkpoint of this step is complete on disk."""

    step: int


@message(
    by=AGENT,
    fences=(SEARCH,),
    says="the newest checkpoint in the folder of {task} is of step {step}",
)
class CheckpointsLooked(Event):
    """The folder was looked at before everyone loads a state: its newest checkpoint may be one that no report
    told of. None: it could not be looked at. `again`: the answer is lost; ask another node.
    """

    step: int | None
    search: int = 0
    again: bool = False


@message(says="the newest state of {task} in memory is of step {step}")
class StateKept(Event):
    """The newest step whose whole state is in the memory of nodes; None: there is none, or none any more."""

    step: int | None


@message(says="task {task} is not stopped: {because}")
class StopAbandoned(Event):
    """Its workers have stopped and hold a state that could not be made safe: they continue."""

    because: str


@message(says="copies of {task} in memory are lost: {because}")
class CopiesLost(Event):
    """The node that was to keep copies of the state is gone: they must go elsewhere."""

    because: str


@message(
    by=WORKER, fences=(INCARNATION,), says="worker {worker} of {task} cannot load the state of step {step}"
)
class RestoreFailed(Event):
    """A worker was to load a state, and could not read it: from memory, no holder of a part gave it (what it
    tried is in its `StateFetched`); or the checkpoint on disk is damaged.
    """

    worker: Worker
    incarnation: int
    step: int
    epoch: int = 0  # of the order to load it; 0: not known


@message(by=WORKER, fences=(INCARNATION,), says="worker {worker} of {task} holds its optimizer chunks")
class ChunksFilled(Event):
    """Sharded states: a worker has the state of every chunk that it is a holder of."""

    worker: Worker
    incarnation: int
    step: int


@message(says="the workers of {task} are to end after their step: {because}")
class StopRequested(Event):
    """This shape ends after the last step that a worker is in now. `final`: and the task with it. `saves`:
    its last state is also saved as a checkpoint, where the task has checkpoints.
    """

    because: str
    final: bool = False
    saves: bool = False
