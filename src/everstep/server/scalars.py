"""A run in TensorBoard: loss, pace, who is there, whose work was done by others, and incidents as text.

The same tags for `everstep train --tensorboard` and for every task of a coordinator. What goes wrong here
(a full disk) is reported once and stops nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.core.task.recovery import Recovery
from everstep.log import say
from everstep.protocol.incidents import Incident
from everstep.server.record import ClusterRecord
from everstep.server.tfevents import EventFile

FLUSH_S = 1.0


class RunScalars:
    """One run's file."""

    def __init__(self, folder: Path, *, say: Callable[[str], None] = say) -> None:
        self._file = EventFile(folder)
        self._say = say
        self._last = 0
        self._flushed_at = 0.0
        self._broken = False

    def step(self, row: Mapping[str, Any], recovery: Recovery | None, at: float) -> None:
        """A step is recorded; a repeated step replaces itself and all later ones."""
        values = {
            "train/loss": row["loss"],
            "train/grad_norm": row["grad_norm"],
            "pace/step_seconds": row["seconds"],
            "health/epoch": row["epoch"],
        }
        if recovery is not None:
            values |= membership(recovery, row["step"])
        finite = {tag: float(value) for tag, value in values.items() if value is not None}

        def write() -> None:
            if row["step"] <= self._last:
                self._file.goes_back(row["step"], at)
            self._file.scalars(row["step"], at, {t: v for t, v in finite.items() if not math.isnan(v)})
            self._last = row["step"]

        self._safely(write)

    def evaluation(self, step: int, values: Mapping[str, float], at: float) -> None:
        finite = {f"eval/{name}": value for name, value in values.items() if math.isfinite(value)}
        self._safely(lambda: self._file.scalars(step, at, finite))

    def incident(self, one: Incident, at: float) -> None:
        self._safely(lambda: self._file.text(one.step, at, f"incident/{one.number}", story(one)))

    def close(self) -> None:
        self._safely(self._file.close)

    def _safely(self, write: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            write()
            if time.monotonic() - self._flushed_at >= FLUSH_S:
                self._file.flush()
                self._flushed_at = time.monotonic()
        except OSError as error:
            self._broken = True
            self._say(f"no more scalars for TensorBoard: {error}")


class TaskScalars:
    """One file for every task of a coordinator, in a folder of the task's name."""

    def __init__(self, record: ClusterRecord, folder: Path) -> None:
        self._record, self._folder = record, folder
        self._tasks: dict[str, RunScalars] = {}

    def hear(self, news: Mapping[str, Any]) -> None:
        if not self._record.leads:  # the journal is being read: these were written before
            return
        tasks = self._record.machine.tasks
        match news["kind"]:
            case "step":
                self._of(news["task"]).step(news["row"], tasks[news["task"]].managed, news["at"])
            case "evaluation":
                self._of(news["task"]).evaluation(news["step"], news["values"], news["at"])
            case "IncidentClosed":
                for one in self._record.machine.log.incidents:
                    if one.number == news["incident"] and one.task:
                        self._of(one.task).incident(one, news["at"])
            case "TaskEnded" if news["task"] in self._tasks:
                self._tasks.pop(news["task"]).close()

    def close(self) -> None:
        for run in self._tasks.values():
            run.close()

    def _of(self, task: str) -> RunScalars:
        if task not in self._tasks:
            self._tasks[task] = RunScalars(self._folder / task, say=self._record.say)
        return self._tasks[task]


def membership(recovery: Recovery, step: int) -> dict[str, int]:
    """Who took part in a step; the work of an empty place is done by its peers."""
    now = [members for members in recovery.members if members.from_step <= step]
    shape = recovery.shape
    places = shape.replicas * shape.stages
    alive = sum(map(len, now[-1].live)) if now else places
    return {"health/workers": alive, "health/microbatches_rerouted": (places - alive) * shape.microbatches}


def story(one: Incident) -> str:
    """An incident in Markdown."""
    lines = [f"**{one.what}**, step {one.step}", ""]
    lines += [f"- evidence ({item.source}): {item.text}" for item in one.evidence]
    if one.verdict is not None:
        verdict = one.verdict
        lines.append(f"- verdict: SEV{verdict.severity} {verdict.kind}, because {verdict.because}")
    for remedy in one.remedies:
        outcome = f"; {remedy.outcome}" if remedy.outcome else ""
        lines.append(f"- remedy: {remedy.what}, because {remedy.because}{outcome}")
    if one.resumed_at is not None:
        lines.append(f"- closed after {(one.resumed_at - one.evidence_at) * 1e3:.0f} ms")
    return "\n".join(lines)
