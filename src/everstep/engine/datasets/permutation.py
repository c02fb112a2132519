"""An order of n rows that is a function of a key: no list of n numbers, no state.

Four rounds of a Feistel network permute the numbers below 4^k, the least power of four that is not below n. A
number that lands at n or above is sent through again until it lands below (cycle walking): less than four
times on average. So `place(i)` costs the same whatever n is, any worker can ask for any i, and a new key for
every epoch is a new shuffle.
"""

from __future__ import annotations

import numpy as np

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
