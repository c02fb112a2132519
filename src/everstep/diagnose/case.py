"""One case of many parts: which groups are the same, who is in them, and who exists.

Groups are the same when their name and their members are: after a split, one name may stand for two sets of
ranks. Of several dumps of one rank the latest counts.

gloo's dumps name their groups and not the members. A rank with records in a group is in it; a rank that left
no dump, or stopped before its first operation there, has none and is in it all the same. Four things tell
how many are missing: the output of an all-gather has one row per member; groups that ranks count alike (their
first, their second...) are parts of one division of the world and mostly equally large; ranks are numbered
from 0 without gaps; and no rank communicates alone. Who fills a place: ranks that left no record of that
division, nor of anything that comes after it, first those that continue the group's stride; if there are
none, the world is larger than the ranks that left a dump.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from everstep.diagnose.comm_record import (
    FLIGHT_RECORDER,
    UNKNOWN,
    Dump,
    Group,
    GroupProgress,
    Log,
    concatenate,
)

_LARGEST_WORLD = 1 << 16


@dataclass(slots=True, kw_only=True)
class Case:
    """Everything known about one job at one time."""

    log: Log
    groups: list[Group]
    ranks: tuple[int, ...]  # who spoke
    world: tuple[int, ...]  # who exists
    progress: dict[tuple[int, int], GroupProgress] = field(default_factory=dict)
    taken_ns: dict[int, int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    stuck_hosts: dict[int, str] = field(default_factory=dict)
    errors: dict[int, tuple[int, str]] = field(default_factory=dict)
    has_device: bool = True
    messages_next: dict[int, int] = field(default_factory=dict)  # that a rank usually issues before its next
    # recorded operation, where the recorder leaves messages out
    pulled: frozenset[int] = frozenset()
    dumped: frozenset[int] = frozenset()  # ranks whose Flight Recorder was read

    def name(self, group: int) -> str:
        return str(self.groups[group])


def join(parts: Sequence[Dump]) -> Case:
    """Everything that is known of one job."""
    parts = _latest(parts)
    groups, moved = _same_groups(parts)
    log = concatenate([(part.log, moved[i]) for i, part in enumerate(parts)])
    spoke = {rank for part in parts for rank in part.ranks} | set(np.unique(log.rank).tolist())
    silent = {rank: why for part in parts for rank, why in part.silent.items()}
    world = spoke | set(silent) | set(range(_world_size(parts, groups)))
    groups, world = _with_members(groups, log, {rank for g in groups for rank in g.members} | world)
    case = Case(
        log=log,
        groups=groups,
        ranks=tuple(sorted(spoke)),
        world=tuple(sorted(world)),
        silent=silent,
        dumped=frozenset(rank for part in parts if part.form == FLIGHT_RECORDER for rank in part.ranks),
    )
    for part, indices in sorted(zip(parts, moved, strict=True), key=lambda each: bool(each[0].pulled)):
        case.progress |= {(rank, indices[g]): value for (rank, g), value in part.progress.items()}
        case.hosts |= part.hosts
        case.stacks |= part.stacks
        case.stuck_hosts |= part.stuck_hosts
        case.errors |= part.errors
        case.has_device &= part.has_device
        case.taken_ns |= part.taken_ns  # a pull comes last: it knows better than a file's date
        case.messages_next |= part.messages_next
        case.pulled |= part.pulled
    return case


def _latest(parts: Sequence[Dump]) -> list[Dump]:
    newest: dict[tuple[str, tuple[int, ...]], Dump] = {}
    for part in parts:
        key = (part.form, part.ranks) if part.ranks else (part.source, ())
        other = newest.get(key)
        if other is None or _reach(part) >= _reach(other):
            newest[key] = part
    return list(newest.values())


def _reach(part: Dump) -> tuple[int, int]:
    return (int(part.log.order.max()) if len(part.log) else UNKNOWN), len(part.log)


def _same_groups(parts: Sequence[Dump]) -> tuple[list[Group], list[list[int]]]:
    """All groups, and where those of each part have moved to."""
    keys: dict[tuple[str, tuple[int, ...]], int] = {}
    groups: list[Group] = []
    moved = []
    for part in parts:
        indices = []
        for group in part.groups:
            key = (group.name, group.members)
            if key not in keys:
                keys[key] = len(groups)
                groups.append(group)
            else:
                known = groups[keys[key]]
                groups[keys[key]] = replace(known, size=max(known.size, group.size))
            indices.append(keys[key])
        moved.append(indices)
    return groups, moved


# ------------------------------------------------------------------ members that no source names


def _world_size(parts: Sequence[Dump], groups: list[Group]) -> int:
    said = max((part.world_size for part in parts), default=0)
    named = max((group.size for group in groups if not group.members and _is_default(group)), default=0)
    dumped = [rank for part in parts if part.form == FLIGHT_RECORDER for rank in part.ranks]
    nameless = any(not group.members for group in groups)
    return max(said, named, max(dumped, default=UNKNOWN) + 1 if nameless else 0)


def _is_default(group: Group) -> bool:
    return "default" in group.about


def _with_members(groups: list[Group], log: Log, world: set[int]) -> tuple[list[Group], set[int]]:
    """Members where a source left them out: all for the default group, else the ranks seen in it, and
    those that must be in it. Also the world, with those that must exist."""
    seen = {
        index: set(np.unique(log.rank[log.group == index]).tolist())
        for index, group in enumerate(groups)
        if not group.members
    }
    divisions: dict[int, list[int]] = defaultdict(list)
    for index, ranks in seen.items():
        if groups[index].level != UNKNOWN and ranks and not _is_default(groups[index]):
            divisions[groups[index].level].append(index)
    world = set(world)
    for level in sorted(divisions):
        world |= _fill(groups, log, seen, divisions[level], world)
    for index in seen:
        if _is_default(groups[index]):
            alone = len(world) == 1 and bool(seen[index])
            world |= {max(world) + 1} if alone else set()
            seen[index] = world
    filled = [
        replace(group, members=tuple(sorted(seen[index]))) if index in seen else group
        for index, group in enumerate(groups)
    ]
    return filled, world


def _fill(
    groups: list[Group], log: Log, seen: dict[int, set[int]], division: list[int], world: set[int]
) -> set[int]:
    """Gives the groups of one division the members they lack; returns ranks that left no record."""
    unheard: set[int] = set()
    usual = max(len(seen[index]) for index in division)
    early = _early(log, division, world)
    paired = _paired(groups, seen, division, early - set().union(*(seen[at] for at in division)))
    for index in division:
        seen[index] |= paired.get(index, set())
        least = max(groups[index].size, 2)
        lacking = max(least, usual) - len(seen[index])
        free = (early | unheard) - set().union(*(seen[at] for at in division))
        if lacking > 0 and free:
            seen[index] |= _who_fits(seen[index], free, lacking)
        elif len(seen[index]) < least or (lacking > 0 and _is_a_block(seen[index], world)):
            first = max(world | unheard) + 1
            beyond = set(range(first, min(first + lacking, _LARGEST_WORLD)))
            seen[index] |= beyond
            unheard |= beyond
    return unheard


def _paired(
    groups: list[Group], seen: dict[int, set[int]], division: list[int], free: set[int]
) -> dict[int, set[int]]:
    """As many single ranks as ranks to pair them with: in order, as divisions are made."""
    single = sorted((index for index in division if len(seen[index]) == 1), key=lambda at: min(seen[at]))
    if len(single) < 2 or len(single) != len(division) or len(single) != len(free):
        return {}
    if any(groups[index].size > 2 for index in single):
        return {}
    return {index: {rank} for index, rank in zip(single, sorted(free), strict=True)}


def _early(log: Log, division: list[int], world: set[int]) -> set[int]:
    """Ranks without a record, or with too few to have come to these groups: they may be in any of them."""
    ranks, first_row, length = np.unique(log.rank, return_index=True, return_counts=True)
    start = dict(zip(ranks.tolist(), first_row.tolist(), strict=True))
    rows = np.flatnonzero(np.isin(log.group, division))
    first_use = min((at - start[int(log.rank[at])] for at in rows.tolist()), default=0)
    enough = {rank for rank, count in zip(ranks.tolist(), length.tolist(), strict=True) if count > first_use}
    return world - enough


def _is_a_block(seen: set[int], world: set[int]) -> bool:
    """The last ranks of the world, without a gap: of equal blocks, the one that may be cut off."""
    return max(seen) == max(world) and max(seen) - min(seen) == len(seen) - 1 and len(seen) > 1


def _who_fits(seen: set[int], free: set[int], lacking: int) -> set[int]:
    if len(free) <= lacking:
        return set(free)
    strided = {rank for rank in free if _is_strided(seen | {rank})}
    return set(sorted(strided)[:lacking])


def _is_strided(ranks: set[int]) -> bool:
    """Do these lie on one stride, with at most one place left open?"""
    steps = np.diff(sorted(ranks))
    least = int(steps.min())
    return (
        len(steps) > 1 and bool(np.all(steps % least == 0)) and int(steps.sum()) <= least * (len(steps) + 1)
    )
