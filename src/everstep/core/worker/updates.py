"""Seal, validate, update: what follows once a worker holds the sum of a step.

A stage updates when the norm of all stages is known, or eagerly before that, where the norm will most likely
not matter. An eager update is validated later: then it is committed. An invalid one is reported, and undone
in the next epoch.
"""

from __future__ import annotations

import math

from everstep.core.worker.announcements import Announcements
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.open_steps import OpenSteps
from everstep.core.worker.reduction import Reduction
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import SealState, StepState, SumState, UpdateState
from everstep.protocol.events import UpdateInvalidated
from everstep.protocol.parcels import ParcelKind
from everstep.protocol.work import AdoptWeights, CombineTied, ReleaseGradients, Update, Wait, WorkItem


class Updates:
    """Owns the last norm that is known, by which it decides whether to update eagerly."""

    def __init__(
        self, mail: Mailbox, rules: TaskRules, steps: OpenSteps, reduction: Reduction, news: Announcements
    ) -> None:
        self.mail, self.rules, self.me = mail, rules, mail.me
        self.chunks = reduction.chunks
        self.steps, self.reduction, self.news = steps, reduction, news
        self.last_norm: float | None = None

    def settle(self, state: StepState) -> bool:
        """Draw the consequences of what has arrived. False: an eager update turned out invalid.

        A step that was computed on an update that is not final is not announced: else another stage could
        make its own update of it final, and would have no way back.
        """
        if state.seal is SealState.OPEN and state.holds_sum and self.reduction.all_hold(state):
            state.sealed()
            self.news.send_tied(state)
        counts = state is self.steps.before or self.steps.is_trusted
        if state.seal is SealState.SEALED and counts and state.sum_of_squares is not None:
            state.announced()
            self.news.announce(state, state.sum_of_squares)
        if state.seal is SealState.ANNOUNCED and (norm := self.norm(state)) is not None:
            state.completed()
            self.mail.drop_sent(state.step)  # no boundary tensor of it is needed again
            if state.update is UpdateState.EAGER:
                self._validate(state, norm)
        return state.update is not UpdateState.INVALID

    def _validate(self, state: StepState, norm: float) -> None:
        """An eager update was made as if the norm did not matter. Does it?"""
        if self.rules.scale(norm) == 1.0:
            state.validated()
            self.last_norm = norm
        else:
            state.invalidated()
            attempt = self.mail.order.attempt(state.step + 1)
            self.mail.commands.append(
                UpdateInvalidated(worker=self.me, step=state.step, norm=norm, attempt=attempt)
            )

    def next(self) -> WorkItem:
        """The update of the current step, or what it waits for."""
        now, before = self.steps.now, self.steps.before
        if before is not None and not (before.is_sealed and before.is_final):
            return Wait(f"the seal and norm of step {before.step}")
        if self.rules.is_tied(self.me.stage) and now.sum is not SumState.COMBINED:
            if not now.is_sealed:  # after combining, the sum is no longer what a peer could lack
                return Wait(f"the seal of step {now.step}")
            other = self.mail.name(ParcelKind.TIED, now.step, self.rules.other_tied(self.me.stage))
            return CombineTied(now.step, other) if other in self.mail.box else Wait(str(other))
        norm = self.norm(now)
        if self.rules.chunks:
            if norm is None or not now.is_sealed:  # before the seal the reduce may have to start over
                return Wait(f"the seal and norm of step {now.step}")
            return self.chunks.next(now, self.rules.scale(norm))
        if norm is not None:
            return Update(now.step, self.rules.scale(norm), keep=False)
        return (
            Update(now.step, 1.0, keep=True)
            if self._may_be_eager(now)
            else Wait(f"the norm of step {now.step}")
        )

    def _may_be_eager(self, now: StepState) -> bool:
        return (
            now.update is UpdateState.PENDING
            and now.sum_of_squares is not None
            and math.isfinite(now.sum_of_squares)
            and now.step < self.steps.last_step  # after the last step no epoch follows that could undo it
            and self.rules.allows_eager(now.step, self.last_norm)
        )

    def updated(self, task: Update) -> None:
        now = self.steps.now
        if self.rules.chunks:
            now.shared(task.scale)
            self.mail.commands.append(ReleaseGradients(task.step))
            self.chunks.updated(task)
            return
        now.todo.pop()
        now.updated(task.scale, eagerly=task.keep)
        if not task.keep:
            self.last_norm = self.norm(now)
        self.steps.advance()

    def adopted(self, task: AdoptWeights) -> None:
        """Every chunk's working weights are here."""
        now = self.steps.now
        now.todo.pop()
        now.committed()
        for weights in task.weights:
            self.mail.use(weights)
        self.last_norm = self.norm(now)
        self.steps.advance()
        self.chunks.entered(self.steps.now.step)

    def norm(self, state: StepState) -> float | None:
        """The gradient norm over all stages, once every stage's share is known."""
        squares: list[float] = []
        for stage in range(self.rules.stages):
            share = (
                state.sum_of_squares
                if stage == self.me.stage
                else self.mail.box.get(self.mail.name(ParcelKind.NEWS, state.step, stage))
            )
            if share is None:
                return None
            squares.append(float(share))
        return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan

    def norms(self) -> tuple[tuple[int, bool], ...]:
        """The open steps whose norm is known: does an eager update hold, if a worker has made one?"""
        known = ((state.step, self.norm(state)) for state in self.steps.all)
        return tuple(
            (step, self.rules.scale(norm) == 1.0 or not self.rules.can_be_eager(step))
            for step, norm in known
            if norm is not None
        )
