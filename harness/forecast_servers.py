"""Fork servers in a forecast: one per node, from which its workers are forked.

One that was killed is noticed when a worker is to start; then another one starts, and the worker waits for
it. One that is stopped forks nothing until it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.forecast_cores import Cores, Start

Deed = Callable[[], None]


@dataclass(slots=True)
class ForecastServer:
    starts: Start | None = None  # until it is up
    is_stopped: bool = False
    is_dead: bool = False
    waiting: list[Deed] = field(default_factory=list)


class ForkServers:
    """`work_s`: of one core, until one is up."""

    def __init__(self, cores: Cores, nodes: Sequence[str], work_s: float) -> None:
        self._cores, self._work_s = cores, work_s
        self._on = {node: ForecastServer() for node in nodes}

    def when_up(self, node: str, deed: Deed) -> None:
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
