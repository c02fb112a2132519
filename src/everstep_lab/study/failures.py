"""What fails in a cluster's life, and of what kind: one value per failure, the same for every policy.

The kinds and their shares are the terminations of large jobs on Alibaba's cloud as Unicron's authors count
them (percent of all jobs, 43.4 together), each with the detector that sees it and its severity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from everstep_lab.draw import Draw

HOUR_S, DAY_S = 3600.0, 86_400.0


class Seen(StrEnum):
    """By which detector a system with detectors sees it (Unicron's four)."""

    SILENCE = "node silence"
    EXIT = "process exit"
    EXCEPTION = "exception"
    STATISTICS = "iteration time"


@dataclass(frozen=True, slots=True)
class FailureCause:
    name: str
    share: float
    severity: int
    seen: Seen


CAUSES = (
    FailureCause("NCCL timeout", 10.1, 3, Seen.STATISTICS),
    FailureCause("ECC error", 5.0, 1, Seen.EXCEPTION),
    FailureCause("NVLink error", 4.5, 1, Seen.EXCEPTION),
    FailureCause("other network error", 4.0, 3, Seen.EXCEPTION),
    FailureCause("link flapping", 3.9, 3, Seen.STATISTICS),
    FailureCause("other software error", 3.3, 2, Seen.EXIT),
    FailureCause("task hang", 3.1, 2, Seen.STATISTICS),
    FailureCause("illegal memory access", 2.1, 2, Seen.EXCEPTION),
    FailureCause("invalid DMA mapping", 2.1, 1, Seen.EXCEPTION),
    FailureCause("connection refused", 2.1, 3, Seen.EXIT),
    FailureCause("CUDA error", 1.6, 2, Seen.EXCEPTION),
    FailureCause("connection reset", 1.0, 3, Seen.EXIT),
    FailureCause("GPU driver error", 0.6, 1, Seen.EXCEPTION),
)
LOST = FailureCause("node lost", 0.0, 1, Seen.SILENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    at_s: float
    node: int
    severity: int
    seen: Seen
    cause: str
    repair_s: float = 0.0  # of severity 1; infinite: only a join brings the node back


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A cluster's misfortunes: failures by time; joins bring nodes that a spot market took away."""

    name: str
    horizon_s: float
    nodes: int
    failures: tuple[Failure, ...]
    joins: tuple[tuple[float, int], ...] = ()  # (time, node)
    absent: tuple[int, ...] = ()  # nodes that are not there at the start
    spot: bool = False  # single-GPU instances that a market gives and takes

    @property
    def per_1000_node_days(self) -> float:
        return 1000 * len(self.failures) / (self.nodes * self.horizon_s / DAY_S)

    @property
    def severe_per_1000_node_days(self) -> float:
        severe = sum(f.severity == 1 for f in self.failures)
        return 1000 * severe / (self.nodes * self.horizon_s / DAY_S)


def of_severity(severity: int, draw: Draw) -> FailureCause:
    return pick([c for c in CAUSES if c.severity == severity], draw)


def of_any_but(severity: int, draw: Draw) -> FailureCause:
    return pick([c for c in CAUSES if c.severity != severity], draw)


def pick(causes: Sequence[FailureCause], draw: Draw) -> FailureCause:
    at = draw.uniform(0.0, sum(c.share for c in causes))
    for cause in causes:
        at -= cause.share
        if at < 0:
            return cause
    return causes[-1]
