"""Which shard of a worker do the others wait for?

The shards of a worker enter the same collectives in the same order. Each counts those it has entered, and the
time it has spent inside, in a few bytes of shared memory (`engine.shards.marks`).

    hung   the kernel says that one is stopped; or the others are inside a collective that one has not entered
    slow   the others spend a good part of their time inside collectives, and one hardly any: it comes last

If all are inside the same collective, none of them is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORTH = 0.1  # of the time: what the others wait for a slow shard
LESS = 0.5  # a slow shard waits at most this part of what any other waits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgress:
    """One shard among its group's collectives."""

    entered: int
    is_inside: bool  # the last one it has entered
    stopped: bool = False  # the kernel says so


def hung_shard(shards: Sequence[ShardProgress]) -> int | None:
    stopped = [index for index, one in enumerate(shards) if one.stopped]
    if stopped:
        return stopped[0]
    newest = max((one.entered for one in shards), default=0)
    behind = [index for index, one in enumerate(shards) if one.entered < newest]
    waiting = [one for one in shards if one.entered == newest and one.is_inside]
    return min(behind, key=lambda index: shards[index].entered) if behind and waiting else None


def slow_shard(waited_s: Sequence[float], seconds: float) -> int | None:
    """`waited_s`: inside collectives, of each shard, in these seconds."""
    if len(waited_s) < 2:
        return None
    last = min(range(len(waited_s)), key=lambda index: waited_s[index])
    others = min(waited for index, waited in enumerate(waited_s) if index != last)
    return last if others >= WORTH * seconds and waited_s[last] <= LESS * others else None
