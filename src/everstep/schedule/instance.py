"""What a planner is asked: who lives, how long each op takes, how much fits in memory, what is done already.

Times are in any one unit (the engine uses seconds) and per worker, because a slow worker is heavier, not
dead. Memory is a number of microbatches, between the start of their F and the end of their W (`stash_cap`):
what bytes allow is worked out before (`stash_limits.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from everstep.errors import UserError
from everstep.protocol.ops import Kind, Microbatch, Worker

Grid = tuple[tuple[float, ...], ...]  # [replica][stage]


class Done(NamedTuple):
    """What a live worker has run of one (microbatch, stage) of a broken step. It pins the host."""

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
    reduce: tuple[float, ...] = ()  # per stage
    update: tuple[float, ...] = ()  # per stage
    stash_cap: Mapping[Worker, int] | None = None  # most microbatches a worker may hold from F to W
    dead: frozenset[Worker] = frozenset()
    done: Mapping[tuple[Microbatch, int], Done] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("replicas", "stages", "microbatches"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; make it at least 1.")
        for name in ("forward", "input_grad", "weight_grad"):
            grid: Grid = getattr(self, name)
            if len(grid) != self.replicas or any(len(row) != self.stages for row in grid):
                raise UserError(
                    f"{name} must have one row per replica and one time per stage in each "
                    f"({self.replicas} x {self.stages})."
                )
        for name in ("reduce", "update"):
            if len(getattr(self, name)) not in (0, self.stages):
                raise UserError(f"{name} must be empty or give one number per stage ({self.stages}).")
        self._check_numbers()
        for worker in self.dead:
            if not (0 <= worker.replica < self.replicas and 0 <= worker.stage < self.stages):
                raise UserError(
                    f"dead worker {worker} is outside the {self.replicas} replicas x {self.stages} stages."
                )
        for stage in range(self.stages):
            if not self.live(stage):
                raise UserError(f"stage {stage} has no live worker; give it one, or restore a checkpoint.")
        if self.stash_cap is not None and min(self.stash_cap.values(), default=1) < 1:
            raise UserError("stash_cap must let every worker hold at least 1 microbatch.")

    def _check_numbers(self) -> None:
        if not _is_a_time(self.hop):
            raise UserError(f"hop is {self.hop:g}; make it a finite time of 0 or more.")
        for name in ("forward", "input_grad", "weight_grad"):
            grid: Grid = getattr(self, name)
            for row in {id(row): row for row in grid}.values():  # replicas often share one
                if not (min(row) >= 0.0 and sum(row) < float("inf")):
                    stage = next(s for s, value in enumerate(row) if not _is_a_time(value))
                    where = f"{name} of worker {grid.index(row)}:{stage}"
                    raise UserError(f"{where} is {row[stage]:g}; make it a finite time of 0 or more.")
        for name in ("reduce", "update"):
            for stage, value in enumerate(getattr(self, name)):
                if not _is_a_time(value):
                    raise UserError(f"{name} of stage {stage} is {value:g}; make it finite, 0 or more.")

    def live(self, stage: int) -> list[int]:
        """The replicas that live at a stage."""
        gone = {worker.replica for worker in self.dead if worker.stage == stage}
        return [k for k in range(self.replicas) if k not in gone]

    def workers(self) -> Iterator[Worker]:
        """The live workers."""
        return (
            Worker(k, s)
            for k in range(self.replicas)
            for s in range(self.stages)
            if Worker(k, s) not in self.dead
        )

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
            case Kind.R:
                return self.reduce[stage] if self.reduce else 0.0
            case Kind.U:
                return self.update[stage] if self.update else 0.0

    def closing(self, stage: int) -> float:
        """The time of a reduce and an update."""
        return (self.reduce[stage] if self.reduce else 0.0) + (self.update[stage] if self.update else 0.0)

    def kinds_done(self, microbatch: Microbatch, stage: int) -> str:
        done = self.done.get((microbatch, stage))
        return done.kinds if done else ""

    def fault_free(self) -> Instance:
        """The same step with all workers alive and nothing done: before anything failed."""
        return replace(self, dead=frozenset(), done={})


def _is_a_time(value: float) -> bool:
    return 0.0 <= value < float("inf")


def uniform(*, replicas: int, stages: int, value: float) -> Grid:
    """The same time for every worker."""
    return ((value,) * stages,) * replicas


def per_stage(*, replicas: int, values: tuple[float, ...]) -> Grid:
    """A time per stage, the same for all replicas."""
    return tuple(values for _ in range(replicas))


def same_cap(*, replicas: int, stages: int, cap: int) -> dict[Worker, int]:
    """The same stash cap for every worker."""
    return {Worker(k, s): cap for k in range(replicas) for s in range(stages)}
