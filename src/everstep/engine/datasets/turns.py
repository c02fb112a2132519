"""Whose turn it is: an endless order of parts in which every share holds, known at any place on its own.

After n microbatches a part is owed T(n) of them, the sum of its shares so far, and has had floor(T(n)) or
ceil(T(n)): always less than one from its share. So each microbatch of a part has a window, from the place
where floor(T) reaches its number to the place by which it must have come. A state of the order at a place
(how many each part has had) is a choice: which of the windows open there have been served?

    place            0   1   2   3   4   5   6   7   8   9   10
    0.5   windows    [-------)[------)[------)[------)[------)
    0.3              [-------------)
                                [-------------)
                                            [-------------)
    0.2              [------------------)[-------------------)

The state at a place follows from those at two others, one before and one after it, at multiples of a higher
power of two (at a power of two from one alone, at half of it). So about 2 log2(n) states lead to any place n,
and neighbours share nearly all of them. Windows that are open at one of the two places as well keep what was
chosen there. Of the others those that end first are served, but of those that opened at a place s or later
no more than

    ceil( sum over all parts of min(T(n) - T(s), T(n) - floor(T(n))) )

Without this limit the windows of a stretch could need more places than it has. With it a choice always
exists: windows served evenly while they are open keep to every limit in fractions; limits are whole numbers
of two nested families (by the start of a window, by its end), and what meets such limits in fractions does
so in whole numbers too. The limits of a place follow from those of its neighbours, as shares add up to one.

Where weights change, what parts are owed is carried over, as much of it as keeps the limits; a part without
weight is owed nothing until it has one again. Nothing before a change depends on it.

Rejected: always the part furthest behind (a place is known from all before it only), a period (the weights
may fit none), a tree of halves or the order of T (a part can be two or more from its share).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import groupby

_STATES = 512  # that are kept of a stretch: those on the way to any place are about 80
_LONG = 256  # bits of a number: debts of many weights in turn would have ever longer ones

Counts = tuple[int, ...]
Shares = Sequence[Fraction]


class Turns:
    """The order for the weights of several parts, each from a place on; the first from 0."""

    def __init__(self, weights: Sequence[tuple[int, Shares]]) -> None:
        parts = range(len(weights[0][1]))
        had, owed = [0 for _ in parts], [Fraction(0) for _ in parts]
        self._firsts = [first for first, _ in weights]
        self._stretches: list[tuple[_Stretch, Counts]] = []  # of weights that hold; what parts had before
        for at, (first, given) in enumerate(weights):
            total = sum(given)
            shares = [weight / total for weight in given]
            debts = [_short(due - has) for due, has in zip(owed, had, strict=True)]
            stretch = _Stretch.after(debts, shares)
            self._stretches.append((stretch, tuple(had)))
            if at + 1 < len(weights):
                length = weights[at + 1][0] - first
                had = [has + more for has, more in zip(had, stretch.counts(length), strict=True)]
                owed = [due + length * share for due, share in zip(owed, shares, strict=True)]

    def counts(self, place: int) -> Counts:
        """How many of the microbatches before this place are of each part."""
        at = bisect_right(self._firsts, place) - 1
        stretch, had = self._stretches[at]
        more = stretch.counts(place - self._firsts[at])
        return tuple(a + b for a, b in zip(had, more, strict=True))

    def turn(self, place: int) -> tuple[int, int]:
        """Which part's turn it is, and how many it has had before."""
        before, after = self.counts(place), self.counts(place + 1)
        (part,) = [k for k, (had, has) in enumerate(zip(before, after, strict=True)) if has > had]
        return part, before[part]


class _Stretch:
    """The order while weights hold, from parts that are owed less than one microbatch each, in all none."""

    def __init__(self, shares: Shares, debts: Shares) -> None:
        self._unit = math.lcm(*(number.denominator for number in (*shares, *debts)))
        self._each = [int(share * self._unit) for share in shares]  # owed with each microbatch, in units
        self._first = [int(debt * self._unit) for debt in debts]
        self.counts = lru_cache(maxsize=_STATES)(self._counts)

    @classmethod
    def after(cls, debts: Shares, shares: Shares) -> _Stretch:
        """From debts of weights before: as much of them as can be borne within the limits."""
        idle = sum(debt for debt, share in zip(debts, shares, strict=True) if not share) - sum(debts)
        debts = [
            debt + idle * share if share else Fraction(0) for debt, share in zip(debts, shares, strict=True)
        ]
        for quarters in (4, 3, 2, 1):
            borne = [debt * quarters / 4 for debt in debts]
            if all(-1 < debt < 1 for debt in borne):
                stretch = cls(shares, borne)
                if stretch._is_bearable():
                    return stretch
        return cls(shares, [Fraction(0) for _ in debts])

    def _is_bearable(self) -> bool:
        """Whether what is owed at first can be served in time: the limit of windows that end by a place."""
        windows = [
            (-first % self._unit, each) for first, each in zip(self._first, self._each, strict=True) if each
        ]
        due = sorted(
            -(-(self._unit - first) // each)
            for first, each in zip(self._first, self._each, strict=True)
            if first > 0
        )
        return all(
            number * self._unit < sum(min(each * place, rest) for rest, each in windows) + self._unit
            for number, place in enumerate(due, 1)
        )

    def _owed(self, place: int) -> list[int]:
        return [first + each * place for first, each in zip(self._first, self._each, strict=True)]

    def _counts(self, place: int) -> Counts:
        """How many of the microbatches before this place are of each part."""
        if place == 0:
            return (0,) * len(self._each)
        step = place & -place
        earlier = place // 2 if step == place else place - step
        before = self.counts(earlier)
        after = None if step == place else self.counts(place + step)
        owed = self._owed(place)
        counts, free = [], []
        for part, had in enumerate(before):
            low, high = owed[part] // self._unit, -(-owed[part] // self._unit)
            low, high = max(low, had), high if after is None else min(high, after[part])
            counts.append(low)
            if high > low:
                free.append(part)
        served = place - sum(counts)
        for part in free if served == len(free) else self._served(owed, place - earlier, free, served):
            counts[part] += 1
        assert sum(counts) == place
        return tuple(counts)

    def _served(self, owed: list[int], since: int, free: list[int], number: int) -> list[int]:
        """Those of the free parts whose open windows have been served: as many as given."""
        limits = self._limits(owed, since, free, number)
        due = {part: -(-(-owed[part] % self._unit) // self._each[part]) for part in free}
        room = list(range(number + 1))  # at each index: where to look for the last unused one up to it
        served = []
        for part in sorted(free, key=due.__getitem__):
            at = limits[part]
            while room[at] != at:
                room[at] = room[room[at]]
                at = room[at]
            if at:  # each takes an index up to its limit: then no limit has more than it allows
                room[at] -= 1
                served.append(part)
        return served

    def _limits(self, owed: list[int], since: int, free: list[int], number: int) -> dict[int, int]:
        """Of each free part: how many windows that opened with its own, or later, may be served."""
        rests = [one % self._unit for one in owed]  # what open windows have had, in units
        ages = [-(-rest // each) if each else 0 for rest, each in zip(rests, self._each, strict=True)]
        limits = dict.fromkeys(free, number)  # windows as old as `since` have no other
        latest_first = sorted(range(len(owed)), key=ages.__getitem__)
        taken = whole = share = 0  # of the parts whose windows are not older
        for age, alike in groupby((part for part in latest_first if part in limits), key=ages.__getitem__):
            if age >= since:
                break
            while taken < len(latest_first) and ages[latest_first[taken]] <= age:
                whole += rests[latest_first[taken]]
                share += self._each[latest_first[taken]]
                taken += 1
            most = whole + age * (
                self._unit - share
            )  # of those taken what they have had, of others all since
            limits.update(dict.fromkeys(alike, min(number, -(-most // self._unit))))
        return limits


def _short(debt: Fraction) -> Fraction:
    return debt if debt.denominator.bit_length() <= _LONG else Fraction(round(debt * 2**_LONG), 2**_LONG)
