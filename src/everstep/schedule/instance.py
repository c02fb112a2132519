"""What a planner is asked: who lives, how long each op takes, how much fits in memory, what is done already.

Times are in any one unit (the engine uses seconds) and per worker, because a slow worker is heavier, not
dead.

Memory has two forms. `stash_cap` counts microbatches between the start of their F and the end of their W
(or B). `memory` is bytes a worker can spend on activations; a microbatch then costs `held_forward` bytes
from F to I and `held_weight` bytes from I to W. With both given, the count is lowered to what the bytes
allow, which is safe and simple; a planner that juggles two resources at once was not worth its branches.

Where workers run several parts of the model (`virtual`), `stages` counts the parts: the pipeline of a
microbatch is that long. `Worker(replica, part)` then names a *cell*, the part on that replica, in times; the
worker that runs it is `Worker(replica, fold.stage(part))`: who is dead, has memory, reduces and updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from everstep.errors import UserError
from everstep.protocol.ops import Kind, Microbatch, Worker
from everstep.protocol.shape import Fold

Grid = tuple[tuple[float, ...], ...]  # [replica][stage]


class Done(NamedTuple):
    """What a live worker has run of one (microbatch, stage) of a broken step. It pins the host."""

    host: int
    kinds: str  # "F", "FI" or "FIW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One step to schedule: `replicas` x `stages` workers, `microbatches` per replica."""

    replicas: int
    stages: int  # parts of the pipeline: one per worker of a replica, or `virtual`
    microbatches: int
    forward: Grid
    input_grad: Grid
    weight_grad: Grid
    hop: float = 0.0
    reduce: tuple[float, ...] = ()  # per stage of workers
    update: tuple[float, ...] = ()  # per stage of workers
    stash_cap: Mapping[Worker, int] | None = None  # most microbatches a worker may hold from F to W
    memory: Mapping[Worker, float] | None = None  # bytes a worker has for activations; None: no limit
    held_forward: tuple[float, ...] = ()  # per stage: bytes a microbatch holds from F to I
    held_weight: tuple[float, ...] = ()  # per stage: bytes it holds from I to W
    boundary: tuple[float, ...] = ()  # per stage: bytes of what it sends to the next stage, and gets back
    dead: frozenset[Worker] = frozenset()
    done: Mapping[tuple[Microbatch, int], Done] = field(default_factory=dict)
    virtual: int = 1  # parts per worker
    turns: bool = True  # how they are folded onto workers

    def __post_init__(self) -> None:
        if self.virtual < 1 or self.stages % self.virtual:
            raise UserError(f"virtual is {self.virtual}; make it a divisor of the {self.stages} parts.")
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
        of_workers = self.stages // self.virtual
        for name in ("reduce", "update", "held_forward", "held_weight", "boundary"):
            count = of_workers if name in ("reduce", "update") else self.stages
            if len(getattr(self, name)) not in (0, count):
                raise UserError(f"{name} must be empty or give one number per stage ({count}).")
        self._check_numbers()
        for worker in self.dead:
            if not (0 <= worker.replica < self.replicas and 0 <= worker.stage < of_workers):
                raise UserError(
                    f"dead worker {worker} is outside the {self.replicas} replicas x {of_workers} stages."
                )
        for stage in range(self.stages):
            if not self.live(stage):
                raise UserError(f"stage {stage} has no live worker; give it one, or restore a checkpoint.")
        self._check_memory()

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
        for name in ("reduce", "update", "held_forward", "held_weight", "boundary"):
            for stage, value in enumerate(getattr(self, name)):
                if not _is_a_time(value):
                    raise UserError(f"{name} of stage {stage} is {value:g}; make it finite, 0 or more.")

    def _check_memory(self) -> None:
        least = self.virtual
        if self.stash_cap is not None and min(self.stash_cap.values(), default=least) < least:
            raise UserError(f"stash_cap must let every worker hold at least {least} microbatch(es).")
        if self.memory is not None:
            fold = self.fold
            for worker in self.workers():
                need = sum(map(self.bytes_per_microbatch, fold.parts_of(worker.stage)))
                if self.memory.get(worker, need) < need:
                    raise UserError(
                        f"memory of worker {worker} is {self.memory[worker]:g} bytes; one "
                        f"microbatch of stage {worker.stage} needs {need:g}."
                    )

    def bytes_per_microbatch(self, stage: int) -> float:
        """The most bytes one microbatch holds at a stage."""
        return max(
            self.held_forward[stage] if self.held_forward else 0.0,
            self.held_weight[stage] if self.held_weight else 0.0,
        )

    @property
    def fold(self) -> Fold:
        return Fold(self.stages // self.virtual, self.virtual, self.turns)

    def live(self, stage: int) -> list[int]:
        """The replicas that live at a stage."""
        at = stage if self.virtual == 1 else self.fold.stage(stage)
        gone = {worker.replica for worker in self.dead if worker.stage == at}
        return [k for k in range(self.replicas) if k not in gone]

    def workers(self) -> Iterator[Worker]:
        """The live workers."""
        return (
            Worker(k, s)
            for k in range(self.replicas)
            for s in range(self.stages // self.virtual)
            if Worker(k, s) not in self.dead
        )

    def homes(self) -> Iterator[Microbatch]:
        return (Microbatch(k, m) for k in range(self.replicas) for m in range(self.microbatches))

    def time(self, kind: Kind, worker: Worker) -> float:
        """Of one op at a cell; of R and U, at a worker."""
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

    def closing(self, stage: int) -> float:
        """The time of a reduce and an update, at a stage of workers."""
        return (self.reduce[stage] if self.reduce else 0.0) + (self.update[stage] if self.update else 0.0)

    def kinds_done(self, microbatch: Microbatch, stage: int) -> str:
        done = self.done.get((microbatch, stage))
        return done.kinds if done else ""

    def merged(self) -> Instance:
        """As if each worker ran its parts as one: for questions about work, not about order."""
        if self.virtual == 1:
            return self
        fold = self.fold

        def added(grid: Grid) -> Grid:
            return tuple(
                tuple(sum(row[part] for part in fold.parts_of(s)) for s in range(fold.stages)) for row in grid
            )

        def per_stage(values: tuple[float, ...]) -> tuple[float, ...]:
            return added((values,))[0] if values else ()

        return replace(
            self,
            stages=fold.stages,
            virtual=1,
            forward=added(self.forward),
            input_grad=added(self.input_grad),
            weight_grad=added(self.weight_grad),
            held_forward=per_stage(self.held_forward),
            held_weight=per_stage(self.held_weight),
            boundary=per_stage(self.boundary),
            done={},
        )

    def fault_free(self) -> Instance:
        """The same step with all workers alive and nothing done: what references are measured on."""
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
