"""How long each rank worked in each step, waiting taken out.

Between two communications a rank computes; inside one it also waits. What it did itself before operation k is

    own = enqueued(k) - the moment it was free: released from operation k-1, or, if it had not waited for that
          one, when it enqueued it

An operation releases a rank when it ends, where ends are known. Where they are not (Flight Recorder on
gloo) an operation that no rank leaves before all have come releases all when the last one comes. So a
rank that is late because it waited elsewhere has no own time to show for it: it is a victim.

Ranks are compared with ranks of the same *role* only: those that do the same work by construction. Messages
tell pipelines: ranks joined by messages are stages of one replica and have different roles; ranks that
share a group of collectives and no message path do the same. A role's group also beats the steps: its
operations repeat with a period, and one period is a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everstep_diagnose.case import Case
from everstep_diagnose.comm_record import COMPUTE, RECV, SEND, SYNCHRONIZING, UNKNOWN, Ints, Log, most_by

Floats = NDArray[np.float64]
_LONGEST_PERIOD = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWork:
    """Ranks that do the same work, and the seconds of own work each did in each step."""

    name: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    own_s: Floats  # [step, rank]
    step_s: float  # how long a step takes, waiting included


def roles_of(case: Case, offsets: Mapping[int, int]) -> list[RoleWork]:
    """Every role with the work of its ranks; ranks with too few records are left out."""
    log = case.log
    if not len(log):
        return []
    if log.is_kind(COMPUTE).any():
        return _recorded_times(case)
    own = _own_ns(case, offsets)
    beats = _beats(case)
    roles = []
    starts = np.flatnonzero(np.r_[True, np.diff(log.rank) != 0])
    bounds = {
        int(log.rank[a]): (int(a), int(b)) for a, b in zip(starts, np.r_[starts[1:], len(log)], strict=True)
    }
    for name, (ranks, group, period) in beats.items():
        role = _role(log, own, name, [r for r in ranks if r in bounds], group, period, bounds)
        if role is not None:
            roles.append(role)
    return roles


def _own_ns(case: Case, offsets: Mapping[int, int]) -> Ints:
    """Before each record, the time its rank spent on its own; 0 for its first."""
    log = case.log
    shift = np.zeros(int(log.rank.max()) + 1, dtype=np.int64)
    for rank, offset in offsets.items():
        if rank < len(shift):
            shift[rank] = offset
    enqueued = np.where(log.enqueued_ns != UNKNOWN, log.enqueued_ns - shift[log.rank], 0)
    released = np.where(log.ended_ns != UNKNOWN, log.ended_ns - shift[log.rank], enqueued)
    open_ended = (log.ended_ns == UNKNOWN) & (log.done != 0) & log.is_kind(*SYNCHRONIZING)
    if open_ended.any():
        key = _operations(log)
        keys, last = most_by(key[open_ended], enqueued[open_ended])
        released[open_ended] = last[np.searchsorted(keys, key[open_ended])]
    if _only_lengths(log):
        return _lateness_ns(log)
    own = np.zeros(len(log), dtype=np.int64)
    waited = released[:-1] <= enqueued[1:]  # else it went on without waiting for it
    free = np.where(waited, np.maximum(released[:-1], enqueued[:-1]), enqueued[:-1])
    same = (np.diff(log.rank) == 0) & (log.enqueued_ns[1:] != UNKNOWN) & (log.enqueued_ns[:-1] != UNKNOWN)
    own[1:] = np.where(same, np.maximum(enqueued[1:] - free, 0), 0)
    return own


def _recorded_times(case: Case) -> list[RoleWork]:
    """Where ranks record their own work: a role is a group, a record's number its step."""
    log, roles = case.log, []
    rows = np.flatnonzero(log.is_kind(COMPUTE) & (log.took_ns != UNKNOWN))
    for group in np.unique(log.group[rows]).tolist():
        mine = rows[log.group[rows] == group]
        ranks = np.unique(log.rank[mine])
        first = max(int(log.seq[mine[log.rank[mine] == r]].min()) for r in ranks) + 1
        last = min(int(log.seq[mine[log.rank[mine] == r]].max()) for r in ranks) - 1
        mine = mine[(log.seq[mine] >= first) & (log.seq[mine] <= last)]
        if last < first:
            continue
        steps, at = np.unique(log.seq[mine], return_inverse=True)
        own = np.zeros((len(steps), len(ranks)))
        np.add.at(own, (at, np.searchsorted(ranks, log.rank[mine])), log.took_ns[mine] / 1e9)
        span = (log.enqueued_ns[mine].max() - log.enqueued_ns[mine].min()) / 1e9 if len(mine) else 0.0
        roles.append(
            RoleWork(
                name=case.name(group),
                ranks=tuple(ranks.tolist()),
                steps=tuple(steps.tolist()),
                own_s=own,
                step_s=float(span) / max(len(steps), 1),
            )
        )
    return roles


def _only_lengths(log: Log) -> bool:
    return bool(np.mean((log.took_ns != UNKNOWN) & ~log.is_kind(COMPUTE)) > 0.5)


def _lateness_ns(log: Log) -> Ints:
    """Where only lengths are known: the rank that comes last waits least, so the longest length in an
    operation less a rank's own is by how much it came later than the first.
    """
    late = np.zeros(len(log), dtype=np.int64)
    rows = np.flatnonzero((log.took_ns != UNKNOWN) & log.is_kind(*SYNCHRONIZING))
    key = _operations(log)[rows]
    keys, longest = most_by(key, log.took_ns[rows])
    late[rows] = longest[np.searchsorted(keys, key)] - log.took_ns[rows] if len(rows) else 0
    return late


def _operations(log: Log) -> Ints:
    """One number for each operation of each group."""
    low = int(log.seq.min())
    return log.group.astype(np.int64) * (int(log.seq.max()) - low + 1) + (log.seq - low)


# ------------------------------------------------------------------ roles and steps


def _beats(case: Case) -> dict[str, tuple[list[int], int, int]]:
    """For each role: its ranks, the group whose operations beat its steps (-1: its messages), the period."""
    log = case.log
    replica = _replicas(case)
    is_message = log.is_kind(SEND, RECV)
    collective = ~is_message & ~log.is_kind(COMPUTE)
    counts = np.bincount(log.group[collective], minlength=len(case.groups))
    found: dict[str, tuple[list[int], int, int]] = {}
    placed: set[int] = set()
    for group in np.argsort(-counts, kind="stable").tolist():
        members = [m for m in case.groups[group].members if m in replica and m not in placed]
        distinct = len({replica[m] for m in members}) == len(members)
        if counts[group] == 0 or len(members) < 2 or not distinct:
            continue
        period = _period(case, members[0], group)
        found[f"group {case.name(group)}"] = (members, group, period)
        placed |= set(members)
    for rank in case.ranks:
        if rank not in placed and rank in replica:
            shared = [g for g in range(len(case.groups)) if rank in case.groups[g].members and counts[g]]
            group = max(shared, key=lambda g: len(case.groups[g].members)) if shared else -1
            found[f"rank {rank}"] = ([rank], group, _period(case, rank, group))
    return found


def _replicas(case: Case) -> dict[int, int]:
    """Ranks joined by messages are stages of one replica: each rank's lowest such rank."""
    log = case.log
    starts = np.flatnonzero(np.r_[True, np.diff(log.rank) != 0])
    parent = {rank: rank for rank in log.rank[starts].tolist()}

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    rows = log.is_kind(SEND, RECV) & (log.peer != UNKNOWN)
    for a, b in np.unique(np.stack([log.rank[rows], log.peer[rows]], axis=1), axis=0).tolist():
        if a in parent and b in parent:
            one, other = root(a), root(b)
            parent[max(one, other)] = min(one, other)
    return {rank: root(rank) for rank in parent}


def _rows_of_beat(log: Log, first: int, last: int, group: int) -> Ints:
    kind = log.kind[first:last]
    wanted = np.array([(name in (SEND, RECV)) == (group < 0) and name != COMPUTE for name in log.kinds])
    chosen = wanted[kind]
    if group >= 0:
        chosen &= log.group[first:last] == group
    return np.flatnonzero(chosen) + first


def _period(case: Case, rank: int, group: int) -> int:
    """After how many operations the same ones come again."""
    log = case.log
    ends = np.searchsorted(log.rank, [rank, rank + 1])
    rows = _rows_of_beat(log, int(ends[0]), int(ends[1]), group)
    sign: Ints = log.kind[rows].astype(np.int64) * (1 << 44) + log.bytes[rows] * 4096 + log.peer[rows]
    for period in range(1, min(len(sign) // 3, _LONGEST_PERIOD) + 1):
        if np.mean(sign[period:] == sign[:-period]) >= 0.97:
            return period
    return 1


def _step_s(log: Log, closing: Ints) -> float:
    if len(closing) > 1 and (log.enqueued_ns[closing] != UNKNOWN).all():
        return float(np.median(np.diff(log.enqueued_ns[closing]))) / 1e9
    return 2 * float(np.max(log.took_ns[closing])) / 1e9  # no moments: operations as the measure


def _role(
    log: Log,
    own: Ints,
    name: str,
    ranks: list[int],
    group: int,
    period: int,
    bounds: dict[int, tuple[int, int]],
) -> RoleWork | None:
    sums: dict[int, tuple[Ints, Floats, float]] = {}
    for rank in ranks:
        first, last = bounds[rank]
        beats = _rows_of_beat(log, first, last, group)
        if len(beats) < 3 * period:
            continue
        number = (log.seq[beats] if group >= 0 else np.arange(len(beats))) // period
        steps, starts = np.unique(number, return_index=True)
        closing = np.r_[beats[starts[1:] - 1], beats[-1]]  # the last beat of each step
        total = np.cumsum(own[first:last])
        own_s = np.diff(np.r_[0, total[closing - first]]) / 1e9
        length = _step_s(log, closing)
        sums[rank] = steps, own_s, length
    if not sums:
        return None
    common = sorted(set.intersection(*(set(steps.tolist()) for steps, _, _ in sums.values())))
    if len(common) > 2:
        common = common[1:-1]  # the first has no beginning, the last may have no end
    if not common:
        return None
    own_s = np.stack([values[np.searchsorted(steps, common)] for steps, values, _ in sums.values()], axis=1)
    return RoleWork(
        name=name,
        ranks=tuple(sums),
        steps=tuple(common),
        own_s=own_s,
        step_s=float(np.median([length for _, _, length in sums.values()])),
    )
