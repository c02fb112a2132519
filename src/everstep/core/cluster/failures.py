"""Evidence about workers and nodes becomes a verdict (`faults.severity`) and a remedy (`faults.remedies`)."""

from __future__ import annotations

from everstep.core.cluster.incidents import Incidents
from everstep.core.cluster.node import Node
from everstep.core.cluster.node_states import NodeAdmin
from everstep.core.cluster.nodes import Nodes
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.policy import CoordinatorPolicy
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.staffing import Staffing
from everstep.core.cluster.task import Task, TaskState
from everstep.core.cluster.training import Training
from everstep.core.faults import detector, remedies
from everstep.core.faults.severity import ErrorKind, Judgement, Severity, judge, known
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.incidents import Incident
from everstep.core.words.moment import Moment

END_IT = "end the hung process, then restart the worker"
SHOWN_WITNESSES = 8


class Failures:
    """Changes `task.failures`."""

    def __init__(
        self,
        *,
        roster: Roster,
        incidents: Incidents,
        training: Training,
        staffing: Staffing,
        nodes: Nodes,
        policy: CoordinatorPolicy,
    ) -> None:
        self._roster, self._incidents = roster, incidents
        self._training, self._staffing, self._nodes = training, staffing, nodes
        self._policy = policy

    # -------------------------------------------------------------- a process is gone

    def raised(self, task: Task, event: ev.WorkerRaised, now: Moment) -> Actions:
        """Its exit follows; then it is judged."""
        task.failures.raised[event.worker] = (event.incarnation, event.error)
        if task.state is TaskState.RUNNING:
            self._incidents.suspect(task, event.worker, "exception", event.error, now)
        return self._training.inform(task, event, now)

    def exited(self, task: Task, event: ev.WorkerExited, now: Moment) -> Actions:
        worker, seat = event.worker, task.seats[event.worker]
        task.failures.overdue.pop(worker, None)
        if task.recovery is None or task.state is not TaskState.RUNNING or seat.leaving:
            del task.seats[worker]
            return self._staffing.gone(task, worker, seat, seat.leaving or event.reason, now)
        incarnation, error = task.failures.raised.pop(worker, (0, ""))
        if incarnation == event.incarnation:
            judgement = judge("exception", error)
            incident = self._incidents.of_task(task.name).suspected(worker, error, 0, now.at)
        else:
            judgement = judge("exit", event.reason)
            incident = self._incidents.suspect(task, worker, "exit", event.reason, now)
        incident.node = seat.node
        if incident.verdict is None or not incident.remedies:
            self._incidents.judge(incident, judgement, now)
        if incident.remedies and incident.remedies[-1].what == END_IT:
            incident.remedies[-1].outcome = "it has ended"
        return self._restart_or_isolate(task, event, incident, judgement, now)

    def _restart_or_isolate(
        self, task: Task, event: ev.WorkerExited, incident: Incident, judgement: Judgement, now: Moment
    ) -> Actions:
        worker, patience = event.worker, self._policy.patience
        seat, times = task.seats[worker], task.failures.times
        times[worker] = [*remedies.recent(times.get(worker, []), now.at, patience), now.at]
        first = len(times[worker]) == 1
        actions = self._staffing.grant(task, now, clean=frozenset({worker})) if first else []
        history = remedies.History(
            failures=len(times[worker]),
            node=seat.node,
            could_live_elsewhere=self._roster.can_do_without(seat.node),
        )
        choice = remedies.after_exit(judgement, history, patience)
        self._incidents.treat(incident, choice.what, choice.because, now)
        seat.incarnation, seat.address = 0, None
        if choice.what is remedies.RemedyKind.ISOLATE:
            del task.seats[worker]
            actions += self._staffing.grant(task, now)
            actions += self._nodes.isolate(self._roster.nodes[seat.node], choice.because, now)
        elif choice.wait_s:
            task.starts.not_before[worker] = now.at + choice.wait_s
        return actions + self._training.inform(task, event, now)

    # -------------------------------------------------------------- no progress

    def overdue(self, task: Task, report: msg.OpOverdue, now: Moment) -> Actions:
        if task.state is not TaskState.RUNNING:
            return []
        task.failures.overdue[report.worker] = report
        actions = self._nodes.confirm_silence(now)
        found = detector.locate(task.failures.overdue, members=len(task.seats), limits=self._policy.limits)
        match found:
            case detector.Hung():
                return actions + self._hung(task, found, now)
            case detector.Stalled():
                return actions + self._stalled(task, found.because, now)
            case None:
                return actions

    def _hung(self, task: Task, found: detector.Hung, now: Moment) -> Actions:
        seat = task.seats[found.worker]
        if not self._roster.is_heard(seat.node):
            return []  # the node is in doubt already
        incident = self._incidents.suspect(task, found.worker, "progress", found.because, now)
        incident.node = seat.node
        for witness in found.waiting[:SHOWN_WITNESSES]:
            report = task.failures.overdue[witness]
            text = f"{witness} waits for {report.doing} since {report.elapsed_s:.2f} s: ruled out"
            self._incidents.tell(incident, "progress", (text,), now)
        self._incidents.judge(incident, judge("progress", f"task hang: {found.because}"), now)
        self._incidents.treat(incident, END_IT, found.because, now)
        task.failures.overdue.clear()
        return self._staffing.kill(task, found.worker, found.because, now)

    def _stalled(self, task: Task, because: str, now: Moment) -> Actions:
        task.failures.overdue.clear()
        incident = self._incidents.new(task=task, what="everybody waits", now=now, step=task.next_step)
        self._incidents.tell(incident, "progress", (because,), now)
        self._incidents.judge(incident, known(ErrorKind.OTHER_NETWORK, because), now)
        remedy = "a new epoch: what was lost is sent again"
        self._incidents.treat(incident, remedies.RemedyKind.RETRY, remedy, now)
        return self._training.inform(task, ev.TrainingStalled(because=because), now)

    # -------------------------------------------------------------- links and nodes

    def mended(self, task: Task, event: msg.LinkMended, now: Moment) -> Actions:
        """A connection between two live workers broke and was opened again."""
        if task.state is not TaskState.RUNNING or event.worker not in task.seats:
            return []
        link, patience, mended = f"{event.worker} - {event.peer}", self._policy.patience, task.failures.mended
        mended[link] = [*remedies.recent(mended.get(link, []), now.at, patience), now.at]
        text = f"connection reset between {event.worker} and {event.peer}"
        incident = self._incidents.suspect(task, event.worker, "link", text, now)
        judgement = known(ErrorKind.CONNECTION_RESET, text)
        self._incidents.judge(incident, judgement, now)
        choice = remedies.after_mend(judgement, len(mended[link]), patience)
        self._incidents.treat(incident, choice.what, choice.because, now)
        if choice.what is remedies.RemedyKind.RETRY:
            incident.stops_training = False
            outcome = "the link was opened again and what may be lost was sent again"
            return self._incidents.close(incident, outcome, now, because="the link works again")
        mended.pop(link)
        return self._staffing.kill(task, event.worker, choice.because, now)

    def kernel_spoke(self, node: Node, text: str, now: Moment) -> Actions:
        judgement = judge("kernel", text)
        if judgement.severity is not Severity.SEV1 or node.admin is not NodeAdmin.UP:
            return []
        incident = self._incidents.new(task=None, what=f"node {node.name}: {text}", now=now)
        incident.node, incident.stops_training = node.name, False
        self._incidents.tell(incident, "kernel", (text,), now)
        self._incidents.judge(incident, judgement, now)
        actions: Actions = []
        if self._roster.can_do_without(node.name):
            self._incidents.treat(incident, remedies.RemedyKind.ISOLATE, judgement.because, now)
            actions += self._nodes.isolate(node, judgement.because, now)
        because = "the node is isolated"
        return actions + self._incidents.close(incident, "its workers are moved", now, because=because)
