"""What a planner answers: the ordered ops of every worker for one step, and how far from the best they can
be.

Replicas that do the same work have the same plan, so a plan keeps one list of op codes per *kind* of worker
and writes out the ops of a worker when they are asked for. To the reader it is an ordinary mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from everstep.protocol.ops import Kind, Microbatch, Op, Worker
from everstep.schedule.modes import STAGGERED

V = TypeVar("V")


class LazyByWorker(Mapping[Worker, V]):
    """A mapping over workers; who they are is asked, and values are made, when first read."""

    def __init__(self, who: Callable[[], Iterable[Worker]], make: Callable[[Worker], V]) -> None:
        self._who = who
        self._make = make
        self._known: dict[Worker, None] | None = None
        self._made: dict[Worker, V] = {}

    def __getitem__(self, worker: Worker) -> V:
        if worker not in self._workers():
            raise KeyError(worker)
        if worker not in self._made:
            self._made[worker] = self._make(worker)
        return self._made[worker]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers())

    def __len__(self) -> int:
        return len(self._workers())

    def _workers(self) -> dict[Worker, None]:
        if self._known is None:
            self._known = dict.fromkeys(self._who())
        return self._known

    def __repr__(self) -> str:
        return f"<{len(self)} workers>"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ops still to run, in order, per live worker. Running them in this order cannot deadlock."""

    ops: Mapping[Worker, tuple[Op, ...]]

    def hosts(self) -> dict[tuple[Microbatch, int], int]:
        """Who hosts each (microbatch, stage) that has an op here."""
        return {
            (op.microbatch, op.stage): worker.replica
            for worker, ops in self.ops.items()
            for op in ops
            if op.microbatch is not None
        }

    def text(self) -> str:
        """One line a worker: `1:2 = 2F1.0 2I1.0 2W1.0 2R 2U`."""
        return "\n".join(
            f"{worker} = {' '.join(map(str, ops))}".rstrip() for worker, ops in sorted(self.ops.items())
        )


class Timed(NamedTuple):
    """An op with its place in time."""

    worker: Worker
    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A schedule, and how far from the best it can be.

    `starts` aligns with `schedule.ops`. `period` is the time from one step to the next when the schedule
    repeats; with a barrier between steps it equals `makespan`.
    """

    mode: str
    schedule: Schedule
    period: float
    makespan: float
    lower_bound: float
    starts: Mapping[Worker, tuple[float, ...]] = field(default_factory=dict)
    peak_stash: Mapping[Worker, int] = field(default_factory=dict)
    rerouted: int = 0  # (microbatch, stage) pairs that do not run at home
    because: str = ""

    @property
    def value(self) -> float:
        """What the mode minimises."""
        return self.period if self.mode == STAGGERED else self.makespan

    @property
    def gap(self) -> float:
        """How much longer than the lower bound, as a fraction."""
        return max(0.0, self.value / self.lower_bound - 1) if self.lower_bound else 0.0

    def timeline(self, time: Callable[[Kind, Worker], float]) -> Iterator[Timed]:
        """Every op with its start and end; `time` is the instance's."""
        for worker, ops in self.schedule.ops.items():
            for op, start in zip(ops, self.starts[worker], strict=True):
                cell = Worker(worker.replica, op.stage)
                yield Timed(worker, op, start, start + time(op.kind, cell))


def closing_ops(stage: int) -> tuple[Op, Op]:
    """What every worker's step ends with."""
    return Op(Kind.R, None, stage), Op(Kind.U, None, stage)
