"""The coordinator's incidents: evidence comes in, verdict and remedy are written down, it closes."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.cluster.orders import Actions
from everstep.core.cluster.task import Task
from everstep.core.faults.severity import Judgement
from everstep.protocol.incidents import Evidence, Fact, Incident, IncidentLog, Remedy, TaskIncidents, Verdict
from everstep.protocol.messages import IncidentClosed, StateFetched
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker


class Incidents:
    def __init__(self) -> None:
        self.log = IncidentLog()

    def of_task(self, task: str) -> TaskIncidents:
        return self.log.of_task(task)

    def open_ones(self, task: str) -> list[Incident]:
        return [incident for incident in self.log.open_ones() if incident.task == task]

    def named(self, task: Task, what: str) -> Incident | None:
        """The open incident of a task that has this name."""
        return next((incident for incident in self.open_ones(task.name) if incident.what == what), None)

    def lost_slot(self, node: str, slot: int, now: Moment) -> Incident:
        """A slot that a process holds which nothing can end: of no task, because it outlives the task."""
        incident = self.new(task=None, what=_lost(node, slot), now=now)
        incident.node, incident.stops_training = node, False
        return incident

    def slots_back(self, node: str, slots: Iterable[int], outcome: str, now: Moment) -> Actions:
        whats = {_lost(node, slot) for slot in slots}
        found = [incident for incident in self.open_ones("") if incident.what in whats]
        return [action for incident in found for action in self.close(incident, outcome, now)]

    def of_worker(self, task: Task, worker: Worker, what: str) -> Incident | None:
        """The open incident of this worker alone that has this name."""
        found = (i for i in self.open_ones(task.name) if i.workers == [worker] and i.what == what)
        return next(found, None)

    def new(self, *, task: Task | None, what: str, now: Moment, step: int = 0) -> Incident:
        name = "" if task is None else task.name
        return self.log.new(task=name, workers=[], what=what, step=step, now=now.at)

    def suspect(self, task: Task, worker: Worker, source: str, text: str, now: Moment) -> Incident:
        """Evidence about a worker: part of its open incident, or the first of a new one."""
        incident = self.of_task(task.name).suspected(worker, text, task.next_step, now.at)
        self.tell(incident, source, (text,), now)
        return incident

    def read_failed(self, task: Task, event: StateFetched, text: str, now: Moment, *, lost: bool) -> None:
        """Evidence for the incidents for which the task stands still, or else for the last one for which it
        went back to this state: other workers may run ops of it already. `lost`: the worker has no state, so
        training stops again; if no incident is open, that is a new one.
        """
        found = [incident for incident in self.open_ones(task.name) if incident.stops_training]
        if not found and lost:
            self.suspect(task, event.worker, "memory", text, now)
        elif not found:
            found = [i for i in self.of_task(task.name).incidents if i.restored_from == event.step][-1:]
        for incident in found:
            self.tell(incident, "memory", (text,), now)

    def tell(self, incident: Incident, source: str, texts: Iterable[str], now: Moment) -> None:
        for text in texts:
            incident.add(Evidence(at=now.at, source=source, text=text, event=now.event))

    def state(self, incident: Incident, source: str, text: str, fact: Fact, now: Moment) -> None:
        """Evidence with the fact behind it."""
        incident.add(Evidence(at=now.at, source=source, text=text, event=now.event, fact=fact))

    def clear(
        self, incident: Incident, source: str, what: str, now: Moment, fact: Fact | None = None
    ) -> None:
        """Evidence that rules a worker, node or link out."""
        text = f"ruled out: {what}"
        evidence = Evidence(at=now.at, source=source, text=text, event=now.event, clears=what, fact=fact)
        incident.add(evidence)

    def judge(self, incident: Incident, judgement: Judgement, now: Moment) -> None:
        verdict = Verdict(
            at=now.at,
            kind=judgement.kind,
            severity=int(judgement.severity),
            because=judgement.because,
            event=now.event,
        )
        incident.judge(verdict)

    def treat(self, incident: Incident, what: str, because: str, now: Moment) -> None:
        incident.treat(Remedy(at=now.at, what=str(what), because=because, event=now.event))

    def close(self, incident: Incident, outcome: str, now: Moment, because: str = "") -> Actions:
        incident.close(now.at, outcome)
        incident.belongs(now.event)
        return [IncidentClosed(number=incident.number, because=because or outcome, cause=now.event)]


def _lost(node: str, slot: int) -> str:
    return f"slot {slot} of node {node} is lost: a process there cannot be killed"
