"""What the ranks of one machine testify, as the supervision of `everstep run --nproc` keeps it."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core.faults import testimony
from everstep.core.faults.severity import Judgement, judge
from everstep.core.faults.testimony import MOST_EVIDENCE, Witness, cause_of, names
from everstep.ranks.words import RankExited, RankRaised, ScriptIncident


def of_exception(event: RankRaised, now: float) -> Witness:
    return Witness(
        rank=event.rank,
        what=testimony.raised_what(event.rank, event.error, event.where),
        judgement=testimony.judged("exception", testimony.raised_text(event.error, event.traceback)),
        code=1,
        since=now if event.raised_at is None else min(event.raised_at, now),
        traceback=event.traceback,
        program_error=testimony.program_error(event.error, event.where),
    )


def of_exit(event: RankExited, now: float) -> Witness:
    return Witness(
        rank=event.rank,
        what=f"rank {event.rank} {event.reason}",
        judgement=testimony.judged("exit", testimony.exit_text(event.code, event.reason, event.words)),
        code=event.code,
        since=now,
        evidence=testimony.last_words(event.rank, event.words),
    )


def of_stillness(
    rank: int | None, what: str, because: str, since: float, evidence: tuple[str, ...] = ()
) -> Witness:
    """No rank makes progress and no error text exists; the sentence has all that is known."""
    kind = judge("progress", "")
    judgement = Judgement(kind=kind.kind, severity=kind.severity, because=because)
    return Witness(rank=rank, what=what, judgement=judgement, code=1, since=since, evidence=evidence)


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
    room = MOST_EVIDENCE - len(incident.evidence)
    incident.evidence.extend(text for text in sentences[:room] if text not in incident.evidence)
