"""Ranks that disagree about what an operation is: its kind, or its size where sizes must agree.

They come before any look at who waits: the operation can never complete, and the minority runs
another program, or another iteration of it. On a tie the past tells: a rank that calls what it called after
the same operations before follows the program. Where it does not tell, all are named, unsure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from everstep_diagnose.case import Case
from everstep_diagnose.comm_record import COMPUTE, EQUAL_SIZES, RECV, SEND, UNKNOWN, Record
from everstep_diagnose.finding import Finding, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep_diagnose.wait_graph import RankPositions

_BY_MAJORITY, _BY_THE_PAST, _TIED = 0.95, 0.7, 0.5
_LOOK_BACK = 256  # operations
_CONTEXT = 3  # operations back that must agree for two places of a program to be the same, where it has them


def find_mismatches(case: Case, positions: RankPositions) -> list[Finding]:
    """The earliest disagreement at an operation that a rank waits at, if there is one."""
    for records in _waited_for(case, positions):
        kinds = Counter(record.kind for record in records)
        if len(kinds) > 1:
            said = {record.rank: record.kind for record in records}
            return [_disagree(case, records, said, "calls {0} where {1} call {2}")]
        sizes = {record.bytes for record in records if record.bytes != UNKNOWN}
        if len(sizes) > 1 and records[0].kind in EQUAL_SIZES:
            said = {record.rank: f"{record.bytes} bytes" for record in records}
            return [_disagree(case, records, said, "brings {0} to it where {1} bring {2}")]
    return []


def _waited_for(case: Case, positions: RankPositions) -> list[list[Record]]:
    log = case.log
    wanted = {(r.group, r.seq) for r in positions.first.values() if not r.is_message}
    if not wanted:
        return []
    rows = np.flatnonzero(np.isin(log.seq, np.array([seq for _, seq in wanted], dtype=np.int64)))
    found: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for at in rows[~log.take(rows).is_kind(SEND, RECV)].tolist():
        record = log.row(at)
        if (record.group, record.seq) in wanted:
            found[record.group, record.seq].append(record)
    return [found[key] for key in sorted(found)]


def _disagree(case: Case, records: list[Record], said: dict[int, str], form: str) -> Finding:
    most, count = Counter(said.values()).most_common(1)[0]
    tied = count * 2 <= len(said)
    strays = [record.rank for record in records if tied and _strays(case, record)]
    if 0 < len(strays) < len(said):
        odd, confidence = sorted(strays), _BY_THE_PAST
        most = next(word for rank, word in said.items() if rank not in strays)
    else:
        odd = sorted(said) if tied else sorted(rank for rank, word in said.items() if word != most)
        confidence = _TIED if tied else _BY_MAJORITY
    others = f"rank {ranks_text(rank for rank, word in said.items() if word == most)}"
    operation = f"operation {records[0].seq} of group {case.name(records[0].group)}"
    agreed = RuledOut(what="device and link", because="ranks disagree about the operation itself")
    return Finding(
        syndrome=Syndrome.COMMUNICATION_HANG,
        where=Where.PROGRAM,
        suspects=tuple(
            Suspect(
                rank=rank,
                confidence=confidence,
                evidence=f"at {operation} it {form.format(said[rank], others, most)}",
                node=case.hosts.get(rank, ""),
            )
            for rank in odd
        ),
        victims=tuple(r for r in case.ranks if r not in odd),
        ruled_out=(agreed,),
        because=f"ranks do not agree on {operation}: rank {ranks_text(odd)} differs from the rest.",
    )


def _strays(case: Case, record: Record) -> bool:
    """Is it another operation than the one the rank called after the same operations before?"""
    log = case.log
    mine = (log.rank == record.rank) & (log.group == record.group) & (log.seq < record.seq)
    rows = np.flatnonzero(mine & ~log.is_kind(SEND, RECV, COMPUTE))[-_LOOK_BACK:]
    past = [(log.kinds[log.kind[at]], int(log.bytes[at])) for at in rows.tolist()]
    before = _same_place(past)
    return before is not None and past[before] != (record.kind, record.bytes)


def _same_place(calls: Sequence[Hashable]) -> int | None:
    """Where the program stood before at the place it has reached after `calls`: the index of what came next
    then, the latest one. None: it has not been here."""
    for context in range(min(_CONTEXT, len(calls)), 0, -1):
        end = tuple(calls[-context:])
        for at in range(len(calls) - 1, context - 1, -1):
            if tuple(calls[at - context : at]) == end:
                return at
    return None
