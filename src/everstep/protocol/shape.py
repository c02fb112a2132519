"""The shape of a task: how many replicas, stages, shards and microbatches, and the places that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep.protocol.ops import Microbatch, Worker

CHUNKS_PER_REPLICA = 4  # of a stage's optimizer state: after a death they fall to different peers


@dataclass(frozen=True, slots=True)
class Shape:
    replicas: int
    stages: int
    microbatches: int  # per replica
    chunks: int = 0  # of each stage's optimizer state, where its replicas share it; 0: each has all of it
    shards: int = 1  # processes per worker, each with a slot, on one node

    def __str__(self) -> str:
        counts = [self.replicas, self.stages] + ([self.shards] if self.shards > 1 else [])
        return "x".join(map(str, counts))

    def cut(self, replicas: int, stages: int, shards: int | None = None) -> Shape:
        """The same batch on other workers. Chunks follow the number of replicas; shards stay if not given."""
        total = self.replicas * self.microbatches
        chunks = CHUNKS_PER_REPLICA * replicas if self.chunks else 0
        each, shards = total // replicas, shards or self.shards
        return replace(
            self, replicas=replicas, stages=stages, microbatches=each, chunks=chunks, shards=shards
        )

    def workers(self) -> list[Worker]:
        return [Worker(k, s) for k in range(self.replicas) for s in range(self.stages)]

    def all_microbatches(self) -> list[Microbatch]:
        return [Microbatch(k, m) for k in range(self.replicas) for m in range(self.microbatches)]
