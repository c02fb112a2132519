"""Parcels: what workers send each other.

A parcel is named by what it is, never by its place in a stream: two parcels of one name hold the same thing,
so a receiver drops the second, any live holder can send it again, and no sender has to know what a dead one
had sent.

`attempt` counts how often a step was taken back (a restored checkpoint, an undone update before it); a parcel
of an earlier attempt was computed from weights that no longer count. `round` is the epoch in which a stage's
reduce group was formed: parts of different rounds are never added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from everstep.protocol.ops import Microbatch


class ParcelKind(StrEnum):
    ACTIVATION = "A"  # into part `stage` of the model, of `microbatch`
    GRADIENT = "G"  # into part `stage` of the model, of `microbatch`
    PART = "P"  # `sender`'s gradients for the chunk that `owner` sums, or gathers (`routes`)
    # The chunk that `sender` has summed; if `owner` is the sender, with those that it passes on to its node;
    # sharded: what `owner` holds of it.
    SUM = "S"
    HELD = "H"  # `sender` holds the whole sum
    TIED = "T"  # the sum of the tied tensor at `stage`
    NEWS = "N"  # `stage` has sealed the step; its gradient's sum of squares
    COPY = "C"  # the whole sum, for a peer whose owner of a chunk died
    FEED = "J"  # the whole sum and its scale, for a worker that is joining; sharded: the working weights
    WEIGHTS = "W"  # sharded: the working weights of chunk `owner` after the step
    FILL = "K"  # sharded: the optimizer state of chunk `owner` after the step, for a new holder
    HASHES = "D"  # of what `sender` has computed in a step that is voted on
    REPLAY = "Q"  # `sender` asks `owner` to compute `microbatch` again, from these inputs
    ANSWER = "V"  # the hashes of what `sender` has computed for a REPLAY of `owner`


class Parcel(NamedTuple):
    """The name of a message between two workers. Its payload (a tensor) and value (small facts) travel
    with it.
    """

    what: ParcelKind
    attempt: int
    step: int
    stage: int
    microbatch: Microbatch | None = None
    round: int = 0
    sender: int = -1
    owner: int = -1

    @property
    def maker(self) -> int:
        """Of a boundary tensor, the stage it comes from: of an activation the one before, of a gradient
        the one behind.
        """
        return self.stage - 1 if self.what is ParcelKind.ACTIVATION else self.stage + 1

    def __str__(self) -> str:
        detail = self.microbatch or (
            f"{self.sender}>{self.owner}" if self.what is ParcelKind.PART else self.sender
        )
        return f"{self.what}[{self.step} stage {self.stage} {detail}]"


Scores = tuple[tuple[Microbatch, tuple[float, ...]], ...]  # what an evaluation found, by microbatch


class Part(NamedTuple):
    """The small facts of a PART: what its sender added up, so that a sum is checked before it is used."""

    microbatches: tuple[Microbatch, ...]
    losses: tuple[tuple[Microbatch, float], ...]  # sums; in a whole step's part, as `Reduction` scales them
    executed: int  # ops this worker ran for the step, to show that nothing was run twice
    weights: tuple[float, ...]  # of the microbatches, in their order
    scores: Scores = ()


class StepHashes(NamedTuple):
    """Of HASHES: what its sender has computed in a step, and with what. Names are those of the engine."""

    incarnation: int  # of the sender
    computes: str  # what its bits depend on besides the job
    state: Mapping[str, str]  # weights and optimizer state before the step
    made: Mapping[str, Mapping[str, str]]  # by microbatch


class RunHashes(NamedTuple):
    """Of ANSWER: what its sender has found, run by run."""

    incarnation: int  # of the sender
    runs: tuple[Mapping[str, str], ...]


class StateTransfer(NamedTuple):
    """The name of a state on its way from a member to a joiner: every frame of it carries this.

    `number` is the coordinator's and rises, so a joiner knows which of two transfers counts. A transfer that
    is sent again after a broken connection keeps its number and may have a later step.
    """

    number: int
    state_step: int
    source: int  # replica
    incarnation: int  # of the joiner: a frame for an earlier process is of no use


# In a recorder's row, one number says which parcel it is about; so sends and gets of one parcel are found.
_HOME_AT, _WHAT_AT, STEP_AT = 12, 24, 32  # bits; below: the microbatch. `what` has eight
_PLACE = (1 << 12) - 1  # a replica, or a microbatch of one


def recorded_as(step: int, what: int, home: int, number: int) -> int:
    return step << STEP_AT | what << _WHAT_AT | (home & _PLACE) << _HOME_AT | number & _PLACE


def parts_of(recorded: int) -> tuple[int, int, int, int]:
    """The other way round."""
    what = recorded >> _WHAT_AT & 0xFF
    return recorded >> STEP_AT, what, recorded >> _HOME_AT & _PLACE, recorded & _PLACE
