"""How training systems order a step, for the throughput model: one row each.

To add one, add a row. `broken` and `whole` name rows of `schedule.modes`: which schedule a step with missing
workers is planned by, and which one a whole step is compared with; no `whole`: with the stack's own order,
whose bubble the throughput model counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.schedule.modes import DECOUPLED, STAGGERED
from everstep.schedule.stash_limits import stash_cap


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOrder:
    """Functions of (stages, chunks of the model per worker)."""

    broken: str
    whole: str
    in_flight: Callable[[int, int], float]  # microbatches that the first stage holds, in whole stages' worth
    bubble: Callable[[int, int], float]  # idle time of a step, in microbatches


def _one_per_stage(stages: int, chunks: int) -> float:
    return float(stages)


def _fill_and_drain(stages: int, chunks: int) -> float:
    return float(stages - 1)


def _interleaved(stages: int, chunks: int) -> float:
    return stages * (1.0 + (stages - 1) / (stages * chunks)) if chunks > 1 else float(stages)


def _staggered(stages: int, chunks: int) -> float:
    return float(stash_cap(stages))  # with so many, no stage waits for another


OURS, RESCHEDULED = "staggered", "rescheduled"
ORDERS: dict[str, PipelineOrder] = {
    "1f1b": PipelineOrder(
        broken=DECOUPLED, whole=DECOUPLED, in_flight=_one_per_stage, bubble=_fill_and_drain
    ),
    "interleaved": PipelineOrder(
        broken=DECOUPLED,
        whole=DECOUPLED,
        in_flight=_interleaved,
        bubble=lambda stages, chunks: (stages - 1) / chunks,
    ),
    OURS: PipelineOrder(
        broken=STAGGERED, whole=STAGGERED, in_flight=_staggered, bubble=lambda stages, chunks: 0.0
    ),
    # 1F1B and its memory while nothing is lost; after a loss our order, or 1F1B around the missing workers.
    RESCHEDULED: PipelineOrder(broken=STAGGERED, whole="", in_flight=_one_per_stage, bubble=_fill_and_drain),
    "unstaggered": PipelineOrder(
        broken=DECOUPLED, whole="", in_flight=_one_per_stage, bubble=_fill_and_drain
    ),
}
