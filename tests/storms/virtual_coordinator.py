"""The real driver around a machine that decides, with a disk that forgets and a process that crashes.

    event arrives ──► appended ──► synced ──► handled ──► actions carried out
                         │            │
          a crash here: lost,         a crash here: replayed after the restart,
          its sender sends it again   and its actions are carried out then

Agents send an event until it is acknowledged, which is after the sync, and carry out an action once: that is
what makes a crash between the two harmless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from everstep.core.task.recovery import Course, Recovery
from everstep.core.task.states import RecoveryPolicy
from everstep.drive.driver import Driver, Handled, StateMachine
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol.shape import Shape
from tests.storms.disk import JournalDisk
from tests.storms.scene import Scene
from tests.storms.spec import Spec

E = TypeVar("E")
A = TypeVar("A")
E_contra = TypeVar("E_contra", contravariant=True)


class Decider(StateMachine[E_contra, A], Protocol[E_contra, A]):
    def validate(self) -> None: ...


class VirtualCoordinator(Generic[E, A]):
    """`fresh` makes the machine, `fingerprint` is all of its state. `orders_are_kept`: the machine keeps what
    was not carried out, so that after a restart everything in the journal has only to be read. `turned` is
    called when the process has died and when it is up again.
    """

    def __init__(
        self,
        scene: Scene,
        *,
        fresh: Callable[[], Decider[E, A]],
        fingerprint: Callable[[], str],
        port: Callable[[Handled[E, A]], None],
        time_passed: E,
        orders_are_kept: bool,
        turned: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec, self.agenda, self.checkers = scene.spec, scene.agenda, scene.checkers
        self._fresh, self._fingerprint, self._port = fresh, fingerprint, port
        self._time_passed, self._orders_are_kept, self._turned = time_passed, orders_are_kept, turned
        self.journal: JournalDisk[tuple[float, E]] = JournalDisk()
        self.waiting: deque[E] = deque()  # not acknowledged, so sent again after a restart
        self.up = True
        self.life = 0
        self.acted = 0  # entries whose actions have been carried out
        self.machine = fresh()
        self.driver = self._new_driver()
        self._dies_before_acting = False
        self._down_us = 0

    def _new_driver(self) -> Driver[E, A]:
        return Driver(self.machine, clock=self, store=self, port=self._take, time_passed=self._time_passed)

    def hear(self, event: E) -> None:
        if self.up:
            self.driver.hear(event)
        else:
            self.waiting.append(event)

    def replayed(self, upto: int) -> Decider[E, A]:
        """The machine that the journal alone gives."""
        machine = self._fresh()
        for at, event in self.journal.entries[:upto]:
            machine.handle(event, at)
        return machine

    # -------------------------------------------------------------- the driver's ports

    def time(self) -> float:
        return self.agenda.now_us / 1e6

    def wake_at(self, when: float) -> None:
        self.agenda.at(max(self.agenda.now_us + 1, int(when * 1e6) + 1), self._wake, self.life)

    def _wake(self, life: int) -> None:
        if self.up and life == self.life:
            self.driver.look_at_clock()

    def write(self, entries: Sequence[tuple[float, E]], done: Callable[[], None]) -> None:
        for entry in entries:
            self.journal.append(entry)
        self.agenda.after(self.spec.weather.sync_us, self._synced, self.life, done)

    def _synced(self, life: int, done: Callable[[], None]) -> None:
        if life != self.life or not self.up:
            return
        self.journal.sync()
        if self._dies_before_acting:
            self._dies_before_acting = False
            self._go_down()
        else:
            done()

    def _take(self, one: Handled[E, A]) -> None:
        self.acted = max(self.acted, one.number)
        self.machine.validate()
        self._port(one)

    # -------------------------------------------------------------- crashes

    def crash(self, down_us: int, *, before_acting: bool) -> None:
        """Now, or between the next sync and what would have followed from it."""
        self._down_us = down_us
        if before_acting:
            self._dies_before_acting = True
        elif self.up:
            self._go_down()

    def elect(self, span_us: int) -> None:
        """Another process takes over, nearly at once."""
        if self.up:
            self._down_us = span_us % 1_000
            self._go_down()

    def _go_down(self) -> None:
        self.up = False
        self.life += 1
        self.waiting.extend(event for _, event in self.journal.crash())
        self.waiting.extend(self.driver.close())
        self._turned()
        self.agenda.after(self._down_us, self._restart)

    def _restart(self) -> None:
        if self.up:
            return
        before, acted = self._fingerprint(), self.acted
        self.machine = self._fresh()
        self.driver = self._new_driver()
        self.driver.replay(self.journal.entries[:acted])
        self.checkers.journal_replayed(before, self._fingerprint())
        self.up = True
        rest = self.journal.entries[acted:]
        self.driver.replay(rest, carried_out=None if self._orders_are_kept else acted)
        self.driver.resume()
        self._turned()
        while self.waiting and self.up:
            self.hear(self.waiting.popleft())


class RecoveryMachine:
    """One task's recovery alone, as a machine that can be driven."""

    def __init__(self, spec: Spec) -> None:
        rules = spec.rules
        policy = RecoveryPolicy(rejoin_after_steps=spec.rejoin_after_steps, max_restarts=spec.max_restarts)
        shape = Shape(
            rules.replicas,
            rules.stages,
            rules.microbatches,
            rules.chunks,
        )
        self.recovery = Recovery(shape, Course(steps=rules.steps), policy=policy)
        self.first = self.recovery.begin()
        self._question: act.ComputePlan | None = None

    def handle(self, event: ev.Event, now: float) -> list[act.Action]:
        if isinstance(event, ev.PlanComputed) and self._question is not None:
            self._question = None if event.epoch == self._question.epoch else self._question
        actions = self.recovery.handle(event, now)
        for action in actions:
            if isinstance(action, act.ComputePlan):
                self._question = action
        return actions

    def due_at(self) -> None:
        return None

    def unfinished(self) -> list[act.Action]:
        """The thinking that was under way died with the process: it is asked for again."""
        return [] if self._question is None else [self._question]

    def validate(self) -> None:
        self.recovery.validate()


def fingerprint(recovery: Recovery) -> str:
    """All of its state, as text."""
    return repr((recovery.snapshot(), recovery.incidents))
