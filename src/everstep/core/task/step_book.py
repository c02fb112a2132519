"""The book of steps: which stages have sealed which step, what is recorded, and which step is the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from everstep.protocol.actions import RecordStep
from everstep.protocol.events import StepSealed
from everstep.protocol.shape import Shape
from everstep.protocol.work import SuspectedStep

UNVOTED_STEPS = 100  # so long a state waits for votes before it counts without
_KEPT_SHARES = 4  # steps
_WITNESSED = 256  # steps: of older ones a worker may have forgotten what it has to report


@dataclass(slots=True, kw_only=True)
class StepBook:
    shape: Shape
    steps: int  # of the whole task
    recorded: int
    closes: bool = False  # the last step only evaluates
    until: int | None = None  # the last step of this shape, if the task is to take another one
    stopping: str = ""  # why this shape ends
    final: bool = False  # the task ends with it
    saves: bool = False  # its last state is a checkpoint
    sealed: dict[int, dict[int, StepSealed]] = field(default_factory=dict)  # by step and stage
    shares: dict[int, dict[int, float]] = field(default_factory=dict)  # of the norm, of the last few steps
    verified: int = 0  # the last recorded step in which all that could did vote, or the state it began with
    is_voting: bool = False  # such a step was seen, or every step is
    every: bool = False  # step is voted on: one that is not was broken by a new epoch
    votes: bool = True  # there are to be votes, where the task's rules say so
    suspect: SuspectedStep | None = None  # a step that is computed again because of its numbers
    odd: int | None = None  # the last step whose NaN or spike came from data or model

    @property
    def last_step(self) -> int:
        return self.steps if self.until is None else self.until

    @property
    def is_full(self) -> bool:
        return self.recorded >= self.last_step

    def is_state_verified(self, step: int) -> bool:
        """Of a recorded step: have states been compared after its update? They are in the next step. Where
        every step is voted on, was it, or a later one?
        """
        is_old = step + UNVOTED_STEPS <= self.recorded
        is_voted = not self.every or step <= self.verified
        return not self.is_voting or (is_voted and step < self.recorded) or is_old or self.is_full

    @property
    def must_stop(self) -> bool:
        """This shape is to end, and its last step is not chosen yet."""
        return bool(self.stopping) and self.until is None

    def stop(self, because: str, *, final: bool, saves: bool) -> None:
        """After the step that is the last one when this is planned for."""
        self.stopping, self.final = because, self.final or final
        self.saves = self.saves or saves or final

    def go_on(self) -> None:
        """This shape does not end after all."""
        self.until, self.stopping, self.final, self.saves = None, "", False, False

    def stop_after(self, step: int) -> None:
        if self.must_stop and step < self.steps:
            self.until = step

    def seal(
        self,
        event: StepSealed,
        *,
        epoch: int,
        attempt: int,
        alone: Callable[[int], Collection[int]],
        has_witness: Callable[[int, int], bool] = lambda stage, step: False,
    ) -> list[RecordStep]:
        """One stage has sealed a step. Every step that all stages have sealed now is recorded, in order.
        `alone`: the stages that had one worker in a step. Their votes are not waited for. `has_witness`: does
        a worker live that was in this stage in this step?
        """
        oldest = self.recorded - _KEPT_SHARES
        if event.step > oldest:
            self.shares.setdefault(event.step, {})[event.stage] = event.sum_of_squares
            self.shares = {step: shares for step, shares in self.shares.items() if step > oldest}
        if event.step <= self.recorded:
            return []
        self.sealed.setdefault(event.step, {})[event.stage] = event
        self._imply_earlier_seals(event, has_witness)
        records = []
        while len(self.sealed.get(self.recorded + 1, {})) == self.shape.stages:
            step = self.recorded + 1
            records.append(
                self._record(self.sealed.pop(step), epoch=epoch, attempt=attempt, alone=alone(step))
            )
        return records

    def go_back_to(self, step: int, *, is_verified: bool) -> None:
        """The state of this step is restored: later steps are not recorded any more. That a state was kept
        says nothing of the steps it was made in, unless it `is_verified`.
        """
        self.recorded = step
        self.verified = step if is_verified else min(self.verified, step)
        self.sealed.clear()

    def void_from(self, step: int) -> None:
        """What was computed of this step and later ones does not count."""
        self.shares = {earlier: shares for earlier, shares in self.shares.items() if earlier < step}

    def hear_shares(self, known: Iterable[tuple[int, int, float]]) -> None:
        """What workers know of other stages' shares: those who had announced them may be dead."""
        oldest = self.recorded - _KEPT_SHARES
        for step, stage, share in known:
            if step > oldest:
                self.shares.setdefault(step, {}).setdefault(stage, share)

    def all_shares(self) -> tuple[tuple[int, int, float], ...]:
        return tuple((step, stage, x) for step, shares in self.shares.items() for stage, x in shares.items())

    @property
    def _total(self) -> int:
        return self.shape.replicas * self.shape.microbatches

    @property
    def _ops_of_a_stage(self) -> int:
        """In a step, if none is run twice."""
        return 3 * self._total

    def _imply_earlier_seals(self, event: StepSealed, has_witness: Callable[[int, int], bool]) -> None:
        """A stage seals its steps in order. If the only worker that knew of an earlier seal died before it
        could report it, this report stands for it too; the losses of that step are then lost. While a witness
        lives, its report is on its way: another node may be connected again sooner.
        """
        for step in range(self.recorded + 1, event.step):
            if event.stage in self.sealed.get(step, ()):
                continue
            if event.step - step < _WITNESSED and has_witness(event.stage, step):
                continue
            implied = StepSealed(
                step=step,
                stage=event.stage,
                attempt=event.attempt,
                microbatches=self._total,
                executed=self._ops_of_a_stage,
            )
            self.sealed.setdefault(step, {}).setdefault(event.stage, implied)

    def _record(
        self, stages: dict[int, StepSealed], *, epoch: int, attempt: int, alone: Collection[int]
    ) -> RecordStep:
        self.recorded += 1
        voted = {stage for stage, sealed in stages.items() if sealed.voted}
        if voted and len(voted.union(alone)) == len(stages):
            self.verified, self.is_voting = self.recorded, True
        last = self.shape.stages - 1
        once = all(sealed.microbatches == self._total for sealed in stages.values())
        squares = [sealed.sum_of_squares for sealed in stages.values()]
        norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        suspect = self.suspect if self.suspect is not None and self.suspect.step == self.recorded else None
        if suspect is not None:
            self.suspect = None
        return RecordStep(
            step=self.recorded,
            epoch=epoch,
            attempt=attempt,
            losses=stages[last].losses,
            norm=norm,
            microbatches_committed=self._total if once else 0,
            replayed_elsewhere=sum(sealed.executed - self._ops_of_a_stage for sealed in stages.values()),
            because="every stage has sealed it",
            scores=stages[last].scores,
            trains=not (self.closes and self.recorded == self.steps),
            suspect=suspect,
        )
