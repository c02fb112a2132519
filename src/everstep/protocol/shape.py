"""The shape of a task: how many replicas, stages, shards and microbatches, and the places that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

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
        return list(_workers(self.replicas, self.stages))

    def all_microbatches(self) -> list[Microbatch]:
        return list(_microbatches(self.replicas, self.microbatches))


@lru_cache(maxsize=16)  # asked several times per event, and there may be 16,384
def _workers(replicas: int, stages: int) -> tuple[Worker, ...]:
    return tuple([Worker(k, s) for k in range(replicas) for s in range(stages)])


@lru_cache(maxsize=16)
def _microbatches(replicas: int, each: int) -> tuple[Microbatch, ...]:
    return tuple([Microbatch(k, m) for k in range(replicas) for m in range(each)])
