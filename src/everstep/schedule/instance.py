"""What a planner is asked: who lives, how long each op takes, what is done already.

Times are in any one unit (the engine uses seconds). They are per worker, because a slow worker is heavier, not dead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.core.ops import Kind, Microbatch, Worker
from everstep.errors import UserError

Grid = tuple[tuple[float, ...], ...]  # [replica][stage]


class Done(NamedTuple):
    """What a live worker has run of one (microbatch, stage) of a broken step. It pins the host: the stash is there."""

    host: int
    kinds: str  # "F", "FI" or "FIW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One step to schedule: `replicas` x `stages` workers, `microbatches` per replica."""

    replicas: int
    stages: int
    microbatches: int
    forward: Grid
    input_grad: Grid
    weight_grad: Grid
    hop: float = 0.0
    reduce: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    stash_cap: Mapping[Worker, int] | None = None  # most microbatches a worker may hold from F to W; None: no cap
    dead: frozenset[Worker] = frozenset()
    done: Mapping[tuple[Microbatch, int], Done] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in range(self.stages):
            if not self.live(stage):
                raise UserError(f"stage {stage} has no live worker; give it one, or restore from a checkpoint.")

    def live(self, stage: int) -> list[int]:
        """The replicas that live at a stage."""
        return [k for k in range(self.replicas) if Worker(k, stage) not in self.dead]

    def workers(self) -> Iterator[Worker]:
        """The live workers."""
        return (Worker(k, s) for k in range(self.replicas) for s in range(self.stages)
                if Worker(k, s) not in self.dead)

    def homes(self) -> Iterator[Microbatch]:
        return (Microbatch(k, m) for k in range(self.replicas) for m in range(self.microbatches))

    def time(self, kind: Kind, worker: Worker) -> float:
        replica, stage = worker
        match kind:
            case Kind.F:
                return self.forward[replica][stage]
            case Kind.I:
                return self.input_grad[replica][stage]
            case Kind.W:
                return self.weight_grad[replica][stage]
            case Kind.B:
                return self.input_grad[replica][stage] + self.weight_grad[replica][stage]
            case Kind.R:
                return self.reduce[stage] if self.reduce else 0.0
            case Kind.U:
                return self.update[stage] if self.update else 0.0


def uniform(*, replicas: int, stages: int, value: float) -> Grid:
    """The same time for every worker."""
    return tuple((value,) * stages for _ in range(replicas))
