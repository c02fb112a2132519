"""A local run for TensorBoard: a watcher in front of another."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.drive.step_rows import StepRow
from everstep.launch.local.run import LocalTask, Watcher
from everstep.protocol.incidents import Incident
from everstep.server.scalars import RunScalars


class ScalarWatcher:
    def __init__(self, folder: Path, watch: Watcher) -> None:
        self._run, self._watch = RunScalars(folder), watch
        self._task: LocalTask | None = None

    def __call__(self, kind: str, what: Any) -> None:
        match what:
            case (int() as step, dict() as values) if kind == "evaluation":
                self._run.evaluation(step, values, time.time())
            case LocalTask():
                self._task = what
            case StepRow():
                recovery = self._task.recovery if self._task is not None else None
                self._run.step(asdict(what), recovery, time.time())
            case Incident():
                self._run.incident(what, time.time())
        self._watch(kind, what)

    def close(self) -> None:
        self._run.close()
