"""The worker's own decisions: which op next, what to send where, when a step is over.

A `Walker` walks its op list. It holds names, never tensors: its shell (the engine, or a test's virtual
worker) stores payloads under the names and does what `next()` and `take_commands()` say. So the code that
decides what survives a death is the same in a real worker and in a simulated one.

    arrived(parcel)  ─┐                  ┌─► next()            one task now, or Wait / Paused / Finished
    finished(task)    ├──►  Walker  ─────┤
    interrupt(), resume(order)           └─► take_commands()   sends, releases, reports

Nothing here changes between an interrupt and the order to go on, except that parcels are put aside: a ledger,
once told, stays true until the worker resumes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from everstep.core.words.ops import Kind, Op, Worker
from everstep.core.words.worker_messages import (
    ApplyFeed,
    AssembleSum,
    CombineTied,
    Command,
    Compute,
    Contribute,
    DiscardWork,
    DropStashes,
    Finished,
    Ledger,
    Parcel,
    ParcelKind,
    Paused,
    ReleaseGradients,
    ReleaseSum,
    Restore,
    Resume,
    SaveCheckpoint,
    Send,
    Snapshot,
    StoreCopy,
    SumChunk,
    TellCopied,
    TellInvalid,
    TellSealed,
    TellUnrestored,
    Undo,
    Update,
    Wait,
    WorkItem,
)
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.reduction import Reduction
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState
from everstep.errors import InternalError


class WorkerState:
    """One worker's state and decisions."""

    def __init__(self, me: Worker, rules: TaskRules) -> None:
        self.me = me
        self.rules = rules
        self.mail = Mailbox(me)
        self.reduction = Reduction(self.mail, rules)
        self.epoch = 0
        self.paused = True
        self.joining = True
        self.state_step: int | None = None  # while joining: the step the copied state has reached
        self.enter_at: int | None = None
        self.now = StepState(step=1, round=0)
        self.before: StepState | None = None
        self.feeds: dict[int, int | None] = {}
        self.snapshots_due: list[int] = []
        self.last_norm: float | None = None
        self._told: dict[int, TellSealed] = {}  # the last few steps, told again when it may have been missed
        self._closed: int | None = None  # the last step that is closed here; a peer may not know yet
        self._first: list[WorkItem] = []  # tasks that come before anything else (restore, undo)

    # -------------------------------------------------------------- what happens to a worker

    def arrived(self, parcel: Parcel, value: Any = None) -> bool:
        """A parcel is here. False: it is of no use (a duplicate, a dead round); drop its payload."""
        if parcel in self.mail.box or not self._is_wanted(parcel):
            return False
        self.mail.box[parcel] = value
        return True

    def interrupt(self, epoch: int) -> Ledger:
        """Stop between tasks and tell what is done."""
        self.paused = True
        self.epoch = max(epoch, self.epoch)
        if self.joining:
            return Ledger(step=(self.state_step or 0) + 1, joining=True)
        return Ledger(
            step=self.now.step,
            done=(*self.now.done, *self.now.ghosts),
            done_before=() if self.before is None else (*self.before.done, *self.before.ghosts),
            holding=tuple(p for p in self.mail.box if p.what in (ParcelKind.ACTIVATION, ParcelKind.GRADIENT)),
        )

    def resume(self, order: Resume) -> None:
        """Take over a new epoch's membership and lists, and make good what the change may have lost."""
        if order.epoch < self.epoch:
            return
        self.epoch = order.epoch
        self.paused = False
        self.mail.order = order
        if order.restore is not None:
            self._start_over(order.step, order.restore)
        elif self.joining:
            live_from = [m.from_step for m in order.members if self.me.replica in m.live[self.me.stage]]
            self.enter_at = live_from[0] if live_from else None
            return
        else:
            if order.rewind is not None:
                self._rewind(order.rewind)
            self._continue()
        self.snapshots_due = [replica for replica in self.snapshots_due if replica in order.feeds]
        self.feeds = {k: last for k, last in order.feeds.items() if k not in self.snapshots_due}
        for state in self._open_states():
            for peer in order.give.get(state.step, ()):
                self.reduction.give(state, Worker(peer, self.me.stage))

    def copy_to(self, joiner: int) -> None:
        """Start feeding a joining peer of this stage: a snapshot first, then every further step."""
        self.feeds.pop(joiner, None)
        self.snapshots_due.append(joiner)

    def stop_feeding(self, joiner: int) -> None:
        """The joiner is gone."""
        self.feeds.pop(joiner, None)
        self.snapshots_due = [replica for replica in self.snapshots_due if replica != joiner]

    def wants_snapshot(self, state_step: int) -> bool:
        """Is a state that has arrived newer than what is here? A dead source's may come late."""
        return self.joining and (self.state_step is None or state_step > self.state_step)

    def snapshot_arrived(self, state_step: int) -> None:
        """A peer's state is here, and loaded if it was wanted."""
        if not self.joining:
            return
        self.state_step = max(state_step, self.state_step or 0)
        self._command(TellCopied(self.state_step))

    def link_reopened(self, peer: Worker) -> None:
        """A connection to a live peer broke and is back: what was under way on it is sent again."""
        self.mail.repost(peer)
        for state in self._open_states():
            if peer.stage == self.me.stage:
                self.reduction.resend(state, peer)
        if peer.stage == self.me.stage:
            if self._closed is not None:
                self.reduction.tell_one(self._closed, peer)
            if peer.replica in self.feeds:
                self.copy_to(peer.replica)  # feeds may be lost: anew from a snapshot
        for step, sealed in self._told.items():
            self._tell_news(step, sealed)

    # -------------------------------------------------------------- what a worker does next

    def take_commands(self) -> list[Command]:
        """What the shell shall do besides the task; empties the list."""
        commands, self.mail.commands = self.mail.commands, []
        return commands

    def next(self) -> WorkItem:
        """The one task to run now. Settles first what arrivals have decided."""
        if self.joining:
            return self._next_while_joining()
        if self.paused:
            return Paused()
        if self._first:
            return self._first[0]
        if self.before is not None and self._settle(self.before):
            return Wait(f"the undo of step {self.before.step}")
        self._settle(self.now)
        return self._housekeeping() or self._next_op()

    def finished(self, task: WorkItem, answer: Any = None) -> None:
        """The shell has run the task."""
        match task:
            case Compute():
                self._computed(task)
            case Contribute():
                self.reduction.contributed(self.now, *answer)
            case SumChunk():
                self.reduction.summed(self.now, task, float(answer))
            case AssembleSum():
                self.reduction.assembled(self.now, task, answer)
                self.now.todo.pop()
                self._drop_ghosts()
            case CombineTied():
                self.now.combined = True
                self.now.sum_of_squares = float(answer)
                self.mail.use(task.other)
            case Update():
                self._updated(task)
            case Undo():
                self._first.pop(0)
            case Restore():
                self._first.pop(0)
                if answer is False:
                    self._unrestored(task)
            case Snapshot():
                self.snapshots_due.remove(task.joiner)
                self.feeds[task.joiner] = None
                if self.before is not None:
                    self.before.fed.add(task.joiner)  # the snapshot has it
            case ApplyFeed():
                self.state_step = task.step
                self.mail.use(task.feed)
            case SaveCheckpoint():
                assert self.before is not None
                self.before.saved_among = self.mail.peers(task.state_step)
            case StoreCopy():
                assert self.before is not None
                self.before.shelved = True
            case Wait() | Paused() | Finished():
                raise InternalError(f"{task} is not a task that finishes")

    # -------------------------------------------------------------- ops

    def _next_op(self) -> WorkItem:
        now, before = self.now, self.before
        if now.step > self.last_step:
            over = before is None or (before.sealed and before.valid)
            return Finished() if over else Wait(f"the seal of step {now.step - 1}")
        if not now.todo:
            raise InternalError(f"worker {self.me} has no op left in step {now.step} and has not updated")
        op = now.todo[-1]
        match op.kind:
            case Kind.R:
                return self.reduction.next(now)
            case Kind.U:
                return self._next_of_update()
            case _:
                return self._next_compute(op)

    def _next_compute(self, op: Op) -> WorkItem:
        step, microbatch = self.now.step, op.microbatch
        assert microbatch is not None
        needs: Parcel | None = None
        makes: Parcel | None = None
        is_first, is_last = op.stage == 0, op.stage + 1 == self.rules.stages
        if op.kind is Kind.F:
            needs = None if is_first else self.mail.name(ParcelKind.ACTIVATION, step, op.stage, microbatch)
            makes = None if is_last else self.mail.name(ParcelKind.ACTIVATION, step, op.stage + 1, microbatch)
        elif op.kind is not Kind.W:
            needs = None if is_last else self.mail.name(ParcelKind.GRADIENT, step, op.stage, microbatch)
            makes = None if is_first else self.mail.name(ParcelKind.GRADIENT, step, op.stage - 1, microbatch)
        if needs is not None and needs not in self.mail.box:
            return Wait(str(needs))
        return Compute(op, step, needs, makes, ghost=(step, microbatch) in self.mail.order.ghosts)

    def _computed(self, task: Compute) -> None:
        done = self.now.todo.pop()
        assert done == task.op, f"{task.op} was run while {done} was next"
        self.now.record(task.op, ghost=task.ghost)
        if task.input is not None:
            self.mail.use(task.input)
        if task.output is not None:
            self.mail.post(task.output)
        if task.ghost:
            self._drop_ghosts()

    def _drop_ghosts(self) -> None:
        """A worker that holds the sum never runs W of a ghost. One that does not may have to: the last holder
        may die. A ghost that has run F alone may be asked for its I until the step is closed.
        """
        if self.now.holds_sum and (over := self.now.ghost_stashes(Kind.I)):
            self._command(DropStashes(self.now.step, over))

    # -------------------------------------------------------------- seal, validate, update

    def _settle(self, state: StepState) -> bool:
        """Draw the consequences of what is in the box. True: an eager update turned out invalid.

        A step that was computed on an update not yet valid is not announced: else another stage could make
        its own update of it final, and would have no way back.
        """
        if state.holds_sum and not state.sealed and self.reduction.all_hold(state):
            state.sealed = True
            self._command(ReleaseGradients(state.step))
            self._tell_tied(state)
        trusted = state is self.before or self.before is None or self.before.valid
        if state.sealed and trusted and not state.news_sent and state.sum_of_squares is not None:
            state.news_sent = True
            self._announce(state, state.sum_of_squares)
        norm = self._norm(state) if state.news_sent else None
        if norm is not None:  # every stage has sealed: nothing of this step can be asked for again
            self.mail.drop_sent(state.step)
            if state.updated and not state.valid and self._is_invalid(state, norm):
                return True
        if state.valid and state.updated:
            self._feed(state)
        return False

    def _is_invalid(self, state: StepState, norm: float) -> bool:
        """An eager update was made as if the norm did not matter. Does it?"""
        if self.rules.scale(norm) == 1.0:
            state.valid = True
            self.last_norm = norm
            return False
        if not state.must_wait:
            state.must_wait = True
            self._command(TellInvalid(state.step, norm, self.mail.order.attempt(state.step + 1)))
        return True

    def _next_of_update(self) -> WorkItem:
        now, before = self.now, self.before
        if before is not None and not (before.sealed and before.valid):
            return Wait(f"the seal and norm of step {before.step}")
        if self.rules.is_tied(self.me.stage) and not now.combined:
            if not now.sealed:  # after combining, the sum is no longer what a peer could lack
                return Wait(f"the seal of step {now.step}")
            other = self.mail.name(ParcelKind.TIED, now.step, self.rules.other_tied(self.me.stage))
            return CombineTied(now.step, other) if other in self.mail.box else Wait(str(other))
        norm = self._norm(now)
        if norm is not None:
            return Update(now.step, self.rules.scale(norm), keep=False)
        finite = now.sum_of_squares is not None and math.isfinite(now.sum_of_squares)
        may_be_undone = now.step < self.last_step  # after it nobody is there to undo it
        if (
            finite
            and may_be_undone
            and not now.must_wait
            and self.rules.allows_eager(now.step, self.last_norm)
        ):
            return Update(now.step, 1.0, keep=True)
        return Wait(f"the norm of step {now.step}")

    def _updated(self, task: Update) -> None:
        now = self.now
        now.todo.pop()
        now.updated, now.eager, now.valid, now.scale = True, task.keep, not task.keep, task.scale
        if not task.keep:
            self.last_norm = self._norm(now)
        if self.before is not None:
            self._close(self.before)
        self.before = now
        self._enter(now.step + 1)

    def _norm(self, state: StepState) -> float | None:
        """The gradient norm over all stages, once every stage's share is known."""
        squares: list[float] = []
        for stage in range(self.rules.stages):
            own = stage == self.me.stage
            share = (
                state.sum_of_squares
                if own
                else self.mail.box.get(self.mail.name(ParcelKind.NEWS, state.step, stage))
            )
            if share is None:
                return None
            squares.append(float(share))
        return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan

    def _enter(self, step: int) -> None:
        self.now = StepState(step=step, round=self.mail.round(step))
        self._take_list()

    def _take_list(self) -> None:
        step = self.now.step
        self.now.todo = list(reversed(self.mail.order.ops(step))) if step <= self.last_step else []

    def _close(self, state: StepState) -> None:
        assert state.sealed
        assert state.valid
        self._closed = state.step
        if state.ghosts and (over := state.ghost_stashes(Kind.F, Kind.I)):
            self._command(DropStashes(state.step, over))
        self._command(ReleaseSum(state.step))
        self.mail.drop(lambda parcel: parcel.step <= state.step)

    def _housekeeping(self) -> WorkItem | None:
        """What is done between two ops, while the state is final."""
        before = self.before
        if before is not None and not before.valid:
            return None
        if self.snapshots_due:
            return Snapshot(self.snapshots_due[0], self.now.step - 1)
        every = self.rules.checkpoint_every
        if before is not None and every and before.step % every == 0:
            peers = self.mail.peers(before.step)
            if before.saved_among != peers:  # one of them may have died: then its share is not written
                attempt = self.mail.order.attempt(before.step)
                return SaveCheckpoint(before.step, attempt, peers.index(self.me.replica), len(peers))
        return self._shelving(before) if before is not None else None

    def _shelving(self, before: StepState) -> WorkItem | None:
        """A copy in memory that outlives this worker: from one of a stage now and then, from all who go."""
        leaving = before.step == self.mail.order.until
        every = self.rules.shelve_every
        due = leaving or (every and before.step % every == 0 and self.mail.is_first_peer(before.step))
        if not due or before.shelved:
            return None
        return StoreCopy(before.step, self.mail.order.attempt(before.step), leaving)

    # -------------------------------------------------------------- joining

    def _next_while_joining(self) -> WorkItem:
        if self.state_step is None:
            return Wait("a snapshot of a peer's state")
        if self.enter_at is not None and self.state_step == self.enter_at - 1:
            if self.paused:
                return Paused()
            self._become_a_member(self.enter_at)
            return self.next()
        feed = Parcel(ParcelKind.FEED, 0, self.state_step + 1, self.me.stage)
        if feed in self.mail.box:
            return ApplyFeed(feed.step, self.mail.box[feed], feed)
        return Wait(str(feed))

    def _become_a_member(self, step: int) -> None:
        self.joining = False
        for parcel in [p for p in self.mail.box if p.what is ParcelKind.FEED]:
            self.mail.use(parcel)
        self.mail.drop_stale(0)
        self.mail.drop(lambda parcel: parcel.step < step)
        self._enter(step)

    def _feed(self, state: StepState) -> None:
        for joiner, last in self.feeds.items():
            if joiner not in state.fed and (last is None or state.step <= last):
                state.fed.add(joiner)
                feed = Parcel(ParcelKind.FEED, 0, state.step, self.me.stage)
                self._command(Send(feed, joiner, self.me.stage, state.scale))

    # -------------------------------------------------------------- going on in a new epoch

    def _continue(self) -> None:
        self._take_list()
        for state in self._open_states():
            if state.round != self.mail.round(state.step):
                state.restart_reduce(self.mail.round(state.step))
        self.mail.redirect()
        for state in self._open_states():  # a dead worker may have owed these; duplicates are dropped
            if state.holds_sum:
                self.reduction.tell_held(state)
            if state.sealed:
                self._tell_tied(state)
        for step, sealed in self._told.items():
            self._tell_news(step, sealed)
        for step, stage, share in self.mail.order.shares:
            if stage != self.me.stage:
                self.arrived(self.mail.name(ParcelKind.NEWS, step, stage), share)

    def _rewind(self, step: int) -> None:
        """An eager update of `step` does not hold: undo it, and throw away what was done of later ones."""
        if self.now.step > step:
            self._command(DiscardWork(step + 1))
            self.mail.drop_stale(step + 1)
            before = self.before
            if before is not None and before.eager and not before.valid:
                self._first.append(Undo(before.step))
                self.before = None
                if before.step == step:
                    self.now = before
                    before.updated = before.eager = False
            if self.now.step > step:
                self._enter(step + 1)
        self.now.must_wait = self.now.step == step

    def _start_over(self, step: int, restore: int) -> None:
        self.joining, self.enter_at, self.state_step = False, None, None
        self._command(DiscardWork(None))
        self.mail.drop_stale(0)
        self.before = self._closed = None
        self._told.clear()
        self.last_norm = None
        self.snapshots_due.clear()
        self._first = [Restore(restore)]
        self._enter(step)

    def _unrestored(self, task: Restore) -> None:
        """As new: what the next order says to load may be there."""
        self.joining = self.paused = True
        self._command(TellUnrestored(task.state_step))

    # -------------------------------------------------------------- telling

    def _command(self, command: Command) -> None:
        self.mail.commands.append(command)

    def _tell_tied(self, state: StepState) -> None:
        if self.rules.is_tied(self.me.stage):
            for target in self.mail.wards(state.step):
                if self.rules.is_tied(target.stage):
                    self.mail.send(self.mail.name(ParcelKind.TIED, state.step, self.me.stage), target)

    def _announce(self, state: StepState, sum_of_squares: float) -> None:
        assert state.everyone is not None
        sealed = TellSealed(
            state.step,
            len(state.everyone.microbatches),
            state.everyone.executed,
            state.everyone.losses,
            sum_of_squares,
            self.mail.order.attempt(state.step),
        )
        self._told = {step: told for step, told in self._told.items() if state.step - 4 < step < state.step}
        self._told[state.step] = sealed
        self._tell_news(state.step, sealed)

    def _tell_news(self, step: int, sealed: TellSealed) -> None:
        if self.mail.is_first_peer(step):
            self._command(replace(sealed, attempt=self.mail.order.attempt(step)))
        for target in self.mail.wards(step):
            self.mail.send(
                self.mail.name(ParcelKind.NEWS, step, self.me.stage), target, sealed.sum_of_squares
            )

    # -------------------------------------------------------------- looking things up

    def _is_wanted(self, parcel: Parcel) -> bool:
        if parcel.what is ParcelKind.FEED:
            return self.joining
        if parcel.attempt != self.mail.order.attempt(parcel.step):
            return parcel.attempt > self.mail.order.attempt(parcel.step)
        if self.paused and not self.joining:
            oldest = self.now.step if self.before is None else self.before.step
            return parcel.step >= oldest  # the order to come may take back the op that had used it
        if parcel.step != self.now.step:
            is_open = self.before is not None and parcel.step == self.before.step
            return parcel.step > self.now.step or (
                is_open and parcel.what in (ParcelKind.HELD, ParcelKind.NEWS)
            )
        match parcel.what:
            case ParcelKind.ACTIVATION:
                return not self.now.has_run(Kind.F, parcel.microbatch, parcel.stage)
            case ParcelKind.GRADIENT:
                return not self.now.has_run(Kind.I, parcel.microbatch, parcel.stage)
            case ParcelKind.PART | ParcelKind.SUM | ParcelKind.COPY:
                return not self.now.holds_sum and parcel.round >= self.now.round
            case _:
                return True

    @property
    def last_step(self) -> int:
        """Of the task, or of this shape of it."""
        until = self.mail.order.until
        return self.rules.steps if until is None else until

    def _open_states(self) -> list[StepState]:
        return [self.now] if self.before is None else [self.before, self.now]
