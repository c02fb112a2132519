"""One thing a task could do next, and many of them side by side."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from everstep_lab.plan.task_shape import Floats, ParallelShape

Ints = npt.NDArray[np.int64]
NEVER = -np.inf
MUST_RUN = 1e4  # stopping a task that must run costs so many times the most it could earn


class OptionKind(IntEnum):
    STOP = 0
    KEEP = 1
    REROUTE = 2
    DROP = 3
    GROW = 4
    RESHAPE = 5
    START = 6
    SPREAD = 7

    @property
    def verb(self) -> str:
        return {
            OptionKind.STOP: "stops",
            OptionKind.KEEP: "keeps its workers",
            OptionKind.REROUTE: "keeps its shape and re-routes",
            OptionKind.DROP: "drops replicas",
            OptionKind.GROW: "adds replicas",
            OptionKind.RESHAPE: "changes shape",
            OptionKind.START: "starts",
            OptionKind.SPREAD: "moves workers between stages",
        }[self]

    @property
    def infinitive(self) -> str:
        return {
            OptionKind.STOP: "stop",
            OptionKind.KEEP: "keep its workers",
            OptionKind.REROUTE: "re-route",
            OptionKind.DROP: "drop replicas",
            OptionKind.GROW: "add replicas",
            OptionKind.RESHAPE: "change shape",
            OptionKind.START: "start",
            OptionKind.SPREAD: "move workers between stages",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOption:
    """One option, written out."""

    kind: OptionKind
    units: int
    workers: int
    shape: ParallelShape | None
    throughput: float
    transition_s: float
    back_s: float = 0.0
    reward: float = 0.0  # w T D_running
    cost: float = 0.0  # w T(today) D_transition
    way_back: float = 0.0  # P(repair) w T(after) D_back

    @property
    def worth(self) -> float:
        return self.reward - self.cost - self.way_back

    def same(self, other: TaskOption | None) -> bool:
        return other is not None and (self.kind, self.workers, self.shape) == (
            other.kind,
            other.workers,
            other.shape,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """Options side by side, as columns."""

    units: Ints
    workers: Ints
    throughput: Floats
    transition_s: Floats
    kind: npt.NDArray[np.int8]
    cut: Ints  # index into the curve's cuts, -1: unknown
    replicas: Ints  # places per stage, some of them perhaps empty; 0: unknown
    back_s: Floats
    worth: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Horizon:
    """What the worth of an option is counted over."""

    running_s: float
    ends_by_repair: float = 0.0
    target: TaskOption | None = None  # what the task will want when the repair comes
