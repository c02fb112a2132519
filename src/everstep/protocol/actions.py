"""What a task's recovery decides. Imperative, frozen; each has its reason, the sentence that logs and screens
show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Scores
from everstep.protocol.table import message
from everstep.protocol.work import EpochFacts, OwnOrders, Place, SuspectedStep


class Action:
    """A decision of a task's recovery."""

    __slots__ = ()
    because: str


class Notice:
    """One that workers are told: it travels in a `NotifyWorker`."""

    __slots__ = ()


@message(says="start worker {worker}")
class StartWorker(Action):
    """Start a process for this place."""

    worker: Worker
    incarnation: int
    because: str


@message(says="pause and report the ledger, epoch {epoch}")
class InterruptWorkers(Action, Notice):
    """Finish the op in hand, report a ledger, wait."""

    workers: tuple[Worker, ...]
    epoch: int
    because: str


@dataclass(frozen=True, slots=True)
class BrokenStep:
    """A step that a worker is in: which places take no part, and what is done, as (host, kinds) per place."""

    dead: frozenset[Worker]
    done: Mapping[Place, tuple[int, str]]


@message(says="reschedule the rest of the step, epoch {epoch}")
class ComputePlan(Action):
    """Order the ops that are owed in each broken step, and find the schedule that repeats after them."""

    epoch: int
    broken: Mapping[int, BrokenStep]
    dead: frozenset[Worker]  # from the first whole step on
    because: str


@message(says="resume")
class ResumeWorkers(Action):
    """A new epoch: each of these workers continues with its own ops. Where they are reached is not known
    here: the book is empty.
    """

    facts: EpochFacts
    orders: Mapping[Worker, OwnOrders]
    because: str


@message(says="worker {source} sends its state to worker {joiner}")
class CopyState(Action, Notice):
    """`source` sends its state to `joiner`, and then every further step."""

    source: Worker
    joiner: Worker
    incarnation: int  # of the joiner
    transfer: int  # its number
    because: str


@message(says="worker {source} stops feeding worker {joiner}")
class StopFeeding(Action, Notice):
    """`source` sends no further steps to `joiner`."""

    source: Worker
    joiner: Worker
    because: str


@message(says="record step {step}")
class RecordStep(Action):
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
    suspect: SuspectedStep | None = None  # what it looked like the first time, if it was computed again


@message(says="close incident {number}")
class CloseIncident(Action):
    """This incident is over."""

    number: int
    because: str


@message(says="the task is finished")
class FinishTask(Action):
    """All steps are complete."""

    because: str


@message(says="the workers of this shape end after step {step}")
class FinishShape(Action):
    """The last step of this shape is sealed: its workers leave their states behind and go."""

    step: int
    because: str


@message(says="the task has failed")
class FailTask(Action):
    """The task cannot continue."""

    because: str


@message(says="look for a newer checkpoint")
class LookForCheckpoint(Action):
    """Before everyone loads a state: is there a newer one on disk than was reported?"""

    because: str


# ------------------------------------------------------------------ of script tasks


@message(says="stop worker {worker}")
class StopWorker(Action):
    """End this worker's process at once."""

    worker: Worker
    because: str


@message(says="life {life} has failed: {what}")
class LifeFailed(Action):
    """The ranks of a script task end because of this. What it means for the node is judged by the cluster."""

    life: int
    worker: Worker | None  # None: no rank is named
    rank: int | None
    what: str
    source: str
    text: str  # from which the fault is judged
    ago_s: float
    evidence: tuple[str, ...]
    remedy: str
    is_over: bool  # there is no other life
    because: str
    finding: str = ""  # what the stacks of a hang show; empty: the text says it all
    traceback: str = ""
    held_s: float | None = None  # the other ranks waited so long, and continue; None: the life ends


@message(says="{what}: {because}")
class RanksSlow(Action):
    """Ranks of one node are slower than the others; or no longer."""

    worker: Worker
    ranks: tuple[int, ...]
    what: str
    because: str
    is_over: bool = False
    factor: float = 1.0  # a step takes so many times as long because the others wait for them
