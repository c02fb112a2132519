"""One step at one worker, from its first op to the moment no peer can need it again.

Three lifecycles, each with its table:

    sum       computing ──► contributed ──► own chunk summed ──► held (──► combined, at a tied stage)
                ──► released, once sealed and final: the next step's sum takes its place
    seal      open ──► sealed (every live peer holds the sum) ──► announced (to the other stages) ──► complete
    update    pending ──► final                 the norm of all stages was known
              pending ──► eager ──► valid ──► final       it was not, and turned out not to matter
                            └─────► invalid ──► waiting ──► final      it did: undone, and made again

A step is closed once it is sealed, its update is final, and the next one is updated too. So a worker has at
most two steps open: the one it is in, and the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.protocol.lifecycle import move
from everstep.protocol.ops import Kind, Microbatch, Op
from everstep.protocol.parcels import Parcel, Part
from everstep.protocol.work import Place


class SumState(StrEnum):
    COMPUTING = "computing"  # it runs the ops of its list
    CONTRIBUTED = "contributed"  # its part went to the owner of each chunk
    CHUNK_SUMMED = "chunk summed"  # the chunk it owns went to every peer
    HELD = "held"  # it has the whole sum
    COMBINED = "combined"  # with the other half of the tied tensor
    RELEASED = "released"  # no peer can lack it, and no update needs it


class SealState(StrEnum):
    OPEN = "open"  # a peer may lack the sum
    SEALED = "sealed"  # every live peer of the stage holds the sum
    ANNOUNCED = "announced"  # the other stages and the coordinator know
    COMPLETE = "complete"  # every stage has sealed the step, and the norm of all stages is known


class UpdateState(StrEnum):
    PENDING = "pending"  # not updated yet
    EAGER = "eager"  # the norm is not known: the layers compute with it, the optimizer's state is older
    VALID = "valid"  # it holds, and is to be committed
    INVALID = "invalid"  # reported, and not undone yet
    WAITING = "waiting"  # undone or forbidden: it waits for the norm
    SHARED = "shared"  # sharded: its own chunks are updated, others' weights are not all here
    FINAL = "final"  # updated for good


SUM: Mapping[SumState, frozenset[SumState]] = {  # HELD from anywhere: a peer gives its whole sum
    SumState.COMPUTING: frozenset({SumState.CONTRIBUTED, SumState.HELD}),
    SumState.CONTRIBUTED: frozenset({SumState.CHUNK_SUMMED, SumState.HELD, SumState.COMPUTING}),
    SumState.CHUNK_SUMMED: frozenset({SumState.HELD, SumState.COMPUTING}),
    SumState.HELD: frozenset({SumState.COMBINED, SumState.RELEASED, SumState.COMPUTING}),  # sharded: no whole
    SumState.COMBINED: frozenset({SumState.RELEASED}),
    SumState.RELEASED: frozenset(),
}
SEAL: Mapping[SealState, frozenset[SealState]] = {
    SealState.OPEN: frozenset({SealState.SEALED}),
    SealState.SEALED: frozenset({SealState.ANNOUNCED}),
    SealState.ANNOUNCED: frozenset({SealState.COMPLETE}),
    SealState.COMPLETE: frozenset(),
}
UPDATE: Mapping[UpdateState, frozenset[UpdateState]] = {
    UpdateState.PENDING: frozenset(
        {UpdateState.EAGER, UpdateState.FINAL, UpdateState.WAITING, UpdateState.SHARED}
    ),
    UpdateState.EAGER: frozenset({UpdateState.VALID, UpdateState.INVALID, UpdateState.WAITING}),
    UpdateState.VALID: frozenset({UpdateState.FINAL}),
    UpdateState.INVALID: frozenset({UpdateState.WAITING}),
    UpdateState.WAITING: frozenset({UpdateState.FINAL}),
    UpdateState.SHARED: frozenset({UpdateState.FINAL}),
    UpdateState.FINAL: frozenset(),
}
_UPDATED = frozenset({UpdateState.EAGER, UpdateState.VALID, UpdateState.INVALID, UpdateState.FINAL})
_HOLDING = frozenset({SumState.HELD, SumState.COMBINED, SumState.RELEASED})


@dataclass(slots=True)
class StepState:
    """What this worker knows of one open step."""

    step: int
    round: int
    todo: list[Op] = field(default_factory=list)  # reversed: the next op is the last element
    done: dict[Op, None] = field(default_factory=dict)
    ghosts: dict[Op, None] = field(default_factory=dict)  # run again for their outputs only
    dropped: set[Place] = field(default_factory=set)  # ghosts whose stashes are gone
    executed: int = 0
    sum: SumState = SumState.COMPUTING
    seal: SealState = SealState.OPEN
    update: UpdateState = UpdateState.PENDING
    own_part: Part | None = None  # once contributed
    own_chunk_squares: tuple[float, ...] | None = None  # once the chunks it owns are summed
    reduced_squares: float | None = None  # of the sum as it was reduced
    sum_of_squares: float | None = None  # of the whole stage; for a tied stage after combining
    gathered: dict[int, Part] = field(default_factory=dict)  # owner on another node -> what went there
    passed_on: tuple[float, ...] | None = None  # squares of the chunks that it gathers for: its node has them
    # What it waits for, by epoch, round and purpose, less what has come.
    awaited: dict[tuple[int, int, str], list[Parcel]] = field(default_factory=dict)
    everyone: Part | None = None  # the parts of all peers, added up and checked
    tied_attempt: int = -1  # in which it was combined; in another attempt no peer lacks it
    scale: float | None = None  # what the update multiplied the gradient with; None: it was skipped
    fed: set[int] = field(default_factory=set)  # the joiners that have this step
    saved_among: tuple[int, ...] = ()  # the peers that shared the writing of its checkpoint
    saved_chunks: set[int] = field(default_factory=set)  # in a checkpoint, by this worker
    stored_chunks: set[int] = field(default_factory=set)  # in memory that outlives this worker
    is_stored: bool = False  # in memory that outlives this worker
    is_verified: bool = False  # in votes of this epoch this worker found nothing; once sealed, no peer has

    # -------------------------------------------------------------- lifecycles

    def _move_sum(self, new: SumState) -> None:
        self.sum = move(SUM, self.sum, new, f"the sum of step {self.step}")

    def _move_seal(self, new: SealState) -> None:
        self.seal = move(SEAL, self.seal, new, f"the seal of step {self.step}")

    def _move_update(self, new: UpdateState) -> None:
        self.update = move(UPDATE, self.update, new, f"the update of step {self.step}")

    @property
    def holds_sum(self) -> bool:
        """Also when it is released: it has been held."""
        return self.sum in _HOLDING

    @property
    def is_sealed(self) -> bool:
        return self.seal is not SealState.OPEN

    @property
    def is_updated(self) -> bool:
        return self.update in _UPDATED

    @property
    def is_provisional(self) -> bool:
        """Updated eagerly, and it is not known to hold."""
        return self.update is UpdateState.EAGER or self.update is UpdateState.INVALID

    @property
    def is_final(self) -> bool:
        return self.update is UpdateState.FINAL

    def contributed(self, part: Part) -> None:
        self._move_sum(SumState.CONTRIBUTED)
        self.own_part = part

    def chunk_summed(self, squares: tuple[float, ...]) -> None:
        self._move_sum(SumState.CHUNK_SUMMED)
        self.own_chunk_squares = squares

    def held(self, stage: int, squares: float) -> None:
        """The whole sum is here; `squares` is its sum of squares."""
        self._move_sum(SumState.HELD)
        self.reduced_squares = squares
        self.done[Op(Kind.R, None, stage)] = None

    def combined(self, squares: float, attempt: int) -> None:
        self._move_sum(SumState.COMBINED)
        self.tied_attempt = attempt
        self.sum_of_squares = squares

    def released(self) -> None:
        self._move_sum(SumState.RELEASED)

    def restart_reduce(self, round: int) -> None:
        """The reduce group has changed. Parts of the old round do not count; a sum that is held does."""
        self.round = round
        self.gathered.clear()
        self.passed_on = None
        if self.sum in (SumState.CONTRIBUTED, SumState.CHUNK_SUMMED):
            self._move_sum(SumState.COMPUTING)
        if not self.holds_sum:
            self.own_part = self.own_chunk_squares = self.everyone = None

    def let_go_of_sum(self, stage: int) -> None:
        """Sharded: a peer lacks its chunks, and a holder of theirs is dead. No worker can have updated."""
        assert not self.is_sealed, f"step {self.step} is reduced again after its seal"
        self._move_sum(SumState.COMPUTING)
        self.reduced_squares = self.sum_of_squares = None
        del self.done[Op(Kind.R, None, stage)]

    def sealed(self) -> None:
        self._move_seal(SealState.SEALED)

    def announced(self) -> None:
        self._move_seal(SealState.ANNOUNCED)

    def completed(self) -> None:
        self._move_seal(SealState.COMPLETE)

    def updated(self, scale: float | None, *, eagerly: bool) -> None:
        self._move_update(UpdateState.EAGER if eagerly else UpdateState.FINAL)
        self.scale = scale

    def shared(self, scale: float | None) -> None:
        """The chunks of this worker are updated."""
        self._move_update(UpdateState.SHARED)
        self.scale = scale

    def validated(self) -> None:
        self._move_update(UpdateState.VALID)

    def committed(self) -> None:
        self._move_update(UpdateState.FINAL)

    def invalidated(self) -> None:
        self._move_update(UpdateState.INVALID)

    def must_wait(self) -> None:
        """Whether it was updated eagerly or not: its update waits for the norm of all stages."""
        if self.update is not UpdateState.WAITING:
            self._move_update(UpdateState.WAITING)

    # -------------------------------------------------------------- ops

    def record(self, op: Op, *, ghost: bool) -> None:
        """An op has run."""
        if ghost:
            self.ghosts[op] = None
            return
        self.done[op] = None
        self.executed += 1
        if self.ghosts:
            self._adopt_ghosts(op)

    def _adopt_ghosts(self, run: Op) -> None:
        """The sum that held this microbatch is lost, so what was run for its outputs only counts in full."""
        for op in [ghost for ghost in self.ghosts if ghost[1:] == run[1:]]:
            del self.ghosts[op]
            self.done[op] = None
            self.executed += 1

    def ghost_stashes(self, *kinds: Kind) -> tuple[Place, ...]:
        """The ghosts that have run one of these ops and whose stashes are still here; from now on they go."""
        ran = {
            (op.microbatch, op.stage) for op in self.ghosts if op.kind in kinds and op.microbatch is not None
        }
        found = tuple(sorted(ran - self.dropped))
        self.dropped.update(found)
        return found

    def has_run(self, kind: Kind, microbatch: Microbatch | None, stage: int) -> bool:
        op = Op(kind, microbatch, stage)
        return op in self.done or op in self.ghosts

    def accumulated(self) -> tuple[Microbatch, ...]:
        """The microbatches whose weight gradients are in this worker's gradients."""
        return tuple(op.microbatch for op in self.done if op.kind is Kind.W and op.microbatch is not None)
