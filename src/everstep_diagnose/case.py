"""One case of many parts: which groups are the same, who is in them, and who exists.

A folder may hold two jobs: `mixed` says so, and nothing is joined. Groups are the same when their name and
their members are: after a split, one name may stand for two sets of ranks. Of several dumps of one rank the
latest counts.

gloo's dumps name their groups and not the members: of the default group all ranks are, of another one the
ranks with records in it. No rank is made up of which no source speaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

import numpy as np

from everstep_diagnose.comm_record import (
    FLIGHT_RECORDER,
    UNKNOWN,
    Dump,
    Group,
    GroupProgress,
    Log,
    concatenate,
)


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
    errors: dict[int, tuple[int, str]] = field(default_factory=dict)
    has_device: bool = True
    misses_messages: bool = False  # some were issued, and a recorder left them out

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
    world |= {rank for group in groups for rank in group.members}
    for part in parts:
        if part.form == "ring" and not part.world_size:  # its writer did not know
            world |= set(np.unique(part.log.peer).tolist()) - {UNKNOWN}
    groups = _with_members(groups, log, world)
    case = Case(
        log=log,
        groups=groups,
        ranks=tuple(sorted(spoke)),
        world=tuple(sorted(world)),
        silent=silent,
    )
    for part, indices in zip(parts, moved, strict=True):
        case.progress |= {(rank, indices[g]): value for (rank, g), value in part.progress.items()}
        case.hosts |= part.hosts
        case.errors |= part.errors
        case.has_device &= part.has_device
        case.taken_ns |= part.taken_ns
        case.misses_messages |= part.misses_messages
    return case


@dataclass(frozen=True, slots=True)
class Mixed:
    """A rank of which two jobs, or two attempts at one, have left the same kind of file."""

    rank: int
    folders: tuple[str, ...]  # of all such ranks; one: it has both
    sizes: tuple[int, ...]  # of their jobs, where these differ


def mixed(parts: Sequence[Dump]) -> Mixed | None:
    """Several files of a rank in one folder are takes of one job; in two folders they are of two."""
    takes: dict[tuple[str, tuple[int, ...]], list[Dump]] = {}
    for part in parts:
        if part.ranks:
            takes.setdefault((part.form, part.ranks), []).append(part)
    first: tuple[int, tuple[int, ...]] | None = None
    folders: set[str] = set()
    for (_, ranks), found in sorted(takes.items(), key=lambda item: item[0][1]):
        places = {str(PurePosixPath(part.source).parent) for part in found}
        sizes = tuple(sorted({part.world_size for part in found if part.world_size}))
        if len(places) > 1 or len(sizes) > 1:
            first = first or (ranks[0], sizes if len(sizes) > 1 else ())
            folders |= places
    return None if first is None else Mixed(first[0], tuple(sorted(folders)), first[1])


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
            indices.append(keys[key])
        moved.append(indices)
    return groups, moved


# ------------------------------------------------------------------ members that no source names


def _world_size(parts: Sequence[Dump], groups: list[Group]) -> int:
    """As said; else, where groups are not listed, there is every rank below one that left a dump."""
    said = max((part.world_size for part in parts), default=0)
    dumped = [rank for part in parts if part.form == FLIGHT_RECORDER for rank in part.ranks]
    is_listed = all(group.members for group in groups)
    return said if is_listed else max(said, max(dumped, default=UNKNOWN) + 1)


def _with_members(groups: list[Group], log: Log, world: set[int]) -> list[Group]:
    """Members where a source left them out: all for the default group, else the ranks seen in it."""
    found = []
    for index, group in enumerate(groups):
        if not group.members:
            seen = world if group.is_first else set(np.unique(log.rank[log.group == index]).tolist())
            group = replace(group, members=tuple(sorted(seen)))
        found.append(group)
    return found
