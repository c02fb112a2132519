"""A task's checkpoints: which one to start from, and when one that is being written counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
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
        root = folder.root_of(self.job.base, spec.folder)
        folder.clean(root)
        found, self.refused = folder.newest_valid(root)
        for step in folder.complete_steps(root):
            if found is None or step > found.step:
                folder.remove(root, step)
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
                root = folder.root_of(self.job.base, spec.folder)
                told = list(parts.values())
                folder.commit(root, step, told, self._meta(step), spec.keep, groups=self._groups(step, told))
                yield step

    def _meta(self, step: int) -> dict[str, Any]:
        """What a run needs besides tensors. Data and random draws are functions of (seed, step, microbatch),
        the rate of the step: the step is the position of them all.
        """
        job, optimizer = self.job, self.job.optimizer
        return {
            "seed": job.seed,
            "steps": job.steps,
            "precision": job.precision,
            "model": asdict(shape) if (shape := job.model.gpt()) is not None else {"build": job.model.build},
            "shape": {"replicas": job.replicas, "stages": job.stages, "microbatches": job.microbatches},
            "rng": {"kind": "of (seed, step, microbatch, layer)", "seed": job.seed},
            "scheduler": {
                "decay": optimizer.decay,
                "warmup": optimizer.warmup,
                "floor": optimizer.floor,
                "next_multiplier": job.rate(step),
            },
            "data": {"next_step": step + 1, "microbatches_in_step": job.microbatches_in_step},
        }

    def _groups(self, step: int, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups of our AdamW; a user's own optimizer says nothing of its groups here."""
        spec = self.job.optimizer
        if spec.build is not None:
            return []
        rows = [row for part in parts for row in part["slices"] if row["tensor"].startswith("model/")]
        found = []
        for is_matrix in (True, False):
            names = [row["tensor"][6:] for row in rows if (len(row["shape"]) > 1) == is_matrix]
            if names:
                found.append(
                    {
                        "params": names,
                        "lr": spec.lr * self.job.rate(step),
                        "initial_lr": spec.lr,
                        "betas": list(spec.betas),
                        "eps": spec.eps,
                        "weight_decay": spec.weight_decay if is_matrix else 0.0,
                    }
                )
        return found
