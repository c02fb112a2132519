"""What a worker sends to other stages, and to the coordinator, about the steps that its stage has sealed.

The last few announcements are kept and sent again in a new epoch or over a link that was mended: the worker
that sent them, or the one that received them, may be dead. Duplicates are dropped where they arrive.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.core.words.worker_messages import ParcelKind, TellSealed
from everstep.core.worker.mailbox import Mailbox
from everstep.core.worker.rules import TaskRules
from everstep.core.worker.step_state import StepState, SumState

_KEPT = 4  # steps


class Announcements:
    def __init__(self, mail: Mailbox, rules: TaskRules) -> None:
        self.mail, self.rules, self.me = mail, rules, mail.me
        self._recent: dict[int, TellSealed] = {}

    def announce(self, state: StepState, sum_of_squares: float) -> None:
        assert state.everyone is not None
        sealed = TellSealed(
            state.step,
            len(state.everyone.microbatches),
            state.everyone.executed,
            state.everyone.losses,
            sum_of_squares,
            self.mail.order.attempt(state.step),
            state.everyone.scores,
        )
        kept = {step: s for step, s in self._recent.items() if state.step - _KEPT < step < state.step}
        self._recent = {**kept, state.step: sealed}
        self._send(sealed)

    def repeat(self) -> None:
        for sealed in self._recent.values():
            self._send(sealed)

    def forget_all(self) -> None:
        self._recent.clear()

    def _send(self, sealed: TellSealed) -> None:
        step = sealed.step
        if self.mail.is_first_peer(step):
            self.mail.commands.append(replace(sealed, attempt=self.mail.order.attempt(step)))
        news = self.mail.name(ParcelKind.NEWS, step, self.me.stage)
        for worker in self.mail.listeners(step):
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
