"""One line on a terminal that a run keeps up to date, and above it the lines that are worth keeping."""

from __future__ import annotations

import sys
import time
from typing import Any

from everstep.job.job import Job
from everstep.launch.local.pace import Pace
from everstep.launch.local.plain_lines import PlainLines
from everstep.launch.local.run import LocalTask

FRAME_S = 0.1
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"


class LiveLine:
    """A watcher. Incidents, evaluations and what went wrong are lines of their own, as without a terminal."""

    def __init__(self, job: Job, *, width: int = 100) -> None:
        self.job, self._width = job, width
        self.pace = Pace(steps=job.steps)
        self._lines = PlainLines(job, every=job.steps + 1, say=self._say)
        self._drawn_at, self._frame = 0.0, 0

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *error: Any) -> None:
        self._write(f"{_CLEAR}{self.text()}\n" if self.pace.row is not None else _CLEAR)

    def __call__(self, kind: str, what: Any) -> None:
        self.pace.hear(kind, what)
        if kind != "step":
            self._lines(kind, what)
        now = time.monotonic()
        if isinstance(what, LocalTask) and now - self._drawn_at >= FRAME_S:
            self._drawn_at = now
            self._frame += 1
            self._write(f"{_CLEAR}{self.text()[: self._width]}")

    def text(self) -> str:
        row, steps = self.pace.row, self.job.steps
        if row is None:
            count = self.job.replicas * self.job.stages
            which = "1 worker" if count == 1 else f"{count} workers"
            return f"{SPINNER[self._frame % len(SPINNER)]} starting {which}"
        bar = "█" * (20 * row.step // steps)
        return f"{bar:░<20} {row.step}/{steps}  {'  '.join(self.pace.words())}"

    def _say(self, line: str, **facts: Any) -> None:
        self._write(f"{_CLEAR}{line}\n")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (BrokenPipeError, UnicodeEncodeError):  # training continues
            pass
