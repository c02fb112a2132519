"""A step with a NaN, or with a loss far outside its recent band, is computed again before it counts.

A bad machine, bad data and a diverging model can all give such a step. The first one does not give it twice
on another worker, the other two do:

    the losses of all microbatches are here ──► suspicious: report it, and hold this worker's chunk of the sum
    or the chunk's sum is not finite            no peer can hold the sum, so the weights stay in place
                                            ──► a new epoch: the step from its beginning, voted on as a whole
    the same loss again                     ──► data or model: it counts, or is skipped, as the job says
    another loss                            ──► a machine: what counts is the second run

The coordinator tells every worker the loss of the first run, so all of them judge the second one alike. A
step that is skipped is announced with a norm that is not a number: that is how all stages skip a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState
from everstep.protocol.events import StepSuspected
from everstep.protocol.ops import Microbatch
from everstep.protocol.work import SuspectedStep, Wait, is_quiet, mean_loss

BAND = 32  # steps
LEAST = 12  # of them must be known
LEAST_SPREAD = 0.02  # of the median: losses that hardly change at all have no spread to speak of
MOST_SHOWN = 8


def why_spike(loss: float, before: Sequence[float], spike: float) -> str:
    """Why this loss is far above those of the steps before it; empty: it is not. The median and the median
    distance from it: a few odd losses among them do not move the band.
    """
    if len(before) < LEAST or not spike:
        return ""
    middle = statistics.median(before)
    spread = max(
        1.4826 * statistics.median(abs(each - middle) for each in before), LEAST_SPREAD * abs(middle)
    )
    if loss <= middle + spike * spread:
        return ""
    return f"its loss is {loss:.4g}; the last {len(before)} steps had {middle:.4g} (spread {spread:.2g})"


class Suspicion:
    """Owns the losses of recent steps, and whether this worker holds a sum back."""

    def __init__(self, mail: Mailbox, rules: TaskRules) -> None:
        self.mail, self.rules = mail, rules
        self._losses: dict[int, float] = {}
        self._held: SuspectedStep | None = None
        self._odd: int | None = None  # the last step whose numbers came from data or model

    def begin_epoch(self) -> None:
        """A report that came too late for its epoch is made again, if its step is still suspicious."""
        self._held = None
        order = self.mail.order
        if order.suspect is not None and order.rewind is None and order.restore is None:
            self._odd = order.suspect.step  # it is not computed again

    def next(self, state: StepState) -> Wait | None:
        """Before a chunk is summed, when the losses of all microbatches are known. None: nothing is held."""
        if self._held is not None:
            return Wait(f"the replay of step {state.step}")
        if (loss := self._loss(state)) is None:
            return None
        if self._is_again(state):
            self._odd = state.step
            return None
        because = self._why(state.step, loss) if self._is_looked_at(state.step) else ""
        if not because:
            # Later ones are of steps that are done again, from a kept state.
            self._losses = {step: known for step, known in self._losses.items() if step < state.step}
            if math.isfinite(loss):
                self._losses[state.step] = loss
            while len(self._losses) > BAND:
                del self._losses[min(self._losses)]
            return None
        assert state.everyone is not None
        worst = sorted(state.everyone.losses, key=_size, reverse=True)[:MOST_SHOWN]
        self._hold(SuspectedStep(step=state.step, loss=loss, losses=tuple(worst)), because)
        return Wait(f"the replay of step {state.step}")

    def _why(self, step: int, loss: float) -> str:
        if not math.isfinite(loss):
            return "its loss is not finite" if self.rules.replays else ""
        before = [known for each, known in self._losses.items() if each < step]
        return why_spike(loss, before, self.rules.spike)

    def holds_sum(self, state: StepState, squares: Sequence[float]) -> bool:
        """A gradient that is not finite, of finite losses."""
        if all(map(math.isfinite, squares)) or not self.rules.replays:
            return False
        if not self._is_looked_at(state.step):
            self._odd = state.step
            return False
        loss, stage = self._loss(state), self.mail.me.stage
        found = SuspectedStep(step=state.step, loss=math.nan if loss is None else loss, stage=stage)
        self._hold(found, f"the gradient of stage {stage} is not finite")
        return True

    def skip_if_again(self, state: StepState) -> None:
        """The order says to skip this step if its loss is the same again: every stage skips a norm of NaN."""
        suspect = self.mail.order.suspect
        if suspect is not None and suspect.skips and self._is_again(state):
            state.reduced_squares = math.nan
            if state.sum_of_squares is not None:
                state.sum_of_squares = math.nan

    def _is_looked_at(self, step: int) -> bool:
        suspect, rules = self.mail.order.suspect, self.rules
        if suspect is not None and suspect.step == step:
            return False
        return not is_quiet(step, self._odd) and not (rules.closes and step >= rules.steps)

    def _is_again(self, state: StepState) -> bool:
        suspect, loss = self.mail.order.suspect, self._loss(state)
        return (
            suspect is not None and suspect.step == state.step and loss is not None and suspect.is_again(loss)
        )

    def _loss(self, state: StepState) -> float | None:
        """None at a stage that has no losses."""
        return None if state.everyone is None else mean_loss(state.everyone.losses)

    def _hold(self, found: SuspectedStep, because: str) -> None:
        self._held = found
        self.mail.commands.append(
            StepSuspected(
                worker=self.mail.me,
                epoch=self.mail.order.epoch,
                found=found,
                because=f"step {found.step}: {because}",
            )
        )


def _size(one: tuple[Microbatch, float]) -> float:
    return one[1] if math.isfinite(one[1]) else math.inf
