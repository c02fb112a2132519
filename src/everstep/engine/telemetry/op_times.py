"""When ops begin and end, for schedules and detectors: by the clock on a CPU, by events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from everstep.engine.telemetry.recorder import WorkerRecorder
from everstep.engine.telemetry.stopwatch import ClockReading, Stopwatch
from everstep.net.completions import Completions
from everstep.protocol.ops import Kind

Began = tuple[ClockReading, Any]  # and the device's event, where there is a device


class OpTimes:
    def __init__(
        self,
        *,
        clock_ns: Callable[[], int],
        completions: Completions | None,
        recorder: WorkerRecorder | None,
    ) -> None:
        self.stopwatch = Stopwatch(clock_ns=clock_ns)
        self._clock_ns, self._completions, self.recorder = clock_ns, completions, recorder
        self.shows: Callable[[str], None] = lambda doing: None  # called when the host waits for the device

    def begin(self) -> Began:
        completions = self._completions
        return self.stopwatch.moment(), None if completions is None else completions.op_begins()

    def end(
        self, kind: Kind, began: Began, step: int, *, doing: str = "", slower: Iterable[float] = ()
    ) -> None:
        """An op is over; on a device it is launched, not over. `slower`: planted faults, which add to it."""
        started, event = began
        took_s = (self._clock_ns() - started.clock_ns) / 1e9
        if event is not None:
            took_s = self.stopwatch.times.get(str(kind), 0.0)
        for factor in slower:
            time.sleep((factor - 1) * took_s)
        if event is not None:
            self._launched(kind, event, step, doing or str(kind))
            return
        ended_ns, own_ns = self.stopwatch.op(kind, started)
        if self.recorder is not None:
            self.recorder.op(step, started.clock_ns, ended_ns, own_ns)

    def _launched(self, kind: Kind, event: Any, step: int, doing: str) -> None:
        assert self._completions is not None
        self._completions.op_launched(kind, step, event, doing, self.shows)
        for op in self._completions.finished_ops():
            self.stopwatch.device_op(op.kind, op.ended_ns - op.started_ns)
            if self.recorder is not None:
                self.recorder.op(op.step, op.started_ns, op.ended_ns, op.ended_ns - op.started_ns)
