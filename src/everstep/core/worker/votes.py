"""Votes: a peer computes a share of what a worker computes again, and must get the same bits.

An op is a pure function of its named inputs, so a peer with the same weights gets the same bits, or one of
the two computes wrong numbers. The peers of a stage form a ring, another one in each vote; each worker checks
the one before it:

    A, G of a voted microbatch ──┬──► its host       F, I, W as usual, and hashes of what they make
                                 └──► its checker
    before the sum of the step:  host ── HASHES ──► checker: compares states, computes the microbatch again
                                                      the same bits: it goes on with the sum
                                                      other bits: host, checker and a third peer compute it
                                                      again (REPLAY, ANSWER); the coordinator judges

A checker owns a chunk of the sum. While it waits for a verdict no peer can hold the sum, so the weights of
the step stay in place for replays, and in a step that is voted on no wrong contribution is sealed. So a
sealed step that was voted on is *verified*, and no message has to say so.

Which microbatches, and who checks whom, are functions of the step and its members, so every worker knows.
Which steps: `TaskRules`. In a step that a new epoch breaks there are no votes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState, SumState
from everstep.protocol.events import INPUTS, VoteDiffered, VoteRun
from everstep.protocol.ops import Microbatch, Worker, parse_microbatch
from everstep.protocol.parcels import Parcel, ParcelKind, RunHashes, StepHashes
from everstep.protocol.work import Answer, Compute, HashState, Recompute, Wait, WorkItem

Hashes = Mapping[str, str]
REPLAYS = 2  # runs of each worker that is asked to compute again
MOST_SHOWN = 8  # parts that differ, in a report


@dataclass(slots=True)
class Dispute:
    """What a checker and its host differ in."""

    microbatch: Microbatch | None  # None: their states
    runs: list[tuple[Worker, int, Hashes]]  # with the incarnation: the host's, the checker's; more come
    asked: list[Worker] = field(default_factory=list)  # who computes it again
    own_again: bool = False  # the checker has
    reported: bool = False


class Votes:
    """What this worker has to compare in the step it is in."""

    def __init__(self, mail: Mailbox, rules: TaskRules) -> None:
        self.mail, self.rules, self.me = mail, rules, mail.me
        self.computes = ""  # what bits depend on besides the job; workers that differ in it are not compared
        self._attempt = 0  # at the step
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._step = step
        self._state: Hashes | None = None  # of this worker
        self._made: dict[Microbatch, Hashes] = {}  # of the voted microbatches that it hosts
        self._agreed: set[Microbatch] = set()
        self._dispute: Dispute | None = None
        self._answers: dict[Parcel, RunHashes] = {}  # to peers that have asked this worker

    def forget_all(self) -> None:
        """A kept state is loaded."""
        self._begin(0)

    # -------------------------------------------------------------- who, what, when

    def is_on(self, step: int, stage: int) -> bool:
        """Are there votes at a stage in a step? In the first one of new members states are compared: those
        have come over a wire, or from a disk.
        """
        order = self.mail.order
        if order.votes_from is None or step < order.votes_from or not self.rules.vote_every:
            return False
        members = order.members_at(step)
        is_compared = members.from_step == step or self.rules.is_compared(step)
        return (self._is_voted(step) or is_compared) and len(members.live[stage]) > 1

    def is_hashed(self, microbatch: Microbatch, step: int, stage: int) -> bool:
        """Does a peer compute this microbatch again?"""
        return self._is_voted(step, microbatch.number) and self.is_on(step, stage)

    def _is_voted(self, step: int, number: int | None = None) -> bool:
        """By the rules; and of a step that is computed again because of its numbers, all."""
        suspect = self.mail.order.suspect
        is_replay = suspect is not None and suspect.step == step and self.rules.vote_every > 0
        return is_replay or self.rules.is_voted(step, number)

    def _checker(self, step: int, stage: int, host: int) -> Worker:
        live = self.mail.order.members_at(step).live[stage]
        return Worker(live[(live.index(host) + self._distance(step, len(live))) % len(live)], stage)

    def _host(self, step: int) -> Worker:
        """The worker that this one checks."""
        live = self.mail.peers(step)
        at = live.index(self.me.replica) - self._distance(step, len(live))
        return Worker(live[at % len(live)], self.me.stage)

    def _distance(self, step: int, count: int) -> int:
        return 1 + self.rules.turn(step) % (count - 1)

    # -------------------------------------------------------------- the inputs of a checker

    def post(self, parcel: Parcel) -> None:
        """A boundary tensor of a voted microbatch goes to the checker of its host, too."""
        if (checker := self._second_receiver(parcel)) is not None:
            self.mail.send(parcel, checker)

    def _second_receiver(self, parcel: Parcel) -> Worker | None:
        step, stage, microbatch = parcel.step, parcel.stage, parcel.microbatch
        assert microbatch is not None
        if not self.is_hashed(microbatch, step, stage):
            return None
        return self._checker(step, stage, self.mail.order.host(step, microbatch, stage))

    def link_reopened(self, peer: Worker) -> None:
        """What was under way to this peer is sent again."""
        for parcel in list(self.mail.outbox):
            if self._second_receiver(parcel) == peer:
                self.mail.send(parcel, peer)
        if peer.stage != self.me.stage or not self._step or not self.is_on(self._step, peer.stage):
            return
        if self._state is not None:
            self._send_hashes(only=peer)
        if self._dispute is not None and peer in self._dispute.asked:
            self._ask(self._dispute, peer)
        for answer, value in self._answers.items():
            if answer.owner == peer.replica:
                self.mail.send(answer, peer, value)

    # -------------------------------------------------------------- what comes before a sum

    def computed(self, task: Compute, hashes: Answer) -> None:
        """An op of a voted microbatch has run here. Its last one has the hashes."""
        assert task.op.microbatch is not None
        if hashes is not None:
            self._enter(task.step)
            self._made[task.op.microbatch] = hashes

    def next(self, state: StepState) -> WorkItem | None:
        """None: all that is compared so far has the same bits. The step before this one is final."""
        step = state.step
        if not self.is_on(step, self.me.stage):
            return None
        self._enter(step)
        if (asked := self._asked(step)) is not None:
            if asked.microbatch is None:
                return HashState(step)
            return Recompute(step, asked.microbatch, replay=asked, runs=REPLAYS)
        if state.sum is not SumState.CONTRIBUTED:
            return None
        if self._state is None:
            return HashState(step)
        if self._dispute is not None:
            return self._settle(self._dispute)
        hashes = self._name(ParcelKind.HASHES, sender=self._host(step))
        if hashes not in self.mail.box:
            return Wait(str(hashes))
        said = self.mail.box[hashes]
        if said.state != self._state:
            self._dispute = self._differs(None, said.incarnation, said.state, self._state)
            return self._settle(self._dispute)
        if said.computes == self.computes:
            for microbatch in map(parse_microbatch, sorted(said.made)):
                if microbatch not in self._agreed:
                    return self._compute_again(microbatch, runs=1)
        state.is_verified = self._is_voted(step)
        return None

    def hashed(self, item: HashState, answer: Hashes) -> None:
        asked = self._asked(item.step)
        if asked is not None and asked.microbatch is None:
            self._answer(asked, [answer])
        elif self._state is None:
            self._state = answer
            self._send_hashes()
        elif self._dispute is not None:
            self._again(self._dispute, [answer])

    def recomputed(self, item: Recompute, answers: Sequence[Hashes]) -> None:
        if item.replay is not None:
            self._answer(item.replay, answers)
        elif self._dispute is not None:
            self._again(self._dispute, answers)
        else:
            said = self.mail.box[self._name(ParcelKind.HASHES, sender=self._host(item.step))]
            theirs = said.made[str(item.microbatch)]
            if theirs != answers[0]:
                self._dispute = self._differs(item.microbatch, said.incarnation, theirs, answers[0])
                return
            self._agreed.add(item.microbatch)
            for parcel in (item.activation, item.gradient):
                if parcel is not None:
                    self.mail.use(parcel)

    def _enter(self, step: int) -> None:
        attempt = self.mail.order.attempt(step)
        if (self._step, self._attempt) != (step, attempt):
            self._begin(step)
            self._attempt = attempt

    def _compute_again(self, microbatch: Microbatch, *, runs: int) -> WorkItem:
        activation, gradient = self._inputs(microbatch)
        for needed in (activation, gradient):
            if needed is not None and needed not in self.mail.box:
                return Wait(str(needed))
        return Recompute(self._step, microbatch, activation, gradient, runs=runs)

    def _inputs(self, microbatch: Microbatch) -> tuple[Parcel | None, Parcel | None]:
        stage, is_last = self.me.stage, self.me.stage + 1 == self.rules.stages
        name = self.mail.name
        return (
            name(ParcelKind.ACTIVATION, self._step, stage, microbatch) if stage else None,
            None if is_last else name(ParcelKind.GRADIENT, self._step, stage, microbatch),
        )

    def _send_hashes(self, only: Worker | None = None) -> None:
        checker = self._checker(self._step, self.me.stage, self.me.replica)
        if only in (None, checker):
            made = {str(microbatch): hashes for microbatch, hashes in self._made.items()}
            assert self._state is not None
            value = StepHashes(self.mail.incarnation, self.computes, self._state, made)
            self.mail.send(self._name(ParcelKind.HASHES, sender=self.me), checker, value)

    # -------------------------------------------------------------- bits that differ

    def _differs(
        self, microbatch: Microbatch | None, incarnation: int, theirs: Hashes, mine: Hashes
    ) -> Dispute:
        """`incarnation`: of the host."""
        host = self._host(self._step)
        runs = [(host, incarnation, theirs), (self.me, self.mail.incarnation, mine)]
        dispute = Dispute(microbatch, runs)
        others = [peer for peer in self.mail.other_peers(self._step) if peer != host]
        dispute.asked = [host, *others[:1]]
        for peer in dispute.asked:
            self._ask(dispute, peer)
        return dispute

    def _ask(self, dispute: Dispute, peer: Worker) -> None:
        name = self._name(ParcelKind.REPLAY, dispute.microbatch, sender=self.me, owner=peer)
        self.mail.send(name, peer)

    def _settle(self, dispute: Dispute) -> WorkItem:
        """All who are asked compute it again; then the coordinator judges."""
        if not dispute.own_again:
            if dispute.microbatch is None:
                return HashState(self._step)
            return self._compute_again(dispute.microbatch, runs=REPLAYS)
        for peer in dispute.asked:
            answer = self._name(ParcelKind.ANSWER, dispute.microbatch, sender=peer, owner=self.me)
            if answer not in self.mail.box:
                return Wait(str(answer))
        if not dispute.reported:
            for peer in dispute.asked:
                answer = self._name(ParcelKind.ANSWER, dispute.microbatch, sender=peer, owner=self.me)
                said = self.mail.box[answer]
                dispute.runs += [(peer, said.incarnation, hashes) for hashes in said.runs]
            dispute.reported = True
            self._report(dispute)
        return Wait(f"the verdict on {dispute.microbatch or 'states'} of step {self._step}")

    def _again(self, dispute: Dispute, answers: Sequence[Hashes]) -> None:
        dispute.runs += [(self.me, self.mail.incarnation, hashes) for hashes in answers]
        dispute.own_again = True

    def _report(self, dispute: Dispute) -> None:
        """With the parts that differ, and what they were computed from."""
        runs = [hashes for _, _, hashes in dispute.runs]
        names = dict.fromkeys(name for hashes in runs for name in hashes)
        differ = [n for n in names if n not in INPUTS and len({hashes.get(n) for hashes in runs}) > 1]
        shown = [*INPUTS, *differ[:MOST_SHOWN]]
        self.mail.commands.append(
            VoteDiffered(
                worker=self.me,
                host=dispute.runs[0][0],
                epoch=self.mail.order.epoch,
                step=self._step,
                microbatch=dispute.microbatch,
                runs=tuple(
                    VoteRun(
                        worker=worker,
                        incarnation=incarnation,
                        whole=_whole(hashes),
                        hashes={name: hashes[name] for name in shown if name in hashes},
                    )
                    for worker, incarnation, hashes in dispute.runs
                ),
            )
        )

    # -------------------------------------------------------------- as the one who is asked

    def _asked(self, step: int) -> Parcel | None:
        """A replay that this worker owes an answer to."""
        for parcel in self.mail.box:
            if parcel.what is ParcelKind.REPLAY and parcel.step == step and parcel.owner == self.me.replica:
                return parcel
        return None

    def _answer(self, asked: Parcel, answers: Sequence[Hashes]) -> None:
        peer = Worker(asked.sender, self.me.stage)
        name = self._name(ParcelKind.ANSWER, asked.microbatch, sender=self.me, owner=peer)
        self.mail.use(asked)
        self._answers[name] = RunHashes(self.mail.incarnation, tuple(answers))
        self.mail.send(name, peer, self._answers[name])

    def _name(
        self,
        what: ParcelKind,
        microbatch: Microbatch | None = None,
        *,
        sender: Worker,
        owner: Worker | None = None,
    ) -> Parcel:
        to = -1 if owner is None else owner.replica
        return self.mail.name(what, self._step, self.me.stage, microbatch, sender=sender.replica, owner=to)


def _whole(hashes: Hashes) -> str:
    """Of what was made; not of what it was made from."""
    text = "\n".join(f"{name} {hashes[name]}" for name in sorted(hashes) if name not in INPUTS)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
