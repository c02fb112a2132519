"""The worker's own decisions: which op next, what to send where, when a step is over.

`WorkerState` holds names, never tensors: its shell (the engine's worker loop, or a storm's virtual worker)
stores payloads under the names and does what `next()` and `take_commands()` say. So the code that decides
what survives a death is the same in a real worker and in a simulated one.

    arrived(parcel)  ─┐                       ┌─► next()            one work item, or Wait / Paused / Finished
    finished(item)    ├──►  WorkerState  ─────┤
    interrupt(), resume(order)                └─► take_commands()   sends, releases, reports

Between an interrupt and the order to resume nothing changes, except that parcels are put aside: a ledger that
was reported stays true until the worker resumes.

    OpenSteps       the current step, the one before, the op list
    Reduction       the gradient sum of a step        Updates         seal, validate, update
    Chunks          sharded states: who holds what
    Joiner, Feeder  states copied between peers       Announcements   what other stages must know
    Votes           bits compared with peers          Suspicion       NaNs and losses out of their band
"""

from __future__ import annotations

from everstep.core.worker.announcements import Announcements
from everstep.core.worker.chores import next_chore
from everstep.core.worker.chunks import Chunks
from everstep.core.worker.joining import Feeder, Joiner, WorkerLife
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.open_steps import OpenSteps
from everstep.core.worker.reduction import Reduction
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState, SumState, UpdateState
from everstep.core.worker.suspicion import Suspicion
from everstep.core.worker.updates import Updates
from everstep.core.worker.votes import Votes
from everstep.errors import InternalError
from everstep.protocol.events import Event, RestoreFailed
from everstep.protocol.ops import Kind, Worker
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import (
    AdoptWeights,
    Answer,
    ApplyFeed,
    AssembleSum,
    CombineTied,
    Command,
    Commit,
    Compute,
    Contribute,
    DiscardWork,
    Facts,
    Finished,
    GatherParts,
    HashState,
    Ledger,
    LoadFill,
    Paused,
    Recompute,
    Restore,
    Resume,
    SaveCheckpoint,
    Snapshot,
    StoreCopy,
    SumChunk,
    Undo,
    Update,
    Wait,
    WorkItem,
)


class WorkerState:
    """One worker's state and decisions."""

    def __init__(self, me: Worker, rules: TaskRules, *, incarnation: int) -> None:
        self.me = me
        self.rules = rules
        self.epoch = 0
        self.paused = True
        self.mail = Mailbox(me, incarnation=incarnation)
        self.votes = Votes(self.mail, rules)
        self.steps = OpenSteps(self.mail, rules, self.votes)
        self.chunks = Chunks(self.mail, rules)
        self.reduction = Reduction(self.mail, rules, self.chunks)
        self.news = Announcements(self.mail, rules)
        self.updates = Updates(self.mail, rules, self.steps, self.reduction, self.news)
        self.suspicion = Suspicion(self.mail, rules)
        self.joiner = Joiner(self.mail)
        self.feeder = Feeder(self.mail)
        self._first: list[WorkItem] = []  # what comes before anything else: a restore, an undo

    @property
    def now(self) -> StepState:
        """The step this worker is in."""
        return self.steps.now

    @property
    def joining(self) -> bool:
        return self.joiner.life is not WorkerLife.MEMBER

    # -------------------------------------------------------------- what happens to a worker

    def arrived(self, parcel: Parcel, value: Facts = None) -> bool:
        """A parcel is here. False: it is of no use (a duplicate, an old round); drop its payload."""
        if parcel in self.mail.box or not self._is_wanted(parcel):
            return False
        self.mail.box[parcel] = value
        return True

    def _is_wanted(self, parcel: Parcel) -> bool:
        if parcel.what is ParcelKind.FEED:
            return self.joining
        attempt = self.mail.order.attempt(parcel.step)
        if parcel.attempt != attempt:
            return parcel.attempt > attempt
        if parcel.what is ParcelKind.FILL:
            return self.joining or self.chunks.wants(parcel, self.now.step)
        if self.paused and not self.joining:
            return self.steps.may_want(parcel)
        return self.steps.wants(parcel)

    def interrupt(self, epoch: int) -> Ledger:
        """Stop between two work items and report what is done."""
        self.paused = True
        self.epoch = max(epoch, self.epoch)
        if self.joining:
            return Ledger(step=(self.joiner.state_step or 0) + 1, joining=True)
        now, before = self.steps.now, self.steps.before
        return Ledger(
            step=now.step,
            done=(*now.done, *now.ghosts),
            done_before=() if before is None else (*before.done, *before.ghosts),
            chunks=tuple(sorted(self.chunks.kept)),
            holding=tuple(p for p in self.mail.box if p.what in (ParcelKind.ACTIVATION, ParcelKind.GRADIENT)),
            shares=tuple(self.mail.known_shares()),
            norms=self.updates.norms(),
        )

    def resume(self, order: Resume) -> None:
        """Take over a new epoch's membership and lists, and make good what the change may have lost."""
        if order.epoch < self.epoch:
            return
        self.epoch = order.epoch
        self.paused = False
        self.mail.order = order
        self.suspicion.begin_epoch()
        if order.restore is not None:
            self._start_over(order.step, order.restore)
        elif self.joining:
            self.joiner.let_in(order)
            return
        else:
            if order.rewind is not None:
                self._rewind(order.rewind)
            self._continue()
        self.feeder.obey(order)
        for state in self.steps.all:
            for replica in order.give.get(state.step, ()):
                peer = Worker(replica, self.me.stage)
                if self.rules.chunks:
                    self.chunks.give(state.step, peer)
                else:
                    self.reduction.give(state, peer)

    def link_reopened(self, peer: Worker) -> None:
        """A connection to a live peer broke and is back: what was under way on it is sent again."""
        self.mail.repost(peer)
        if peer.stage == self.me.stage:
            for state in self.steps.all:
                self.reduction.resend(state, peer)
            if self.steps.closed is not None:
                self.reduction.send_held_to(self.steps.closed, peer)
            if self.rules.chunks:
                self.chunks.resend(self.steps.now, self.steps.before, peer)
            if peer.replica in self.feeder.feeds:
                self.feeder.copy_again(peer.replica)
        self.votes.link_reopened(peer)
        self.news.repeat()

    # -------------------------------------------------------------- what a worker does next

    def take_commands(self) -> list[Command | Event]:
        """What the shell does besides the work item; empties the list."""
        commands, self.mail.commands = self.mail.commands, []
        return commands

    def next(self) -> WorkItem:
        """The one work item to run now. Draws first the consequences of what has arrived."""
        if self.joining:
            item = self.joiner.next()
            if item is not None:
                return item
            if self.paused:
                return Paused()
            self.steps.enter(self.joiner.enter())
            self.chunks.forget_all()
        if self.paused:
            return Paused()
        if self._first:
            return self._first[0]
        steps = self.steps
        for state in steps.all:
            if not self.updates.settle(state):
                return Wait(f"the undo of step {state.step}")
            if state.update is UpdateState.VALID:
                return Commit(state.step)
            if state.is_final and state.is_sealed:
                self.feeder.feed(state, is_over=self._feed_is_over(state))
        if self.rules.chunks:
            self.chunks.send_fills()
            if (fill := self.chunks.next_fill(steps.now.step)) is not None:
                return fill
            if (
                steps.now.update is UpdateState.SHARED
            ):  # its state is neither of this step nor of the one before
                return self._next_op()
        return next_chore(steps, self.feeder, self.mail, self.rules, self.chunks) or self._next_op()

    def _feed_is_over(self, state: StepState) -> bool:
        """A feed holds the step's sum; sharded: the working weights after it."""
        if self.rules.chunks:
            return self.now.update is UpdateState.SHARED
        return state.sum is SumState.RELEASED

    def _next_op(self) -> WorkItem:
        now, before = self.steps.now, self.steps.before
        if now.step > self.steps.last_step:
            is_over = before is None or (before.is_sealed and before.is_final)
            return Finished() if is_over else Wait(f"the seal of step {now.step - 1}")
        if not now.todo:
            raise InternalError(f"worker {self.me} has no op left in step {now.step} and has not updated")
        op = now.todo[-1]
        match op.kind:
            case Kind.R:
                return self._next_of_reduce()
            case Kind.U:
                return self.updates.next()
            case _:
                return self.steps.next_compute(op)

    def _next_of_reduce(self) -> WorkItem:
        """There is one buffer for sums: the step before must need its own no more."""
        item, before = self.reduction.next(self.steps.now), self.steps.before
        is_settled = before is None or (before.is_sealed and before.is_final)
        is_contributed = not isinstance(item, Contribute)
        if is_settled and is_contributed and (vote := self.votes.next(self.steps.now)) is not None:
            return vote
        if is_settled and isinstance(item, SumChunk) and (held := self.suspicion.next(self.steps.now)):
            return held
        if before is not None and isinstance(item, SumChunk | AssembleSum):
            if not is_settled:
                return Wait(f"the seal and norm of step {before.step}")
            self.steps.release_sum(before)
        return item

    def finished(self, item: WorkItem, answer: Answer = None) -> None:
        """The shell has run the work item."""
        steps = self.steps
        match item:
            case Compute():
                steps.computed(item)
                if item.hashed:
                    self.votes.computed(item, answer)
            case HashState():
                self.votes.hashed(item, answer)
            case Recompute():
                self.votes.recomputed(item, answer)
            case Contribute():
                self.reduction.contributed(steps.now, *answer)
            case GatherParts():
                self.reduction.gathered(steps.now, item)
            case SumChunk():
                squares = tuple(map(float, answer))
                if not self.suspicion.holds_sum(steps.now, squares):
                    self.reduction.summed(steps.now, item, squares)
            case AssembleSum():
                self.reduction.assembled(steps.now, item, answer)
                self.suspicion.skip_if_again(steps.now)
                steps.now.todo.pop()
                steps.drop_ghosts()
            case CombineTied():
                steps.now.combined(float(answer), item.other.attempt)
                self.suspicion.skip_if_again(steps.now)
                self.mail.use(item.other)
            case Update():
                self.updates.updated(item)
            case AdoptWeights():
                self.updates.adopted(item)
            case LoadFill():
                self.chunks.filled(item, steps.now)
            case Commit():
                assert steps.before is not None
                steps.before.committed()
            case Undo():
                self._first.pop(0)
            case Restore():
                self._first.pop(0)
                if answer is False:
                    self._restore_failed(item)
                elif self.rules.chunks:
                    self.chunks.loaded(item.state_step)
            case Snapshot():
                self.feeder.snapshot_sent(item.joiner, steps.before)
            case ApplyFeed():
                self.joiner.applied(item)
            case SaveCheckpoint():
                assert steps.before is not None
                steps.before.saved_among = self.mail.peers(item.state_step)
                steps.before.saved_chunks |= set(item.chunks)
            case StoreCopy():
                assert steps.before is not None
                steps.before.is_stored = True
                steps.before.stored_chunks |= set(item.chunks)
            case Wait() | Paused() | Finished():
                raise InternalError(f"{item} is not a work item that finishes")

    # -------------------------------------------------------------- a new epoch

    def _continue(self) -> None:
        steps = self.steps
        steps.take_list()
        if self.rules.chunks:
            self.chunks.obey(self.mail.order)
            self.chunks.entered(self.now.step)
            if self.now.holds_sum and any(op.kind is Kind.R for op in self.now.todo):
                self.now.let_go_of_sum(self.me.stage)
        for state in steps.all:
            state.is_verified = state.is_verified and state.is_sealed
            if state.round != self.mail.round(state.step):
                state.restart_reduce(self.mail.round(state.step))
            self.reduction.drop_old_rounds(state)
        self.mail.redirect()
        for state in steps.all:  # a dead worker may have owed these; duplicates are dropped
            if state.holds_sum:
                self.reduction.send_held(state)
            if state.is_sealed:
                self.news.send_tied(state)
        if self.now.update is UpdateState.SHARED:
            for peer in self.mail.other_peers(self.now.step):
                self.chunks.give(self.now.step, peer)
        self.news.begin_epoch()
        for step, stage, share in self.mail.order.shares:
            if stage != self.me.stage:
                self.arrived(self.mail.name(ParcelKind.NEWS, step, stage), share)

    def _rewind(self, step: int) -> None:
        """An eager update of `step` does not hold: undo it, and discard what was done of later steps."""
        if self.now.step > step:
            self.mail.commands.append(DiscardWork(step + 1))
            self.mail.drop_stale(step + 1)
            undo = self.steps.go_back_to(step)
            if undo is not None:
                self._first.append(Undo(undo))
        if self.now.step == step:
            self.now.must_wait()

    def _start_over(self, step: int, restore: int) -> None:
        self.joiner.restore()
        self.mail.commands.append(DiscardWork(None))
        self.mail.drop_stale(0)
        self.news.forget_all()
        self.chunks.forget_all()
        self.votes.forget_all()
        self.updates.last_norm = None
        self.feeder.stop_all()
        self._first = [Restore(restore)]
        self.steps.start_over(step)

    def _restore_failed(self, item: Restore) -> None:
        self.joiner.restore_failed()
        self.paused = True
        self.mail.commands.append(
            RestoreFailed(
                worker=self.me,
                incarnation=self.mail.incarnation,
                step=item.state_step,
                epoch=self.mail.order.epoch,
            )
        )
