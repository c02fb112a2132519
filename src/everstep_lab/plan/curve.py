"""A task's throughput as a function of its workers: the best feasible shape for each count.

A table of measured throughput, in any unit, by number of workers from 0; `everstep_lab.plan.throughput` also
computes curves of models that were never measured. Curves are not monotone, and should not be: 11 workers may
have no good shape where 10 have one. A plan then simply leaves the eleventh to another task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from everstep_lab.plan.pipeline_orders import OURS
from everstep_lab.plan.task_shape import RECOMPUTE, Floats, ParallelShape, StepShares

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SameCut:
    """One way to cut the model, at every number of replicas: what adding or dropping replicas gives."""

    stages: int
    shards: int
    throughput: Floats  # by replicas, from 0; 0 where it does not divide or fit
    microbatch: Ints
    recompute: npt.NDArray[np.int8]
    # Shares of the step's time, by replicas; zeros: unknown.
    per_step: Floats  # what comes once per step whatever the number of microbatches: reduction and update
    bubble: Floats  # of the pipeline

    def shape(self, replicas: int) -> ParallelShape:
        return ParallelShape(
            replicas,
            self.stages,
            self.shards,
            int(self.microbatch[replicas]),
            RECOMPUTE[self.recompute[replicas]] if self.microbatch[replicas] else "",
        )

    def shares(self, replicas: int) -> StepShares:
        return StepShares(per_step=float(self.per_step[replicas]), bubble=float(self.bubble[replicas]))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Curve:
    """Throughput by workers, from 0. Beyond its end more workers bring nothing."""

    throughput: Floats
    cut_of: Ints  # per number of workers: index into `cuts`, -1 where no shape is known
    cuts: tuple[SameCut, ...] = ()
    state_bytes: float = 0.0  # weights and optimizer of the whole task
    work_per_step: float = 0.0  # in the unit of throughput; 0: unknown
    batch: int = 0
    schedule: str = OURS
    replicated: bool = True  # a live replica holds all there is; not so when ZeRO-1 splits the optimizer
    _index: Mapping[tuple[int, int], int] = field(default_factory=dict)
    _by_units: dict[int, tuple[Floats, Ints]] = field(default_factory=dict, init=False, repr=False)
    kept: dict[str, object] = field(
        default_factory=dict, init=False, repr=False
    )  # what others derived from it

    def by_units(self, unit: int) -> tuple[Floats, Ints]:
        """For 1, 2, ... units the best throughput that needs so many, and its number of workers. Kept."""
        if unit not in self._by_units:
            top = -(-self.most // unit)
            table = np.zeros(top * unit)
            table[: self.most] = self.throughput[1:]
            rows = table.reshape(top, unit)
            column = rows.argmax(axis=1)
            best = rows[np.arange(top), column]
            self._by_units[unit] = best, np.arange(top) * unit + column + 1
        return self._by_units[unit]

    def best_between(self, least: int, most: int) -> tuple[float, int]:
        """The best throughput of a few worker counts, and which."""
        counts = np.arange(least, most + 1)
        values = self.throughput[np.minimum(counts, self.most)]
        at = int(values.argmax())
        return float(values[at]), int(counts[at])

    @property
    def most(self) -> int:
        return len(self.throughput) - 1

    def at(self, workers: int) -> float:
        return float(self.throughput[min(workers, self.most)])

    def shape(self, workers: int) -> ParallelShape | None:
        if workers > self.most or self.cut_of[workers] < 0:
            return None
        cut = self.cuts[int(self.cut_of[workers])]
        return cut.shape(workers // (cut.stages * cut.shards))

    def like(self, shape: ParallelShape) -> SameCut | None:
        """The throughput of this cut at every number of replicas."""
        found = self.cut_index(shape)
        return None if found < 0 else self.cuts[found]

    def cut_index(self, shape: ParallelShape | None) -> int:
        """Which of `cuts` a shape has; -1: none we know."""
        return -1 if shape is None else self._index.get((shape.stages, shape.shards), -1)

    def of_shape(self, shape: ParallelShape) -> float:
        """Throughput in exactly this shape, not the best shape of as many workers."""
        cut = self.like(shape)
        if cut is None:
            return self.at(shape.workers)
        return float(cut.throughput[shape.replicas]) if shape.replicas < len(cut.throughput) else 0.0

    def shares(self, shape: ParallelShape) -> StepShares:
        cut = self.like(shape)
        return cut.shares(shape.replicas) if cut and shape.replicas < len(cut.per_step) else StepShares()

    def step_s(self, throughput: float) -> float:
        return self.work_per_step / throughput if throughput > 0 else 0.0


def from_table(
    throughput: Sequence[float],
    *,
    stages: int | None = None,
    shards: int = 1,
    state_bytes: float = 0.0,
    step_s: float = 0.0,
    batch: int = 0,
) -> Curve:
    """A measured curve. With `stages`, workers are replicas x stages x shards, and re-routing is possible."""
    values = np.asarray(throughput, dtype=np.float64)
    cut_of = np.full(len(values), -1, dtype=np.int64)
    cuts: tuple[SameCut, ...] = ()
    if stages is not None:
        each = stages * shards
        cut_of[::each] = 0
        rows = values[::each].copy()
        none = np.zeros(len(rows), dtype=np.int64)
        zeros = np.zeros(len(rows))
        cuts = (SameCut(stages, shards, rows, none, none.astype(np.int8), zeros, zeros),)
    best = float(values.max(initial=0.0))
    return Curve(
        throughput=values,
        cut_of=cut_of,
        cuts=cuts,
        state_bytes=state_bytes,
        work_per_step=best * step_s,
        batch=batch,
        _index={(cut.stages, cut.shards): i for i, cut in enumerate(cuts)},
    )


def replicated(
    *,
    stages: int,
    per_replica: float,
    most_replicas: int,
    shards: int = 1,
    state_bytes: float = 0.0,
    batch: int = 0,
    schedule: str = OURS,
) -> Curve:
    """A job with a fixed cut whose replicas each bring the same: what is known before measuring.

    `batch` is its microbatches a step, over all replicas; re-routing depends on how many there are.
    """
    each = stages * shards
    table = np.zeros(most_replicas * each + 1)
    table[::each] = per_replica * np.arange(most_replicas + 1)
    curve = from_table(table.tolist(), stages=stages, shards=shards, state_bytes=state_bytes, batch=batch)
    return replace(curve, schedule=schedule)
