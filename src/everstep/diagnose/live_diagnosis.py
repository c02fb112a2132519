"""Diagnosis while the job runs: records come in, verdicts come out, memory stays where it is.

    stream = DiagnosisStream(keep=512)
    stream.feed(part)             # a rank's ring as it is now; feed_records: only what is new
    stream.verdicts(now_ns)       # what holds now, and held a moment ago too

Of every rank the last `keep` records are kept: enough for some tens of steps, which is what a verdict rests
on, and 70 bytes each, so 4,096 ranks need 150 MB however long the job runs. A record that comes again
(first as begun, later as ended) replaces the earlier one.

One look can be wrong about a moment: a rank seen between two operations has nothing outstanding. So a
finding is a verdict when two looks in a row agree on its suspects; time between looks is the caller's.
`speeds` tells how fast each rank is against its role, in the terms a schedule takes: a slow rank gets less
work before it is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from everstep.diagnose.comm_record import UNKNOWN, Dump, Group, Log, Record, concatenate
from everstep.diagnose.finding import Diagnosis, Finding, Imbalance
from everstep.diagnose.own_work import RoleWork
from everstep.diagnose.verdict import Analysis, analyse

_LEAST_STEPS = 3
Sign = tuple[str, str, tuple[tuple[int, int | None], ...]]


class DiagnosisStream:
    """The analysis of a job that runs: feed it records, ask for verdicts; `keep` records a rank stay."""

    def __init__(self, *, keep: int = 512) -> None:
        self._keep = keep
        self._parts: dict[tuple[str, tuple[int, ...]], Dump] = {}
        self._seen: set[Sign] = set()
        self._roles: list[RoleWork] = []
        self.imbalances: list[Imbalance] = []

    def feed(self, part: Dump) -> None:
        """All a rank says now, such as its ring: replaces what it said before."""
        self._parts[part.form, part.ranks] = self._trimmed(part)

    def feed_records(
        self, rank: int, records: Iterable[Record], groups: list[Group], *, form: str = "records"
    ) -> None:
        """A rank's later words: they are added to the earlier ones."""
        part = Dump(source=form, form=form, log=Log.of(records), groups=list(groups), ranks=(rank,))
        before = self._parts.get((form, (rank,)))
        if before is not None:
            part.log = _merged(before, part)
        self._parts[form, (rank,)] = self._trimmed(part)

    def forget(self, rank: int) -> None:
        """A rank that left the job: its last records must not accuse any rank."""
        self._parts = {key: part for key, part in self._parts.items() if part.ranks != (rank,)}

    def verdicts(self, now_ns: int = UNKNOWN) -> list[Finding]:
        """Findings that this look and the one before agree on."""
        analysis = self.look(now_ns)
        findings = [finding for finding in analysis.diagnosis.incidents if finding.suspects]
        signs = {_sign(finding) for finding in findings}
        agreed = [finding for finding in findings if _sign(finding) in self._seen]
        self._seen = signs
        return agreed

    def look(self, now_ns: int = UNKNOWN) -> Analysis:
        """One look, with everything it rests on."""
        if not self._parts:
            return Analysis(diagnosis=Diagnosis())
        analysis = analyse(list(self._parts.values()), now_ns=now_ns)
        self._roles, self.imbalances = analysis.roles, analysis.diagnosis.imbalances
        return analysis

    def speeds(self) -> dict[int, float]:
        """As of the last look: 1 is as fast as the middle of its role, 0.5 takes twice as long."""
        found = {}
        for role in self._roles:
            if len(role.ranks) > 1 and len(role.steps) >= _LEAST_STEPS:
                recent = np.median(role.own_s[-8:], axis=0)
                middle = float(np.median(recent))
                for rank, own in zip(role.ranks, recent.tolist(), strict=True):
                    found[rank] = middle / own if own > 0 else 1.0
        return found

    def _trimmed(self, part: Dump) -> Dump:
        if len(part.log) > self._keep:
            part.log = part.log.take(np.arange(len(part.log) - self._keep, len(part.log)))
        return part


def _merged(before: Dump, part: Dump) -> Log:
    """The earlier records and the new ones; one that comes again, now ended, takes the place of the first."""
    known = {(group.name, group.members): at for at, group in enumerate(part.groups)}
    moved = []
    for group in before.groups:
        key = (group.name, group.members)
        if key not in known:
            known[key] = len(part.groups)
            part.groups.append(group)
        moved.append(known[key])
    log = concatenate([(before.log, moved), (part.log, list(range(len(part.groups))))])
    names = np.stack([log.order, log.group, log.seq, log.kind, log.peer], axis=1)
    _, last = np.unique(names[::-1], axis=0, return_index=True)
    return log.take(np.sort(len(log) - 1 - last))


def _sign(finding: Finding) -> Sign:
    """What makes two findings the same: who is accused of what."""
    return str(finding.syndrome), str(finding.where), tuple((s.rank, s.peer) for s in finding.suspects)
