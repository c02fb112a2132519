"""The steps that are open at a worker: the one it is in, and the one before until no peer can need it.

Walks the op list of the current step: which op is next, which parcel it needs, which one it makes.
"""

from __future__ import annotations

from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState, SumState
from everstep.core.worker.votes import Votes
from everstep.protocol.ops import Kind, Op
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import Compute, DropStashes, ReleaseSum, Wait, WorkItem


class OpenSteps:
    def __init__(self, mail: Mailbox, rules: TaskRules, votes: Votes) -> None:
        self.mail, self.rules, self.votes = mail, rules, votes
        self.now = StepState(step=1, round=0)
        self.before: StepState | None = None
        self.closed: int | None = None  # the last one; a peer may not know yet that it is sealed

    @property
    def all(self) -> list[StepState]:
        return [self.now] if self.before is None else [self.before, self.now]

    @property
    def last_step(self) -> int:
        """Of the task, or of this shape of it."""
        until = self.mail.order.until
        return self.rules.steps if until is None else until

    @property
    def is_trusted(self) -> bool:
        """Is the step before final, so that what is computed on it counts?"""
        return self.before is None or self.before.is_final

    # -------------------------------------------------------------- from step to step

    def enter(self, step: int) -> None:
        self.now = StepState(step=step, round=self.mail.round(step))
        self.take_list()

    def take_list(self) -> None:
        """The ops of the current step, as the order in force has them."""
        step = self.now.step
        self.now.todo = list(reversed(self.mail.order.ops(step))) if step <= self.last_step else []

    def advance(self) -> None:
        """The current step is updated: it becomes the one before, and the one before is closed."""
        if self.before is not None:
            self._close(self.before)
        self.before = self.now
        self.enter(self.now.step + 1)

    def _close(self, state: StepState) -> None:
        assert state.is_sealed
        assert state.is_final
        self.closed = state.step
        self.release_sum(state)
        self.mail.drop(lambda parcel: parcel.step <= state.step)

    def release_sum(self, state: StepState) -> None:
        """Sealed at every stage and updated for good: neither its sum nor a ghost can be asked for."""
        if state.sum is SumState.RELEASED:
            return
        state.released()
        if state.ghosts and (over := state.ghost_stashes(Kind.F, Kind.I)):
            self.mail.commands.append(DropStashes(state.step, over))
        self.mail.commands.append(ReleaseSum(state.step))

    def go_back_to(self, step: int) -> int | None:
        """Forget what was computed after `step`. Returns the step whose eager update must be undone."""
        before, undo = self.before, None
        if before is not None and before.is_provisional:
            undo, self.before = before.step, None
            if before.step == step:
                self.now = before
        if self.now.step > step:
            self.enter(step + 1)
        return undo

    def start_over(self, step: int) -> None:
        self.before = self.closed = None
        self.enter(step)

    # -------------------------------------------------------------- ops

    def next_compute(self, op: Op) -> WorkItem:
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
        ghost = (step, microbatch) in self.mail.order.ghosts
        return Compute(op, step, needs, makes, ghost, self.votes.is_hashed(microbatch, step, op.stage))

    def computed(self, task: Compute) -> None:
        done = self.now.todo.pop()
        assert done == task.op, f"{task.op} was run while {done} was next"
        self.now.record(task.op, ghost=task.ghost)
        if task.input is not None:
            self.mail.use(task.input)
        if task.output is not None:
            self.mail.post(task.output)
            self.votes.post(task.output)
        if task.ghost:
            self.drop_ghosts()

    def drop_ghosts(self) -> None:
        """A worker that holds the sum never runs W of a ghost. One that does not may have to: the last holder
        may die. A ghost that has run F alone may be asked for its I until the step is closed.
        """
        if self.now.holds_sum and (over := self.now.ghost_stashes(Kind.I)):
            self.mail.commands.append(DropStashes(self.now.step, over))

    # -------------------------------------------------------------- parcels

    def wants(self, parcel: Parcel) -> bool:
        """Can this parcel, of the attempt that counts, still be of use?"""
        now = self.now
        if parcel.step != now.step:
            is_open = self.before is not None and parcel.step == self.before.step
            return parcel.step > now.step or (is_open and parcel.what in _OF_A_STEP_THAT_IS_UPDATED)
        match parcel.what:
            case ParcelKind.ACTIVATION:
                return not now.has_run(Kind.F, parcel.microbatch, parcel.stage)
            case ParcelKind.GRADIENT:
                return not now.has_run(Kind.I, parcel.microbatch, parcel.stage)
            case ParcelKind.PART | ParcelKind.SUM | ParcelKind.COPY:
                return not now.holds_sum and parcel.round >= now.round
            case _:
                return True

    def may_want(self, parcel: Parcel) -> bool:
        """While this worker is interrupted: the order to come may take back the op that had used it."""
        oldest = self.now.step if self.before is None else self.before.step
        return parcel.step >= oldest


_OF_A_STEP_THAT_IS_UPDATED = (ParcelKind.HELD, ParcelKind.NEWS)
