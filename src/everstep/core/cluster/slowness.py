"""What the coordinator makes of a slow worker: an incident that stays open while it is slow, and less work.

Whether a worker is slow is found elsewhere (`diagnose.watch`); here it is a verdict with evidence. The remedy
does not stop training: the scheduler is asked for a schedule that knows the speeds, and the worker's peers of
its stage take over some of its microbatches. Where it has no peer nothing can be moved, and that is said.

A worker is slow until it is told to be fast again, or until its process is gone: a new one starts even.
A link's slowness is told too, and moves no work: a worker that waits for a link is not slow.
"""

from __future__ import annotations

from everstep.core.cluster.dispatch import Actions, Orders
from everstep.core.cluster.roster import Task
from everstep.core.faults.severity import TABLE, ErrorKind, Judgement
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.incidents import Evidence, Incident
from everstep.core.words.ops import Kind, Worker

SLOW = "is slow"
LESS_WORK = "give it less work"
NOTHING = "none that training could take by itself"


class SlowDesk(Orders):
    def _slowed(self, task: Task, event: msg.SlownessFound, now: float) -> str | None:
        """Open or continue its incident. A sentence, if another schedule is wanted."""
        seat = task.seats[event.worker]
        incident = self._slow_incident(task, event.worker)
        if incident is None:
            incident = self.log.new(
                task=task.name,
                workers=[event.worker],
                what=SLOW,
                step=event.since_step,
                now=now,
            )
            incident.node, incident.stops_training = seat.node, False
        for text in event.evidence:
            incident.told(Evidence(at=now, source="pace", text=text))
        for text in event.ruled_out:
            incident.told(Evidence(at=now, source="pace", text=f"ruled out: {text}"))
        judgement = _judgement(ErrorKind.SLOW_WORKER, event.because)
        self._verdict(incident, judgement, now)
        task.slow[event.worker] = event.factor
        peers = sorted(w for w in task.seats if w.stage == event.worker.stage and w not in task.slow)
        if not peers:
            self._remedy(incident, NOTHING, self._what_would_help(event, task), now)
            return None
        few = ", ".join(map(str, peers[:4])) + (" and others" if len(peers) > 4 else "")
        because = f"worker {event.worker} takes {event.factor:.2f} times as long: {few} can run its work"
        self._remedy(incident, LESS_WORK, because, now)
        return because

    def _slow_link(self, task: Task, event: msg.SlowLinkFound | msg.SlowLinkEnded, now: float) -> Actions:
        """Said, and no more: nobody's work is the reason, so nobody gets less of it."""
        what = f"{SLOW} at the link to {event.peer}"
        same = [i for i in self.log.open_ones() if i.task == task.name and i.what == what]
        known = next((i for i in same if i.workers == [event.worker]), None)
        if isinstance(event, msg.SlowLinkEnded):
            if known is None:
                return []
            known.close(now, event.because)
            return [msg.IncidentClosed(number=known.number, because=event.because)]
        if known is not None:
            return []
        incident = self.log.new(
            task=task.name,
            workers=[event.worker],
            what=what,
            step=task.recovery.recorded + 1 if task.recovery is not None else 0,
            now=now,
        )
        incident.node, incident.stops_training = task.seats[event.worker].node, False
        for text in event.evidence:
            incident.told(Evidence(at=now, source="pace", text=text))
        for text in event.ruled_out:
            incident.told(Evidence(at=now, source="pace", text=f"ruled out: {text}"))
        self._verdict(incident, _judgement(ErrorKind.SLOW_LINK, event.because), now)
        because = "a worker with less work would wait for the same link; another path, or another node, helps"
        self._remedy(incident, NOTHING, because, now)
        return []

    def _fast_again(self, task: Task, worker: Worker, because: str, now: float) -> Actions:
        """It is as fast as it was, or its process is gone."""
        incident = self._slow_incident(task, worker)
        if task.slow.pop(worker, None) is None or incident is None:
            return []
        incident.close(now, because)
        return [msg.IncidentClosed(number=incident.number, because=because)]

    def _balanced(self, task: Task, plan: ev.PlanComputed, now: float) -> None:
        """A schedule that knows the speeds is in force: how much is left to each slow worker?"""
        for worker in task.planned_slow.keys() & plan.steady.keys():
            incident = self._slow_incident(task, worker)
            if incident is None or not incident.remedies or incident.remedies[-1].what != LESS_WORK:
                continue
            left = sum(op.kind is Kind.F for op in plan.steady[worker])
            usual = task.shape.microbatches
            incident.remedies[-1].outcome = (
                f"from epoch {plan.epoch} on it runs {left} microbatches of each step, at home were {usual}"
                if left != usual
                else f"no other division of its {usual} microbatches would make the step shorter"
            )

    def _slow_incident(self, task: Task, worker: Worker) -> Incident | None:
        for incident in self.log.open_ones():
            if incident.task == task.name and incident.workers == [worker] and incident.what == SLOW:
                return incident
        return None

    def _what_would_help(self, event: msg.SlownessFound, task: Task) -> str:
        alone = all(w == event.worker or w.stage != event.worker.stage for w in task.seats)
        why = (
            f"worker {event.worker} is the only one of stage {event.worker.stage}"
            if alone
            else f"every worker of stage {event.worker.stage} is slow"
        )
        free = [node for node, _ in self.roster.free() if node != task.seats[event.worker].node]
        place = f"a slot on {free[0]} is free for that" if free else "no other node has a free slot"
        return (
            f"{why}, so nobody can take its microbatches, and steps take about {event.factor:.2f} times as "
            f"long at this stage; draining its node would move it, and {place}"
        )


def _judgement(kind: ErrorKind, because: str) -> Judgement:
    return Judgement(kind=kind, severity=TABLE[kind], because=because)
