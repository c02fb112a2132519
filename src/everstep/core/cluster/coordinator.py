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

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import ClassVar

from everstep.core.cluster import fences
from everstep.core.cluster.checkpoints import Checkpoints
from everstep.core.cluster.context import ClusterContext
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
from everstep.core.cluster.slowness import Slowness, nodes_of_slow_links, slow_links
from everstep.core.cluster.staffing import Staffing
from everstep.core.cluster.task import Task, TaskState
from everstep.core.cluster.tasks import PlannerQuestion, Tasks
from everstep.core.cluster.training import Training
from everstep.core.faults import gray
from everstep.core.faults.detector import DetectorLimits
from everstep.core.faults.severity import ErrorKind, known
from everstep.core.task.states import Copying
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import IncidentLog
from everstep.protocol.messages import ClusterEvent, Patience
from everstep.protocol.moment import Moment
from everstep.protocol.table import Handlers

MOST_UNKNOWN = 20  # kinds of reports of a node that are counted by name

# What an incident says of an answer that could not be computed: what, remedy, outcome.
NO_PLAN = (
    "no plan could be computed",
    "keep the workers of every task, give free slots to those that wait",
    "tasks have the workers that they had",
)
NO_SCHEDULE = (
    "no schedule could be computed",
    "use a plain schedule, which is slower",
    "the task has a schedule",
)


def _if_any(at: float | None) -> tuple[float, ...]:
    return () if at is None else (at,)


def _first(timers: Mapping[str, Iterable[float]]) -> float:
    return min((at for times in timers.values() for at in times), default=inf)


# What a task may wait for.
TASK_TIMERS: Mapping[str, Callable[[Task, Patience], Iterable[float]]] = {
    "start put off": lambda task, patience: task.starts.put_off_until(),
    "start": lambda task, patience: task.starts.late_at(patience),
    "copy of a state": lambda task, patience: task.starts.copy_late_at(patience),
    "broken links": lambda task, patience: _if_any(task.failures.links.judge_at),
    "next search": lambda task, patience: _if_any(task.checkpoints.search_at),
    "search": lambda task, patience: task.checkpoints.search_due_at(patience),
    "state that is held": lambda task, patience: (
        () if task.progress.held is None else (task.progress.held.since + patience.disk_answer_s,)
    ),
    "commit": lambda task, patience: task.checkpoints.commits_due_at(patience),
    "life of a script": lambda task, patience: () if task.lives is None else _if_any(task.lives.due_at()),
}


class Coordinator:
    """The state machine. `handle` is its only way to change."""

    on: ClassVar = Handlers[Actions](msg.ClusterEvent)
    on_report: ClassVar = Handlers[Actions](msg.NodeReport)

    def __init__(
        self,
        *,
        patience: Patience | None = None,
        limits: DetectorLimits | None = None,
        planned: bool = False,
    ) -> None:
        self.policy = CoordinatorPolicy(
            patience=patience or Patience(), limits=limits or DetectorLimits(), planned=planned
        )
        self.roster = Roster()
        self.incidents = Incidents()
        self.question = PlannerQuestion()
        self.events = 0  # handled so far: the number of the last one in the journal
        # The only task that the last event can have changed; None: any. Most events are reports of one task's
        # progress, and what is kept about hundreds of others is not looked at again for it.
        self.only_task: str | None = None
        self._due: float | None = None
        self._due_after = -1  # the event after which it was found
        self._task_due: dict[str, float] = {}  # by task, its first timer
        self._stale: set[str] | None = None  # tasks whose first timer may be another one now; None: all
        self._orders = Orders(self.roster.nodes)
        self._later = FollowUps()
        self._retention = Retention(roster=self.roster, log=self.incidents.log)
        context = ClusterContext(
            roster=self.roster,
            orders=self._orders,
            incidents=self.incidents,
            policy=self.policy,
            later=self._later,
        )
        # Each part gets those it asks or tells, and no others.
        self._checkpoints = checkpoints = Checkpoints(context)
        self._slowness = slowness = Slowness(context)
        self._copies = copies = MemoryCopies(context)
        self._training = training = Training(
            context, slowness=slowness, checkpoints=checkpoints, copies=copies
        )
        staffing = Staffing(context, training=training)
        self._tasks = tasks = Tasks(
            context,
            checkpoints=checkpoints,
            copies=copies,
            training=training,
            staffing=staffing,
            question=self.question,
        )
        self._nodes = nodes = Nodes(context, copies=copies, training=training, staffing=staffing, tasks=tasks)
        self._failures = Failures(context, training=training, staffing=staffing, nodes=nodes)

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
        """When `TimePassed` is wanted next, if at all. Asked 20 times per second, and changed by events."""
        if self._due_after != self.events:
            self._due, self._due_after = self._next_due(), self.events
        return self._due

    def _next_due(self) -> float | None:
        for name in self.tasks if self._stale is None else self._stale & self.tasks.keys():
            self._task_due[name] = _first(self.timers_of(self.tasks[name]))
        self._stale = set()
        if len(self._task_due) > len(self.tasks):
            self._task_due = {name: self._task_due[name] for name in self.tasks}
        first = min(_first(self.timers_of(None)), min(self._task_due.values(), default=inf))
        return None if first == inf else first

    def timers(self) -> dict[str, list[float]]:
        """By what is waited for, the times at which it is looked at if nothing happens before. What waits
        for a process or an agent that is alive needs none: those are watched.
        """
        found: dict[str, list[float]] = {what: [] for what in TASK_TIMERS}
        for task in (None, *self.tasks.values()):
            for what, times in self.timers_of(task).items():
                found.setdefault(what, []).extend(times)
        return found

    def timers_of(self, task: Task | None) -> dict[str, Iterable[float]]:
        """None: those of no task."""
        if task is not None:
            return {what: times(task, self.policy.patience) for what, times in TASK_TIMERS.items()}
        return {**self._nodes.timers(), "review of a plan": _if_any(self.question.review_at)}

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
        due, first = self.due_at(), _first(self.timers())
        assert first == (inf if due is None else due), f"{due} is due first, and not {first}"

    def acknowledged(self, node: str, number: int) -> None:
        """A node has carried out its orders up to this one. Changes no decision, only what is kept."""
        self._orders.acknowledged(node, number)

    # -------------------------------------------------------------- events

    def handle(self, event: ClusterEvent, now: float) -> Actions:
        """Take one event; say what follows from it."""
        self.events += 1
        moment = Moment(now, self.events)
        self.log.event = self.events
        only = self._only_about(event)
        actions = self._handle(event, moment)
        only = only if self._later.nothing_to_judge() else None
        actions += self._failures.judge_lives(self._later, moment) + self._note_slow_ranks(moment)
        self._note_networks(moment)
        actions += self._failures.judge_replays(self._later, moment)
        actions += self._tasks.look_at_held(self.tasks.values() if only is None else (only,), moment)
        only = only if self._later.clear() else None
        actions += self._tasks.settle(moment)
        self._retention.handled(self.events)
        self.only_task = None if only is None else only.name
        if only is None:
            self._stale = None
        elif self._stale is not None:
            self._stale.add(only.name)
        return actions

    def _only_about(self, event: ClusterEvent) -> Task | None:
        """The one task that an event is about, if all that can follow is said by `FollowUps`. Where a vote is
        open, its end may isolate nodes.
        """
        match event:
            case msg.FromNode(
                report=msg.TaskEvent(
                    task=name, event=ev.StepSealed() | ev.LedgerReported() | ev.WorkerResumed()
                )
                | msg.PartWritten(task=name)
                | msg.WorkerMoved(task=name)
                | msg.RankProgressed(task=name)
                | msg.RanksPaced(task=name)
            ):
                task = self.tasks.get(name)
                return task
            case _:
                return None

    def _handle(self, event: ClusterEvent, now: Moment) -> Actions:
        """What is about a node or a task that is not known does not count."""
        handle = self.on.handler(self, event)
        match event:
            case msg.NodeEvent():
                node = self.nodes.get(event.node)
                return [] if node is None else handle(node, event, now)
            case msg.TaskRequest():
                task = self.tasks.get(event.task)
                return [] if task is None else handle(task, event, now)
            case _:
                return handle(event, now)

    # -------------------------------------------------------------- the cluster

    @on
    def _joined(self, event: msg.NodeJoined, now: Moment) -> Actions:
        return self._nodes.joined(event, now)

    @on
    def _submitted(self, event: msg.TaskSubmitted, now: Moment) -> Actions:
        return self._tasks.submit(event, now)

    @on
    def _assigned(self, event: msg.AssignmentChosen, now: Moment) -> Actions:
        is_current = event.version == self.version
        actions = self._tasks.assigned(event, now)
        for name, moved in event.moved.items() if is_current else ():
            task = self.tasks.get(name)
            if task is not None:
                actions += self._move(task, moved, now)
        return actions

    def _move(self, task: Task, moved: msg.MovedWorker, now: Moment) -> Actions:
        """Off slots that are slow. What the planner knew may have changed meanwhile."""
        going = (moved.worker, *moved.others)
        seats = [task.seats[worker] for worker in going if worker in task.seats]
        if len(seats) < len(going) or any(seat.leaving for seat in seats):
            return []
        if moved.node:
            if moved.node != seats[0].node:
                return []
            actions = self._slowness.moved(task, moved, now)
            return actions + self._nodes.leave_link(self.nodes[moved.node], task, moved.because, now)
        if not set(going) <= task.speeds.slow.keys() | task.speeds.awaited.keys():
            return []
        actions = self._slowness.moved(task, moved, now)
        for name in sorted({seat.node for seat in seats}):
            slots = tuple(sorted(slot for seat in seats if seat.node == name for slot in seat.slots))
            node = self.nodes[name]
            actions += self._nodes.isolate_slots(node, slots, moved.because, now, evicts=not moved.stops)
        if moved.stops:
            actions += self._tasks.leave_safely(task, f"slow workers move: {moved.because}", now)
        return actions

    @on
    def _policy_set(self, event: msg.PolicySet, now: Moment) -> Actions:
        self.policy.patience, self.policy.planned = event.patience, event.planned
        self._later.slots_changed("the policy was set")
        return []

    @on
    def _journal_begun(self, event: msg.JournalBegun, now: Moment) -> Actions:
        self.policy.journal, self.policy.version = event.journal, event.version
        return []

    @on
    def _report_unknown(self, node: Node, event: msg.ReportUnknown, now: Moment) -> Actions:
        """Counted; shown once for each kind."""
        node.heard = max(node.heard, event.report)
        is_new = event.what not in node.unknown
        what = event.what if not is_new or len(node.unknown) < MOST_UNKNOWN else "others"
        node.unknown[what] = node.unknown.get(what, 0) + 1
        if node.unknown[what] > 1:
            return []
        incident = self.incidents.new(
            task=None, what=f"a report ({event.what}) of node {node.name} is not understood", now=now
        )
        incident.stops_training, incident.node = False, node.name
        text = "its agent may be of a later version"
        self.incidents.tell(incident, "coordinator", (text,), now)
        return self.incidents.close(incident, "reports of this kind are counted and do nothing", now)

    @on
    def _set_aside(self, event: msg.EventSetAside, now: Moment) -> Actions:
        node = self.nodes.get(event.node)
        if node is not None:
            node.heard = max(node.heard, event.report)
        what = f"internal error while handling {event.what}: event {event.number} is set aside"
        if not event.number:
            what = f"a report ({event.what}) of node {event.node} is refused"
        incident = self.incidents.new(task=None, what=what, now=now)
        incident.stops_training, incident.node = False, event.node
        self.incidents.tell(incident, "coordinator", (event.error,), now)
        return self.incidents.close(incident, "the state is as if it had not happened", now)

    @on
    def _plan_failed(self, event: msg.PlanFailed, now: Moment) -> Actions:
        """A bug of ours, not of the cluster's: it is shown, and training goes on with less."""
        task = self.tasks.get(event.task)
        what, instead, outcome = NO_PLAN if task is None else NO_SCHEDULE
        incident = self.incidents.new(task=task, what=what, now=now)
        incident.stops_training = False
        self.incidents.tell(incident, "coordinator", (event.because,), now)
        self.incidents.judge(incident, known(ErrorKind.OTHER, event.because), now)
        self.incidents.treat(incident, instead, "training does not wait for it", now)
        return self.incidents.close(incident, outcome, now)

    @on
    def _time_passed(self, event: msg.TimePassed, now: Moment) -> Actions:
        actions: Actions = []
        for task in list(self.tasks.values()):
            actions += self._tasks.time_passed(task, now) + self._failures.starts_late(task, now)
            actions += self._failures.copies_late(task, now) + self._failures.links_due(task, now)
        self._tasks.review_if_due(now)
        return actions + self._nodes.time_passed(now)

    # -------------------------------------------------------------- a node

    @on
    def _fell_silent(self, node: Node, event: msg.NodeFellSilent, now: Moment) -> Actions:
        return self._nodes.fell_silent(node, event, now)

    @on
    def _left(self, node: Node, event: msg.NodeLeft, now: Moment) -> Actions:
        return self._nodes.left(node, now)

    @on
    def _drained(self, node: Node, event: msg.DrainRequested, now: Moment) -> Actions:
        return self._nodes.drain(node, now, force=event.force, by=event.by)

    @on
    def _readmitted(self, node: Node, event: msg.ReadmitRequested, now: Moment) -> Actions:
        return self._nodes.readmit(node, event.by, now)

    @on
    def _leave_announced(self, node: Node, event: msg.LeaveAnnounced, now: Moment) -> Actions:
        return self._nodes.announced(node, event.leaves_in_s, event.by, now)

    # -------------------------------------------------------------- a task

    @on
    def _cancelled(self, task: Task, event: msg.CancelRequested, now: Moment) -> Actions:
        return self._tasks.cancel(task, event.by, now)

    @on
    def _finished_early(self, task: Task, event: msg.FinishRequested, now: Moment) -> Actions:
        return self._tasks.finish_early(task, event.because, now)

    @on
    def _paused(self, task: Task, event: msg.PauseRequested, now: Moment) -> Actions:
        return self._tasks.pause(task, event.by, now, force=event.force)

    @on
    def _unpaused(self, task: Task, event: msg.UnpauseRequested, now: Moment) -> Actions:
        return self._tasks.unpause(task)

    @on
    def _resized(self, task: Task, event: msg.ResizeRequested, now: Moment) -> Actions:
        return self._tasks.resize(task, event.workers, f"{event.by} resized it", now)

    @on
    def _released(self, task: Task, event: msg.ResizeReleased, now: Moment) -> Actions:
        return self._tasks.release(task)

    @on
    def _reshaped(self, task: Task, event: msg.ReshapeRequested, now: Moment) -> Actions:
        return self._tasks.reshape(task, event, now)

    @on
    def _updated(self, task: Task, event: msg.UpdateRequested, now: Moment) -> Actions:
        return self._tasks.update(task, event, now)

    @on
    def _planned(self, task: Task, event: msg.PlanAnswered, now: Moment) -> Actions:
        return self._training.inform(task, event.event, now)

    @on
    def _paced(self, task: Task, event: msg.SlownessFound | msg.SlownessEnded, now: Moment) -> Actions:
        """A worker is slow, or no longer."""
        seat = task.seats.get(event.worker)
        if seat is None or task.state is not TaskState.RUNNING or seat.incarnation != event.incarnation:
            return []
        actions: Actions = []
        if isinstance(event, msg.SlownessFound):
            because = self._slowness.found(task, event, now)
            actions += self._failures.noted(self.nodes[seat.node], gray.SLOW, now)
            self._later.slots_changed(f"worker {event.worker} of {task.name} is slow")
        else:
            because = f"a new schedule: {event.because}" if event.worker in task.speeds.slow else ""
            actions += self._slowness.ended(task, event.worker, event.because, now)
        if because:
            self._later.slots_changed(because)
            actions += self._training.inform(task, ev.ProfileChanged(because=because), now)
        return actions

    @on
    def _slow_link(self, task: Task, event: msg.SlowLinkFound | msg.SlowLinkEnded, now: Moment) -> Actions:
        is_known = isinstance(event, msg.SlowLinkEnded) or {event.worker, event.peer} <= task.seats.keys()
        if task.state is not TaskState.RUNNING or not is_known:
            return []
        actions = self._slowness.link(task, event, now)
        if isinstance(event, msg.SlowLinkEnded):
            return actions
        self._later.slots_changed(f"the link from {event.worker} to {event.peer} of {task.name} is slow")
        ends = nodes_of_slow_links(slow_links(self.log, task), task.seats)
        return actions + (self._nodes.compare_networks(ends, now) if len(ends) == 2 else [])

    @on
    def _links_suspected(self, task: Task, event: msg.LinksSuspected, now: Moment) -> Actions:
        ends = nodes_of_slow_links(event.links, task.seats)
        if task.state is not TaskState.RUNNING or len(ends) != 2:
            return []
        task.speeds.suspected, task.speeds.suspected_because = event.links, event.because
        return self._nodes.compare_networks(ends, now)

    def _note_networks(self, now: Moment) -> None:
        measured, self._later.networks = self._later.networks, []
        for name in self._slowness.networks_measured(measured, now) if measured else ():
            self._later.slots_changed(f"slow links are those of node {name}")

    def _note_slow_ranks(self, now: Moment) -> Actions:
        actions: Actions = []
        while self._later.slow_ranks:
            task, wish = self._later.slow_ranks.pop(0)
            seat = task.seats.get(wish.worker)
            if seat is not None or wish.is_over:
                actions += self._slowness.ranks(task, wish, now)
            if seat is not None and not wish.is_over:
                actions += self._failures.noted(self.nodes[seat.node], gray.SLOW, now)
                self._later.slots_changed(f"{wish.what} in {task.name}")
        return actions

    # -------------------------------------------------------------- reports of nodes

    @on
    def _reported(self, event: msg.FromNode, now: Moment) -> Actions:
        node, report = self.nodes.get(event.node), event.report
        if node is None or event.boot != node.boot or event.number <= node.heard:
            return []
        node.heard = event.number
        if fences.refused(node, report, event.sender, self.tasks):
            return []
        handle = self.on_report.handler(self, report)
        if isinstance(report, msg.OwnReport):
            return handle(node, report, now)
        task = self.tasks.get(report.task)
        return [] if task is None else handle(node, task, report, now)

    @on_report
    def _node_checked(self, node: Node, report: msg.NodeChecked, now: Moment) -> Actions:
        return self._nodes.checked(node, report.results, report.because, now)

    @on_report
    def _pair_measured(self, node: Node, report: msg.PairMeasured, now: Moment) -> Actions:
        return self._nodes.pair_measured(node, report, now)

    @on_report
    def _kernel_spoke(self, node: Node, report: msg.KernelSpoke, now: Moment) -> Actions:
        return self._failures.kernel_spoke(node, report.text, report.slots, now)

    @on_report
    def _leave_noticed(self, node: Node, report: msg.LeaveNoticed, now: Moment) -> Actions:
        at_once = report.at_once
        return self._nodes.announced(node, report.leaves_in_s, report.by, now, at_once=at_once)

    @on_report
    def _slot_freed(self, node: Node, report: msg.SlotFreed, now: Moment) -> Actions:
        return self._failures.slot_freed(node, report.slot, now)

    @on_report
    def _checkpoint_found(self, node: Node, task: Task, report: msg.CheckpointFound, now: Moment) -> Actions:
        return self._tasks.checkpoint_found(task, report, now)

    @on_report
    def _checkpoint_unusable(
        self, node: Node, task: Task, report: msg.CheckpointUnusable, now: Moment
    ) -> Actions:
        return self._tasks.checkpoint_unusable(task, report, now)

    @on_report
    def _part_written(self, node: Node, task: Task, report: msg.PartWritten, now: Moment) -> Actions:
        return self._training.part_written(task, report, node.name, now)

    @on_report
    def _save_failed(self, node: Node, task: Task, report: msg.SaveFailed, now: Moment) -> Actions:
        return self._checkpoints.failed(task, report, node.name, now)

    @on_report
    def _state_fetched(self, node: Node, task: Task, report: msg.StateFetched, now: Moment) -> Actions:
        self._copies.fetched(task, report, now)
        return []

    @on_report
    def _op_overdue(self, node: Node, task: Task, report: msg.OpOverdue, now: Moment) -> Actions:
        return self._failures.overdue(task, report, now)

    @on_report
    def _worker_moved(self, node: Node, task: Task, report: msg.WorkerMoved, now: Moment) -> Actions:
        task.failures.overdue.drop(report.worker)
        return []

    @on_report
    def _link_mended(self, node: Node, task: Task, report: msg.LinkMended, now: Moment) -> Actions:
        return self._failures.mended(task, report, now)

    @on_report
    def _link_down(self, node: Node, task: Task, report: msg.LinkDown, now: Moment) -> Actions:
        return self._failures.link_down(task, report, now)

    @on_report
    def _links_probed(self, node: Node, task: Task, report: msg.LinksProbed, now: Moment) -> Actions:
        return self._failures.links_probed(node, task, report, now)

    @on_report
    def _times_reported(self, node: Node, task: Task, report: msg.TimesReported, now: Moment) -> Actions:
        """For the scheduler, which hears it before it comes here."""
        return []

    @on_report
    def _ranks_said(
        self,
        node: Node,
        task: Task,
        report: msg.RanksIdle
        | msg.RanksStarted
        | msg.RanksLocated
        | msg.RankProgressed
        | msg.RanksPaced
        | msg.RanksLeft
        | msg.RanksSaid
        | msg.RankGone
        | msg.SnapshotTaken
        | msg.SnapshotCopied
        | msg.SnapshotDrained,
        now: Moment,
    ) -> Actions:
        if isinstance(report, msg.RanksStarted):
            task.failures.overdue.clear()
        if task.lives is None:
            return []
        saved = task.lives.checkpoint
        actions = self._training.inform(task, report, now)
        if task.speeds.awaited and task.lives is not None and task.lives.checkpoint > saved:
            self._later.slots_changed(f"the state of {task.name} is saved, and slow ranks can move")
        return actions

    @on_report
    def _ranks_in_trouble(
        self,
        node: Node,
        task: Task,
        report: msg.RankFailed | msg.RanksStill | msg.RanksMoved,
        now: Moment,
    ) -> Actions:
        return self._failures.ranks(task, report, now) if task.is_script else []

    @on_report
    def _worker_event(self, node: Node, task: Task, report: msg.TaskEvent, now: Moment) -> Actions:
        """An event of the process that holds a worker's seat, or of an agent."""
        event = report.event
        match event:
            case ev.WorkerStarted():
                task.seats[event.worker].address = event.address
                task.starts.arrived(event.worker, now.at)
                if task.managed is not None and (error := task.managed.other_sums(event)) is not None:
                    return self._failures.unfit(task, event, error, now)
            case ev.StateCopied():
                actions = self._training.inform(task, event, now)
                if task.managed is not None and not isinstance(task.managed.places[event.worker], Copying):
                    task.starts.copied(event.worker, now.at)
                return actions
            case ev.CheckpointCommitted():
                saved = self._checkpoints.committed(task, event.step, now)
                return saved + self._training.inform(task, event, now)
            case ev.CheckpointsLooked():
                return self._training.looked(task, event, now)
            case ev.RestoreFailed():
                return self._training.unrestored(task, event, now)
            case ev.WorkerRaised():
                return self._failures.raised(task, event, now)
            case ev.WorkerExited():
                return self._failures.exited(task, event, now)
            case ev.VoteDiffered():
                return self._failures.differed(task, event, now)
            case ev.StepSuspected():
                return self._failures.suspected(task, event, now)
            case ev.LedgerReported() | ev.WorkerResumed() | ev.UpdateInvalidated():
                task.failures.overdue.drop(event.worker)
        return self._training.inform(task, event, now)
