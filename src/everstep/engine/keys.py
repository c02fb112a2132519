"""Randomness as a function of keys: the same (seed, step, microbatch, layer) gives the same numbers anywhere.

A draw that depended on the worker, or on what the worker did before, could not be repeated by another host
after a death. So nothing here has state: a key goes in, 64 well-mixed bits come out. The mixing is that of
splitmix64, written out here because the streams of numpy's and torch's generators may change between
versions, and a dataset must not.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# The first word of a key says what it is for, so that two uses of one seed never meet.
INIT, DROPOUT, DATA, UPDATE, BACKWARD, EVALUATION = 1, 2, 3, 4, 5, 6


def key(*words: int) -> int:
    """64 bits that depend on every word and on their order."""
    state = 0
    for word in words:
        state = _mix((state ^ (word & _MASK)) + _GOLDEN & _MASK)
    return state


def _mix(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31


def draws(seed: int, count: int) -> np.ndarray:
    """`count` 64-bit words of the stream that `seed` names; the first n do not depend on `count`."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed & _MASK) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return x ^ x >> np.uint64(31)


def uniform(seed: int, count: int) -> np.ndarray:
    """`count` doubles in [0, 1)."""
    return (draws(seed, count) >> np.uint64(11)) * 2.0**-53
