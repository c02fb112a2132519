"""A task's checkpoints: which one to start from, and when one that is being written counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from everstep.checkpoint import folder
from everstep.checkpoint.search import Newest, newest_to_use
from everstep.engine.job import Job


class CheckpointDirectory:
    def __init__(self, job: Job) -> None:
        self.job = job

    def newest(self, known: int = 0) -> Newest:
        """The newest whole checkpoint; `NoStart` if that cannot be said, or needs an operator's word."""
        spec = self.job.checkpoint
        if spec is None:
            return Newest(0)
        root = folder.root_of(self.job.base, spec.folder)
        return newest_to_use(root, known=known, start_over=spec.start_over)

    def commit(self, step: int, told: list[dict[str, Any]]) -> None:
        """All parts of this step lie in the folder: from now on it is a checkpoint."""
        spec = self.job.checkpoint
        assert spec is not None
        root = folder.root_of(self.job.base, spec.folder)
        groups = merged(group for part in told for group in part.get("groups", ()))
        parts = [{key: value for key, value in part.items() if key != "groups"} for part in told]
        folder.commit(root, step, parts, self._meta(step), spec.keep, groups=groups)

    def _meta(self, step: int) -> dict[str, Any]:
        """What a run needs besides tensors. Data and random draws are functions of (seed, step, microbatch),
        the rate of the step: the step is the position of them all.
        """
        job, optimizer = self.job, self.job.optimizer
        return {
            "seed": job.seed,
            "steps": job.steps,
            "precision": job.precision,
            **job.model_card(),
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


def merged(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's groups of all stages: those of the same numbers are one."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        numbers = {key: value for key, value in group.items() if key != "params"}
        key = json.dumps(numbers, sort_keys=True)
        found.setdefault(key, {"params": [], **numbers})["params"].extend(group["params"])
    return list(found.values())
