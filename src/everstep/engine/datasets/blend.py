"""`everstep.blend`: several data sets in given shares, which may change with the step.

Each microbatch is of one of them. Which one is a function of its number in the run, so that every share holds
to within one microbatch at any moment; and each data set gives its own microbatches one after the other, as
if it trained alone: nothing of it is skipped and nothing comes twice.

    weights      web 0.5, code 0.3, books 0.2
    microbatch   0    1     2     3    4    5     6    7    8      9
    of           web  code  books web  code  web  web  code books  web
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Self

from everstep.engine.datasets.data import dataset_of, named_arguments, of_job
from everstep.engine.datasets.stream import Stream
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.job.job import Job

_PERIOD = 4096  # microbatches after which the order of the parts repeats

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
    shares = [(step, tuple(w / sum(phases[step]) for w in phases[step])) for step in sorted(phases)]
    return Blend(parts=parts, shares=tuple(shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    parts: tuple[Any, ...]
    shares: tuple[tuple[int, tuple[float, ...]], ...]  # from which step on; of each part, 1 in all
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
        phase = bisect_right([first for first, _ in self.shares], step) - 1
        first, shares = self.shares[phase]
        count = (step - first) * self.microbatches + microbatch
        part = _picks(shares)[count % _PERIOD]
        lengths = [(b[0] - a[0]) * self.microbatches for a, b in pairwise(self.shares[: phase + 1])]
        earlier = sum(_given(of, part, length) for length, (_, of) in zip(lengths, self.shares, strict=False))
        return part, earlier + _given(shares, part, count)


@cache
def _picks(shares: tuple[float, ...]) -> tuple[int, ...]:
    """The part of each microbatch of a period: always the one that is furthest behind its share."""
    given = [0] * len(shares)
    picks = []
    for number in range(1, _PERIOD + 1):
        part = max(range(len(shares)), key=lambda k: (shares[k] * number - given[k], -k))
        given[part] += 1
        picks.append(part)
    return tuple(picks)


@cache
def _counts(shares: tuple[float, ...], part: int) -> tuple[int, ...]:
    """How many of the first microbatches of a period are of a part: 0, ... all of the period."""
    return tuple(accumulate((pick == part for pick in _picks(shares)), initial=0))


def _given(shares: tuple[float, ...], part: int, count: int) -> int:
    """How many of the first `count` microbatches are of a part."""
    counts = _counts(shares, part)
    return count // _PERIOD * counts[-1] + counts[count % _PERIOD]
