"""Incidents: from evidence to verdict to remedy to closed, with time, reason and event of each.

    suspected ──► judged ──► treated ──► planned ──► closed
                    ▲           │
                    └───────────┘  a remedy that fails leads to a more severe one

One log for the whole cluster; each task's recovery sees its own part of it. An incident that stops training
closes with the first op that runs again; any other closes when its remedy has worked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from everstep.protocol.lifecycle import move
from everstep.protocol.ops import Worker
from everstep.protocol.parcels import ParcelKind

MOST_EVENTS = 100  # of one incident
MOST_EVIDENCE = 100  # of one incident: the first half of it stays, and the newest
RECOVERY_EDGES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

# ------------------------------------------------------------------ facts behind evidence
# What a sentence of an incident says, as values that a picture can be made of.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWaits:
    """A worker waits for a parcel, and so is not to blame."""

    worker: Worker
    awaits: str  # the parcel, in its notation
    sender: Worker | None  # who would send it when every microbatch is at home
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsTook:
    """The ops of a worker in one step: their own time, and what is usual."""

    step: int
    took_s: float
    usual_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PacesSeen:
    """By worker: the time of its ops, in parts of their usual time."""

    paces: Mapping[Worker, float]


Fact = WorkerWaits | OpsTook | PacesSeen

_PARCEL = re.compile(r"([A-Z])\[\d+ stage (\d+) (\d+)")


def usual_sender(parcel: str) -> Worker | None:
    """Who sends the parcel of this notation when every microbatch is at home; None: it is not a parcel."""
    found = _PARCEL.match(parcel)
    if found is None:
        return None
    what, stage, replica = found[1], int(found[2]), int(found[3])
    away = {ParcelKind.ACTIVATION.value: -1, ParcelKind.GRADIENT.value: +1}.get(what, 0)
    return Worker(replica, stage + away)


# ------------------------------------------------------------------ what an incident is about
# Of those that are found again while they are open: by these values, never by their words.


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsLost:
    """A process on the incident's node holds them that cannot be ended."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesFail:
    in_memory: bool  # else on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSkipped:
    """One after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OddNumbers:
    """A step that is computed again for its numbers."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    worker: Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
    worker: Worker  # whose ranks they are
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    sender: Worker
    receiver: Worker


Subject = SlotsLost | SavesFail | StepsSkipped | OddNumbers | SlowWorker | SlowRanks | SlowLink

# ------------------------------------------------------------------ incidents


class IncidentState(StrEnum):
    SUSPECTED = "suspected"  # there is evidence
    JUDGED = "judged"  # there is a verdict
    TREATED = "treated"  # a remedy is under way
    PLANNED = "planned"  # the rest of the step is planned: the first op of the new epoch closes it
    CLOSED = "closed"  # training has resumed, or the remedy has worked


_S = IncidentState
INCIDENT: Mapping[IncidentState, frozenset[IncidentState]] = {
    _S.SUSPECTED: frozenset({_S.JUDGED, _S.PLANNED, _S.CLOSED}),
    _S.JUDGED: frozenset({_S.JUDGED, _S.TREATED, _S.PLANNED, _S.CLOSED}),
    _S.TREATED: frozenset({_S.JUDGED, _S.TREATED, _S.PLANNED, _S.CLOSED}),
    _S.PLANNED: frozenset({_S.PLANNED, _S.CLOSED}),
    _S.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    at: float
    source: str  # exit, exception, silence, progress, kernel, link, person
    text: str
    event: int = 0  # the number of the event that brought it
    clears: str = ""  # who or what it rules out
    fact: Fact | None = None  # what the text says, as values


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    at: float
    kind: str
    severity: int
    because: str
    event: int = 0


@dataclass(slots=True, kw_only=True)
class Remedy:
    at: float
    what: str
    because: str
    outcome: str = ""  # empty while it is under way
    event: int = 0


@dataclass(slots=True, kw_only=True)
class Incident:
    """One disturbance. Times are those given to `handle`."""

    number: int
    workers: list[Worker]
    what: str
    step: int  # the worker was in, where that is known
    evidence_at: float
    first_step: int = 0  # the first that was not complete; the worker may have been ahead of it
    task: str = ""
    node: str = ""
    subject: Subject | None = None  # by which it is found again
    rank: int | None = None  # of a script, if one can be named
    traceback: str = ""
    planned_at: float | None = None
    resumed_at: float | None = None
    replayed_ops: int = 0
    replayed_elsewhere: int = 0
    kept_outputs: int = 0  # of the dead: live workers had received them, and use them as they are
    epoch: int = 0
    restored_from: int | None = None
    restored_where: str = ""  # memory or disk
    killed_at: float | None = None  # where the killer is known, as in a demo
    stops_training: bool = True
    state: IncidentState = IncidentState.SUSPECTED
    evidence: list[Evidence] = field(default_factory=list)
    verdict: Verdict | None = None
    remedies: list[Remedy] = field(default_factory=list)
    events: list[int] = field(default_factory=list)  # the numbers of those that belong to it

    @property
    def closed(self) -> bool:
        return self.state is IncidentState.CLOSED

    @property
    def disturbed(self) -> range:
        """The steps in which it found the workers."""
        return range(self.first_step or self.step, self.step + 1)

    @property
    def label(self) -> str:
        """Severity and kind of its verdict."""
        return "none none" if self.verdict is None else f"SEV{self.verdict.severity} {self.verdict.kind}"

    def add(self, evidence: Evidence) -> None:
        if len(self.evidence) >= MOST_EVIDENCE:
            del self.evidence[MOST_EVIDENCE // 2]
        self.evidence.append(evidence)
        self.belongs(evidence.event)

    def judge(self, verdict: Verdict) -> None:
        self._become(IncidentState.JUDGED)
        self.verdict = verdict
        self.belongs(verdict.event)

    def treat(self, remedy: Remedy) -> None:
        self._become(IncidentState.TREATED)
        if self.remedies and not self.remedies[-1].outcome:
            self.remedies[-1].outcome = "not enough"
        if len(self.remedies) >= MOST_EVIDENCE:
            del self.remedies[MOST_EVIDENCE // 2]
        self.remedies.append(remedy)
        self.belongs(remedy.event)

    def plan(self, at: float, epoch: int) -> None:
        """What it interrupted is planned again."""
        self._become(IncidentState.PLANNED)
        self.planned_at = self.planned_at or at
        self.epoch = epoch

    def close(self, at: float, outcome: str) -> None:
        self._become(IncidentState.CLOSED)
        self.resumed_at = at
        if self.remedies and not self.remedies[-1].outcome:
            self.remedies[-1].outcome = outcome

    def belongs(self, event: int) -> None:
        """The event of this number is part of its history."""
        if event and event not in self.events[-1:] and len(self.events) < MOST_EVENTS:
            self.events.append(event)

    def _become(self, state: IncidentState) -> None:
        self.state = move(INCIDENT, self.state, state, f"incident {self.number}")


@dataclass(slots=True, kw_only=True)
class ForgottenIncidents:
    """What is left of closed incidents that are no longer kept: counts, which only rise."""

    last: int = 0  # the highest number
    since: float = 0.0  # the last of them closed then
    verdicts: dict[str, int] = field(default_factory=dict)  # by severity and kind
    recoveries: dict[str, int] = field(default_factory=dict)  # by the first edge that is not less
    recovery_s: float = 0.0  # all together

    @property
    def count(self) -> int:
        return sum(self.verdicts.values())

    def add(self, incident: Incident) -> None:
        closed_at = incident.resumed_at if incident.resumed_at is not None else incident.evidence_at
        took_s = closed_at - incident.evidence_at
        edge = next((str(edge) for edge in RECOVERY_EDGES_S if took_s <= edge), "+Inf")
        self.last, self.since = max(self.last, incident.number), max(self.since, closed_at)
        self.verdicts[incident.label] = self.verdicts.get(incident.label, 0) + 1
        self.recoveries[edge] = self.recoveries.get(edge, 0) + 1
        self.recovery_s += took_s


class IncidentLog:
    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self.forgotten = ForgottenIncidents()
        self.event = 0  # the number of the event that is being handled
        self._open: list[Incident] = []  # of the first `_looked_at`
        self._looked_at = 0

    def of_task(self, task: str) -> TaskIncidents:
        return TaskIncidents(self, task)

    def new(self, *, task: str, workers: list[Worker], what: str, step: int, now: float) -> Incident:
        incident = Incident(
            number=max(self.forgotten.last, self.incidents[-1].number if self.incidents else 0) + 1,
            workers=workers,
            what=what,
            step=step,
            evidence_at=now,
            task=task,
        )
        incident.belongs(self.event)
        self.incidents.append(incident)
        return incident

    def open_ones(self) -> list[Incident]:
        """Asked for at many events, where a thousand closed ones are kept: it looks only at what is new."""
        new, self._looked_at = self.incidents[self._looked_at :], len(self.incidents)
        self._open = [incident for incident in (*self._open, *new) if not incident.closed]
        return list(self._open)

    def forget_closed(self, most: int) -> None:
        """All but the last `most` to close; those that are open stay."""
        if len(self.incidents) <= most:
            return
        self.open_ones()
        closed = sorted(
            (i for i in self.incidents if i.closed), key=lambda i: (i.resumed_at or 0.0, i.number)
        )
        over = closed[: len(closed) - min(len(closed), most)]
        for incident in over:
            self.forgotten.add(incident)
        numbers = {incident.number for incident in over}
        self.incidents = [incident for incident in self.incidents if incident.number not in numbers]
        self._looked_at = len(self.incidents)


class TaskIncidents:
    """The incidents of one task, as its recovery opens, plans for and closes them."""

    def __init__(self, log: IncidentLog, task: str) -> None:
        self._log, self._task = log, task

    @property
    def incidents(self) -> list[Incident]:
        return [incident for incident in self._log.incidents if incident.task == self._task]

    def suspected(self, worker: Worker, what: str, step: int, now: float) -> Incident:
        """The open incident about this worker, or a new one: what is said next belongs to it."""
        for incident in self._waiting():
            if worker in incident.workers:
                return incident
        return self._log.new(task=self._task, workers=[worker], what=what, step=step, now=now)

    def open(self, worker: Worker, what: str, step: int, now: float, lost_ops: int) -> Incident:
        """A member is gone. A second disturbance before the first has been planned for is part of it."""
        waiting = self._waiting()
        about = [incident for incident in waiting if worker in incident.workers] or waiting
        if about:
            incident = about[-1]
            if worker not in incident.workers:
                incident.workers.append(worker)
        else:
            incident = self._log.new(task=self._task, workers=[worker], what=what, step=step, now=now)
        incident.step, incident.stops_training = step, True
        incident.replayed_ops += lost_ops
        return incident

    def planned(self, now: float, epoch: int, kept_outputs: int = 0) -> None:
        for incident in self._stopping():
            if incident.planned_at is None:
                incident.kept_outputs = kept_outputs
            incident.plan(now, epoch)
            incident.belongs(self._log.event)

    def restoring(self, step: int, where: str) -> None:
        for incident in self._stopping():
            incident.restored_from, incident.restored_where = step, where

    def recorded(self, step: int, replayed_elsewhere: int) -> None:
        for incident in self.incidents:
            if step in incident.disturbed:
                incident.replayed_elsewhere += replayed_elsewhere

    def resumed(self, at: float) -> list[Incident]:
        """The incidents that are over now."""
        closed = [incident for incident in self._stopping() if incident.planned_at is not None]
        for incident in closed:
            incident.close(at, "training resumed")
            incident.belongs(self._log.event)
        return closed

    def _stopping(self) -> list[Incident]:
        return [i for i in self._log.open_ones() if i.task == self._task and i.stops_training]

    def _waiting(self) -> list[Incident]:
        return [i for i in self._stopping() if i.planned_at is None]
