"""Evaluation inside the next step: its batches travel along with the microbatches of training.

    step t        ... update: the weights to be evaluated
    step t + 1    F of microbatch m first computes, at every stage, the evaluation batches m, m + M, m + 2M,
                  without dropout and gradients; then its own forward. M: microbatches in a step

What crosses the edge of a stage is then {"trained": ..., "scored": [...]}. So evaluation is distributed over
the same workers, and whatever heals a step heals it: another host of a microbatch computes the same scores,
from the same weights, and they are reduced once with the step. After the last step follows a closing step,
which evaluates and trains nothing: its weight is 0, and an update of weight 0 is skipped.

Rejected: phases of their own between steps. They would need ledgers, owed work and epochs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from everstep.engine.datasets.data import Dataset
from everstep.engine.layers.boundary import Value, described, tensors_in
from everstep.errors import UserError

Metric = Callable[[Any, Any], Any]  # (output, targets) -> a mean, or (sum, weight)
TRAINED, SCORED = "trained", "scored"  # the two parts of what crosses the edge of a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    data: Dataset
    every: int
    batches: int
    steps: int  # of training
    microbatches: int  # in a step
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return ("loss", *self.metrics)

    def evaluates(self, step: int) -> bool:
        """Does this step carry the evaluation of the weights after the step before?"""
        before = step - 1
        return before > 0 and (before % self.every == 0 or before == self.steps)

    def closes(self, step: int) -> bool:
        return step > self.steps

    def numbers(self, microbatch: int) -> range:
        """The evaluation batches that travel with a microbatch."""
        return range(microbatch, self.batches, self.microbatches)

    def scores(self, loss: Metric, output: Value, targets: Value) -> list[tuple[float, float]]:
        """(sum, weight) of the loss and of every metric, of one batch."""
        return [
            score(name, metric(output, targets), targets)
            for name, metric in (("loss", loss), *self.metrics.items())
        ]


def refuse_as_score(name: str, made: Any) -> None:
    """What a metric gives is one number, or two."""
    parts = made if isinstance(made, tuple | list) and len(made) == 2 else [made]
    if not all(isinstance(part, SupportsFloat) and _is_single(part) for part in parts):
        raise UserError(
            f"the metric {name!r} gives {described(made)}; it must give one number, such as a mean, or "
            "(sum, weight)."
        )


def _is_single(part: Any) -> bool:
    return math.prod(getattr(part, "shape", ())) == 1


def score(name: str, made: Any, targets: Value) -> tuple[float, float]:
    refuse_as_score(name, made)
    if isinstance(made, tuple | list):
        return float(made[0]), float(made[1])
    rows = len(tensors_in(targets)[0])  # a mean counts by its rows
    return float(made) * rows, float(rows)


def added(scores: Iterable[list[tuple[float, float]]]) -> tuple[float, ...]:
    """The scores of several batches as one line of sums and weights; correctly rounded, so in any order."""
    return tuple(
        math.fsum(part) for column in zip(*scores, strict=True) for part in zip(*column, strict=True)
    )
