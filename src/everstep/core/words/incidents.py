"""Incidents: from evidence to verdict to remedy to closed, with the time and the reason of each.

    evidence ──► verdict ──► remedy ──► (planned ──► first op of the new epoch) ──► closed
                    ▲           │
                    └───────────┘  a remedy that fails is evidence for a graver verdict

One log for the whole cluster; each task's recovery sees its own part of it. An incident of a task closes with
the first op that runs again; one that never stopped training closes when its remedy has worked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.words.ops import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    at: float
    source: str  # exit, exception, silence, progress, kernel, link, person
    text: str
    event: int = 0  # the number of the event that brought it


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
    step: int
    evidence_at: float
    task: str = ""
    node: str = ""
    planned_at: float | None = None
    resumed_at: float | None = None
    replayed_ops: int = 0
    replayed_elsewhere: int = 0
    epoch: int = 0
    restored_from: int | None = None
    restored_where: str = ""  # memory or disk
    killed_at: float | None = None  # where the killer is known, as in a demo
    stops_training: bool = True
    evidence: list[Evidence] = field(default_factory=list)
    verdict: Verdict | None = None
    remedies: list[Remedy] = field(default_factory=list)

    @property
    def closed(self) -> bool:
        return self.resumed_at is not None

    def told(self, evidence: Evidence) -> None:
        self.evidence.append(evidence)

    def tried(self, remedy: Remedy) -> None:
        if self.remedies and not self.remedies[-1].outcome:
            self.remedies[-1].outcome = "not enough"
        self.remedies.append(remedy)

    def close(self, at: float, outcome: str) -> None:
        self.resumed_at = at
        if self.remedies and not self.remedies[-1].outcome:
            self.remedies[-1].outcome = outcome


class IncidentLog:
    def __init__(self) -> None:
        self.incidents: list[Incident] = []

    def of_task(self, task: str) -> TaskIncidents:
        return TaskIncidents(self, task)

    def new(self, *, task: str, workers: list[Worker], what: str, step: int, now: float) -> Incident:
        incident = Incident(
            number=self.incidents[-1].number + 1 if self.incidents else 1,
            workers=workers,
            what=what,
            step=step,
            evidence_at=now,
            task=task,
        )
        self.incidents.append(incident)
        return incident

    def open_ones(self) -> list[Incident]:
        return [incident for incident in self.incidents if not incident.closed]


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

    def planned(self, now: float, epoch: int) -> None:
        for incident in self._stopping():
            incident.planned_at = incident.planned_at or now
            incident.epoch = epoch

    def restoring(self, step: int, where: str) -> None:
        for incident in self._stopping():
            incident.restored_from, incident.restored_where = step, where

    def recorded(self, step: int, replayed_elsewhere: int) -> None:
        for incident in self.incidents:
            if incident.step == step:
                incident.replayed_elsewhere += replayed_elsewhere

    def resumed(self, at: float) -> list[Incident]:
        """The incidents that are over now."""
        closed = [incident for incident in self._stopping() if incident.planned_at is not None]
        for incident in closed:
            incident.close(at, "training goes on")
        return closed

    def _stopping(self) -> list[Incident]:
        return [i for i in self._log.open_ones() if i.task == self._task and i.stops_training]

    def _waiting(self) -> list[Incident]:
        return [i for i in self._stopping() if i.planned_at is None]
