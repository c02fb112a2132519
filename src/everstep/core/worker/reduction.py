"""The reduce of one step at one stage, as parcels: every peer owns a chunk of the gradient.

    contribute    send each owner this worker's part of its chunk
    gather        of several replicas on one node, one sends the node's part (`protocol.routes`)
    sum           the owner adds the parts, in the order of replicas, and sends the sum to all
    assemble      with every owner's chunk in hand, the worker holds the sum, and says so
    seal          all live peers hold it: no peer can ask for the sum again

A worker that holds the sum needs its own gradients no more: each owner of a chunk has had its part, and to a
peer that lacks the sum it can give the whole of it. So there is one buffer for gradients, not two.

As many bytes as a ring moves, in two hops whatever the number of peers, four by nodes, and without forming
a group: when a peer dies, only what it owned, gathered or had not sent is missing. Any holder can give the
whole sum to a peer that lacks it. Where no live peer holds it, the parts do not count and the reduce starts
over in a new round.

A microbatch has a weight: 1, or what its loss says (how many tokens it counts). Its gradients are those of a
sum; the owner divides the sum of all by the sum of all weights. The weights travel in the parts, beside the
names of the microbatches they are of, so each is counted exactly once, and their sum is correctly rounded, so
it does not depend on which worker ran which microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from everstep.core.worker.chunks import Chunks
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState, SumState
from everstep.errors import InternalError
from everstep.protocol.ops import Microbatch, Worker
from everstep.protocol.parcels import Parcel, ParcelKind, Part, Scores
from everstep.protocol.routes import Routes
from everstep.protocol.work import (
    AssembleSum,
    Contribute,
    GatherParts,
    ReleaseGradients,
    SumChunk,
    Wait,
    WorkItem,
)

_OF_A_ROUND = (ParcelKind.PART, ParcelKind.SUM, ParcelKind.COPY)


class Reduction:
    """Decides for the step it is given; keeps nothing itself."""

    def __init__(self, mail: Mailbox, rules: TaskRules, chunks: Chunks) -> None:
        self.mail, self.rules, self.me, self.chunks = mail, rules, mail.me, chunks

    def next(self, state: StepState) -> WorkItem:
        box, routes, me = self.mail.box, self.mail.routes(state.step), self.me.replica
        copy = self.copy(state.step)
        if copy in box:
            return AssembleSum(state.step, routes, (copy,))
        if state.step in self.mail.order.awaits:  # the parts that are left may lack a dead peer's
            return Wait(str(copy))
        if state.own_part is None:
            return Contribute(state.step)
        if state.sum is SumState.CONTRIBUTED:
            if missing := self._missing(state, "mates", lambda: self._parts(state, routes.mates)):
                return Wait(str(missing))
            left = next((owner for owner in routes.owners if owner not in state.gathered), None)
            if routes.mates and left is not None:
                here = self._parts(state, routes.mates)
                return GatherParts(state.step, routes, here, self._part(state, sender=me, owner=left))
            if missing := self._missing(state, "gatherers", lambda: self._parts(state, routes.gatherers)):
                return Wait(str(missing))
            parts = self._parts(state, routes.senders)
            state.everyone = self._check([state.own_part, *(box[part] for part in parts)], state.step)
            owned = self.chunks.owned(state.step) if self.rules.chunks else ()
            return SumChunk(state.step, routes, parts, math.fsum(state.everyone.weights), owned)
        self._pass_on(state, routes)
        if missing := self._missing(state, "sums", lambda: self._chunks_due(state, routes)):
            return Wait(str(missing))
        return AssembleSum(state.step, routes, self._chunks_due(state, routes))

    def _missing(
        self, state: StepState, purpose: str, names: Callable[[], Iterable[Parcel]]
    ) -> Parcel | None:
        """The first of these that is not here. There may be thousands, and each that comes is a reason to ask
        again: what is here already is not looked for.
        """
        key = (self.mail.order.epoch, state.round, purpose)
        if key not in state.awaited:
            state.awaited[key] = [*names()][::-1]
        left, box = state.awaited[key], self.mail.box
        while left and left[-1] in box:
            left.pop()
        return left[-1] if left else None

    def _parts(self, state: StepState, senders: Iterable[int]) -> tuple[Parcel, ...]:
        return tuple(self._part(state, sender=k, owner=self.me.replica) for k in senders)

    def _chunks_due(self, state: StepState, routes: Routes) -> tuple[Parcel, ...]:
        """The sums that this worker waits for."""
        if self.rules.chunks:
            return tuple(self._chunk(state, k, routes.me) for k in routes.members if k != routes.me)
        here = tuple(self._chunk(state, k, k if routes.passes_on else -1) for k in routes.mates)
        return (*here, *(self._chunk(state, k) for k in routes.owners))

    def _pass_on(self, state: StepState, routes: Routes) -> None:
        """To the other replicas on its node: all sums at once that this worker gathers for."""
        if self.rules.chunks or not routes.passes_on or state.passed_on is not None:
            return
        others = (self._chunk(state, k) for k in routes.owners)
        if self._missing(state, "sums to pass on", lambda: others) is None:
            of_owners = (self.mail.box[self._chunk(state, k)] for k in routes.owners)
            of_chunks = [state.own_chunk_squares or (), *of_owners]
            state.passed_on = tuple(one for squares in of_chunks for one in squares)
            for mate in routes.mates:
                self._send_chunks(state, mate, routes)

    def _send_chunks(self, state: StepState, to: int, routes: Routes) -> None:
        """What this worker has summed, or passes on, once it has it."""
        squares, owner = state.own_chunk_squares, to if self.rules.chunks else -1
        if not self.rules.chunks and routes.passes_on and to in routes.mates:
            squares, owner = state.passed_on, routes.me
        if squares is not None:
            self.mail.send(self._chunk(state, routes.me, owner), Worker(to, self.me.stage), squares)

    def _readers(self, routes: Routes) -> tuple[int, ...]:
        """To whom this worker sends sums. Sharded: to each what it holds, so nobody passes them on."""
        return tuple(k for k in routes.members if k != routes.me) if self.rules.chunks else routes.senders

    def contributed(
        self,
        state: StepState,
        losses: Iterable[tuple[Microbatch, float]],
        weights: Mapping[Microbatch, float],
        scores: Scores = (),
    ) -> None:
        microbatches = state.accumulated()
        part = Part(
            microbatches,
            tuple(losses),
            state.executed,
            tuple(weights[m] for m in microbatches),
            tuple(scores),
        )
        state.contributed(part)
        for k in _receivers(self.mail.routes(state.step)):
            self._send_part(state, k, part)

    def gathered(self, state: StepState, task: GatherParts) -> None:
        """The part of this node goes to its owner."""
        assert state.own_part is not None
        whole = _together([state.own_part, *(self.mail.box[part] for part in task.parts)])
        state.gathered[task.into.owner] = whole
        self._send_part(state, task.into.owner, whole)

    def _send_part(self, state: StepState, to: int, part: Part) -> None:
        parcel = self._part(state, sender=self.me.replica, owner=to)
        self.mail.send(parcel, Worker(to, self.me.stage), part)

    def summed(self, state: StepState, task: SumChunk, squares: tuple[float, ...]) -> None:
        state.chunk_summed(squares)
        for part in task.parts:
            self.mail.use(part)
        for k in self._readers(task.routes):
            self._send_chunks(state, k, task.routes)

    def assembled(self, state: StepState, task: AssembleSum, squares: float | None) -> None:
        """`squares`: the shell's answer, where the whole is not the sum of its chunks."""
        box = self.mail.box
        if task.chunks and task.chunks[0].what is ParcelKind.COPY:
            reduced, state.everyone = box[task.chunks[0]]
        else:
            of_chunks = [state.own_chunk_squares or (), *(box[chunk] for chunk in task.chunks)]
            reduced = math.fsum(one for squares_of in of_chunks for one in squares_of)
        for chunk in task.chunks:
            self.mail.use(chunk)
        state.held(self.me.stage, reduced if squares is None else squares)
        if not self.rules.chunks:  # sharded: the reduce may have to start over until the seal
            self.mail.commands.append(ReleaseGradients(state.step))
        if not self.rules.is_tied(self.me.stage):
            state.sum_of_squares = state.reduced_squares
        self.send_held(state)

    def all_hold(self, state: StepState) -> bool:
        peers = self.mail.other_peers(state.step)
        return (
            self._missing(state, "held", lambda: (self._held(state.step, w.replica) for w in peers)) is None
        )

    def send_held(self, state: StepState) -> None:
        for peer in self.mail.other_peers(state.step):
            self.mail.send(self._held(state.step, self.me.replica), peer)

    def send_held_to(self, step: int, peer: Worker) -> None:
        """That this worker held the sum of a step it has closed since."""
        self.mail.send(self._held(step, self.me.replica), peer)

    def give(self, state: StepState, peer: Worker) -> None:
        """The whole sum, for a peer that lacks it."""
        self.mail.send(self.copy(state.step), peer, (state.reduced_squares, state.everyone))

    def resend(self, state: StepState, peer: Worker) -> None:
        """The connection to this peer was lost for a while."""
        if state.holds_sum:
            self.mail.send(self._held(state.step, self.me.replica), peer)
        routes, k = self.mail.routes(state.step), peer.replica
        if state.own_part is not None and not state.holds_sum:
            if k in _receivers(routes):
                self._send_part(state, k, state.own_part)
            elif k in state.gathered:
                self._send_part(state, k, state.gathered[k])
        if not state.is_sealed and k in self._readers(routes):
            self._send_chunks(state, k, routes)

    def drop_old_rounds(self, state: StepState) -> None:
        """Received for a round that is over: each may be as large as the gradients of a chunk."""
        kinds = (*_OF_A_ROUND, ParcelKind.HELD) if self.rules.chunks else _OF_A_ROUND
        self.mail.drop(lambda p: p.step == state.step and p.what in kinds and p.round < state.round)

    def copy(self, step: int) -> Parcel:
        """Of this round: when the reduce starts over, a dead giver's copy must not reach only some peers."""
        return self.mail.name(ParcelKind.COPY, step, self.me.stage, round=self.mail.round(step))

    def _held(self, step: int, sender: int) -> Parcel:
        """Sharded: of this round, for a sum that is held can be given up before the seal."""
        round = self.mail.round(step) if self.rules.chunks else 0
        return self.mail.name(ParcelKind.HELD, step, self.me.stage, round=round, sender=sender)

    def _part(self, state: StepState, *, sender: int, owner: int) -> Parcel:
        return self.mail.name(
            ParcelKind.PART, state.step, self.me.stage, round=state.round, sender=sender, owner=owner
        )

    def _chunk(self, state: StepState, sender: int, owner: int = -1) -> Parcel:
        """The sum that `sender` has made, and by nodes, for those on its own (`owner`), all those that it
        gathers for. Sharded: what the receiver `owner` holds of it.
        """
        return self.mail.name(
            ParcelKind.SUM, state.step, self.me.stage, round=state.round, sender=sender, owner=owner
        )

    def _check(self, parts: list[Part], step: int) -> Part:
        """Exactly once, checked at run time: every microbatch is in this sum, and none twice."""
        total = self.rules.total_microbatches
        summed = [m for part in parts for m in part.microbatches]
        distinct = len(set(summed))
        if len(summed) != total or distinct != total:
            raise InternalError(
                f"step {step}, stage {self.me.stage}: the sum would hold {len(summed)} "
                f"microbatches, {distinct} distinct, instead of each of {total} once"
            )
        weighted = sorted(
            {(m, w) for part in parts for m, w in zip(part.microbatches, part.weights, strict=True)}
        )
        assert len(weighted) == total, f"step {step}: a microbatch has two weights"
        weight = math.fsum(w for _, w in weighted)
        share = total / weight if weight else math.nan  # so that the mean of all losses is the step's loss
        losses = tuple(sorted((m, loss * share) for part in parts for m, loss in part.losses))
        return Part(
            tuple(m for m, _ in weighted),
            losses,
            sum(part.executed for part in parts),
            tuple(w for _, w in weighted),
            tuple(sorted(score for part in parts for score in part.scores)),
        )


def _receivers(routes: Routes) -> tuple[int, ...]:
    """To whom a worker sends what it has added up alone: its mates, or the owners if it has none."""
    return routes.mates or routes.owners


def _together(parts: list[Part]) -> Part:
    """What the workers of one node have added up."""
    return Part(
        tuple(m for part in parts for m in part.microbatches),
        tuple(loss for part in parts for loss in part.losses),
        sum(part.executed for part in parts),
        tuple(w for part in parts for w in part.weights),
        tuple(score for part in parts for score in part.scores),
    )
