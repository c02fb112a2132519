"""What the coordinator makes of a slow worker: an incident that stays open while it is slow, and less work.

Whether a worker is slow is found elsewhere (`drive.slowness_watch`); here it is a verdict with evidence.
The remedy does not stop training: the scheduler is asked for a schedule that knows the speeds, and the
worker's peers of its stage take over some of its microbatches. Where it has no peer no work can be given to
others, and that is said.

Where free slots of other nodes pay, by the planner's price (`plan.ask`), slow workers move there: one, or all
slow ones of a node. One that is alone in its stage moves with the whole task, whose state is made safe first.
A script's ranks wait for the slow one, so its node's place moves, as soon as little is done again by that.

A worker is slow until it is reported fast again, or until its process is gone: a new one starts even.
A link's slowness is reported too, and moves no work: a worker that waits for a link is not slow. Where all
slow links have one node in common, its workers move. Links between the same two nodes have both in common:
then each is measured with a third node (`network_checks`), and the one whose network is much slower is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.node import Node
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.task import Seat, Task
from everstep.core.faults.remedies import Effect, Situation, choose, name_of
from everstep.core.faults.severity import ErrorKind, known
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import (
    Incident,
    IncidentLog,
    PacesSeen,
    SlowLink,
    SlowRanks,
    SlowWorker,
    Subject,
)
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Kind, Worker

SLOW = "is slow"
APART = 0.5  # one network has less than this share of the other's rate


def slow_links(log: IncidentLog, task: Task) -> list[tuple[Worker, Worker]]:
    """Links whose incidents are open: a watch that starts over must know them, or they stay open."""
    subjects = (incident.subject for incident in log.open_ones() if incident.task == task.name)
    return [(one.sender, one.receiver) for one in subjects if isinstance(one, SlowLink)]


def nodes_of_slow_links(
    links: Sequence[tuple[Worker, Worker]], seats: Mapping[Worker, Seat]
) -> tuple[str, ...]:
    """The nodes that all of them have in common: one, or the two ends of all. A link between two workers of
    one node is no network.
    """
    ends = [{seats[worker].node for worker in link} for link in links if set(link) <= seats.keys()]
    common = set.intersection(*ends) if ends else set()
    return tuple(sorted(common)) if all(len(pair) == 2 for pair in ends) else ()


def node_of_slow_links(
    links: Sequence[tuple[Worker, Worker]], seats: Mapping[Worker, Seat], nodes: Mapping[str, Node]
) -> str | None:
    """The one that is to blame. Of two ends it is the one that is much slower with a third node."""
    common = nodes_of_slow_links(links, seats)
    if len(common) != 2:
        return common[0] if common else None
    slower = sorted(common, key=lambda name: max(_rates(name, common, nodes), default=0.0))
    low, high = (_rates(name, common, nodes) for name in slower)
    return slower[0] if low and max(low) < APART * max(high) else None


def _rates(name: str, ends: Sequence[str], nodes: Mapping[str, Node]) -> list[float]:
    """With those that all ends were measured with."""
    if not all(end in nodes for end in ends):
        return []
    third = set.intersection(*(set(nodes[end].rates) for end in ends))
    return [nodes[name].rates[peer] for peer in sorted(third)]


class Slowness:
    """Changes `task.speeds`, and nothing else of a task."""

    def __init__(self, context: ClusterContext) -> None:
        self._roster, self._incidents, self._policy = context.roster, context.incidents, context.policy

    def found(self, task: Task, event: msg.SlownessFound, now: Moment) -> str:
        """Open or continue its incident. A sentence, if another schedule is wanted."""
        subject = SlowWorker(worker=event.worker)
        incident = self._incidents.about(task, subject)
        if incident is None:
            incident = self._open(task, event.worker, subject, SLOW, event.since_step, now)
        self._write_evidence(incident, event, now)
        judgement = known(ErrorKind.SLOW_WORKER, event.because)
        self._incidents.judge(incident, judgement, now)
        task.speeds.slow[event.worker] = event.factor
        peers = sorted(w for w in task.seats if w.stage == event.worker.stage and w not in task.speeds.slow)
        alone = "" if peers else self._what_would_help(event, task)
        choice = choose(Situation(judgement=judgement, is_alive=True, alone=alone), self._policy.patience)
        self._incidents.treat(incident, choice.what, choice.because, now)
        if choice.effect is not Effect.REBALANCE:
            return ""
        few = ", ".join(map(str, peers[:4])) + (" and others" if len(peers) > 4 else "")
        return f"worker {event.worker} takes {event.factor:.2f} times as long: {few} can run some of its work"

    def ended(self, task: Task, worker: Worker, because: str, now: Moment) -> Actions:
        """It is as fast as it was, or its process is gone."""
        incident = self._incidents.about(task, SlowWorker(worker=worker))
        if task.speeds.slow.pop(worker, None) is None or incident is None:
            return []
        return self._incidents.close(incident, because, now)

    def moved(self, task: Task, moved: msg.MovedWorker, now: Moment) -> Actions:
        """Its process ends, another one begins in a free slot. The incident of a worker closes with the
        process; that of a link now: there are other links then.
        """
        if not moved.node:
            for worker in (moved.worker, *moved.others):
                incident = self._incident_of(task, worker)
                if incident is not None:
                    self._incidents.treat(incident, "move it to a free slot", moved.because, now)
            return []
        actions: Actions = []
        for sender, receiver in slow_links(self._incidents.log, task):
            incident = self._incidents.about(task, SlowLink(sender=sender, receiver=receiver))
            assert incident is not None
            self._incidents.treat(incident, f"move the workers of node {moved.node}", moved.because, now)
            actions += self._incidents.close(incident, f"the task leaves node {moved.node}", now)
        return actions

    def link(self, task: Task, event: msg.SlowLinkFound | msg.SlowLinkEnded, now: Moment) -> Actions:
        """Written down: no worker is the reason, so none gets less work. The planner may move workers."""
        subject = SlowLink(sender=event.worker, receiver=event.peer)
        incident = self._incidents.about(task, subject)
        if isinstance(event, msg.SlowLinkEnded):
            ended = (event.worker, event.peer)
            task.speeds.suspected = tuple(link for link in task.speeds.suspected if link != ended)
            return [] if incident is None else self._incidents.close(incident, event.because, now)
        if incident is not None:
            return []
        what = f"{SLOW} at the link to {event.peer}"
        incident = self._open(task, event.worker, subject, what, task.next_step, now)
        self._write_evidence(incident, event, now)
        judgement = known(ErrorKind.SLOW_LINK, event.because)
        self._incidents.judge(incident, judgement, now)
        choice = choose(Situation(judgement=judgement, is_alive=True), self._policy.patience)
        self._incidents.treat(incident, choice.what, choice.because, now)
        return []

    def networks_measured(self, measured: Sequence[str], now: Moment) -> list[str]:
        """Which end of the slow links is it? Those that can be named. Links that were suspected only are slow
        if their network is.
        """
        blamed: list[str] = []
        there = {task.name: task for name in measured for task in self._roster.tasks_on_node(name)}
        for task in there.values():
            links = slow_links(self._incidents.log, task) or list(task.speeds.suspected)
            ends, nodes = nodes_of_slow_links(links, task.seats), self._roster.nodes
            if len(ends) != 2:
                continue
            rates = {name: _rates(name, ends, nodes) for name in ends}
            if not all(rates.values()):
                continue
            named = node_of_slow_links(links, task.seats, nodes)
            figures = ", ".join(f"{name} {max(found):.4g} MB/s" for name, found in rates.items())
            verdict = f"it is the network of {named}" if named else "neither is much slower than the other"
            blamed += [named] if named else []
            for sender, receiver in task.speeds.suspected if named else ():
                because = task.speeds.suspected_because
                found = msg.SlowLinkFound(task=task.name, worker=sender, peer=receiver, because=because)
                self.link(task, found, now)
            task.speeds.suspected = ()
            for sender, receiver in slow_links(self._incidents.log, task):
                incident = self._incidents.about(task, SlowLink(sender=sender, receiver=receiver))
                assert incident is not None
                incident.node = named or incident.node
                self._incidents.tell(incident, "network", (f"with a third node {figures}: {verdict}",), now)
        return blamed

    def ranks(self, task: Task, wish: act.RanksSlow, now: Moment) -> Actions:
        """Of a script: its ranks cannot give work to each other."""
        subject = SlowRanks(worker=wish.worker, ranks=wish.ranks)
        incident = self._incidents.about(task, subject)
        if wish.is_over:
            task.speeds.awaited.pop(wish.worker, None)
            return [] if incident is None else self._incidents.close(incident, wish.because, now)
        incident = incident or self._open(task, wish.worker, subject, wish.what, task.next_step, now)
        incident.rank = wish.ranks[0] if len(wish.ranks) == 1 else None
        task.speeds.awaited[wish.worker] = wish.factor
        self._incidents.tell(incident, "pace", (wish.because,), now)
        self._incidents.judge(incident, known(ErrorKind.SLOW_WORKER, wish.because), now)
        helps = f"its ranks move from {incident.node} where free slots of another node pay"
        self._incidents.treat(incident, "wait for it", helps, now)
        return []

    def _incident_of(self, task: Task, worker: Worker) -> Incident | None:
        """The open one that says that it is slow: a worker, or ranks of a script."""
        for incident in self._incidents.open_ones(task.name):
            match incident.subject:
                case SlowWorker(worker=slow) | SlowRanks(worker=slow) if slow == worker:
                    return incident
        return None

    def asked(self, task: Task) -> dict[Worker, float]:
        """The speeds a schedule is asked for with."""
        task.speeds.planned = dict(task.speeds.slow)
        return task.speeds.planned

    def balanced(self, task: Task, plan: ev.PlanComputed) -> str:
        """A schedule that knows the speeds is in force: how much is left to each slow worker?

        A sentence, if another schedule is wanted: speeds have changed while this one was made.
        """
        for worker in [w for w in task.speeds.planned if w in plan.steady]:
            incident = self._incidents.about(task, SlowWorker(worker=worker))
            if incident is None or not incident.remedies:
                continue
            if incident.remedies[-1].what != name_of(Effect.REBALANCE):
                continue
            left = sum(op.kind is Kind.F for op in plan.steady[worker])
            usual = task.shape.microbatches
            incident.remedies[-1].outcome = (
                f"from epoch {plan.epoch} on it runs {left} microbatches of each step, at home were {usual}"
                if left != usual
                else f"no other division of its {usual} microbatches would make the step shorter"
            )
        return "speeds have changed meanwhile" if task.speeds.planned != task.speeds.slow else ""

    def _open(
        self, task: Task, worker: Worker, subject: Subject, what: str, step: int, now: Moment
    ) -> Incident:
        incident = self._incidents.new(task=task, what=what, now=now, step=step)
        incident.workers, incident.subject = [worker], subject
        incident.node, incident.stops_training = task.seats[worker].node, False
        return incident

    def _write_evidence(
        self, incident: Incident, event: msg.SlownessFound | msg.SlowLinkFound, now: Moment
    ) -> None:
        ops = event.ops if isinstance(event, msg.SlownessFound) else ()
        for text, took in zip_longest(event.evidence, ops[: len(event.evidence)]):
            if took is None:
                self._incidents.tell(incident, "pace", (text,), now)
            else:
                self._incidents.state(incident, "pace", text, took, now)
        paces = PacesSeen(paces=event.paces) if isinstance(event, msg.SlownessFound) and event.paces else None
        for number, what in enumerate(event.ruled_out):
            self._incidents.clear(incident, "pace", what, now, paces if number == 0 else None)

    def _what_would_help(self, event: msg.SlownessFound, task: Task) -> str:
        alone = all(w == event.worker or w.stage != event.worker.stage for w in task.seats)
        why = (
            f"worker {event.worker} is the only one of stage {event.worker.stage}"
            if alone
            else f"every worker of stage {event.worker.stage} is slow"
        )
        free = [node for node, _ in self._roster.free() if node != task.seats[event.worker].node]
        place = f"a slot on {free[0]} is free for that" if free else "no other node has a free slot"
        return (
            f"{why}, so no other worker can take its microbatches, and steps take about {event.factor:.2f} "
            f"times as long at this stage; it moves, with the state of the task made safe, where that pays: "
            f"{place}"
        )
