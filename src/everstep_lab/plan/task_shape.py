"""A task's shape: replicas x stages x shards, and how the batch is cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """Shares of a whole step's time that do not grow with the work per worker; zeros: none, or unknown."""

    per_step: float = 0.0  # once per step whatever the number of microbatches: reduction and update
    bubble: float = 0.0  # of the pipeline


@dataclass(frozen=True, slots=True, order=True)
class ParallelShape:
    """Workers are numbered replica by replica, stage by stage, shard by shard."""

    replicas: int
    stages: int = 1
    shards: int = 1
    microbatch: int = 0  # sequences; 0 where it does not matter
    recompute: str = ""  # none, selective or full; "" where it does not matter

    @property
    def workers(self) -> int:
        return self.replicas * self.stages * self.shards

    @property
    def groups(self) -> int:
        """Places of one (replica, stage): a group of shards is lost when one of them is."""
        return self.replicas * self.stages

    def __str__(self) -> str:
        parts = [self.replicas, self.stages] + ([self.shards] if self.shards > 1 else [])
        return " x ".join(map(str, parts))
