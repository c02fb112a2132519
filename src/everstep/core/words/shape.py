"""The shape of a task: how many replicas, stages and microbatches, and the places that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.words.ops import Microbatch, Worker


@dataclass(frozen=True, slots=True)
class Shape:
    replicas: int
    stages: int
    microbatches: int  # per replica

    def workers(self) -> list[Worker]:
        return [Worker(k, s) for k in range(self.replicas) for s in range(self.stages)]

    def all_microbatches(self) -> list[Microbatch]:
        return [Microbatch(k, m) for k in range(self.replicas) for m in range(self.microbatches)]
