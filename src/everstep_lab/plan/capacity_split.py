"""Who gets how many: the exact best split of a capacity over tasks.

Maximise sum_t worth_t(k_t) with sum_t k_t <= n. The dynamic program is a max-plus convolution, task by task,

    S_t(j) = max_k S_(t-1)(j - k) + worth_t(k)

one vector operation per option. What makes it fast is asking less of it. For any price mu >= 0 of a unit

    sum_t worth_t(k_t)  =  U(mu) - sum_t loss_t(k_t) - mu (n - sum_t k_t)
    loss_t(k) = max_k' [worth_t(k') - mu k'] - [worth_t(k) - mu k]  >= 0

so once a split worth L is known, no better split uses an option whose loss exceeds U - L. With a good price
a handful of options per task survive, and with losses instead of worths the program also drops every state
that has lost more than U - L already. Nothing is lost by this: the answer is the one of the full program
(tests/plan compares the two, and brute force).

Rejected: greedy by marginal worth (wrong on curves that are not concave, which ours are not), and the full
program alone (256 tasks x 16,384 nodes are 34 billion additions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everstep_lab.plan.task_shape import Floats

Ints = npt.NDArray[np.int64]
SMALL = 200_000  # options x capacity: below this the full program is quicker than thinking
COARSE = 128  # options a task shows while the price is sought
ROUNDS = 6
AROUND = np.array([0, *(side * 2**i for i in range(7) for side in (-1, 1))])
NEAR = 1e-12  # two worths this close (relative) are equal


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """Units for every task, and their worth together."""

    units: tuple[int, ...]
    worth: float


def best_split(tasks: Sequence[tuple[Ints, Floats]], capacity: int) -> TaskSplit:
    """`tasks`: per task its possible units, ascending, from 0, and the worth of each."""
    if not tasks:
        return TaskSplit((), 0.0)
    useful = [_undominated(units, worth, capacity) for units, worth in tasks]
    if sum(len(units) for units, _ in useful) * capacity <= SMALL:
        return _split(useful, [-worth for _, worth in useful], capacity, np.inf)
    return _priced(useful, capacity)


def _undominated(units: Ints, worth: Floats, capacity: int) -> tuple[Ints, Floats]:
    """Options worth more than every option of fewer units: others can be replaced, and units left over."""
    fits = units <= capacity
    units, worth = units[fits], worth[fits]
    assert len(units), "every task can at least stop"
    best_before = np.maximum.accumulate(np.concatenate(([-np.inf], worth[:-1])))
    keep = worth > best_before
    return units[keep], worth[keep]


def _priced(tasks: list[tuple[Ints, Floats]], capacity: int) -> TaskSplit:
    price = _price(tasks, capacity)
    tops = [float((worth - price * units).max()) for units, worth in tasks]
    bound = sum(tops) + price * capacity
    losses = [top - (worth - price * units) for (units, worth), top in zip(tasks, tops, strict=True)]
    allowed = _first_allowance(losses)
    while True:
        kept = [loss <= allowed for loss in losses]
        found = _split(
            [(u[k], w[k]) for (u, w), k in zip(tasks, kept, strict=True)],
            [loss[k] for loss, k in zip(losses, kept, strict=True)],
            capacity,
            allowed,
            price,
        )
        gap = bound - found.worth if found.units else np.inf
        if gap <= allowed:
            return found
        # Not at once to the gap: with a little more allowed, the split found may be far better, the gap less.
        allowed = min(gap * (1 + 1e-9), max(allowed * 6, 1e-9 * abs(bound)))


def _first_allowance(losses: list[Floats]) -> float:
    """A guess that keeps some eight options a task; wrong guesses cost one more round."""
    each = [float(np.partition(loss, 7)[7]) if len(loss) > 8 else float(loss.max()) for loss in losses]
    return sorted(each)[len(each) // 2] + 1e-300


def _price(tasks: list[tuple[Ints, Floats]], capacity: int) -> float:
    """A price at which demand about meets capacity. Any price gives a bound; a good one, a tight bound.

    Sought on a coarse view of each task; what each task would really choose at that price joins the view,
    with its neighbours near and far, and the price is sought again.
    """
    seen = [np.arange(0, len(units), max(1, len(units) // COARSE)) for units, _ in tasks]
    price = 0.0
    for _ in range(ROUNDS):
        price = _coarse_price([(u[at], w[at]) for (u, w), at in zip(tasks, seen, strict=True)], capacity)
        wished = [int((worth - price * units).argmax()) for units, worth in tasks]
        if all(wish in at for wish, at in zip(wished, seen, strict=True)):
            break
        seen = [
            np.union1d(at, np.clip(wish + AROUND, 0, len(units) - 1))
            for at, wish, (units, _) in zip(seen, wished, tasks, strict=True)
        ]
    return price


def _coarse_price(tasks: list[tuple[Ints, Floats]], capacity: int) -> float:
    """By bisection: at a higher price less is wanted."""
    units = np.concatenate([u for u, _ in tasks]).astype(np.float64)
    worth = np.concatenate([w for _, w in tasks])
    lengths = np.array([len(u) for u, _ in tasks])
    starts = np.cumsum(lengths) - lengths

    def demand(price: float) -> float:
        net = worth - price * units
        best = np.repeat(np.maximum.reduceat(net, starts), lengths)
        return float(np.minimum.reduceat(np.where(net >= best, units, np.inf), starts).sum())

    if demand(0.0) <= capacity:
        return 0.0
    slopes = np.concatenate([np.diff(w) / np.diff(u) for u, w in tasks if len(u) > 1])
    low, high = 0.0, float(slopes.max()) + 1e-300
    for _ in range(60):
        middle = 0.5 * (low + high)
        if demand(middle) > capacity:
            low = middle
        else:
            high = middle
        if high - low <= 1e-9 * high:
            break
    return high


def _split(
    tasks: list[tuple[Ints, Floats]],
    losses: list[Floats],
    capacity: int,
    allowed: float,
    price: float = 0.0,
) -> TaskSplit:
    """The program over losses: least total loss, units left over charged at the price."""
    tolerance = NEAR * max((float(np.abs(w).max()) for _, w in tasks if len(w)), default=0.0)
    least = np.zeros(1)
    base = 0  # least[0] is the state in which `base` units are given away
    trail: list[tuple[int, npt.NDArray[np.int32]]] = []
    for (units, _), loss in zip(tasks, losses, strict=True):
        if not len(units):
            return TaskSplit((), -np.inf)
        width = min(capacity - base, len(least) - 1 + int(units[-1]))
        low = int(units[0])
        if width < low:
            return TaskSplit((), -np.inf)
        after = np.full(width - low + 1, np.inf)
        chosen = np.zeros(width - low + 1, dtype=np.int32)
        for index in range(len(units)):
            start = int(units[index]) - low
            end = min(len(after), start + len(least))
            if end <= start:
                break
            view = after[start:end]
            candidate = least[: end - start] + loss[index]
            better = candidate < view - tolerance
            view[better] = candidate[better]
            chosen[start:end][better] = index
        base += low
        live = np.flatnonzero(after <= allowed + tolerance)
        if not len(live):
            return TaskSplit((), -np.inf)
        first, last = int(live[0]), int(live[-1])
        after, chosen, base = after[first : last + 1], chosen[first : last + 1], base + first
        trail.append((base, chosen))
        least = after
    left = capacity - (base + np.arange(len(least)))
    total = least + price * left
    best = float(total.min())
    at = int(np.flatnonzero(total <= best + tolerance)[0]) + base
    picked = []
    for (units, _), (origin, chosen) in zip(reversed(tasks), reversed(trail), strict=True):
        index = int(chosen[at - origin])
        picked.append(index)
        at -= int(units[index])
    picked.reverse()
    worth = float(sum(w[i] for (_, w), i in zip(tasks, picked, strict=True)))
    return TaskSplit(tuple(int(u[i]) for (u, _), i in zip(tasks, picked, strict=True)), worth)
