"""A task's checkpoints: which one to start from, and when one that is being written counts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from everstep.checkpoint import folder
from everstep.engine.job import Job


class Checkpoints:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.refused: list[str] = []  # a sentence for each that was not believed
        self._parts: dict[int, dict[str, Any]] = {}

    def newest(self) -> int:
        """The step of the newest whole checkpoint, 0 if there is none. Refused ones make room."""
        spec = self.job.checkpoint
        if spec is None:
            return 0
        root = self.job.path(spec.folder)
        folder.clean(root)
        found, self.refused = folder.newest_valid(root)
        for step in folder.complete_steps(root):
            if found is None or step > found.step:
                shutil.rmtree(root / f"step-{step:08d}")
        return 0 if found is None else found.step

    def part_written(self, step: int, part: dict[str, Any]) -> None:
        self._parts.setdefault(step, {})[part["file"]] = part

    def commit(self, recorded: int) -> Iterator[int]:
        """Commit what is whole: all stages' parts are there and the step is on record. The steps
        committed.
        """
        spec = self.job.checkpoint
        for step in sorted(self._parts):
            if spec is not None and len(self._parts[step]) == self.job.stages and step <= recorded:
                parts = self._parts.pop(step)
                folder.commit(self.job.path(spec.folder), step, list(parts.values()), self._meta(), spec.keep)
                yield step

    def _meta(self) -> dict[str, Any]:
        return {"seed": self.job.seed, "steps": self.job.steps, "precision": self.job.precision}
