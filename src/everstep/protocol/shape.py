"""The shape of a task: how many replicas, stages, shards and microbatches, and the places that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from everstep.protocol.ops import Microbatch, Worker

CHUNKS_PER_REPLICA = 4  # of a stage's optimizer state: after a death they fall to different peers


class Fold(NamedTuple):
    """Which stage runs which part of the model, where a worker runs several (`virtual`). The pipeline is then
    longer than a replica has workers, and folded onto them:

        part               0  1  2  3  4  5  6  7
        stage, turning     0  1  2  3  3  2  1  0      the V of ZB-V: the turn needs no wire
        stage, else        0  1  2  3  0  1  2  3      interleaved

    The ops of a microbatch and boundary tensors belong to a part; a reduce, an update and a state belong to a
    stage, with all of its parts. With one part per stage the two are the same number.
    """

    stages: int
    virtual: int = 1
    turns: bool = True

    @property
    def parts(self) -> int:
        return self.stages * self.virtual

    def stage(self, part: int) -> int:
        times, at = divmod(part, self.stages)
        return self.stages - 1 - at if self.turns and times % 2 else at

    def parts_of(self, stage: int) -> tuple[int, ...]:
        """Of one worker, in the order of the pipeline."""
        return tuple(part for part in range(self.parts) if self.stage(part) == stage)


@dataclass(frozen=True, slots=True)
class Shape:
    replicas: int
    stages: int
    microbatches: int  # per replica
    chunks: int = 0  # of each stage's optimizer state, where its replicas share it; 0: each has all of it
    shards: int = 1  # processes per worker, each with a slot, on one node
    virtual: int = 1  # parts of the model that each worker runs
    turns: bool = True  # how they are folded onto the stages

    @property
    def fold(self) -> Fold:
        return Fold(self.stages, self.virtual, self.turns)

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
