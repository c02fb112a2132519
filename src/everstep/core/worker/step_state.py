"""One step at one worker, from its first op to the moment nobody can need it again.

    ops ──► contribute ──► own chunk summed ──► sum in hand ──► updated ──► valid ─┐
                                                     │                            ├──► closed
                                                     └──► sealed (all peers hold) ─┘

A worker has at most two steps open: the one it is in, and the one before, which is updated but may not be
sealed (a peer may still need its sum) or not yet valid (an eager update waits for the norm of all stages).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.words.ops import Kind, Microbatch, Op
from everstep.core.words.worker_messages import Part


@dataclass(slots=True)
class StepState:
    """What this worker knows of one open step."""

    step: int
    round: int
    todo: list[Op] = field(default_factory=list)  # reversed: the next op is the last element
    done: dict[Op, None] = field(default_factory=dict)
    ghosts: dict[Op, None] = field(default_factory=dict)  # run again for their outputs only
    dropped: set[Microbatch] = field(default_factory=set)  # ghosts whose stashes are gone
    executed: int = 0
    own_part: Part | None = None  # set when this worker has contributed
    own_chunk_squares: float | None = None  # set when the chunk it owns is summed
    holds_sum: bool = False
    reduced_squares: float | None = None  # of the sum as it was reduced
    sum_of_squares: float | None = None  # of the whole stage; for a tied stage after combining
    everyone: Part | None = None  # the parts of all peers, added up and checked
    combined: bool = False
    sealed: bool = False
    news_sent: bool = False
    updated: bool = False
    eager: bool = False
    valid: bool = False
    scale: float | None = None  # what the update multiplied the gradient with; None: it was skipped
    fed: set[int] = field(default_factory=set)
    saved_among: tuple[int, ...] = ()  # the peers that shared the writing of its checkpoint
    shelved: bool = False
    must_wait: bool = False  # a failed validation forbids another eager update of this step

    def record(self, op: Op, *, ghost: bool) -> None:
        """An op has run. A fused backward counts as its two halves."""
        if ghost:
            self.ghosts[op] = None
            return
        halves = (Kind.I, Kind.W) if op.kind is Kind.B else (op.kind,)
        for kind in halves:
            self.done[Op(kind, op.microbatch, op.stage)] = None
        self.executed += len(halves)
        if self.ghosts:
            self._adopt_ghosts(op.microbatch)

    def _adopt_ghosts(self, microbatch: Microbatch | None) -> None:
        """The sum that held this microbatch is lost, so what was run for its outputs only counts in full."""
        for op in [ghost for ghost in self.ghosts if ghost.microbatch == microbatch]:
            del self.ghosts[op]
            self.done[op] = None
            self.executed += 1

    def ghost_stashes(self, *kinds: Kind) -> tuple[Microbatch, ...]:
        """The ghosts that have run one of these ops and whose stashes are still here; from now on they go."""
        ran = {op.microbatch for op in self.ghosts if op.kind in kinds and op.microbatch is not None}
        found = tuple(sorted(ran - self.dropped))
        self.dropped.update(found)
        return found

    def has_run(self, kind: Kind, microbatch: Microbatch | None, stage: int) -> bool:
        op = Op(kind, microbatch, stage)
        return op in self.done or op in self.ghosts

    def accumulated(self) -> tuple[Microbatch, ...]:
        """The microbatches whose weight gradients are in this worker's gradients."""
        return tuple(op.microbatch for op in self.done if op.kind is Kind.W and op.microbatch is not None)

    def restart_reduce(self, round: int) -> None:
        """The reduce group has changed. What was received of the old round is void; what is held stays
        held.
        """
        self.round = round
        if not self.holds_sum:
            self.own_part = None
            self.own_chunk_squares = None
            self.everyone = None
