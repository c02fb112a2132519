"""The coordinator's machine: the real `Recovery`, a journal that is synced before anything is done, crashes.

    event arrives ──► appended ──► synced ──► handled ──► actions carried out
                         │            │
          a crash here: lost,         a crash here: replayed after the restart,
          its sender sends it again   and its actions are carried out then

Agents send an event until it is acknowledged, which is after the sync, and carry out an action once: that is
what makes a crash between the two harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from everstep.core.task.recovery import Recovery
from everstep.core.task.states import RecoveryPolicy
from everstep.core.words import actions as act
from everstep.core.words import events as ev
from everstep.core.words.shape import Shape
from everstep.sim.agenda import Agenda
from everstep.sim.storm.checkers import Checkers
from everstep.sim.storm.disk import JournalDisk
from everstep.sim.storm.spec import Spec

Entry = tuple[ev.Event, float]


class VirtualCoordinator:
    def __init__(
        self, spec: Spec, agenda: Agenda, checkers: Checkers, perform: Callable[[list[act.Action]], None]
    ) -> None:
        self.spec, self.agenda, self.checkers, self.perform = spec, agenda, checkers, perform
        self.journal: JournalDisk[Entry] = JournalDisk()
        self.waiting: deque[ev.Event] = deque()  # not acknowledged, so sent again after a restart
        self.recovery = self._fresh()
        self.up = True
        self.life = 0
        self.acted = 0  # entries whose actions have been carried out
        self._syncing = False
        self.dies_before_acting = False
        self.down_us = 0

    def _fresh(self) -> Recovery:
        rules = self.spec.rules
        policy = RecoveryPolicy(
            rejoin_after_steps=self.spec.rejoin_after_steps, max_restarts=self.spec.max_restarts
        )
        return Recovery(
            Shape(rules.replicas, rules.stages, rules.microbatches), steps=rules.steps, policy=policy
        )

    def begin(self) -> None:
        self.perform(self.recovery.begin())

    def hear(self, event: ev.Event) -> None:
        if not self.up:
            self.waiting.append(event)
            return
        self.journal.append((event, self.agenda.now_us / 1e6))
        if not self._syncing:
            self._syncing = True
            self.agenda.after(self.spec.weather.sync_us, self._synced, self.life)

    def _synced(self, life: int) -> None:
        if life != self.life or not self.up:
            return
        self._syncing = False
        self.journal.sync()
        if self.dies_before_acting:
            self.dies_before_acting = False
            self._go_down()
            return
        self._act()

    def _act(self) -> None:
        while self.up and self.acted < self.journal.synced:
            event, at = self.journal.entries[self.acted]
            self.acted += 1
            actions = self.recovery.handle(event, at)
            self.recovery.validate()
            if isinstance(event, ev.WorkerResumed) and event.epoch == self.recovery.epoch:
                self.checkers.resumed_in_epoch = event.epoch
            self.perform(actions)

    # -------------------------------------------------------------- crashes

    def crash(self, down_us: int, *, before_acting: bool) -> None:
        """Now, or between the next sync and what would have followed from it."""
        self.down_us = down_us
        if before_acting:
            self.dies_before_acting = True
        elif self.up:
            self._go_down()

    def _go_down(self) -> None:
        self.up = False
        self.life += 1
        self._syncing = False
        self.waiting.extend(event for event, _ in self.journal.crash())
        self.agenda.after(self.down_us, self._restart)

    def _restart(self) -> None:
        if self.up:
            return
        before = fingerprint(self.recovery)
        self.recovery = self.replayed(self.acted)
        self.checkers.journal_replayed(before, fingerprint(self.recovery))
        self.up = True
        question = self._unanswered()
        if question is not None:
            self.perform([question])
        self._act()
        while self.waiting:
            self.hear(self.waiting.popleft())

    def replayed(self, upto: int) -> Recovery:
        """The machine that the journal alone gives."""
        recovery = self._fresh()
        recovery.begin()
        self._asked: act.ComputePlan | None = None
        for event, at in self.journal.entries[:upto]:
            for action in recovery.handle(event, at):
                if isinstance(action, act.ComputePlan):
                    self._asked = action
        return recovery

    def _unanswered(self) -> act.ComputePlan | None:
        """The thinking that was under way died with the process: it is asked for again."""
        asked = self._asked
        if asked is None or any(
            isinstance(e, ev.PlanComputed) and e.epoch == asked.epoch for e, _ in self.journal.entries
        ):
            return None
        return asked


def fingerprint(recovery: Recovery) -> str:
    """All of its state, as text."""
    return repr((recovery.snapshot(), recovery.incidents))
