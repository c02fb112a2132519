"""The worker's own decisions: which op next, what to send where, when a step is over.

A `Walker` walks its op list. It holds names, never tensors: its shell (the engine, or a test's virtual
worker) stores payloads under the names and does what `next()` and `take_commands()` say. So the code that
decides what survives a death is the same in a real worker and in a simulated one.

    arrived(parcel)  ─┐                      ┌─► next()            one task to run now, or Wait / Paused / Finished
    finished(task)    ├──►  Walker  ─────────┤
    interrupt(), resume(order)               └─► take_commands()   sends, releases, reports

Nothing here changes between an interrupt and the order to go on, except that parcels are put aside: a ledger,
once told, stays true until the worker resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.core.messages import (
    ApplyFeed,
    AssembleSum,
    CombineTied,
    Command,
    Compute,
    Contribute,
    DiscardWork,
    Finished,
    Forget,
    Ledger,
    Members,
    Parcel,
    Part,
    Paused,
    Place,
    ReleaseGradients,
    ReleaseSum,
    Restore,
    Resume,
    SaveCheckpoint,
    Send,
    Snapshot,
    SumChunk,
    Task,
    TellCopied,
    TellInvalid,
    TellSealed,
    Undo,
    Update,
    Wait,
    What,
)
from everstep.core.ops import Kind, Microbatch, Op, Worker
from everstep.core.stepstate import StepState
from everstep.errors import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a task fixes for all its workers."""

    replicas: int
    stages: int
    microbatches: int
    steps: int
    clip: float | None = None
    stagger: str = "auto"  # "auto", "always", "never"
    eager_below: float = 0.5  # auto: step eagerly while the last norm is below this share of the clip
    tied: tuple[int, int] | None = None  # the two stages that hold one tied tensor, lower first
    checkpoint_every: int = 0

    @property
    def total_microbatches(self) -> int:
        return self.replicas * self.microbatches


class Walker:
    """One worker's state and decisions."""

    def __init__(self, me: Worker, rules: Rules) -> None:
        self.me = me
        self.rules = rules
        self.epoch = 0
        self.attempts: tuple[tuple[int, int], ...] = ((0, 0),)
        self.ghosts: frozenset[tuple[int, Microbatch]] = frozenset()
        self.paused = True
        self.joining = True
        self.state_step: int | None = None  # while joining: the step the copied state has reached
        self.enter_at: int | None = None
        self.now = StepState(step=1, round=0)
        self.before: StepState | None = None
        self.box: dict[Parcel, Any] = {}  # parcels here and not yet used, with their small facts
        self.outbox: dict[Parcel, int] = {}  # boundary parcels sent and not yet sealed -> replica they went to
        self.members: tuple[Members, ...] = ()
        self.lists: Mapping[int, tuple[Op, ...]] = {}
        self.steady: tuple[Op, ...] = ()
        self.hosts: Mapping[int, Mapping[Place, int]] = {}
        self.steady_hosts: Mapping[Place, int] = {}
        self.feeds: dict[int, int | None] = {}
        self.snapshots_due: list[int] = []
        self.last_norm: float | None = None
        self._told: dict[int, TellSealed] = {}  # the last few steps, told again when somebody may have missed it
        self._first: list[Task] = []  # tasks that come before anything else (restore, undo)
        self._commands: list[Command] = []

    # -------------------------------------------------------------- what happens to a worker

    def arrived(self, parcel: Parcel, value: Any = None) -> bool:
        """A parcel is here. False: it is of no use (a duplicate, a dead round); drop its payload."""
        if parcel in self.box or not self._is_wanted(parcel):
            return False
        self.box[parcel] = value
        return True

    def interrupt(self, epoch: int) -> Ledger:
        """Stop between tasks and tell what is done."""
        self.paused = True
        self.epoch = max(epoch, self.epoch)
        if self.joining:
            return Ledger(step=(self.state_step or 0) + 1, joining=True)
        return Ledger(step=self.now.step, done=(*self.now.done, *self.now.ghosts),
                      done_before=() if self.before is None else (*self.before.done, *self.before.ghosts),
                      holding=tuple(p for p in self.box if p.what in (What.ACTIVATION, What.GRADIENT)))

    def resume(self, order: Resume) -> None:
        """Take over a new epoch's membership and lists, and make good what the change may have lost."""
        if order.epoch < self.epoch:
            return
        self.epoch = order.epoch
        self.paused = False
        assert order.attempts[0][0] == 0
        self.members, self.lists, self.steady = order.members, order.lists, order.steady
        self.hosts, self.steady_hosts, self.ghosts = order.hosts, order.steady_hosts, order.ghosts
        if order.restore is not None:
            self._start_over(order)
        elif self.joining:
            self._be_admitted(order)
            return
        elif order.rewind is not None:
            self._rewind(order)
        else:
            self.attempts = order.attempts
            self._continue(order)
        self.snapshots_due = [replica for replica in self.snapshots_due if replica in order.feeds]
        self.feeds = {k: last for k, last in order.feeds.items() if k not in self.snapshots_due}
        for step, peers in order.give.items():
            for peer in peers:
                self._send(Parcel(What.COPY, self._attempt(step), step, self.me.stage), Worker(peer, self.me.stage),
                           self._whole(step))

    def copy_to(self, joiner: int) -> None:
        """Start feeding a joining peer of this stage: a snapshot first, then every further step."""
        self.feeds.pop(joiner, None)
        self.snapshots_due.append(joiner)

    def stop_feeding(self, joiner: int) -> None:
        """The joiner is gone."""
        self.feeds.pop(joiner, None)
        self.snapshots_due = [replica for replica in self.snapshots_due if replica != joiner]

    def snapshot_arrived(self, state_step: int) -> None:
        """The shell of a joining worker has loaded a peer's state."""
        self.state_step = state_step
        self._commands.append(TellCopied(state_step))

    def link_reopened(self, peer: Worker) -> None:
        """A connection to a live peer broke and is back: what was under way on it is sent again."""
        for parcel, replica in self.outbox.items():
            if Worker(replica, parcel.stage) == peer:
                self._send(parcel, peer)
        for state in self._open_states():
            if peer.stage == self.me.stage:
                self._resend_reduce(state, peer)
        for step, sealed in self._told.items():
            self._tell_news(step, sealed)

    # -------------------------------------------------------------- what a worker does next

    def take_commands(self) -> list[Command]:
        """What the shell shall do besides the task; empties the list."""
        commands, self._commands = self._commands, []
        return commands

    def next(self) -> Task:
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

    def finished(self, task: Task, answer: Any = None) -> None:
        """The shell has run the task."""
        match task:
            case Compute():
                self._computed(task)
            case Contribute():
                self._contributed(tuple(answer or ()))
            case SumChunk():
                self._summed(task, float(answer))
            case AssembleSum():
                self._assembled(task, answer)
            case CombineTied():
                self.now.combined = True
                self.now.sum_of_squares = float(answer)
                self._use(task.other)
            case Update():
                self._updated(task)
            case Undo():
                self._first.pop(0)
            case Restore():
                self._first.pop(0)
            case Snapshot():
                self.snapshots_due.remove(task.joiner)
                self.feeds[task.joiner] = None
                if self.before is not None:
                    self.before.fed.add(task.joiner)  # the snapshot has it
            case ApplyFeed():
                self.state_step = task.step
                self._use(task.feed)
            case SaveCheckpoint():
                assert self.before is not None
                self.before.saved = True
            case Wait() | Paused() | Finished():
                raise InternalError(f"{task} is not a task that finishes")

    # -------------------------------------------------------------- ops

    def _next_op(self) -> Task:
        now = self.now
        if now.step > self.rules.steps:
            before = self.before
            over = before is None or (before.sealed and before.valid)
            return Finished() if over else Wait(f"the seal of step {now.step - 1}")
        if not now.todo:
            raise InternalError(f"worker {self.me} has no op left in step {now.step} and has not updated")
        op = now.todo[-1]
        match op.kind:
            case Kind.R:
                return self._next_of_reduce()
            case Kind.U:
                return self._next_of_update()
            case _:
                return self._next_compute(op)

    def _next_compute(self, op: Op) -> Task:
        now, microbatch = self.now, op.microbatch
        assert microbatch is not None
        needs: Parcel | None = None
        makes: Parcel | None = None
        if op.kind is Kind.F:
            if op.stage > 0:
                needs = Parcel(What.ACTIVATION, self._attempt(now.step), now.step, op.stage, microbatch)
            if op.stage + 1 < self.rules.stages:
                makes = Parcel(What.ACTIVATION, self._attempt(now.step), now.step, op.stage + 1, microbatch)
        elif op.kind is not Kind.W:
            if op.stage + 1 < self.rules.stages:
                needs = Parcel(What.GRADIENT, self._attempt(now.step), now.step, op.stage, microbatch)
            if op.stage > 0:
                makes = Parcel(What.GRADIENT, self._attempt(now.step), now.step, op.stage - 1, microbatch)
        if needs is not None and needs not in self.box:
            return Wait(str(needs))
        return Compute(op, now.step, needs, makes, ghost=(now.step, microbatch) in self.ghosts)

    def _computed(self, task: Compute) -> None:
        now = self.now
        assert now.todo and now.todo[-1] == task.op
        now.todo.pop()
        now.record(task.op, ghost=task.ghost)
        if task.input is not None:
            self._use(task.input)
        if task.output is not None:
            assert task.op.microbatch is not None
            replica = self._host(now.step, task.op.microbatch, task.output.stage)
            self.outbox[task.output] = replica
            self._send(task.output, Worker(replica, task.output.stage))

    # -------------------------------------------------------------- reduce

    def _next_of_reduce(self) -> Task:
        now = self.now
        copy = Parcel(What.COPY, self._attempt(now.step), now.step, self.me.stage)
        if copy in self.box:
            return AssembleSum(now.step, self.peers(now.step), (copy,))
        if now.own_part is None:
            return Contribute(now.step)
        peers = self.peers(now.step)
        others = [k for k in peers if k != self.me.replica]
        if now.own_chunk_squares is None:
            parts = [self._part(now, sender=k, owner=self.me.replica) for k in others]
            missing = [part for part in parts if part not in self.box]
            if missing:
                return Wait(str(missing[0]))
            now.everyone = self._check([now.own_part, *(self.box[part] for part in parts)], now.step)
            return SumChunk(now.step, peers, tuple(parts))
        chunks = [self._chunk(now, owner=k) for k in others]
        missing = [chunk for chunk in chunks if chunk not in self.box]
        return Wait(str(missing[0])) if missing else AssembleSum(now.step, peers, tuple(chunks))

    def _contributed(self, losses: tuple[tuple[Microbatch, float], ...]) -> None:
        now = self.now
        now.own_part = Part(now.accumulated(), losses, now.executed)
        for peer in self._other_peers(now.step):
            self._send(self._part(now, sender=self.me.replica, owner=peer.replica), peer, now.own_part)

    def _summed(self, task: SumChunk, squares: float) -> None:
        self.now.own_chunk_squares = squares
        for part in task.parts:
            self._use(part)
        for peer in self._other_peers(task.step):
            self._send(self._chunk(self.now, owner=self.me.replica), peer, squares)

    def _assembled(self, task: AssembleSum, squares: float | None) -> None:
        now = self.now
        if task.chunks and task.chunks[0].what is What.COPY:
            now.reduced_squares, now.everyone = self.box[task.chunks[0]]
        else:
            of = {chunk.sender: float(self.box[chunk]) for chunk in task.chunks}
            of[self.me.replica] = now.own_chunk_squares or 0.0
            now.reduced_squares = math.fsum(of[k] for k in task.members)
        if squares is not None:
            now.reduced_squares = squares
        for chunk in task.chunks:
            self._use(chunk)
        now.holds_sum = True
        now.todo.pop()
        now.done[Op(Kind.R, None, self.me.stage)] = None
        if not self._is_tied():
            now.sum_of_squares = now.reduced_squares
        for peer in self._other_peers(now.step):
            self._tell_held(now, peer)

    def _check(self, parts: list[Part], step: int) -> Part:
        """Exactly once, checked at run time: every microbatch is in this sum, and none twice."""
        microbatches = [m for part in parts for m in part.microbatches]
        if len(microbatches) != self.rules.total_microbatches or len(set(microbatches)) != len(microbatches):
            raise InternalError(f"step {step}, stage {self.me.stage}: the sum would hold {len(microbatches)} "
                                f"microbatches, {len(set(microbatches))} distinct, instead of each of "
                                f"{self.rules.total_microbatches} once")
        losses = tuple(sorted(loss for part in parts for loss in part.losses))
        return Part(tuple(sorted(microbatches)), losses, sum(part.executed for part in parts))

    # -------------------------------------------------------------- seal, validate, update

    def _settle(self, state: StepState) -> bool:
        """Draw the consequences of what is in the box. True: an eager update turned out invalid.

        A step that was computed on an update not yet valid is not announced: else another stage could make
        its own update of it final, and would have no way back.
        """
        if state.holds_sum and not state.sealed and self._all_hold(state):
            self._seal(state)
        trusted = state is self.before or self.before is None or self.before.valid
        if state.sealed and trusted and not state.news_sent and state.sum_of_squares is not None:
            state.news_sent = True
            self._announce(state)
        norm = self._norm(state) if state.news_sent else None
        if norm is not None:  # every stage has sealed: nothing of this step can be asked for again
            self._drop_sent(state.step)
            if state.updated and not state.valid:
                if self._scale(norm) != 1.0:
                    if not state.must_wait:
                        state.must_wait = True
                        self._commands.append(TellInvalid(state.step, norm, self._attempt(state.step + 1)))
                    return True
                state.valid = True
                self.last_norm = norm
        if state.valid and state.updated:
            self._feed(state)
        return False

    def _seal(self, state: StepState) -> None:
        state.sealed = True
        self._commands.append(ReleaseGradients(state.step))
        if self._is_tied():
            self._tell_tied(state)

    def _next_of_update(self) -> Task:
        now, before = self.now, self.before
        if before is not None and not (before.sealed and before.valid):
            return Wait(f"the seal and norm of step {before.step}")
        if self._is_tied() and not now.combined:
            if not now.sealed:  # after combining, the sum is no longer what a peer could lack
                return Wait(f"the seal of step {now.step}")
            assert self.rules.tied is not None
            lower, higher = self.rules.tied
            other = Parcel(What.TIED, self._attempt(now.step), now.step, higher if self.me.stage == lower else lower)
            return CombineTied(now.step, other) if other in self.box else Wait(str(other))
        norm = self._norm(now)
        if norm is not None:
            return Update(now.step, self._scale(norm), keep=False)
        if self._may_step_eagerly():
            return Update(now.step, 1.0, keep=True)
        return Wait(f"the norm of step {now.step}")

    def _updated(self, task: Update) -> None:
        now = self.now
        now.todo.pop()
        now.updated, now.eager, now.valid = True, task.keep, not task.keep
        now.skipped_or_scale = task.scale
        if not task.keep:
            self.last_norm = self._norm(now)
        if self.before is not None:
            self._close(self.before)
        self.before = now
        self._enter(now.step + 1)

    def _may_step_eagerly(self) -> bool:
        rules, now = self.rules, self.now
        if rules.stagger == "never" or now.must_wait or now.step == rules.steps or rules.stages == 1:
            return False
        if now.sum_of_squares is None or not math.isfinite(now.sum_of_squares):
            return False
        if rules.stagger == "always":
            return True
        known = self.last_norm is not None and math.isfinite(self.last_norm)
        return known and (rules.clip is None or (self.last_norm or 0.0) < rules.eager_below * rules.clip)

    def _norm(self, state: StepState) -> float | None:
        """The gradient norm over all stages, once every stage's share is known."""
        if state.sum_of_squares is None:
            return None
        squares = []
        for stage in range(self.rules.stages):
            if stage == self.me.stage:
                squares.append(state.sum_of_squares)
                continue
            news = self.box.get(Parcel(What.NEWS, self._attempt(state.step), state.step, stage))
            if news is None:
                return None
            squares.append(float(news))
        total = math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan
        return math.sqrt(total)

    def _scale(self, norm: float) -> float | None:
        """What the gradient is multiplied with; None skips the step."""
        if not math.isfinite(norm):
            return None
        clip = self.rules.clip
        return 1.0 if clip is None or norm <= clip else clip / norm

    def _enter(self, step: int) -> None:
        self.now = StepState(step=step, round=self._round(step))
        if step <= self.rules.steps:
            self.now.todo = list(reversed(self.lists.get(step, self.steady)))

    def _close(self, state: StepState) -> None:
        assert state.sealed and state.valid and state.news_sent
        self._commands.append(ReleaseSum(state.step))
        self._drop(lambda parcel: parcel.step <= state.step)

    def _housekeeping(self) -> Task | None:
        before = self.before
        if before is not None and not before.valid:
            return None
        if self.snapshots_due:
            return Snapshot(self.snapshots_due[0], self.now.step - 1)
        every = self.rules.checkpoint_every
        if before is not None and every and before.step % every == 0 and not before.saved:
            if self.peers(before.step)[0] == self.me.replica:
                return SaveCheckpoint(before.step)
            before.saved = True
        return None

    def _feed(self, state: StepState) -> None:
        for joiner, last in self.feeds.items():
            if joiner not in state.fed and (last is None or state.step <= last):
                state.fed.add(joiner)
                self._commands.append(Send(Parcel(What.FEED, 0, state.step, self.me.stage), joiner,
                                           self.me.stage, state.skipped_or_scale))

    # -------------------------------------------------------------- joining

    def _next_while_joining(self) -> Task:
        if self.state_step is None:
            return Wait("a snapshot of a peer's state")
        feed = Parcel(What.FEED, 0, self.state_step + 1, self.me.stage)
        if self.enter_at is not None and self.state_step == self.enter_at - 1:
            if self.paused:
                return Paused()
            self.joining = False
            entered = self.enter_at
            for parcel in [p for p in self.box if p.what is What.FEED]:
                self._use(parcel)
            self._drop(lambda parcel: parcel.step < entered or parcel.attempt < self._attempt(parcel.step))
            self._enter(entered)
            return self.next()
        if feed in self.box:
            return ApplyFeed(feed.step, self.box[feed], feed)
        return Wait(str(feed))

    def _be_admitted(self, order: Resume) -> None:
        self.attempts = order.attempts
        live_from = [m.from_step for m in order.members if self.me.replica in m.live[self.me.stage]]
        self.enter_at = live_from[0] if live_from else None

    # -------------------------------------------------------------- going on in a new epoch

    def _continue(self, order: Resume) -> None:
        self.now.todo = list(reversed(self.lists.get(self.now.step, self.steady)))
        if self.now.step > self.rules.steps:
            self.now.todo = []
        for state in self._open_states():
            if state.round != self._round(state.step):
                state.restart_reduce(self._round(state.step))
        for parcel, replica in list(self.outbox.items()):
            assert parcel.microbatch is not None
            host = self._host(parcel.step, parcel.microbatch, parcel.stage)
            if host != replica:
                self.outbox[parcel] = host
                self._send(parcel, Worker(host, parcel.stage))
        self._repeat_news()

    def _rewind(self, order: Resume) -> None:
        """An eager update of step t does not hold: undo it, and throw away what was done of step t + 1."""
        step = order.rewind
        assert step is not None
        self.attempts = order.attempts
        if self.now.step > step:
            self._commands.append(DiscardWork(step + 1))
            self._clear(step + 1)
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
        self._continue(order)

    def _start_over(self, order: Resume) -> None:
        assert order.restore is not None
        self.attempts = order.attempts
        self.joining, self.enter_at, self.state_step = False, None, None
        self._commands.append(DiscardWork(None))
        self._clear(0)
        self.before = None
        self._told.clear()
        self.last_norm = None
        self.snapshots_due.clear()
        self._first = [Restore(order.restore)]
        self._enter(order.step)

    def _clear(self, from_step: int) -> None:
        """Forget every parcel of these steps that belongs to an attempt before this one."""
        self._drop(lambda parcel: parcel.step >= from_step and parcel.attempt < self._attempt(parcel.step))

    def _repeat_news(self) -> None:
        """A dead worker may have owed these to someone; duplicates are dropped where they arrive."""
        for state in self._open_states():
            if state.holds_sum:
                for peer in self._other_peers(state.step):
                    self._tell_held(state, peer)
            if state.sealed and self._is_tied():
                self._tell_tied(state)
        for step, sealed in self._told.items():
            self._tell_news(step, sealed)

    def _resend_reduce(self, state: StepState, peer: Worker) -> None:
        if state.holds_sum:
            self._tell_held(state, peer)
        if state.own_part is not None and not state.sealed:
            self._send(self._part(state, sender=self.me.replica, owner=peer.replica), peer, state.own_part)
        if state.own_chunk_squares is not None and not state.sealed:
            self._send(self._chunk(state, owner=self.me.replica), peer, state.own_chunk_squares)

    # -------------------------------------------------------------- telling

    def _tell_held(self, state: StepState, peer: Worker) -> None:
        self._send(Parcel(What.HELD, self._attempt(state.step), state.step, self.me.stage, sender=self.me.replica), peer)

    def _tell_tied(self, state: StepState) -> None:
        assert self.rules.tied is not None
        for target in self._wards(state.step):
            if target.stage in self.rules.tied:
                self._send(Parcel(What.TIED, self._attempt(state.step), state.step, self.me.stage), target)

    def _announce(self, state: StepState) -> None:
        assert state.everyone is not None and state.sum_of_squares is not None
        sealed = TellSealed(state.step, len(state.everyone.microbatches), state.everyone.executed,
                            state.everyone.losses, state.sum_of_squares)
        self._told = {step: told for step, told in self._told.items() if state.step - 4 < step < state.step}
        self._told[state.step] = sealed
        self._tell_news(state.step, sealed)

    def _tell_news(self, step: int, sealed: TellSealed) -> None:
        if self.peers(step)[0] == self.me.replica:
            self._commands.append(sealed)
        for target in self._wards(step):
            self._send(Parcel(What.NEWS, self._attempt(step), step, self.me.stage), target, sealed.sum_of_squares)

    def _wards(self, step: int) -> Iterator[Worker]:
        """The workers of other stages that hear from this one: its own replica's, and those whose peer is
        dead.
        """
        live = self._members(step).live
        mine = live[self.me.stage]
        for stage in range(self.rules.stages):
            if stage == self.me.stage:
                continue
            for replica in live[stage]:
                speaker = replica if replica in mine else mine[replica % len(mine)]
                if speaker == self.me.replica:
                    yield Worker(replica, stage)

    # -------------------------------------------------------------- looking things up

    def _is_wanted(self, parcel: Parcel) -> bool:
        if parcel.what is What.FEED:
            return self.joining
        if parcel.attempt != self._attempt(parcel.step):
            return parcel.attempt > self._attempt(parcel.step)
        oldest = self.before.step if self.before is not None else self.now.step
        if parcel.step < oldest:
            return False
        state = self.now if parcel.step == self.now.step else None
        match parcel.what:
            case What.ACTIVATION:
                return parcel.step > self.now.step or (
                    state is not None and not state.has_run(Kind.F, parcel.microbatch, parcel.stage))
            case What.GRADIENT:
                return parcel.step > self.now.step or (
                    state is not None and not state.has_run(Kind.I, parcel.microbatch, parcel.stage))
            case What.PART | What.SUM:
                return parcel.step > self.now.step or (
                    state is not None and not state.holds_sum and parcel.round >= state.round)
            case What.COPY:
                return parcel.step > self.now.step or (state is not None and not state.holds_sum)
            case _:
                return True

    def _attempt(self, step: int) -> int:
        return [attempt for first, attempt in self.attempts if first <= step][-1]

    def _open_states(self) -> list[StepState]:
        return [self.now] if self.before is None else [self.before, self.now]

    def _members(self, step: int) -> Members:
        fitting = [m for m in self.members if m.from_step <= step]
        return fitting[-1] if fitting else self.members[0]

    def peers(self, step: int) -> tuple[int, ...]:
        """The replicas of this worker's stage in a step, itself among them."""
        return self._members(step).live[self.me.stage]

    def _other_peers(self, step: int) -> list[Worker]:
        return [Worker(k, self.me.stage) for k in self.peers(step) if k != self.me.replica]

    def _round(self, step: int) -> int:
        return self._members(step).rounds[self.me.stage]

    def _host(self, step: int, microbatch: Microbatch, stage: int) -> int:
        return self.hosts.get(step, self.steady_hosts).get((microbatch, stage), microbatch.home)

    def _part(self, state: StepState, *, sender: int, owner: int) -> Parcel:
        return Parcel(What.PART, self._attempt(state.step), state.step, self.me.stage, None, state.round, sender, owner)

    def _chunk(self, state: StepState, *, owner: int) -> Parcel:
        return Parcel(What.SUM, self._attempt(state.step), state.step, self.me.stage, None, state.round, owner)

    def _all_hold(self, state: StepState) -> bool:
        held = (Parcel(What.HELD, self._attempt(state.step), state.step, self.me.stage, sender=peer.replica)
                for peer in self._other_peers(state.step))
        return all(parcel in self.box for parcel in held)

    def _whole(self, step: int) -> tuple[float | None, Part | None]:
        """The facts that go with a copy of a sum."""
        state = next(s for s in self._open_states() if s.step == step)
        return state.reduced_squares, state.everyone

    def _is_tied(self) -> bool:
        return self.rules.tied is not None and self.me.stage in self.rules.tied

    def _drop_sent(self, step: int) -> None:
        over = tuple(parcel for parcel in self.outbox if parcel.step == step)
        for parcel in over:
            del self.outbox[parcel]
        if over:
            self._commands.append(Forget(over))

    def _drop(self, is_over: Callable[[Parcel], bool]) -> None:
        """Forget parcels, received or sent. A feed is final whatever the attempt; it is only ever used up."""
        over = [p for p in self.box if is_over(p) and p.what is not What.FEED]
        for parcel in over:
            del self.box[parcel]
        sent = [p for p in self.outbox if is_over(p)]
        for parcel in sent:
            del self.outbox[parcel]
        if over or sent:
            self._commands.append(Forget((*over, *sent)))

    def _use(self, parcel: Parcel) -> None:
        if self.box.pop(parcel, self) is not self:
            self._commands.append(Forget((parcel,)))

    def _send(self, parcel: Parcel, to: Worker, value: Any = None) -> None:
        if to.replica in self._members(parcel.step).live[to.stage]:
            self._commands.append(Send(parcel, to.replica, to.stage, value))
