"""Training repeats itself: what a rank calls next, by what it called after the same operations before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_CONTEXT = 3  # operations back that must agree for two places of a program to be the same, where it has them
_REGULAR = 6  # calls in a row that were as expected, before an unexpected one means something


def same_place(calls: Sequence[Hashable]) -> int | None:
    """Where the program stood before at the place it has reached after `calls`: the index of what came next
    then, the latest one. None: it has not been here."""
    for context in range(min(_CONTEXT, len(calls)), 0, -1):
        end = tuple(calls[-context:])
        for at in range(len(calls) - 1, context - 1, -1):
            if tuple(calls[at - context : at]) == end:
                return at
    return None


def first_stray(calls: Sequence[Hashable]) -> int | None:
    """The first of the last calls that is another than the ones before made expect; None: there is none, or
    the calls have not been regular enough to expect anything."""
    right = 0
    for at in range(max(_CONTEXT, len(calls) - 4 * _REGULAR), len(calls)):
        before = same_place(calls[:at])
        if before is not None and calls[before] == calls[at]:
            right += 1
        elif right >= _REGULAR:
            return at
        else:
            right = 0
    return None


def breaks_off(calls: Sequence[Hashable]) -> bool:
    """Do the calls end inside a round of the ones before, as those of a program that fails in a step? False
    also where there are no rounds to tell by."""
    for period in range(2, len(calls) // 2 + 1):
        if calls[-period:] != calls[-2 * period : -period]:
            continue
        first = len(calls) - period
        while first > 0 and calls[first - 1] == calls[first - 1 + period]:
            first -= 1
        if len(set(calls[first:])) > 1:
            return (len(calls) - first) % period != 0
    return False
