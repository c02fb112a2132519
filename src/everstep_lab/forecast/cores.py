"""Who has how much of the cores in a forecast: tasks that train, programs that start, fork servers.

Cores are fewer than processes, and every process gets as much as any other. A task counts as many processes
as its share says that was measured while all kinds of tasks trained beside each other; then it is as much
slower than alone as others are there. A program that starts is one process, and has so many seconds of one
core to do; beside eight workers on two cores it takes four to five times as long as alone.

Each node has a fork server, from which its workers are forked. A killed one is noticed when a worker is to
start; then another one starts, and the worker waits for it. A stopped one forks nothing until it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everstep_lab.agenda import Agenda


@dataclass(slots=True, eq=False)
class Start:
    """A program that starts."""

    left_s: float  # of one core; infinite: it is up when the trace says so
    up: Callable[[], None]
    is_stopped: bool = False
    rate: float = 0.0  # cores
    since_s: float = 0.0
    number: int = 0  # of the last appointment


class Cores:
    """`training`: how many processes of tasks are busy now. `changed`: is called when programs come or go."""

    def __init__(
        self, agenda: Agenda, count: int, *, training: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self.count = count
        self._agenda, self._training, self._changed = agenda, training, changed
        self._starts: list[Start] = []

    def start(self, work_s: float, up: Callable[[], None]) -> Start:
        """`up` is called when it has had so many seconds of one core."""
        found = Start(work_s, up, since_s=self._now())
        self._starts.append(found)
        self._changed()
        return found

    def end(self, start: Start) -> None:
        if start in self._starts:
            self._starts.remove(start)
            self._changed()

    def hold(self, start: Start, *, is_stopped: bool) -> None:
        start.is_stopped = is_stopped
        self._changed()

    def share_left(self) -> float:
        """Of all cores, what programs that start leave to tasks."""
        return max(0.0, 1.0 - self._each() * self._busy() / self.count)

    def settle(self) -> None:
        """How fast does each one start now?"""
        now, each = self._now(), self._each()
        for start in self._starts:
            start.left_s -= (now - start.since_s) * start.rate
            start.since_s, start.rate = now, 0.0 if start.is_stopped else each
            start.number += 1
            if start.rate and start.left_s < float("inf"):
                left_us = max(1, int(max(0.0, start.left_s / start.rate) * 1e6))
                self._agenda.after(left_us, self._is_up, start, start.number)

    def _is_up(self, start: Start, number: int) -> None:
        if start in self._starts and start.number == number:
            self._starts.remove(start)
            self._changed()
            start.up()

    def _busy(self) -> int:
        return sum(not start.is_stopped for start in self._starts)

    def _each(self) -> float:
        """The part of one core that a program has."""
        return min(1.0, self.count / max(1.0, self._busy() + self._training()))

    def _now(self) -> float:
        return self._agenda.now_us / 1e6


@dataclass(slots=True)
class ForecastServer:
    starts: Start | None = None  # until it is up
    is_stopped: bool = False
    is_dead: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)


class ForkServers:
    """`work_s`: of one core, until one is up."""

    def __init__(self, cores: Cores, nodes: Sequence[str], work_s: float) -> None:
        self._cores, self._work_s = cores, work_s
        self._on = {node: ForecastServer() for node in nodes}

    def when_up(self, node: str, deed: Callable[[], None]) -> None:
        here = self._on[node]
        if here.is_dead:
            self.start(node)
        if here.starts is not None or here.is_stopped:
            here.waiting.append(deed)
        else:
            deed()

    def start(self, node: str) -> None:
        here = self._on[node]
        self._end(here)
        here.starts = self._cores.start(self._work_s, lambda: self._up(node))

    def kill(self, node: str) -> None:
        here = self._on[node]
        self._end(here)
        here.is_dead = True
        if here.waiting:
            self.start(node)

    def lose(self, node: str) -> None:
        """With its node, and all that waits for it."""
        self._on[node].waiting = []
        self.kill(node)

    def stop(self, node: str, *, is_stopped: bool) -> None:
        here = self._on[node]
        here.is_stopped = is_stopped and not here.is_dead
        if here.starts is not None:
            self._cores.hold(here.starts, is_stopped=is_stopped)
        elif not is_stopped and not here.is_dead:
            self._up(node)

    def _end(self, here: ForecastServer) -> None:
        if here.starts is not None:
            self._cores.end(here.starts)
        here.starts, here.is_stopped, here.is_dead = None, False, False

    def _up(self, node: str) -> None:
        here = self._on[node]
        waiting, here.starts, here.waiting = here.waiting, None, []
        for deed in waiting:
            deed()
