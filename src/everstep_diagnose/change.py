"""Has a series changed, and since when: the one split that explains it best, if it explains it well.

Used against a job's own past: a rank that turns slow at step 40 is compared over the steps from 40 on, and
one that has no peer to be compared with is compared with itself. Robust on purpose: a series of step times
has spikes (garbage collection, checkpoints) that are no change.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LEAST = 4  # steps on either side
_CLEAR = 6.0  # times the noise of a difference of means


def spread(values: Floats) -> float:
    """The standard deviation the middle of the values suggests."""
    if len(values) == 0:
        return 0.0
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


def change_point(values: Floats) -> int:
    """The index from which on the series is another one; 0 if it is one series."""
    count = len(values)
    if count < 2 * _LEAST:
        return 0
    clipped = np.clip(values, *np.quantile(values, [0.02, 0.98]))
    sums = np.cumsum(clipped)
    at = np.arange(_LEAST, count - _LEAST + 1)
    before = sums[at - 1] / at
    after = (sums[-1] - sums[at - 1]) / (count - at)
    weight = np.sqrt(at * (count - at) / count)
    best = int(at[np.argmax(np.abs(after - before) * weight)])
    noise = max(spread(clipped[:best]), spread(clipped[best:]), 1e-12)
    gain = abs(float(np.median(values[best:]) - np.median(values[:best])))
    clear = gain * float(np.sqrt(best * (count - best) / count)) > _CLEAR * noise
    return best if clear and gain > 2 * noise else 0
