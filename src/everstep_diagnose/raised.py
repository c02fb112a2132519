"""Ranks that raised: torchrun's error files, and which of them was the first cause.

When one rank raises, its peers' connections break and they raise too, a moment later. Times in error files
are whole seconds, so order does not tell; what was raised does. An error that only says that someone else is
gone is a consequence. The words are the libraries' own; there is no other sign of it. Where all errors are
consequences, the rank that reports none is the one that was lost: killed, aborted, or out of the loop too
early.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from everstep_diagnose.case import Case
from everstep_diagnose.comm_record import UNKNOWN, Dump, Log
from everstep_diagnose.finding import Finding, RuledOut, Suspect, Syndrome, Where, ranks_text
from everstep_diagnose.flight import UnusableFileError

_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|socket|peer|remote process|DistBackendError|"
    r"NCCL (error|timeout)|watchdog|collective operation timeout",
    re.IGNORECASE,
)


def is_error(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"message"} and bool(value)


def read_error(name: str, value: dict[str, Any]) -> Dump:
    """The rank is in the path: torchrun writes attempt_0/3/error.json."""
    found = (
        re.findall(r"rank[_\-.]?(\d+)", name)
        or re.findall(r"(?:^|/)(\d+)/", name)
        or re.findall(r"(\d+)", name)
    )
    if not found:
        raise UnusableFileError("an error file whose path holds no rank")
    said = value["message"]
    more = said.get("extraInfo", {}) if isinstance(said, dict) else {}
    text = str(said.get("message", said) if isinstance(said, dict) else said)
    when = str(more.get("timestamp", "0"))
    at_ns = int(when) * 1_000_000_000 if when.isdigit() else 0
    return Dump(source=name, form="error", log=Log.of([]), groups=[], errors={int(found[-1]): (at_ns, text)})


def find_raised(case: Case) -> list[Finding]:
    """Ranks whose error is their own."""
    own = {
        rank: f"raised {text.strip().splitlines()[-1][:200]}"
        for rank, (_, text) in case.errors.items()
        if text.strip() and not _CONSEQUENCE.search(text)
    }
    return _finding(case, own, "raised", 0.97) if own else []


def find_lost(case: Case) -> list[Finding]:
    """Ranks that reported nothing, where all that the others report is that someone is gone."""
    left = set(case.world) - set(case.errors)
    if not case.errors or not 0 < len(left) <= len(case.world) // 2:
        return []
    return _finding(case, {rank: _left(case, rank) for rank in left}, "left without a word", 0.85)


def _finding(case: Case, first: dict[int, str], said: str, confidence: float) -> list[Finding]:
    ranks = sorted(first)
    others = sorted(set(case.errors) - set(first))
    victims = sorted((set(case.world) | set(others)) - set(ranks))
    return [
        Finding(
            syndrome=Syndrome.NON_COMMUNICATION_HANG,
            where=Where.HOST,
            suspects=tuple(
                Suspect(
                    rank=rank,
                    confidence=confidence,
                    evidence=f"it {text}",
                    node=case.hosts.get(rank, ""),
                )
                for rank, text in sorted(first.items())
            ),
            victims=tuple(victims),
            ruled_out=(
                (
                    RuledOut(
                        what=f"rank {ranks_text(others)}", because="its error says that another rank is gone"
                    ),
                )
                if others
                else ()
            ),
            because=f"rank {ranks_text(ranks)} {said}; the others lost it.",
        )
    ]


def _left(case: Case, rank: int) -> str:
    log = case.log
    last = {int(r): int(log.seq[log.rank == r].max()) for r in np.unique(log.rank)} if len(log) else {}
    far = max(last.values(), default=UNKNOWN)
    got = f"; it got to operation {last[rank]}, others to {far}" if last.get(rank, far) < far else ""
    return f"reported no error while rank {ranks_text(case.errors)} lost a peer{got}"
