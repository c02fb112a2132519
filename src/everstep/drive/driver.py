"""One way to run a machine that decides, wherever it runs.

    event ──► waits ──► written down (store) ──► handled (machine) ──► what follows goes to the port
                              │                                          │
         a crash before: its sender sends it again        a crash before: it is read back and handled again

Events that wait are written in one batch; nothing is done about an event that is not durable. An answer that
a port gives at once waits like any other event, so all that follows from one event is carried out before the
next is handled. The driver also watches the clock for the machine.

The daemon, the local run, the storms and the tests differ in their ports and in nothing else. After a restart
the journal is read back through `replay`: the same events, the same decisions, and nothing is done twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from everstep.protocol.moment import Moment

E = TypeVar("E")
A = TypeVar("A")
E_contra = TypeVar("E_contra", contravariant=True)
MOST_AT_ONCE = 512  # events in one batch
BEFORE_ALL = Moment(0.0, 0)


class StateMachine(Protocol[E_contra, A]):
    def handle(self, event: E_contra, now: float) -> list[A]: ...

    def due_at(self) -> float | None:
        """When it wants to hear that time has passed, if at all."""

    def unfinished(self) -> list[A]:
        """After a restart: what may not have been carried out."""


class Clock(Protocol):
    def time(self) -> float: ...

    def wake_at(self, when: float) -> None:
        """Call `Driver.look_at_clock` then, or soon after."""


class Store(Protocol[E_contra]):
    def write(self, entries: Sequence[tuple[float, E_contra]], done: Callable[[], None]) -> None:
        """Make them durable, in order; then call `done`. Never called again before that."""


@dataclass(frozen=True, slots=True)
class Handled(Generic[E, A]):
    """An event, its number in the journal, and what follows from it."""

    number: int
    at: float
    event: E | None  # None: what was left unfinished before a restart
    actions: list[A]
    replayed: bool  # read from the journal: it was carried out before, or will be asked for again


class Driver(Generic[E, A]):
    def __init__(
        self,
        machine: StateMachine[E, A],
        *,
        clock: Clock,
        store: Store[E],
        port: Callable[[Handled[E, A]], None],
        time_passed: E,
        decide: Callable[[E, float], list[A]] | None = None,
        last: Moment = BEFORE_ALL,
        most_at_once: int = MOST_AT_ONCE,
    ) -> None:
        """`last`: of the last event that is already in the machine's state. `decide`: in place of
        `machine.handle`, to measure it or to survive its errors.
        """
        self.machine, self.number = machine, last.event
        self._clock, self._store, self._port = clock, store, port
        self._decide = decide or machine.handle
        self._time_passed, self._most_at_once = time_passed, most_at_once
        self._now = last.at
        self._waiting: deque[tuple[E, Callable[[], None] | None]] = deque()
        self._is_writing = self._is_pumping = self._is_closed = False
        self._is_time_waiting = False
        self._woken_for: float | None = None

    @property
    def num_waiting(self) -> int:
        """Events that are not on their way into the store yet."""
        return len(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Everything that was heard is durable and handled."""
        return not self._waiting and not self._is_writing

    @property
    def now(self) -> float:
        """The time of the last event."""
        return self._now

    def hear(self, event: E, handled: Callable[[], None] | None = None) -> None:
        """Something has happened. `handled` is called once it is durable and carried out."""
        if not self._is_closed:
            self._waiting.append((event, handled))
            self._pump()

    def look_at_clock(self) -> None:
        """Is something due?"""
        self._woken_for = None
        due = self.machine.due_at()
        if due is None or self._is_time_waiting:
            return
        if due > self._clock.time():
            self._wake_when_due()
        else:
            self._is_time_waiting = True
            self.hear(self._time_passed)

    def replay(self, entries: Iterable[tuple[float, E]], *, carried_out: int | None = None) -> None:
        """Handle what is in the journal. `carried_out`: the number of the last entry that was carried out,
        where that is known; later ones are carried out now.
        """
        for at, event in entries:
            self._now = max(self._now, at)
            self._handle(event, at, replayed=carried_out is None or self.number < carried_out)

    def resume(self) -> None:
        """After the journal is read: carry out what may be unfinished."""
        self._port(Handled(self.number, self._now, None, self.machine.unfinished(), replayed=False))
        self._wake_when_due()

    def close(self) -> list[E]:
        """Nothing is handled from now on. The events that waited to be written."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, deque()
        return [event for event, _ in waiting]

    def _pump(self) -> None:
        """Write what waits, batch by batch: a store may answer at once, or much later."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._waiting and not self._is_writing and not self._is_closed:
                self._write_batch()
        finally:
            self._is_pumping = False

    def _write_batch(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._most_at_once))]
        self._now = max(self._now, self._clock.time())
        self._is_writing = True
        entries = [(self._now, event) for event, _ in batch]
        self._store.write(entries, partial(self._written, batch, self._now))

    def _written(self, batch: list[tuple[E, Callable[[], None] | None]], now: float) -> None:
        if self._is_closed:
            return
        for event, handled in batch:
            self._handle(event, now, replayed=False)
            if handled is not None:
                handled()
        self._is_writing = False
        self._wake_when_due()
        self._pump()

    def _handle(self, event: E, at: float, *, replayed: bool) -> None:
        if event == self._time_passed:
            self._is_time_waiting = False
        actions = self._decide(event, at)
        self.number += 1
        self._port(Handled(self.number, at, event, actions, replayed))

    def _wake_when_due(self) -> None:
        due = self.machine.due_at()
        if due is not None and due != self._woken_for and not self._is_closed:
            self._woken_for = due
            self._clock.wake_at(due)
