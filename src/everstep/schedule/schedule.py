"""What a planner answers: the ordered ops of every worker for one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.core.ops import Kind, Microbatch, Op, Worker


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ops still to run, in order, per live worker. Running them in this order cannot deadlock."""

    ops: Mapping[Worker, tuple[Op, ...]]

    def hosts(self) -> dict[tuple[Microbatch, int], int]:
        """Who hosts each (microbatch, stage) that has an op here."""
        return {(op.microbatch, op.stage): worker.replica
                for worker, ops in self.ops.items() for op in ops if op.microbatch is not None}

    def text(self) -> str:
        """One line a worker: `1:2 = 2F1.0 2I1.0 2W1.0 2R 2U`."""
        return "\n".join(f"{worker} = {' '.join(map(str, ops))}" for worker, ops in sorted(self.ops.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A schedule, and how far from the best it can be."""

    mode: str
    schedule: Schedule
    period: float
    makespan: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """How much longer than the lower bound, as a fraction."""
        value = self.period if self.mode == "staggered" else self.makespan
        return value / self.lower_bound - 1 if self.lower_bound else 0.0


def closing_ops(stage: int) -> tuple[Op, Op]:
    """What every worker's step ends with."""
    return Op(Kind.R, None, stage), Op(Kind.U, None, stage)
