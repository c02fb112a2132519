"""What to do about a fault: retry in place, restart the worker, isolate the node; each failure escalates.

    SEV3 ── retry in place ──(again and again)──► SEV2 ── restart ──(again on this node)──► SEV1 ── isolate

The table of severities says where an error starts on this ladder; the history of the place and of its node
says how far it climbs. Failures older than a window are forgotten, so that a budget is a rate and not a
lifetime. A node isolated too often is a lemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from everstep.core.faults.severity import Judgement, Severity
from everstep.core.words.cluster_messages import Patience


class RemedyKind(StrEnum):
    RETRY = "retry in place"
    RESTART = "restart the worker"
    ISOLATE = "isolate the node"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyChoice:
    what: RemedyKind
    because: str
    wait_s: float = 0.0  # before a restart


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Of the place that failed: recent failures on its node (this one included), and what else there is."""

    failures: int
    node: str
    could_live_elsewhere: bool  # is there another node that could take what runs on this one?


def after_exit(judgement: Judgement, history: History, patience: Patience) -> RemedyChoice:
    """A worker's process is gone."""
    if judgement.severity is Severity.SEV1:
        return _isolate(_clause(judgement), history, patience)
    if history.failures > patience.restarts_per_node:
        return _isolate(
            f"{_clause(judgement)}; {history.failures - 1} restarts on {history.node} have not helped",
            history,
            patience,
        )
    because = _clause(judgement)
    if judgement.severity is Severity.SEV3:
        because += "; its process has ended, so a retry in place is not possible"
    return RemedyChoice(
        what=RemedyKind.RESTART, because=because, wait_s=backoff_s(history.failures, patience)
    )


def after_mend(judgement: Judgement, mends: int, patience: Patience) -> RemedyChoice:
    """A link broke between two live workers and was opened again."""
    if mends < patience.mends_before_restart:
        return RemedyChoice(what=RemedyKind.RETRY, because=judgement.because)
    return RemedyChoice(
        what=RemedyKind.RESTART,
        because=f"{_clause(judgement)}; {mends} times in a row, so mending does not help",
    )


def backoff_s(failures: int, patience: Patience) -> float:
    """The first restart is at once; then 1, 2, 4 … seconds."""
    if failures <= 1:
        return patience.backoff_first_s
    return min(patience.backoff_most_s, patience.backoff_s * 2.0 ** (failures - 2))


def recent(times: list[float], now: float, patience: Patience) -> list[float]:
    return [at for at in times if now - at <= patience.forget_after_s]


def _isolate(because: str, history: History, patience: Patience) -> RemedyChoice:
    if history.could_live_elsewhere:
        return RemedyChoice(what=RemedyKind.ISOLATE, because=because)
    return RemedyChoice(
        what=RemedyKind.RESTART,
        because=f"{because}; no other node could take its work, so it is tried here again",
        wait_s=backoff_s(history.failures, patience),
    )


def _clause(judgement: Judgement) -> str:
    """A sentence that more can be said after."""
    return judgement.because.rstrip(".")
