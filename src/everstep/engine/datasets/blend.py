"""`everstep.blend`: several data sets in given shares, which may change with the step.

Each microbatch is of one of them. Which one is a function of its number in the run (`turns.py`): every share
holds to within one microbatch at any moment, however long the run and however small the share. And each data
set gives its own microbatches one after the other, as if it trained alone: nothing of it is skipped and
nothing comes twice.

    weights      web 0.5, code 0.3, books 0.2
    microbatch   0    1     2     3    4    5     6    7    8      9
    of           web  code web   books web  code web  code  web  books
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from everstep.engine.datasets.data import dataset_of, named_arguments, of_job
from everstep.engine.datasets.stream import Stream
from everstep.engine.datasets.turns import Turns
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.job.job import Job

Weights = Sequence[float]


@named_arguments
def blend(*data: Any, weights: Weights | Mapping[int, Weights]) -> Blend:
    """Data sets, each as `everstep.train(data=...)` takes it, and the share of microbatches that each gives.

    weights   one for each, in any unit: [0.7, 0.3]; or by the step from which they hold: {1: [7, 3], 5000:
              [3, 7]}
    """
    if len(data) < 2:
        raise UserError(f"everstep.blend was given {len(data)} data sets; it takes two or more.")
    phases = weights if isinstance(weights, Mapping) else {1: weights}
    if not phases or min(phases) != 1 or not all(isinstance(step, int) for step in phases):
        raise UserError(f"everstep.blend has weights from the steps {sorted(phases)}; the first must be 1.")
    for given in phases.values():
        known = len(given) == len(data) and all(math.isfinite(weight) and weight >= 0 for weight in given)
        if not known or not sum(given):
            raise UserError(
                f"everstep.blend has weights {list(given)} for {len(data)} data sets; give each of them a "
                "number of at least 0, and one of them more."
            )
    parts = tuple(dataset_of(one) for one in data)
    if any(isinstance(part, Stream) for part in parts):
        raise UserError("everstep.blend was given a stream, which is read in order; blend what it reads.")
    exact = tuple((step, tuple(_exact(weight) for weight in phases[step])) for step in sorted(phases))
    return Blend(parts=parts, weights=exact)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    parts: tuple[Any, ...]
    weights: tuple[tuple[int, tuple[Fraction, ...]], ...]  # from which step on; of each part
    microbatches: int = 1  # in a step

    @property
    def in_a_thread(self) -> bool:
        return all(getattr(part, "in_a_thread", False) for part in self.parts)

    def for_job(self, job: Job) -> Self:
        parts = tuple(of_job(part, job) for part in self.parts)
        return replace(self, parts=parts, microbatches=job.microbatches_in_step)

    def batch(self, step: int, microbatch: int) -> Any:
        part, number = self.place(step, microbatch)
        return self.parts[part].batch(number // self.microbatches + 1, number % self.microbatches)

    def place(self, step: int, microbatch: int) -> tuple[int, int]:
        """Which part gives this microbatch, and how many that part has given before."""
        return _turns(self.weights, self.microbatches).turn((step - 1) * self.microbatches + microbatch)


def _exact(weight: float | Fraction | Decimal) -> Fraction:
    """A weight as it was written: 0.1 is a tenth."""
    return Fraction(weight if isinstance(weight, int | Fraction | Decimal) else repr(float(weight)))


@lru_cache(maxsize=16)
def _turns(weights: tuple[tuple[int, tuple[Fraction, ...]], ...], microbatches: int) -> Turns:
    return Turns([((step - 1) * microbatches, given) for step, given in weights])
