"""What only gloo's Flight Recorder dumps need: members it leaves out, messages it counts and does not record.

pg_config       one entry with an empty name. While a job has only its first group, it lists the ranks
op_id           collectives and messages of a group counted together; `collective_seq_id` counts the
                collectives alone. So a gap in `op_id` between two entries is messages (or another thing
                that is not recorded, as a monitored barrier)
pg_status       `last_enqueued_collective` is the last `op_id`: what it is above the last entry's was
                issued after it
output_sizes    of an all-gather: one row per member
retired         completed, or failed: see `postmortem.py`
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from everstep.diagnose.program import same_place
from everstep.diagnose.record import UNKNOWN

Entries = Sequence[Mapping[str, Any]]


def is_gloo(entry: Mapping[str, Any]) -> bool:
    return str(entry.get("profiling_name", "")).startswith("gloo:")


def is_of_gloo(dump: Mapping[str, Any], entries: Entries) -> bool:
    """NCCL names its groups, also where it has no entries."""
    return any(map(is_gloo, entries)) or (not entries and set(dump.get("pg_config") or {}) == {""})


def members_of_world(dump: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks under the empty name, where they are those of the world."""
    nameless = (dump.get("pg_config") or {}).get("")
    if not isinstance(nameless, Mapping):
        return ()
    ranks = tuple(int(word) for word in re.findall(r"\d+", str(nameless.get("ranks", ""))))
    return ranks if ranks == tuple(range(len(ranks))) else ()


def group_size(entries: Entries) -> int:
    """By the rows that an all-gather of the group puts out; 0: there is none."""
    for entry in entries:
        name = str(entry.get("profiling_name", ""))
        if "gather" in name and "all" in name:
            took, gave = _elements(entry.get("input_sizes")), _elements(entry.get("output_sizes"))
            if took and gave and gave % took == 0:
                return gave // took
    return 0


def _elements(sizes: Any) -> int:
    total = 0
    for shape in sizes if isinstance(sizes, (list, tuple)) else ():
        count = 1
        for size in shape if isinstance(shape, (list, tuple)) else [shape]:
            count *= int(size)
        total += count
    return total


def messages_next(entries: Entries) -> int:
    """How many messages the rank usually issues, over all its groups, before its next collective; 0: none, or
    it cannot be known."""
    by_group: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in entries:
        by_group[int(entry.get("pg_id", UNKNOWN))].append(entry)
    return sum(map(_next_gap, by_group.values()))


def _next_gap(entries: Entries) -> int:
    numbers = [(int(e.get("op_id", 0)), int(e.get("collective_seq_id", 0))) for e in entries]
    gaps = [(b[0] - a[0]) - (b[1] - a[1]) for a, b in pairwise(numbers)]
    before = same_place([(str(e.get("profiling_name")), str(e.get("input_sizes"))) for e in entries])
    first = numbers[0][0] - numbers[0][1]  # before the first one
    return max(0, first if before is None else gaps[before - 1])
