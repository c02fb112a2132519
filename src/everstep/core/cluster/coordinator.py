"""The whole cluster in one machine: nodes, tasks, incidents. Events in, numbered orders and questions out.

It decides and does nothing else: time comes with each event, and everything slow (planning, checkpoints on
disk) is a question whose answer comes back as an event. The driver writes each event into the journal before
it carries out what follows; a restarted coordinator replays the journal and is where it was, down to the
number of the last order to each node. `unfinished` says what must be sent or asked again then.

    evidence ──► judge (faults.severity) ──► remedy (faults.remedies) ──► Recovery.handle ──► orders to nodes

The parts, each with its own state and given its collaborators; an arrow: asks or tells.

    Failures ──► Nodes ──► Tasks ──► Staffing ──► Training ──► Checkpoints, MemoryCopies, Slowness ──► Orders,
                                                                                                    Incidents
"""

from __future__ import annotations

from typing import assert_never

from everstep.core.cluster import fences
from everstep.core.cluster.checkpoints import Checkpoints
from everstep.core.cluster.failures import Failures
from everstep.core.cluster.followups import FollowUps
from everstep.core.cluster.incidents import Incidents
from everstep.core.cluster.memory_copies import MemoryCopies
from everstep.core.cluster.node import Node
from everstep.core.cluster.nodes import Nodes
from everstep.core.cluster.orders import Actions, Orders
from everstep.core.cluster.policy import CoordinatorPolicy
from everstep.core.cluster.retention import Retention
from everstep.core.cluster.roster import Roster
from everstep.core.cluster.slowness import Slowness
from everstep.core.cluster.staffing import Staffing
from everstep.core.cluster.task import Task, TaskState
from everstep.core.cluster.tasks import PlannerQuestion, Tasks
from everstep.core.cluster.training import Training
from everstep.core.faults.detector import DetectorLimits
from everstep.protocol import cluster_messages as msg
from everstep.protocol import events as ev
from everstep.protocol.cluster_messages import ClusterEvent, Patience
from everstep.protocol.incidents import IncidentLog
from everstep.protocol.moment import Moment

TaskRequest = (
    msg.CancelRequested
    | msg.FinishRequested
    | msg.PauseRequested
    | msg.UnpauseRequested
    | msg.ResizeRequested
    | msg.ResizeReleased
    | msg.ReshapeRequested
    | msg.PlanAnswered
    | msg.SlownessFound
    | msg.SlownessEnded
    | msg.SlowLinkFound
    | msg.SlowLinkEnded
)
TaskReport = (
    msg.TaskEvent
    | msg.SlowLinkFound
    | msg.SlowLinkEnded
    | msg.CheckpointFound
    | msg.CheckpointUnusable
    | msg.PartWritten
    | msg.SaveFailed
    | msg.StateFetched
    | msg.OpOverdue
    | msg.WorkerMoved
    | msg.LinkMended
    | msg.TimesReported
)


class Coordinator:
    """The state machine. `handle` is its only way to change."""

    def __init__(
        self,
        *,
        patience: Patience | None = None,
        limits: DetectorLimits | None = None,
        planned: bool = False,
    ) -> None:
        self.policy = CoordinatorPolicy(patience or Patience(), limits or DetectorLimits(), planned)
        self.roster = Roster()
        self.incidents = Incidents()
        self.question = PlannerQuestion()
        self.events = 0  # handled so far: the number of the last one in the journal
        self._orders = Orders(self.roster.nodes)
        self._later = FollowUps()
        self._retention = Retention(roster=self.roster, log=self.incidents.log)
        self._build(self.roster, self._orders, self.incidents, self.policy, self._later)

    def _build(
        self,
        roster: Roster,
        orders: Orders,
        incidents: Incidents,
        policy: CoordinatorPolicy,
        later: FollowUps,
    ) -> None:
        """Each part gets those it asks or tells, and no others."""
        self._checkpoints = checkpoints = Checkpoints(
            orders=orders, incidents=incidents, policy=policy, later=later
        )
        self._slowness = slowness = Slowness(roster=roster, incidents=incidents, policy=policy)
        self._copies = copies = MemoryCopies(roster=roster, orders=orders, incidents=incidents)
        self._training = training = Training(
            roster=roster,
            orders=orders,
            incidents=incidents,
            slowness=slowness,
            checkpoints=checkpoints,
            copies=copies,
            policy=policy,
            later=later,
        )
        staffing = Staffing(roster=roster, orders=orders, training=training, later=later)
        self._tasks = tasks = Tasks(
            roster=roster,
            orders=orders,
            incidents=incidents,
            checkpoints=checkpoints,
            copies=copies,
            training=training,
            staffing=staffing,
            policy=policy,
            question=self.question,
            later=later,
        )
        self._nodes = nodes = Nodes(
            roster=roster,
            orders=orders,
            incidents=incidents,
            copies=copies,
            training=training,
            staffing=staffing,
            tasks=tasks,
            policy=policy,
            later=later,
        )
        self._failures = Failures(
            roster=roster,
            incidents=incidents,
            training=training,
            staffing=staffing,
            nodes=nodes,
            policy=policy,
        )

    # -------------------------------------------------------------- what others read

    @property
    def nodes(self) -> dict[str, Node]:
        return self.roster.nodes

    @property
    def tasks(self) -> dict[str, Task]:
        return self.roster.tasks

    @property
    def log(self) -> IncidentLog:
        return self.incidents.log

    @property
    def patience(self) -> Patience:
        return self.policy.patience

    @property
    def version(self) -> int:
        """Of the last question to the planner: an answer to an earlier one does not count."""
        return self.question.version

    def due_at(self) -> float | None:
        """When `TimePassed` is wanted next, if at all."""
        dues = self._nodes.due_at()
        if self.question.review_at is not None:
            dues.append(self.question.review_at)
        for task in self.tasks.values():
            dues += task.starts.due_at()
            if task.checkpoints.search_at is not None:
                dues.append(task.checkpoints.search_at)
        return min(dues, default=None)

    def unfinished(self) -> Actions:
        """After a restart: the orders nodes may not have got, and the questions without an answer."""
        return self._orders.unfinished() + self._training.unfinished() + self._tasks.unfinished()

    def validate(self) -> None:
        """What must hold between events."""
        self.roster.validate()
        for task in self.tasks.values():
            if task.recovery is not None and task.state is TaskState.RUNNING:
                task.recovery.validate()
                assert task.recovery.granted == task.staying(), f"{task.name}: places and seats differ"
            assert (task.ending is not None) == (task.state is TaskState.ENDING)
        numbers = [incident.number for incident in self.log.incidents]
        assert numbers == sorted(set(numbers))

    def acknowledged(self, node: str, number: int) -> None:
        """A node has carried out its orders up to this one. Changes no decision, only what is kept."""
        self._orders.acknowledged(node, number)

    # -------------------------------------------------------------- events

    def handle(self, event: ClusterEvent, now: float) -> Actions:
        """Take one event; say what follows from it."""
        self.events += 1
        moment = Moment(now, self.events)
        self.log.event = self.events
        actions = self._handle(event, moment) + self._tasks.settle(moment)
        self._retention.handled(self.events)
        return actions

    def _handle(self, event: ClusterEvent, now: Moment) -> Actions:
        match event:
            case msg.FromNode():
                return self._handle_report(event, now)
            case msg.NodeJoined():
                return self._nodes.joined(event, now)
            case (
                msg.NodeFellSilent()
                | msg.NodeLeft()
                | msg.DrainRequested()
                | msg.ReadmitRequested()
                | msg.RepairPromised()
                | msg.LeaveAnnounced()
            ):
                node = self.nodes.get(event.node)
                return [] if node is None else self._handle_node_event(node, event, now)
            case msg.TaskSubmitted():
                return self._tasks.submit(event, now)
            case msg.AssignmentChosen():
                return self._tasks.assigned(event, now)
            case msg.PolicySet():
                return self._handle_policy(event)
            case msg.TimePassed():
                return self._handle_time(now)
            case _:
                task = self.tasks.get(event.task)
                return [] if task is None else self._handle_task_event(task, event, now)

    def _handle_node_event(
        self,
        node: Node,
        event: msg.NodeFellSilent
        | msg.NodeLeft
        | msg.DrainRequested
        | msg.ReadmitRequested
        | msg.RepairPromised
        | msg.LeaveAnnounced,
        now: Moment,
    ) -> Actions:
        match event:
            case msg.NodeFellSilent():
                return self._nodes.fell_silent(node, event.silent_s, now)
            case msg.NodeLeft():
                return self._nodes.left(node, now)
            case msg.DrainRequested():
                return self._nodes.drain(node, now, force=event.force)
            case msg.ReadmitRequested():
                return self._nodes.readmit(node, event.by, now)
            case msg.RepairPromised():
                return self._nodes.promised(node, event.back_in_s, now)
            case msg.LeaveAnnounced():
                return self._nodes.announced(node, event.leaves_in_s, event.by, now)

    def _handle_task_event(self, task: Task, event: TaskRequest, now: Moment) -> Actions:
        match event:
            case msg.CancelRequested():
                return self._tasks.cancel(task, now)
            case msg.FinishRequested():
                return self._tasks.finish_early(task, event.because, now)
            case msg.PauseRequested():
                return self._tasks.pause(task, now)
            case msg.UnpauseRequested():
                return self._tasks.unpause(task)
            case msg.ResizeRequested():
                return self._tasks.resize(task, event.workers, "an operator resized it", now)
            case msg.ResizeReleased():
                return self._tasks.release(task)
            case msg.ReshapeRequested():
                return self._tasks.reshape(task, event, now)
            case msg.PlanAnswered():
                return self._training.inform(task, event.event, now)
            case msg.SlownessFound() | msg.SlownessEnded():
                return self._handle_pace(task, event, now)
            case msg.SlowLinkFound() | msg.SlowLinkEnded():
                return self._handle_link(task, event, now)
            case _:
                assert_never(event)

    def _handle_policy(self, event: msg.PolicySet) -> Actions:
        self.policy.patience, self.policy.planned = event.patience, event.planned
        self._later.slots_changed("the policy was set")
        return []

    def _handle_time(self, now: Moment) -> Actions:
        actions: Actions = []
        for task in list(self.tasks.values()):
            actions += self._tasks.time_passed(task, now)
        self._tasks.review_if_due(now)
        return actions + self._nodes.time_passed(now)

    def _handle_pace(self, task: Task, event: msg.SlownessFound | msg.SlownessEnded, now: Moment) -> Actions:
        """A worker is slow, or no longer."""
        seat = task.seats.get(event.worker)
        if seat is None or task.state is not TaskState.RUNNING or seat.incarnation != event.incarnation:
            return []
        actions: Actions = []
        if isinstance(event, msg.SlownessFound):
            because = self._slowness.found(task, event, now)
        else:
            because = f"a new schedule: {event.because}" if event.worker in task.speeds.slow else ""
            actions += self._slowness.ended(task, event.worker, event.because, now)
        if because:
            self._later.slots_changed(because)
            actions += self._training.inform(task, ev.ProfileChanged(because=because), now)
        return actions

    def _handle_link(self, task: Task, event: msg.SlowLinkFound | msg.SlowLinkEnded, now: Moment) -> Actions:
        is_known = isinstance(event, msg.SlowLinkEnded) or {event.worker, event.peer} <= task.seats.keys()
        running = task.state is TaskState.RUNNING
        return self._slowness.link(task, event, now) if running and is_known else []

    # -------------------------------------------------------------- reports of nodes

    def _handle_report(self, event: msg.FromNode, now: Moment) -> Actions:
        node, report = self.nodes.get(event.node), event.report
        if node is None or event.boot != node.boot or event.number <= node.heard:
            return []
        node.heard = event.number
        if fences.refused(node.name, report, event.sender, self.tasks):
            return []
        if isinstance(report, msg.KernelSpoke):
            return self._failures.kernel_spoke(node, report.text, report.slots, now)
        if isinstance(report, msg.LeaveNoticed):
            return self._nodes.announced(node, report.leaves_in_s, report.by, now)
        if isinstance(report, msg.SlotFreed):
            return self._failures.slot_freed(node, report.slot, now)
        task = self.tasks.get(report.task)
        return [] if task is None else self._handle_task_report(task, report, event.node, now)

    def _handle_task_report(self, task: Task, report: TaskReport, node: str, now: Moment) -> Actions:
        match report:
            case msg.TaskEvent():
                return self._handle_worker_event(task, report.event, now)
            case msg.CheckpointFound():
                return self._tasks.checkpoint_found(task, report, now)
            case msg.CheckpointUnusable():
                return self._tasks.checkpoint_unusable(task, report, now)
            case msg.PartWritten():
                return self._training.part_written(task, report, node, now)
            case msg.SaveFailed():
                return self._checkpoints.failed(task, report, node, now)
            case msg.StateFetched():
                self._copies.fetched(task, report, now)
                return []
            case msg.OpOverdue():
                return self._failures.overdue(task, report, now)
            case msg.WorkerMoved():
                task.failures.overdue.pop(report.worker, None)
                return []
            case msg.LinkMended():
                return self._failures.mended(task, report, now)
            case msg.SlowLinkFound() | msg.SlowLinkEnded():
                return self._handle_link(task, report, now)
            case msg.TimesReported():
                return []
            case _:
                assert_never(report)

    def _handle_worker_event(self, task: Task, event: ev.Event, now: Moment) -> Actions:
        """An event of the process that holds a worker's seat, or of an agent."""
        match event:
            case ev.WorkerStarted():
                task.seats[event.worker].address = event.address
            case ev.CheckpointCommitted():
                saved = self._checkpoints.committed(task, event.step, now)
                return saved + self._training.inform(task, event, now)
            case ev.RestoreFailed():
                return self._training.unrestored(task, event, now)
            case ev.WorkerRaised():
                return self._failures.raised(task, event, now)
            case ev.WorkerExited():
                return self._failures.exited(task, event, now)
            case ev.LedgerReported() | ev.WorkerResumed() | ev.UpdateInvalidated():
                task.failures.overdue.pop(event.worker, None)
        return self._training.inform(task, event, now)
