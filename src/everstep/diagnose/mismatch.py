"""Ranks that disagree about what an operation is: its kind, or its size where sizes must agree.

They come before any look at who waits: the operation can never complete, and whoever is in the minority runs
another program, or another iteration of it. On a tie nobody is in the minority, and all are named, unsure.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from everstep.diagnose.finding import Finding, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep.diagnose.record import EQUAL_SIZES, RECV, SEND, UNKNOWN, Case, Record
from everstep.diagnose.waiting import Standing


def find_mismatches(case: Case, standing: Standing) -> list[Finding]:
    """The earliest disagreement at an operation somebody waits at, if there is one."""
    for records in _waited_for(case, standing):
        kinds = Counter(record.kind for record in records)
        if len(kinds) > 1:
            said = {record.rank: record.kind for record in records}
            return [_disagree(case, records[0], said, "calls {0} where {1} call {2}")]
        sizes = {record.bytes for record in records if record.bytes != UNKNOWN}
        if len(sizes) > 1 and records[0].kind in EQUAL_SIZES:
            said = {record.rank: f"{record.bytes} bytes" for record in records}
            return [_disagree(case, records[0], said, "brings {0} to it where {1} bring {2}")]
    return []


def _waited_for(case: Case, standing: Standing) -> list[list[Record]]:
    log = case.log
    wanted = {(r.group, r.seq) for r in standing.first.values() if not r.is_message}
    if not wanted:
        return []
    span = int(log.seq.max()) + 1
    keys = np.array([group * span + seq for group, seq in wanted], dtype=np.int64)
    rows = np.flatnonzero(np.isin(log.group.astype(np.int64) * span + log.seq, keys))
    found: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for at in rows[~log.take(rows).is_kind(SEND, RECV)].tolist():
        record = log.row(at)
        found[record.group, record.seq].append(record)
    return [found[key] for key in sorted(found)]


def _disagree(case: Case, record: Record, said: dict[int, str], form: str) -> Finding:
    most, _ = Counter(said.values()).most_common(1)[0]
    majority = sorted(rank for rank, word in said.items() if word == most)
    tied = len(majority) * 2 <= len(said)
    odd = sorted(said) if tied else sorted(set(said) - set(majority))
    operation = f"operation {record.seq} of group {case.name(record.group)}"
    agreed = RuledOut(what="device and link", because="ranks disagree about the operation itself")
    return Finding(
        syndrome=Syndrome.COMMUNICATION_HANG,
        where=Where.PROGRAM,
        suspects=tuple(
            Suspect(
                rank=rank,
                confidence=0.5 if tied else 0.95,
                evidence=f"at {operation} it {form.format(said[rank], f'rank {ranks_text(majority)}', most)}",
                node=case.hosts.get(rank, ""),
            )
            for rank in odd
        ),
        victims=tuple(r for r in case.ranks if r not in odd),
        ruled_out=(agreed,),
        because=f"ranks do not agree on {operation}: rank {ranks_text(odd)} differs from the rest.",
    )
