"""What a diagnosis says: incidents with suspects, imbalances without a fault, unusable files.

The four syndromes are C4D's. `where` says which part of the machine to look at: the host (its program or its
processor), the device, a link, the sending or the receiving side of a node, or the program itself when ranks
disagree about which operation comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Syndrome(StrEnum):
    """What is wrong: hung or slow, in communication or in what a rank does between."""

    COMMUNICATION_HANG = "communication hang"
    NON_COMMUNICATION_HANG = "non-communication hang"
    COMMUNICATION_SLOW = "communication slow"
    NON_COMMUNICATION_SLOW = "non-communication slow"


class Where(StrEnum):
    """Which part of the suspect it is."""

    HOST = "host"
    DEVICE = "device"
    WORKER = "worker"  # its host or its device: its own work, which of the two is not known
    LINK = "link"
    SENDER = "sending side"
    RECEIVER = "receiving side"
    PROGRAM = "program"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank, or the link from `rank` to `peer`, with how sure we are (0 to 1) and what says so."""

    rank: int
    confidence: float
    evidence: str
    node: str = ""
    peer: int | None = None  # for a link: the other end; the direction is rank to peer


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """What was thought of and is not the cause."""

    what: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One incident."""

    syndrome: Syndrome
    where: Where
    suspects: tuple[Suspect, ...]
    victims: tuple[int, ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    because: str = ""
    since_step: int | None = None

    def document(self) -> dict[str, Any]:
        return {
            "syndrome": str(self.syndrome),
            "where": str(self.where),
            "because": self.because,
            "suspects": [
                {
                    "rank": s.rank,
                    "confidence": round(s.confidence, 3),
                    "evidence": s.evidence,
                    **({"node": s.node} if s.node else {}),
                    **({"peer": s.peer} if s.peer is not None else {}),
                }
                for s in self.suspects
            ],
            "victims": list(self.victims),
            "ruled_out": [{"what": r.what, "because": r.because} for r in self.ruled_out],
            **({"since_step": self.since_step} if self.since_step is not None else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Uneven, without a fault: a stage with more work, sequences of other lengths, a pause."""

    kind: str
    ranks: tuple[int, ...]
    ratio: float
    because: str

    def document(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "ranks": list(self.ranks),
            "ratio": round(self.ratio, 3),
            "because": self.because,
        }


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """All that was found in the records of a job; `unusable`: (file, why it was left out)."""

    incidents: list[Finding] = field(default_factory=list)
    imbalances: list[Imbalance] = field(default_factory=list)
    unusable: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {
            "incidents": [finding.document() for finding in self.incidents],
            "imbalances": [imbalance.document() for imbalance in self.imbalances],
            "unusable_files": [{"file": name, "because": why} for name, why in self.unusable],
            "notes": self.notes,
        }


def ranks_text(ranks: Any) -> str:
    """`0-3, 7`: ranks as people write them."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
