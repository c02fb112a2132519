"""Who waits for whom: an arrow for every rank that is not where another one waits for it.

Every rank that has an operation outstanding waits at the *first* one of its program: what comes after it
queues behind it. At that operation each other member is in one of these states:

    not there   it has not enqueued the operation                  we wait for it     (NEVER)
    behind      it has, but has an earlier one outstanding         we wait for it     (BEHIND)
    same        it is at this very operation                       we wait together
    gone        it completed the operation                         then the one who still waits is the odd one
    unknown     no record says                                     we may wait for it (ABSENT)

Arrows differ in what they rest on. NEVER and BEHIND rest on records. ABSENT rests on the lack of one, which
is weak: sources forget what is completed, and number messages differently at their two ends.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from everstep_diagnose.case import Case
from everstep_diagnose.comm_record import COMPUTE, RECV, SEND, SYNCHRONIZING, UNKNOWN, Record, most_by

_TOO_MANY_SILENT = 0.34  # of the members of an operation: then silence is missing data, not a symptom


_MANY = 50_000  # arrows of one operation


class Rests(IntEnum):
    ABSENT = 0
    BEHIND = 1
    NEVER = 2


class Arrow(NamedTuple):
    waiter: int
    target: int
    at: Record
    rests: Rests
    how: str  # what the target did instead


@dataclass(slots=True)
class RankPositions:
    """Where every rank stands."""

    first: dict[int, Record] = field(default_factory=dict)  # its first outstanding operation
    outstanding: dict[int, list[Record]] = field(default_factory=lambda: defaultdict(list))
    pending: set[tuple[int, int, int]] = field(default_factory=set)  # (rank, group, seq) of collectives
    posted: dict[tuple[int, int, int, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    pairwise: set[int] = field(default_factory=set)  # groups whose messages have one number at both ends
    reached: dict[tuple[int, int, bool], int] = field(default_factory=dict)  # (rank, group, is message)
    last_message: dict[tuple[int, int, int, str], int] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)  # their records are older than what their peers tell

    def is_through(self, member: int, record: Record) -> bool:
        """Has `member` completed the operation that `record` is of?"""
        if not record.is_message:
            reached = self.reached.get((member, record.group, False), UNKNOWN)
            return reached >= record.seq and (member, record.group, record.seq) not in self.pending
        last = self.last_number(member, record)
        there = (member, record.group, record.rank, _other(record.kind))
        return last is not None and last >= record.seq and record.seq not in self.posted.get(there, ())

    def last_number(self, peer: int, record: Record) -> int | None:
        """The last message the peer enqueued with us, where its numbers mean the same as ours."""
        if record.group not in self.pairwise:
            return None
        there = (peer, record.group, record.rank, _other(record.kind))
        return self.last_message.get(there, self.reached.get((peer, record.group, True)))


def positions_of(case: Case) -> RankPositions:
    log, positions = case.log, RankPositions()
    positions.pairwise = {at for at, group in enumerate(case.groups) if group.pairwise}
    is_message = log.is_kind(SEND, RECV)
    for at in np.flatnonzero((log.done == 0) & ~log.is_kind(COMPUTE)).tolist():
        record = log.row(at)
        positions.outstanding[record.rank].append(record)
        if record.is_message:
            positions.posted[record.rank, record.group, record.peer, record.kind].add(record.seq)
        else:
            positions.pending.add((record.rank, record.group, record.seq))
    for rank, records in positions.outstanding.items():
        positions.first[rank] = min(records, key=lambda r: r.order)
    positions.pairwise |= _aligned(positions)
    if len(log):
        _how_far(case, positions, is_message)
    _count_in(case, positions)
    _set_aside_stale(case, positions)
    return positions


def _aligned(positions: RankPositions) -> set[int]:
    """Groups whose messages are numbered by each rank on its own, and where the two ends agree all the same
    wherever both are outstanding: each rank has one partner there."""
    agrees: dict[int, bool] = {}
    for (rank, group, peer, kind), numbers in list(positions.posted.items()):
        others = positions.posted.get((peer, group, rank, _other(kind)))
        if others:
            agrees[group] = agrees.get(group, True) and bool(numbers & others)
    return {group for group, all_agree in agrees.items() if all_agree}


def _set_aside_stale(case: Case, positions: RankPositions) -> None:
    """Peers completed operations that a rank has not even enqueued, though no rank can complete them without
    it: so it has, and its records were taken earlier. They say nothing about now."""
    if not positions.first:
        return
    lowest: dict[tuple[int, int], int] = {}
    for rank, group, seq in positions.pending:
        lowest[rank, group] = min(seq, lowest.get((rank, group), seq))
    synchronizing = _synchronizing_groups(case)
    for group in synchronizing:
        reached = {r: positions.reached[r, group, False] for r in case.groups[group].members
                   if (r, group, False) in positions.reached}  # fmt: skip
        through = {r: lowest.get((r, group), seq + 1) - 1 for r, seq in reached.items()}
        if len(reached) < 2:
            continue
        ahead = sorted(through.values())[len(through) // 2]
        positions.stale |= {r for r, seq in reached.items() if seq < ahead}
    for rank in positions.stale:
        positions.first.pop(rank, None)
        positions.outstanding.pop(rank, None)


def _synchronizing_groups(case: Case) -> list[int]:
    log = case.log
    if not len(log):
        return []
    other = ~log.is_kind(*SYNCHRONIZING, SEND, RECV, COMPUTE)
    mixed = set(np.unique(log.group[other]).tolist())
    return [g for g in np.unique(log.group[log.is_kind(*SYNCHRONIZING)]).tolist() if g not in mixed]


def _how_far(case: Case, positions: RankPositions, is_message: np.ndarray) -> None:
    log, width = case.log, len(case.groups) * 2
    key = log.rank.astype(np.int64) * width + log.group * 2 + is_message
    keys, last = most_by(key, log.seq)
    for one, seq in zip(keys.tolist(), last.tolist(), strict=True):
        positions.reached[one // width, one % width // 2, bool(one % 2)] = seq
    apart = np.array([group.pairwise and len(group.members) != 2 for group in case.groups] or [False])
    rows = np.flatnonzero(is_message & apart[log.group])
    if len(rows):
        is_send = log.is_kind(SEND)[rows]
        ranks = int(max(log.rank.max(), log.peer.max())) + 2
        key = (
            (log.rank[rows].astype(np.int64) * len(case.groups) + log.group[rows]) * ranks
            + log.peer[rows]
            + 1
        )
        keys, last = most_by(key * 2 + is_send, log.seq[rows])
        for one, seq in zip(keys.tolist(), last.tolist(), strict=True):
            place, kind = one // 2, SEND if one % 2 else RECV
            rank_group, peer = divmod(place, ranks)
            rank, group = divmod(rank_group, len(case.groups))
            positions.last_message[rank, group, peer - 1, kind] = seq


def _count_in(case: Case, positions: RankPositions) -> None:
    """The library's counters say how far a rank got also where its records are gone. One counter serves
    collectives and messages, so it is read as the kind whose numbers, at the members' records, lie nearer;
    but never as collectives where that would have the rank complete one that a member has not enqueued."""
    near: dict[tuple[int, bool], int] = {}
    least: dict[int, int] = {}
    for (_, group, message), seq in positions.reached.items():
        near[group, message] = max(near.get((group, message), UNKNOWN), seq)
        if not message:
            least[group] = min(least.get(group, seq), seq)
    for (rank, group), progress in case.progress.items():
        if progress.enqueued == UNKNOWN:
            continue
        choices = [message for message in (False, True) if (group, message) in near] or [False]
        if progress.completed > least.get(group, progress.completed):
            choices = [True]
        message = min(choices, key=lambda m: abs(near.get((group, m), 0) - progress.enqueued))
        known = positions.reached.get((rank, group, message), UNKNOWN)
        positions.reached[rank, group, message] = max(known, progress.enqueued)


# ------------------------------------------------------------------ arrows


def arrows_of(case: Case, positions: RankPositions) -> list[Arrow]:
    """All arrows. Ranks that wait at one operation wait for the same ones, so each operation is looked at
    once; where that would make very many arrows, one of the waiters stands for all of them."""
    arrows: list[Arrow] = []
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for waiter, record in positions.first.items():
        if record.is_message:
            arrows += _to_the_peer(case, positions, waiter, record)
        else:
            together[record.group, record.seq].append(waiter)
    heard = set(case.ranks) - positions.stale
    for waiters in together.values():
        targets = _missing_at(case, positions, positions.first[waiters[0]], heard)
        some = waiters if len(waiters) * len(targets) <= _MANY else waiters[:1]
        arrows += [
            Arrow(waiter, member, positions.first[waiter], rests, how)
            for waiter in some
            for member, rests, how in targets
            if member != waiter
        ]
    return arrows


def _missing_at(
    case: Case, positions: RankPositions, record: Record, heard: set[int]
) -> list[tuple[int, Rests, str]]:
    """The members that an operation waits for."""
    members = case.groups[record.group].members
    if (
        case.has_device
        and record.kind in SYNCHRONIZING
        and any(positions.is_through(m, record) for m in members if m != record.rank)
    ):
        return []  # one peer is through, so all have contributed: no rank holds these up
    found = []
    for member in members:
        missing = _is_missing(case, positions, member, record) if member in heard else None
        if missing is not None:
            found.append((member, *missing))
    unheard = [member for member in members if member not in heard and member not in positions.stale]
    if all(rests is Rests.ABSENT for _, rests, _ in found) and _silence_speaks(case, unheard, members):
        found += [(m, Rests.ABSENT, case.silent.get(m, "left no records")) for m in unheard]
    return found


def _silence_speaks(case: Case, unheard: list[int], members: tuple[int, ...]) -> bool:
    if not unheard:
        return False
    if all(member in case.silent for member in unheard):
        return True
    return len(unheard) <= max(1, int(_TOO_MANY_SILENT * len(members)))


def _is_missing(
    case: Case, positions: RankPositions, member: int, record: Record
) -> tuple[Rests, str] | None:
    reached = positions.reached.get((member, record.group, False))
    first = positions.first.get(member)
    if reached is None and member in case.silent:
        return Rests.ABSENT, case.silent[member]
    if reached is None:
        how = "has nothing outstanding" if first is None else f"is at {operation(case, first)}"
        return Rests.ABSENT, how
    if reached < record.seq:
        return Rests.NEVER, f"got to {reached} of that group, never to {record.seq}"
    if first is None or (member, record.group, record.seq) not in positions.pending:
        return None  # it is through
    if not first.is_message and first.group == record.group and first.seq >= record.seq:
        return None  # it waits with us
    return Rests.BEHIND, f"is held up before it, at {operation(case, first)}"


def _to_the_peer(case: Case, positions: RankPositions, waiter: int, record: Record) -> list[Arrow]:
    peer, other = record.peer, _other(record.kind)
    if peer == UNKNOWN:
        return []
    if peer in positions.stale:
        return []
    if peer not in case.world:
        return []
    if peer not in case.ranks:
        return [Arrow(waiter, peer, record, Rests.ABSENT, case.silent.get(peer, "left no records"))]
    last, posted = (
        positions.last_number(peer, record),
        positions.posted.get((peer, record.group, waiter, other), ()),
    )
    if positions.is_through(peer, record):
        return []  # the one who waits is the odd one
    if last is not None and last < record.seq:
        how = f"got to {other} {last} with rank {waiter}, never to {record.seq}"
        return [Arrow(waiter, peer, record, Rests.NEVER, how)]
    if not posted:
        return [Arrow(waiter, peer, record, Rests.ABSENT, f"has no {other} outstanding to match")]
    first = positions.first[peer]
    if (
        first.is_message
        and first.peer == waiter
        and first.kind == other
        and (last is None or first.seq == record.seq)
    ):
        return []  # it waits with us
    how = f"is held up before it, at {operation(case, first)}"
    return [Arrow(waiter, peer, record, Rests.BEHIND, how)]


def _other(kind: str) -> str:
    return RECV if kind == SEND else SEND


def operation(case: Case, record: Record) -> str:
    if record.is_message:
        way = "to" if record.kind == SEND else "from"
        return f"{record.kind} {record.seq} {way} rank {record.peer}"
    return f"{record.kind} {record.seq} of group {case.name(record.group)}"
