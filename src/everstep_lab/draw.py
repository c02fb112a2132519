"""Randomness by seed, the same on every machine and every Python.

Only `random.Random.random()` is used, the one method whose sequence Python promises to keep; whole numbers
come from it by multiplication. A stream has a name: what is drawn for the weather does not move what is drawn
for the faults, so a storm with one fault taken out keeps all the others where they were.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    def __init__(self, seed: int, stream: str) -> None:
        self.random = random.Random(f"{stream}/{seed}").random

    def below(self, limit: int) -> int:
        """A whole number from 0 to limit - 1."""
        return int(self.random() * limit)

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both possible."""
        return low + int(self.random() * (high - low + 1))

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def spread(self, typical: int) -> int:
        """A duration around `typical`, sometimes many times longer: order between two of them is open."""
        x = self.random()
        if x < 0.85:
            return int(typical * (0.25 + 1.5 * x)) + 1
        return int(typical * (2.0 + 8.0 * (x - 0.85) / 0.15)) + 1

    def shuffled(self, items: Sequence[T]) -> list[T]:
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(len(items))]


class Steady(Draw):
    """Nothing is left to chance in how long things take: for predictions, not for storms."""

    def spread(self, typical: int) -> int:
        return max(1, typical)
