"""The whole cluster in one machine: nodes, tasks, incidents. Events in, numbered orders and questions out.

It decides and does nothing else: time comes with each event, and everything slow (planning, checkpoints on
disk) is a question whose answer comes back as an event. The server writes each event into the journal before
it carries out what follows; a restarted coordinator replays the journal and is where it was, down to the
number of the last order to each node. `unfinished` says what must be sent or asked again then.

    evidence ──► judge (faults.severity) ──► remedy (faults.remedies) ──► Recovery.handle ──► orders to nodes

Three desks, each knowing only those before it: orders (numbers, incidents), tasks, nodes. Here, events are
handed to them, and evidence about workers becomes verdicts and remedies.
"""

from __future__ import annotations

from typing import assert_never

from everstep.core.cluster import fences
from everstep.core.cluster.dispatch import Actions
from everstep.core.cluster.node_states import NodeAdmin, NodeLiveness
from everstep.core.cluster.nodes import NodeDesk
from everstep.core.cluster.roster import Node, Seat, Task, TaskState
from everstep.core.faults import detector, remedies
from everstep.core.faults.severity import TABLE, ErrorKind, Judgement, judge
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.cluster_messages import ClusterEvent
from everstep.core.words.incidents import Evidence, Incident

END_IT = "end the hung process, then restart the worker"


class Coordinator(NodeDesk):
    """The state machine. `handle` is its only way to change."""

    def handle(self, event: ClusterEvent, now: float) -> Actions:
        """Take one event; say what follows from it."""
        self.events += 1
        match event:
            case msg.FromNode():
                return self._from_node(event, now)
            case msg.NodeJoined():
                return self._joined(event, now)
            case msg.NodeFellSilent():
                return self._silent(event, now)
            case msg.NodeLeft():
                return self._lost(event.node, NodeLiveness.LEFT, "its agent ended in good order", now)
            case msg.DrainRequested():
                return self._drain(event.node, now)
            case msg.ReadmitRequested():
                return self._readmit(event, now)
            case msg.TaskSubmitted():
                return self._submitted(event, now)
            case msg.CancelRequested():
                return self._end(event.task, TaskState.CANCELLED, "a person cancelled it", now, gently=False)
            case msg.PauseRequested():
                return self._end(event.task, TaskState.PAUSED, "a person paused it", now, gently=True)
            case msg.UnpauseRequested():
                return self._unpause(event.task, now)
            case msg.ResizeRequested():
                return self._resize(event.task, event.workers, "a person resized it", now)
            case msg.ReshapeRequested():
                return self._reshape(event, now)
            case msg.PlanAnswered():
                return self._of_task(event.task, event.event, now)
            case msg.AssignmentChosen():
                return self._assigned(event, now)
            case msg.SlownessFound() | msg.SlownessEnded():
                return self._of_pace(event, now)
            case msg.PolicySet():
                self.patience, self.planned = event.patience, event.planned
                return self._fill(now, "the policy was set")
            case msg.TimePassed():
                return self._time_passed(now)
            case _:
                assert_never(event)

    def due_at(self) -> float | None:
        """When `TimePassed` is wanted next, if at all."""
        dues = [task.not_before[worker] for task in self.tasks.values() for worker in task.held]
        dues += [task.search_at for task in self.tasks.values() if task.search_at is not None]
        for node in self.nodes.values():
            if node.liveness is NodeLiveness.SILENT and (ends_at := self._silence_ends_at(node)) is not None:
                dues.append(ends_at)
            if node.admin is NodeAdmin.ISOLATED:
                dues.append(node.admin_since + self.patience.isolation_s)
        return min(dues, default=None)

    def unfinished(self) -> Actions:
        """After a restart: the orders nodes may not have got, and the questions without an answer."""
        actions: Actions = [
            msg.Dispatch(node=node.name, number=number, order=order, because=because)
            for node in self.nodes.values()
            if node.reachable
            for number, order, because in node.pending
        ]
        for task in self.tasks.values():
            if task.question is not None and task.state is TaskState.RUNNING:
                because = task.question.because
                actions.append(
                    msg.Think(task=task.name, question=task.question, because=because, slow=task.planned_slow)
                )
        if self.asked:
            because = "the coordinator has started"
            actions.append(msg.ChooseAssignment(version=self.version, because=because))
        return actions

    def validate(self) -> None:
        """What must hold between events."""
        self.roster.validate()
        for task in self.tasks.values():
            if task.recovery is not None and task.state is TaskState.RUNNING:
                task.recovery.validate()
                assert task.recovery.granted == frozenset(
                    w for w, seat in task.seats.items() if not seat.leaving
                ), f"{task.name}: places and seats differ"
        numbers = [incident.number for incident in self.log.incidents]
        assert numbers == sorted(set(numbers))

    def _from_node(self, event: msg.FromNode, now: float) -> Actions:
        node = self.nodes.get(event.node)
        if node is None or event.boot != node.boot or event.number <= node.heard:
            return []
        node.heard = event.number
        if fences.refused(node.name, event.report, event.sender, self.tasks):
            return []
        match event.report:
            case msg.TaskEvent(task=task, event=inner):
                return self._of_worker(task, inner, now)
            case msg.CheckpointFound() as found:
                return self._found(found, now)
            case msg.CheckpointUnusable() as unusable:
                return self._not_found(unusable, now)
            case msg.PartWritten() as part:
                return self._part_written(part, now)
            case msg.StateFetched() as fetched:
                return self._fetched(fetched)
            case msg.OpOverdue() as report:
                return self._overdue(report, now)
            case msg.WorkerMoved() as moved:
                task_ = self.tasks.get(moved.task)
                if task_ is not None:
                    task_.overdue.pop(moved.worker, None)
                return []
            case msg.LinkMended() as mended:
                return self._mended(mended, now)
            case msg.KernelSpoke(text=text):
                return self._kernel_spoke(node, text, now)
            case msg.SlowLinkFound() | msg.SlowLinkEnded() as link:
                return self._of_link(link, now)
            case msg.TimesReported():
                return []
            case _:
                assert_never(event.report)

    def _of_worker(self, name: str, event: ev.Event, now: float) -> Actions:
        """An event of the process that holds a worker's place."""
        task = self.tasks.get(name)
        if task is None:
            return []
        if isinstance(event, ev.WorkerStarted | ev.WorkerExited | ev.WorkerRaised):
            seat = task.seats[event.worker]
            match event:
                case ev.WorkerStarted():
                    seat.address = event.address
                case ev.WorkerRaised():
                    task.last_words[event.worker] = (event.incarnation, event.error)
                    if task.state is TaskState.RUNNING:
                        self._evidence(task, event.worker, "exception", event.error, now)
                case ev.WorkerExited():
                    return self._exited(task, event, seat, now)
        if isinstance(event, ev.LedgerReported | ev.WorkerResumed | ev.UpdateInvalidated):
            task.overdue.pop(event.worker, None)
        return self._of_task(name, event, now)

    def _exited(self, task: Task, event: ev.WorkerExited, seat: Seat, now: float) -> Actions:
        worker = event.worker
        task.overdue.pop(worker, None)
        if task.recovery is None or task.state is not TaskState.RUNNING or seat.leaving:
            del task.seats[worker]
            return self._gone(task, worker, seat, seat.leaving or event.reason, now)
        incarnation, error = task.last_words.pop(worker, (0, ""))
        raised = incarnation == event.incarnation
        if raised:
            judgement = judge("exception", error)
            incident = self.log.of_task(task.name).suspected(worker, error, 0, now)  # open since it raised
        else:
            judgement = judge("exit", event.reason)
            incident = self._evidence(task, worker, "exit", event.reason, now)
        incident.node = seat.node
        if incident.verdict is None or not incident.remedies:
            self._verdict(incident, judgement, now)
        return self._remedy_exit(task, event, seat, incident, judgement, now)

    def _remedy_exit(
        self,
        task: Task,
        event: ev.WorkerExited,
        seat: Seat,
        incident: Incident,
        judgement: Judgement,
        now: float,
    ) -> Actions:
        worker = event.worker
        if incident.remedies and incident.remedies[-1].what == END_IT:
            incident.remedies[-1].outcome = "it has ended"
        failures = [*remedies.recent(task.failures.get(worker, []), now, self.patience), now]
        task.failures[worker] = failures
        actions = self._grant(task, now, clean=frozenset({worker})) if len(failures) == 1 else []
        history = remedies.History(
            failures=len(failures), node=seat.node, could_live_elsewhere=self._could_live_without(seat.node)
        )
        choice = remedies.after_exit(judgement, history, self.patience)
        self._remedy(incident, choice.what, choice.because, now)
        seat.incarnation, seat.address = 0, None
        if choice.what is remedies.RemedyKind.ISOLATE:
            del task.seats[worker]
            actions += self._grant(task, now)
            actions += self._isolate(self.nodes[seat.node], choice.because, now)
        elif choice.wait_s:
            task.not_before[worker] = now + choice.wait_s
        actions += self._of_task(task.name, event, now)
        if choice.what is remedies.RemedyKind.ISOLATE:
            actions += self._fill(now, f"node {seat.node} is isolated")
        return actions

    def _overdue(self, report: msg.OpOverdue, now: float) -> Actions:
        task = self.tasks.get(report.task)
        if task is None or task.state is not TaskState.RUNNING:
            return []
        task.overdue[report.worker] = report
        actions = self._confirm_silence(now)
        found = detector.locate(task.overdue, members=len(task.seats), limits=self.limits)
        match found:
            case detector.Hung():
                return actions + self._hung(task, found, now)
            case detector.Stalled():
                return actions + self._stalled(task, found.because, now)
            case None:
                return actions

    def _hung(self, task: Task, found: detector.Hung, now: float) -> Actions:
        seat = task.seats[found.worker]
        if not self._is_heard(seat.node):
            return []  # the node is in doubt already
        incident = self._evidence(task, found.worker, "progress", found.because, now)
        incident.node = seat.node
        for witness in found.waiting[:8]:
            report = task.overdue[witness]
            text = f"{witness} waits for {report.doing} since {report.elapsed_s:.2f} s: ruled out"
            incident.told(Evidence(at=now, source="progress", text=text))
        judgement = judge("progress", f"task hang: {found.because}")
        self._verdict(incident, judgement, now)
        self._remedy(incident, END_IT, found.because, now)
        task.overdue.clear()
        order = msg.KillProcess(task=task.name, worker=found.worker, incarnation=seat.incarnation)
        return self._order(self.nodes[seat.node], order, found.because)

    def _stalled(self, task: Task, because: str, now: float) -> Actions:
        task.overdue.clear()
        step = task.recovery.recorded + 1 if task.recovery is not None else 0
        incident = self.log.new(task=task.name, workers=[], what="everybody waits", step=step, now=now)
        incident.told(Evidence(at=now, source="progress", text=because))
        judgement = _known(ErrorKind.OTHER_NETWORK, because)
        self._verdict(incident, judgement, now)
        self._remedy(incident, remedies.RemedyKind.RETRY, "a new epoch: what was lost is sent again", now)
        return self._of_task(task.name, ev.TrainingStalled(because=because), now)

    def _of_link(self, event: msg.SlowLinkFound | msg.SlowLinkEnded, now: float) -> Actions:
        task = self.tasks.get(event.task)
        if task is None or task.state is not TaskState.RUNNING:
            return []
        if not {event.worker, event.peer} <= task.seats.keys():
            return []
        return self._slow_link(task, event, now)

    def _of_pace(self, event: msg.SlownessFound | msg.SlownessEnded, now: float) -> Actions:
        """Somebody is slow, or no longer."""
        task = self.tasks.get(event.task)
        seat = task.seats.get(event.worker) if task is not None else None
        if task is None or seat is None or task.state is not TaskState.RUNNING:
            return []
        if seat.incarnation != event.incarnation:
            return []
        if isinstance(event, msg.SlownessFound):
            because = self._slowed(task, event, now)
            actions: Actions = []
        else:
            because = f"a new schedule: {event.because}" if event.worker in task.slow else None
            actions = self._fast_again(task, event.worker, event.because, now)
        if because is None:
            return actions
        return actions + self._of_task(task.name, ev.ProfileChanged(because=because), now)

    def _mended(self, event: msg.LinkMended, now: float) -> Actions:
        task = self.tasks.get(event.task)
        if task is None or task.state is not TaskState.RUNNING or event.worker not in task.seats:
            return []
        link = f"{event.worker} - {event.peer}"
        times = [*remedies.recent(task.mends.get(link, []), now, self.patience), now]
        task.mends[link] = times
        text = f"connection reset between {event.worker} and {event.peer}"
        incident = self._evidence(task, event.worker, "link", text, now)
        judgement = _known(ErrorKind.CONNECTION_RESET, text)
        self._verdict(incident, judgement, now)
        choice = remedies.after_mend(judgement, len(times), self.patience)
        self._remedy(incident, choice.what, choice.because, now)
        if choice.what is remedies.RemedyKind.RETRY:
            incident.stops_training = False
            incident.close(now, "the link was opened again and what may be lost was sent again")
            return [msg.IncidentClosed(number=incident.number, because="the link works again")]
        task.mends.pop(link)
        seat = task.seats[event.worker]
        order = msg.KillProcess(task=task.name, worker=event.worker, incarnation=seat.incarnation)
        return self._order(self.nodes[seat.node], order, choice.because)

    def _kernel_spoke(self, node: Node, text: str, now: float) -> Actions:
        judgement = judge("kernel", text)
        if judgement.severity != 1 or node.admin is not NodeAdmin.UP:
            return []
        incident = self.log.new(task="", workers=[], what=f"node {node.name}: {text}", step=0, now=now)
        incident.node, incident.stops_training = node.name, False
        incident.told(Evidence(at=now, source="kernel", text=text))
        self._verdict(incident, judgement, now)
        actions: Actions = []
        if self._could_live_without(node.name):
            self._remedy(incident, remedies.RemedyKind.ISOLATE, judgement.because, now)
            actions += self._isolate(node, judgement.because, now)
        incident.close(now, "its workers are moved")
        actions.append(msg.IncidentClosed(number=incident.number, because="the node is isolated"))
        return actions + self._fill(now, f"node {node.name} is isolated")

    def _time_passed(self, now: float) -> Actions:
        actions: Actions = []
        for task in list(self.tasks.values()):
            for worker in [w for w in task.held if task.not_before[w] <= now]:
                actions += self._start(task, task.held.pop(worker), now)
            if task.search_at is not None and task.search_at <= now:
                actions += self._search(task)
        for node in list(self.nodes.values()):
            over = now - node.admin_since >= self.patience.isolation_s
            if node.admin is NodeAdmin.ISOLATED and over:
                actions += self._wanted(node, NodeAdmin.UP, "its time of isolation is over", now)
                actions += self._fill(now, f"node {node.name} is back from isolation")
        return actions + self._confirm_silence(now)


def _known(kind: ErrorKind, because: str) -> Judgement:
    """A fault whose kind needs no guessing from text."""
    return Judgement(kind=kind, severity=TABLE[kind], because=because)
