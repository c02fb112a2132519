"""Training repeats itself: what a rank calls next, by what it called after the same operations before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_CONTEXT = 3  # operations back that must agree for two places of a program to be the same, where it has them


def same_place(calls: Sequence[Hashable]) -> int | None:
    """Where the program stood before at the place it has reached after `calls`: the index of what came next
    then, the latest one. None: it has not been here."""
    for context in range(min(_CONTEXT, len(calls)), 0, -1):
        end = tuple(calls[-context:])
        for at in range(len(calls) - 1, context - 1, -1):
            if tuple(calls[at - context : at]) == end:
                return at
    return None
