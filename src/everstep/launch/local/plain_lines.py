"""A run as lines on stderr: plain ones for logs, pipes and scripts; on a terminal, one kept up to date below
the lines that are worth keeping.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from everstep.errors import printable
from everstep.job.job import Job
from everstep.launch.local.pace import Pace
from everstep.launch.local.report import evaluation_line, incident_line, resume_line, step_line
from everstep.launch.local.run import LocalTask
from everstep.log import say
from everstep.protocol import actions as act
from everstep.protocol.table import TABLE

HELD_S = 2.0  # a start is told after the incident it follows from, which is told when training goes on


class PlainLines:
    """A watcher. Long runs get about a hundred step lines, and all their incidents.

    `decisions`: also every action of recovery, with the time since the run began, and why. `say` gets a line,
    and by name what the line has as numbers.
    """

    def __init__(
        self,
        job: Job,
        *,
        every: int | None = None,
        decisions: bool = False,
        say: Callable[..., None] = say,
    ) -> None:
        self.job, self.decisions, self.say = job, decisions, say
        self._started = time.monotonic()
        self.every = every or max(1, job.steps // 100)
        self._begun = False
        self._starts: list[tuple[float, str]] = []  # not told yet, and since when
        self._pace = Pace(steps=job.steps) if every is not None else None

    def __call__(self, kind: str, what: Any) -> None:
        if self._pace is not None:
            self._pace.hear(kind, what)
        self._tell(kind, what)
        if kind == "incident" or (self._starts and time.monotonic() - self._starts[0][0] > HELD_S):
            for _, line in self._starts:
                self.say(line)
            self._starts.clear()

    def _tell(self, kind: str, what: Any) -> None:
        match kind, what:
            case "tick", LocalTask() if not self._begun:
                self._begin(what)
            case "step", row if row.step % self.every == 0 or row.step in (1, self.job.steps):
                rest = "" if self._pace is None else "  " + "  ".join(self._pace.words()[1:])
                self.say(step_line(row, self.job.steps) + rest, kind=kind, **row.document())
            case "incident", incident:
                self.say(incident_line(incident), kind=kind, incident=incident.number, step=incident.step)
            case "evaluation", (step, values):
                self.say(evaluation_line(step, values), kind=kind, step=step, values=values)
            case "page", page:
                is_seen = sys.stderr.isatty()
                self.say(
                    f"page: {page.address if is_seen else f'{page.place} (link: {page.kept_address()})'}"
                )
            case "warning", sentence:
                self.say(sentence, level=logging.WARNING)
            case "raised", (worker, error, traceback):
                trace = "" if error.startswith("UserError: ") else f"\n{traceback.rstrip()}"
                self.say(f"worker {worker} raised {error}{trace}")
            case "action", action if self.decisions:
                self._decision(action)
            case "action", act.StartWorker(incarnation=incarnation) if incarnation > 1:
                self._starts.append((time.monotonic(), f"starting {what.worker} again: {what.because}"))
            case "action", act.CopyState():
                self.say(what.because)

    def _decision(self, action: act.Action) -> None:
        who = " ".join(map(str, getattr(action, "workers", ())))
        what = TABLE[type(action)].sentence(action) + (f": {who}" if who else "")
        self.say(f"{time.monotonic() - self._started:9.3f} s  {what:<52} {action.because}")

    def _begin(self, task: LocalTask) -> None:
        self._begun = True
        for refused in task.outcome.refused_checkpoints:
            self.say(f"refused: {refused}")
        folder = self.job.checkpoint.folder if self.job.checkpoint else ""
        resumed = resume_line(task.outcome, folder)
        if resumed is not None:
            self.say(resumed)


# ------------------------------------------------------------------ on a terminal

FRAME_S = 0.1
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR = "\r\x1b[K"


class LiveLine:
    """A watcher. Incidents, evaluations and what went wrong are lines of their own, as without a terminal."""

    def __init__(self, job: Job) -> None:
        self.job, self._width = job, shutil.get_terminal_size((100, 24)).columns - 1
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
        self._write(f"{_CLEAR}{printable(line)}\n")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (BrokenPipeError, UnicodeEncodeError):  # training continues
            pass
