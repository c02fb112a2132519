"""The coordinator's incidents: evidence comes in, verdict and remedy are written down, it closes."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.cluster.node import Node
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.task import Task
from everstep.core.faults.severity import Judgement
from everstep.protocol.incidents import (
    Evidence,
    Fact,
    Incident,
    IncidentLog,
    Remedy,
    SlotsLost,
    Subject,
    TaskIncidents,
    Verdict,
)
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

    def about(self, task: Task, subject: Subject) -> Incident | None:
        """The open incident of a task that is about this."""
        return next((one for one in self.open_ones(task.name) if one.subject == subject), None)

    def lost_slots(self, node: str, slots: tuple[int, ...], now: Moment) -> Incident:
        """Slots that a process holds which nothing can end: of no task, because it outlives the task."""
        some = f"slot {', '.join(map(str, slots))} of node {node}"
        what = f"{some} {'is' if len(slots) == 1 else 'are'} lost: a process there cannot be killed"
        incident = self.new(task=None, what=what, now=now)
        incident.node, incident.stops_training, incident.subject = node, False, SlotsLost(slots=slots)
        return incident

    def slots_back(self, node: Node, outcome: str, now: Moment) -> Actions:
        """Of those that were lost some are free, or all."""
        actions: Actions = []
        for one in [one for one in self.open_ones("") if one.node == node.name]:
            if isinstance(one.subject, SlotsLost) and node.lost_slots.isdisjoint(one.subject.slots):
                actions += self.close(one, outcome, now)
        return actions

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
