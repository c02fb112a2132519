"""Who gets how many: the exact best split of a capacity over tasks.

Maximise sum_t worth_t(k_t) with sum_t k_t <= n. The dynamic program is a max-plus convolution, task by task,

    S_t(j) = max_k S_(t-1)(j - k) + worth_t(k)

one vector operation per option. Options that are worth no more than a smaller one are left out, and of the
last task only what is left over counts: for one task the answer is its best option that fits.

Rejected: greedy by marginal worth (wrong on curves that are not concave, which ours are not), and pruning by
a price of slots, which pays from hundreds of tasks on ten thousand nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NEAR = 1e-12  # two worths this close (relative) are equal


def best_split(tasks: Sequence[tuple[Ints, Floats]], capacity: int) -> tuple[int, ...]:
    """Which option of each task, by its index. `tasks`: units, each number once, with 0; and their worth. Of
    two splits that are equal the one with fewer units for later tasks is taken.
    """
    useful = [_useful(units, worth, capacity) for units, worth in tasks]
    tolerance = NEAR * max((float(np.abs(worth).max()) for _, worth in tasks), default=0.0)
    best, trail = np.zeros(capacity + 1), []
    for (units, worth), keep in zip(tasks[:-1], useful, strict=False):
        after, chosen = np.full(capacity + 1, -np.inf), np.zeros(capacity + 1, dtype=np.int64)
        for index in keep:
            size = int(units[index])
            candidate = best[: capacity + 1 - size] + worth[index]
            better = candidate > after[size:] + tolerance
            after[size:][better] = candidate[better]
            chosen[size:][better] = index
        trail.append(chosen)
        best = after
    picked: list[int] = []
    left = capacity
    if tasks:
        units, worth = tasks[-1]
        totals = best[capacity - units[useful[-1]]] + worth[useful[-1]]
        picked.append(int(useful[-1][np.flatnonzero(totals >= totals.max() - tolerance)[0]]))
        left -= int(units[picked[0]])
    for (units, _), chosen in zip(reversed(tasks[:-1]), reversed(trail), strict=True):
        picked.append(int(chosen[left]))
        left -= int(units[picked[-1]])
    return tuple(reversed(picked))


def _useful(units: Ints, worth: Floats, capacity: int) -> Ints:
    """By rising units, those that fit and are worth more than all smaller ones."""
    order = np.argsort(units, kind="stable")
    order = order[units[order] <= capacity]
    assert not units[order[0]], "every task can at least stop"
    before = np.maximum.accumulate(np.concatenate(([-np.inf], worth[order[:-1]])))
    return order[worth[order] > before]
