"""How long ops take on this worker, and when that is worth telling.

Two times of an op. `F` is what it took. *Own* time is what it took less what this thread stood in line for a
core: it is the same on a crowded machine and on an empty one, and it grows when the worker itself has become
slow, whether its core, its device or its sleep takes the longer. The kernel counts the wait for a core
(`/proc/thread-self/schedstat`); where it does not, own is all of it.

Steps are reported one by one, so that slowness is seen in the step after its first; where steps take less
than a quarter of a second, 2, 4, 8 or 16 at once, so that telling stays cheap. Which steps those are follows
from the step's number: all workers of a job tell the same ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from everstep.protocol.ops import Kind
from everstep.schedule.profile import BOUNDARY, EAGER

_REPORT_AFTER_S = 0.25
_MOST_STEPS = 16
_ALWAYS_REPORTED = 3  # the first steps: the first schedule with measured times is made of them


class ClockReading(NamedTuple):
    clock_ns: int
    waited_ns: int


class WaitForCore:
    """Nanoseconds the thread that made this has stood in line for a core."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def __call__(self) -> int:
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0


class Stopwatch:
    def __init__(
        self,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        waited_ns: Callable[[], int] | None = None,
    ) -> None:
        """Made by the thread that runs the ops."""
        self._clock_ns, self._waited_ns = clock_ns, waited_ns or WaitForCore()
        self.times: dict[str, float] = {}  # "F": seconds an op takes, smoothed
        self._ops: dict[str, list[float]] = {}  # since the last report: how many, their own seconds
        self._updates = [0, 0]  # since the last report: all, and those that were eager
        self._step_s: float | None = None  # smoothed
        self._step_at_ns = self._reported_at_ns = self._steps = 0

    def moment(self) -> ClockReading:
        return ClockReading(self._clock_ns(), self._waited_ns())

    def op(self, kind: Kind, began: ClockReading) -> tuple[int, int]:
        """An op is over: when, and its own nanoseconds."""
        now = self.moment()
        took = now.clock_ns - began.clock_ns
        own = max(took - (now.waited_ns - began.waited_ns), 0)
        self._smooth(kind, took / 1e9)
        counted = self._ops.setdefault(str(kind), [0, 0.0])
        counted[0] += 1
        counted[1] += own / 1e9
        return now.clock_ns, own

    def device_op(self, kind: Kind, took_ns: int) -> None:
        """An op that a device has finished, by the device's own events."""
        self._smooth(kind, took_ns / 1e9)
        counted = self._ops.setdefault(str(kind), [0, 0.0])
        counted[0] += 1
        counted[1] += took_ns / 1e9

    def waited_for_data(self, seconds: float) -> None:
        """In one step."""
        self._smooth("data", seconds)

    def sent_boundary(self, num_bytes: int) -> None:
        self.times[BOUNDARY] = float(num_bytes)

    def updated(self, *, eagerly: bool) -> None:
        self._updates = [self._updates[0] + 1, self._updates[1] + eagerly]

    def step(self, step: int) -> dict[str, Any] | None:
        """A step is over here. What to report of it, if anything."""
        now = self._clock_ns()
        if self._step_at_ns:
            took = (now - self._step_at_ns) / 1e9
            self._step_s = took if self._step_s is None else 0.7 * self._step_s + 0.3 * took
        self._step_at_ns = now
        self._steps += 1
        if self._steps > _ALWAYS_REPORTED and step % self._every():
            return None
        if self._updates[0]:
            self.times[EAGER] = self._updates[1] / self._updates[0]
        report = {
            "step": step,
            "times": dict(self.times),
            "ops": {kind: (count, round(own, 9)) for kind, (count, own) in self._ops.items()},
            "seconds": (now - self._reported_at_ns) / 1e9 if self._reported_at_ns else 0.0,
        }
        self._ops.clear()
        self._updates = [0, 0]
        self._reported_at_ns = now
        return report

    def _every(self) -> int:
        every = 1
        while every < _MOST_STEPS and every * (self._step_s or _REPORT_AFTER_S) < _REPORT_AFTER_S:
            every *= 2
        return every

    def _smooth(self, name: str, seconds: float) -> None:
        self.times[name] = seconds if name not in self.times else 0.8 * self.times[name] + 0.2 * seconds
