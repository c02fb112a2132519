"""What a worker sends to other stages, and to the coordinator, about the steps that its stage has sealed.

The last few announcements are kept and sent again in a new epoch or over a link that was mended: the worker
that sent them, or the one that received them, may be dead. Duplicates are dropped where they arrive. For the
coordinator many more are kept: it may have been away for a hundred steps, and be back without the node whose
agent has kept the reports of the first peer.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState, SumState
from everstep.protocol.events import StepSealed
from everstep.protocol.parcels import ParcelKind

_KEPT = 4  # steps, for other stages
_KEPT_FOR_RECORD = 512  # for the coordinator


class Announcements:
    def __init__(self, mail: Mailbox, rules: TaskRules) -> None:
        self.mail, self.rules, self.me = mail, rules, mail.me
        self._recent: dict[int, StepSealed] = {}
        self._unrecorded: dict[int, StepSealed] = {}  # as far as this worker knows

    def announce(self, state: StepState, sum_of_squares: float) -> None:
        assert state.everyone is not None
        sealed = StepSealed(
            step=state.step,
            stage=self.me.stage,
            attempt=self.mail.order.attempt(state.step),
            microbatches=len(state.everyone.microbatches),
            executed=state.everyone.executed,
            losses=state.everyone.losses,
            sum_of_squares=sum_of_squares,
            scores=state.everyone.scores,
            voted=state.is_verified,
        )
        self._recent = {**_last(self._recent, state.step, _KEPT), state.step: sealed}
        self._unrecorded = {**_last(self._unrecorded, state.step, _KEPT_FOR_RECORD), state.step: sealed}
        self._report(sealed)
        self._send_news(sealed)

    def repeat(self) -> None:
        for sealed in self._recent.values():
            self._report(sealed)
            self._send_news(sealed)

    def begin_epoch(self) -> None:
        """The first peer may be another worker now: it reports what the coordinator has no record of."""
        recorded = self.mail.order.recorded
        self._unrecorded = {step: s for step, s in self._unrecorded.items() if step > recorded}
        for step, sealed in self._unrecorded.items():
            if step not in self._recent:
                self._report(sealed)
        self.repeat()

    def forget_all(self) -> None:
        self._recent.clear()
        self._unrecorded.clear()

    def _report(self, sealed: StepSealed) -> None:
        if sealed.step > self.mail.order.recorded and self.mail.is_first_peer(sealed.step):
            self.mail.commands.append(replace(sealed, attempt=self.mail.order.attempt(sealed.step)))

    def _send_news(self, sealed: StepSealed) -> None:
        news = self.mail.name(ParcelKind.NEWS, sealed.step, self.me.stage)
        for worker in self.mail.listeners(sealed.step):
            self.mail.send(news, worker, sealed.sum_of_squares)

    def send_tied(self, state: StepState) -> None:
        """The sum of the tied tensor goes to the stage that holds its other half."""
        is_over = state.sum is SumState.RELEASED and (
            state.tied_attempt != self.mail.order.attempt(state.step)
        )
        if self.rules.is_tied(self.me.stage) and not is_over:
            for worker in self.mail.listeners(state.step):
                if self.rules.is_tied(worker.stage):
                    self.mail.send(self.mail.name(ParcelKind.TIED, state.step, self.me.stage), worker)


def _last(kept: dict[int, StepSealed], step: int, number: int) -> dict[int, StepSealed]:
    """Of the steps before this one."""
    return {before: sealed for before, sealed in kept.items() if step - number < before < step}
