"""What ranks testify when something goes wrong, and which of them tells the cause.

A rank that is killed takes its peers' connections with it, so most of what is heard after a fault is
`HEARSAY`: what a healthy neighbour of the fault would say. The cause is the first witness that is no hearsay;
if there is none, the first that spoke.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.core.faults.remedies import sentence
from everstep.core.faults.severity import ErrorKind, Judgement, Source, judge
from everstep.ranks.words import RankExited, RankRaised, ScriptIncident

HEARSAY = frozenset(
    {
        ErrorKind.CONNECTION_RESET,
        ErrorKind.CONNECTION_REFUSED,
        ErrorKind.OTHER_NETWORK,
        ErrorKind.COMMUNICATOR_ABORTED,
        ErrorKind.NCCL_TIMEOUT,
    }
)

# Errors by which Python says that the program is wrong. Twice the same: the machine is not at fault.
PROGRAM_ERRORS = frozenset(
    {
        "SyntaxError",
        "IndentationError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "UnboundLocalError",
        "AttributeError",
        "TypeError",
        "KeyError",
        "IndexError",
        "ValueError",
        "AssertionError",
        "NotImplementedError",
        "FileNotFoundError",
        "ZeroDivisionError",
    }
)

_MAX_EVIDENCE = 16  # sentences kept for one incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """One piece of evidence, with what it would mean if it were the cause."""

    rank: int | None
    what: str
    judgement: Judgement
    code: int  # as in `subprocess`: negative for a signal
    since: float  # the first trace of it
    traceback: str = ""
    program_error: str | None = None  # the same again: no restart
    evidence: tuple[str, ...] = ()

    @property
    def is_hearsay(self) -> bool:
        return self.judgement.kind in HEARSAY


def of_exception(event: RankRaised, now: float) -> Witness:
    # Lines of a traceback that are not indented are errors; the others are code, which may say anything.
    chain = [line for line in event.traceback.splitlines() if line[:1].strip()]
    name = event.error.partition(":")[0].rpartition(".")[2]
    at = f" at {event.where}" if event.where else ""
    return Witness(
        rank=event.rank,
        what=f"rank {event.rank} raised {_first_line(event.error)}{at}",
        judgement=_judge("exception", "\n".join([event.error, *chain])),
        code=1,
        since=now if event.raised_at is None else min(event.raised_at, now),
        traceback=event.traceback,
        program_error=f"{event.error}{at}" if name in PROGRAM_ERRORS else None,
    )


def of_exit(event: RankExited, now: float) -> Witness:
    # A signal has a cause of its own, whatever the rank wrote before it came.
    text = event.reason if event.code < 0 else f"{event.reason}\n{event.words}"
    last = _last_line(event.words)
    return Witness(
        rank=event.rank,
        what=f"rank {event.rank} {event.reason}",
        judgement=_judge("exit", text),
        code=event.code,
        since=now,
        evidence=(f"the last line of rank {event.rank} on stderr: {last}",) if last else (),
    )


def _judge(source: Source, text: str) -> Judgement:
    judgement = judge(source, text)
    return replace(judgement, because=sentence(judgement))


def of_stillness(
    rank: int | None, what: str, because: str, since: float, evidence: tuple[str, ...] = ()
) -> Witness:
    """No rank makes progress and no error text exists; the sentence has all that is known."""
    kind = judge("progress", "")
    judgement = Judgement(kind=kind.kind, severity=kind.severity, because=because)
    return Witness(rank=rank, what=what, judgement=judgement, code=1, since=since, evidence=evidence)


def cause_of(witnesses: Sequence[Witness]) -> Witness:
    return next((witness for witness in witnesses if not witness.is_hearsay), witnesses[0])


def incident_of(witnesses: Sequence[Witness], *, number: int, life: int, now: float) -> ScriptIncident:
    cause = cause_of(witnesses)
    others = [witness for witness in witnesses if witness is not cause]
    because = cause.judgement.because
    if others and not cause.is_hearsay:
        victims = names(tuple(w.rank for w in others if w.rank is not None))
        because += f" {victims.capitalize()} only lost touch with it."
    incident = ScriptIncident(
        number=number,
        what=cause.what,
        rank=cause.rank,
        life=life,
        verdict=str(cause.judgement.kind),
        severity=str(cause.judgement.severity),
        because=because,
        noticed_ms=round((now - cause.since) * 1e3, 3),
        at=now,
        traceback=cause.traceback,
    )
    for witness in (cause, *others):
        add_evidence(incident, witness.what, *witness.evidence)
    return incident


def add_evidence(incident: ScriptIncident, *sentences: str) -> None:
    room = _MAX_EVIDENCE - len(incident.evidence)
    incident.evidence.extend(text for text in sentences[:room] if text not in incident.evidence)


def names(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
