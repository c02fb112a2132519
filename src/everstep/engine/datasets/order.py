"""Which rows a microbatch gets: those of the data set one after the other, epoch after epoch, each once.

    row number     0 1 2 3 4 5 6 7 8 9 ...           ((step - 1) x microbatches + microbatch) x rows + row
    epoch          0 0 0 0 0 0 0 1 1 1               of a data set with 7 rows
    row of it      4 0 6 2 5 1 3 2 6 0               a shuffle by (seed, epoch)

A function of (seed, step, microbatch, row) and of the microbatches in a step, which no change of shape
changes. A microbatch may end one epoch and begin the next: no row is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everstep.engine import keys
from everstep.engine.datasets.permutation import permuted


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    size: int  # rows of the data set
    rows: int  # in a microbatch
    microbatches: int  # in a step, over all replicas
    seed: int = 0
    shuffle: bool = True

    def places(self, step: int, microbatch: int) -> list[tuple[int, int]]:
        """(epoch, row of the data set) of every row of a microbatch."""
        first = ((step - 1) * self.microbatches + microbatch) * self.rows
        numbers = np.arange(first, first + self.rows, dtype=np.int64)
        epochs, positions = numbers // self.size, numbers % self.size
        if not self.shuffle:
            return list(zip(epochs.tolist(), positions.tolist(), strict=True))
        found: list[tuple[int, int]] = []
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            key = keys.key(self.seed, keys.DATA, epoch)
            rows = permuted(positions[epochs == epoch], self.size, key)
            found += [(epoch, row) for row in rows.tolist()]
        return found

    def steps(self, epochs: float) -> int:
        """The steps that bring every row at least `epochs` times."""
        return -int(-epochs * self.size // (self.microbatches * self.rows))
