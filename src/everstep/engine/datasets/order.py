"""Which rows a microbatch gets: those of the data set one after the other, epoch after epoch, each once.

    row number     0 1 2 3 4 5 6 7 8 9 ...           ((step - 1) x microbatches + microbatch) x rows + row
    epoch          0 0 0 0 0 0 0 1 1 1               of a data set with 7 rows
    row of it      4 0 6 2 5 1 3 2 6 0               a shuffle by (seed, epoch)

A function of (seed, step, microbatch, row) and of the microbatches in a step, which no change of shape
changes. A microbatch may end one epoch and begin the next: no row is dropped. A run that resumes with
another batch continues behind the rows that it has seen: `start` is added to every number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everstep.engine import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    size: int  # rows of the data set
    rows: int  # in a microbatch
    microbatches: int  # in a step, over all replicas
    seed: int = 0
    shuffle: bool = True
    start: int = 0  # below 0 after steps that had fewer rows than those of this order

    def places(self, step: int, microbatch: int) -> list[tuple[int, int]]:
        """(epoch, row of the data set) of every row of a microbatch."""
        # Below 0 only for steps before the one at which the batch became this one.
        first = max(0, self.start + ((step - 1) * self.microbatches + microbatch) * self.rows)
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
        return -int((self.start - epochs * self.size) // (self.microbatches * self.rows))


# ------------------------------------------------------------------
# An order of n rows that is a function of a key: no list of n numbers, no state.
#
# Four rounds of a Feistel network permute the numbers below 4^k, the least power of four that is not below n.
# A number that lands at n or above is sent through again until it lands below (cycle walking): less than four
# times on average. So `place(i)` costs the same whatever n is, any worker can ask for any i, and a new key
# for every epoch is a new shuffle.

_ROUNDS = 4
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permuted(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where the rows at these positions of the shuffle are. Positions and answers are below `size`."""
    values = np.asarray(indices, dtype=np.uint64)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    placed = _rounds(values, half, key)
    while (outside := placed >= np.uint64(size)).any():
        placed[outside] = _rounds(placed[outside], half, key)
    return placed.astype(np.int64)


def _rounds(values: np.ndarray, half: int, key: int) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right, key + number) & mask)
    return (left << bits) | right


def _mixed(x: np.ndarray, key: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + np.uint64((key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & (1 << 64) - 1)
        x = (x ^ x >> np.uint64(30)) * _MULTIPLIERS[0]
        x = (x ^ x >> np.uint64(27)) * _MULTIPLIERS[1]
        return np.asarray(x ^ x >> np.uint64(31))
