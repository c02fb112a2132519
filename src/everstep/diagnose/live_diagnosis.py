"""Diagnosis while the job runs: rings come in, verdicts come out, memory stays where it is.

Of every rank the last `keep` records are kept: enough for some tens of steps, which is what a verdict rests
on, and 70 bytes each, so 4,096 ranks need 150 MB however long the job runs.

One look can be wrong about a moment: a rank seen between two operations has nothing outstanding. So a
finding is a verdict when two looks in a row agree on its suspects; time between looks is the caller's.
"""

from __future__ import annotations

import numpy as np

from everstep.diagnose.comm_record import UNKNOWN, Dump
from everstep.diagnose.finding import Finding
from everstep.diagnose.verdict import analyse

Sign = tuple[str, str, tuple[tuple[int, int | None], ...]]


class DiagnosisStream:
    """The analysis of a job that runs: feed it rings, ask for verdicts; `keep` records a rank stay."""

    def __init__(self, *, keep: int = 512) -> None:
        self._keep = keep
        self._parts: dict[tuple[str, tuple[int, ...]], Dump] = {}
        self._seen: set[Sign] = set()

    def feed(self, part: Dump) -> None:
        """All a rank says now: replaces what it said before."""
        if len(part.log) > self._keep:
            part.log = part.log.take(np.arange(len(part.log) - self._keep, len(part.log)))
        self._parts[part.form, part.ranks] = part

    def forget(self, rank: int) -> None:
        """A rank that left the job: its last records must not accuse any rank."""
        self._parts = {key: part for key, part in self._parts.items() if part.ranks != (rank,)}

    def verdicts(self, now_ns: int = UNKNOWN) -> list[Finding]:
        """Findings that this look and the one before agree on."""
        incidents = analyse(list(self._parts.values()), now_ns=now_ns).incidents
        findings = [finding for finding in incidents if finding.suspects]
        signs = {_sign(finding) for finding in findings}
        agreed = [finding for finding in findings if _sign(finding) in self._seen]
        self._seen = signs
        return agreed


def _sign(finding: Finding) -> Sign:
    """What makes two findings the same: who is accused of what."""
    return str(finding.syndrome), str(finding.where), tuple((s.rank, s.peer) for s in finding.suspects)
