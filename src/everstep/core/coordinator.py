"""The whole cluster in one machine: nodes, tasks, incidents. Events in, numbered orders and questions out.

It decides and does nothing else: time comes with each event, and everything slow (planning, checkpoints on
disk) is a question whose answer comes back as an event. The server writes each event into the journal before
it carries out what follows; a restarted coordinator replays the journal and is where it was, down to the
number of the last order to each node. `unfinished` says what must be sent or asked again then.

Each running task has its own `Recovery`, which knows nothing of nodes. Here its wishes meet the machines: a
place gets a slot, a start may be put off, a dead node is the death of every worker on it.

    evidence ──► judge (core.severity) ──► remedy (core.remedies) ──► Recovery.handle ──► orders to nodes

A node that falls silent is not dead yet: if the steps of its tasks go on, only the line to it is cut. It is
given up when its workers' peers elsewhere wait for it too.
"""

from __future__ import annotations

from typing import assert_never

from everstep.core import actions as act
from everstep.core import cluster as msg
from everstep.core import detector, remedies
from everstep.core import events as ev
from everstep.core.cluster import ClusterAction, ClusterEvent, Order, Patience
from everstep.core.incidents import Evidence, Incident, IncidentLog, Remedy, Verdict
from everstep.core.ops import Worker
from everstep.core.recovery import Recovery
from everstep.core.roster import OVER, REACHABLE, Node, NodeState, Roster, Seat, Task, TaskState
from everstep.core.severity import Judgement, judge
from everstep.core.standing import Policy
from everstep.errors import InternalError

Actions = list[ClusterAction]


class Coordinator:
    """The state machine. `handle` is its only way to change."""

    def __init__(
        self,
        *,
        patience: Patience | None = None,
        limits: detector.Limits | None = None,
        planned: bool = False,
    ) -> None:
        """`planned`: ask a planner how many workers each task gets; else first come, first served."""
        self.patience = patience or Patience()
        self.limits = limits or detector.Limits()
        self.planned = planned
        self.roster = Roster()
        self.log = IncidentLog()
        self.version = 0  # of the question to the planner
        self.events = 0

    @property
    def nodes(self) -> dict[str, Node]:
        return self.roster.nodes

    @property
    def tasks(self) -> dict[str, Task]:
        return self.roster.tasks

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
                return self._lost(event.node, NodeState.LEFT, "its agent ended in good order", now)
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
            case msg.PlanAnswered():
                return self._of_task(event.task, event.event, now)
            case msg.AssignmentChosen():
                return self._assigned(event, now)
            case msg.TimePassed():
                return self._time_passed(now)
            case _:
                assert_never(event)

    def due_at(self) -> float | None:
        """When `TimePassed` is wanted next, if at all."""
        dues = [task.not_before[worker] for task in self.tasks.values() for worker in task.held]
        for node in self.nodes.values():
            if node.state is NodeState.SILENT and self.roster.on_node(node.name):
                dues.append(node.since + self.patience.lonely_silence_s)
            if node.state is NodeState.ISOLATED:
                dues.append(node.since + self.patience.isolation_s)
        return min(dues, default=None)

    def unfinished(self) -> Actions:
        """After a restart: the orders nodes may not have got, and the questions without an answer."""
        actions: Actions = [
            msg.Dispatch(node=node.name, number=number, order=order, because=because)
            for node in self.nodes.values()
            if node.state in REACHABLE
            for number, order, because in node.pending
        ]
        for task in self.tasks.values():
            if task.question is not None and task.state is TaskState.RUNNING:
                because = task.question.because
                actions.append(msg.Think(task=task.name, question=task.question, because=because))
        if self.planned:
            actions += self._replan("the coordinator has started")
        return actions

    def acknowledged(self, node: str, number: int) -> None:
        """A node has carried out its orders up to this one. Changes no decision, only what is kept."""
        if node in self.nodes:
            self.nodes[node].pending = [order for order in self.nodes[node].pending if order[0] > number]

    def validate(self) -> None:
        """What must hold between events."""
        self.roster.validate()
        for task in self.tasks.values():
            if task.recovery is not None:
                task.recovery.validate()
                assert task.recovery.granted == frozenset(
                    w for w, seat in task.seats.items() if not seat.leaving
                ), f"{task.name}: places and seats differ"
        numbers = [incident.number for incident in self.log.incidents]
        assert numbers == sorted(set(numbers))

    # -------------------------------------------------------------- nodes

    def _joined(self, event: msg.NodeJoined, now: float) -> Actions:
        node = self.nodes.get(event.node)
        actions: Actions = []
        if node is not None and node.boot != event.boot:
            if node.state in REACHABLE:
                actions += self._lost(event.node, NodeState.GONE, "its agent was started anew", now)
            node.boot, node.slots, node.host = event.boot, event.slots, event.host
            node.heard, node.sent, node.pending, node.opened = 0, 0, [], set()
        if node is None:
            node = Node(name=event.node, boot=event.boot, slots=event.slots, host=event.host, since=now)
            self.nodes[event.node] = node
        if node.state in (NodeState.SILENT, NodeState.GONE, NodeState.LEFT):
            actions += self._set(node, NodeState.UP, "it is back", now)
        elif node.heard == 0 and node.sent == 0 and node.state is NodeState.UP:
            actions.append(msg.NodeChanged(node=node.name, state=node.state, because=node.because))
        keep = tuple(
            (task.name, worker, task.seats[worker].incarnation)
            for task, worker in self.roster.on_node(node.name)
        )
        actions += self._order(node, msg.KeepOnly(keep=keep), "the node is back: only these count")
        return actions + self._fill(now, f"node {node.name} joined")

    def _silent(self, event: msg.NodeFellSilent, now: float) -> Actions:
        node = self.nodes.get(event.node)
        if node is None or node.state is not NodeState.UP:
            return []
        because = f"not heard for {event.silent_s:.2f} s; its workers may well be training"
        return self._set(node, NodeState.SILENT, because, now) + self._confirm_silence(now)

    def _confirm_silence(self, now: float) -> Actions:
        """Give up a silent node once the peers of its workers, elsewhere, wait too."""
        actions: Actions = []
        for node in [n for n in self.nodes.values() if n.state is NodeState.SILENT]:
            witnesses = [
                f"{worker} of {task.name}"
                for task in {t.name: t for t, _ in self.roster.on_node(node.name)}.values()
                for worker, report in task.overdue.items()
                if worker in task.seats and task.seats[worker].node != node.name and not report.busy
            ]
            if witnesses:
                because = f"silent since {node.since:.1f}, and worker {witnesses[0]} waits for it"
                actions += self._lost(node.name, NodeState.GONE, because, now)
            elif now - node.since >= self.patience.lonely_silence_s and self.roster.on_node(node.name):
                because = f"silent for {now - node.since:.0f} s, and nobody else can speak for it"
                if not self._speaks_for(node.name):
                    actions += self._lost(node.name, NodeState.GONE, because, now)
        return actions

    def _speaks_for(self, node: str) -> bool:
        """Is some task of this node seen training by workers on other nodes? Then only the line is cut."""
        return any(
            any(seat.node != node and self._up(seat.node) for seat in task.seats.values())
            for task, _ in self.roster.on_node(node)
        )

    def _lost(self, name: str, state: NodeState, because: str, now: float) -> Actions:
        """A node is gone, and with it every worker on it."""
        node = self.nodes.get(name)
        if node is None or node.state not in REACHABLE:
            return []
        actions = self._set(node, state, because, now)
        node.pending.clear()
        judgement = judge("silence", f"lost connection: {because}")
        taken: dict[str, list[tuple[Worker, Seat]]] = {}
        for task, worker in self.roster.on_node(name):
            taken.setdefault(task.name, []).append((worker, task.seats.pop(worker)))
        for task_name, seats in taken.items():
            task = self.tasks[task_name]
            actions += self._grant(task, now)
            for worker, seat in seats:
                if state is NodeState.GONE and task.recovery is not None and seat.incarnation:
                    incident = self._evidence(task, worker, "silence", f"node {name} is gone: {because}", now)
                    incident.node = name
                    self._verdict(incident, judgement, now)
                    self._remedy(incident, "replan without the node", judgement.because, now)
                actions += self._gone(task, worker, seat, f"node {name} is gone: {because}", now)
        return actions + self._fill(now, f"node {name} is gone")

    def _drain(self, name: str, now: float) -> Actions:
        node = self.nodes.get(name)
        if node is None or node.state not in (NodeState.UP, NodeState.SILENT):
            return []
        actions = self._set(node, NodeState.DRAINING, "a person drains it", now)
        return actions + self._evacuate(node, "a person drains it", now)

    def _evacuate(self, node: Node, because: str, now: float) -> Actions:
        """Ask a node's workers to go; their places are filled elsewhere."""
        actions: Actions = []
        for task, worker in self.roster.on_node(node.name):
            actions += self._ask_to_go(task, worker, f"node {node.name}: {because}", now)
        return actions

    def _ask_to_go(self, task: Task, worker: Worker, because: str, now: float) -> Actions:
        seat = task.seats[worker]
        if seat.leaving:
            return []
        seat.leaving = because
        actions = self._grant(task, now)
        if seat.incarnation == 0:  # no process yet
            del task.seats[worker]
            held = task.held.pop(worker, None)
            if held is not None:
                exited = ev.WorkerExited(
                    worker=worker, incarnation=held.incarnation, reason=because, planned=True
                )
                actions += self._of_task(task.name, exited, now)
            return actions
        order = msg.KillProcess(task=task.name, worker=worker, incarnation=seat.incarnation)
        return actions + self._order(self.nodes[seat.node], order, because)

    def _isolate(self, node: Node, because: str, now: float) -> Actions:
        node.isolations = [*remedies.recent(node.isolations, now, self.patience), now]
        lemon = len(node.isolations) >= self.patience.isolations_before_lemon
        state = NodeState.LEMON if lemon else NodeState.ISOLATED
        told = f"isolated {len(node.isolations)} times lately; {because}" if lemon else because
        return self._set(node, state, told, now) + self._evacuate(node, f"isolated: {because}", now)

    def _readmit(self, event: msg.ReadmitRequested, now: float) -> Actions:
        node = self.nodes.get(event.node)
        out = (NodeState.LEMON, NodeState.ISOLATED, NodeState.DRAINING)
        if node is None or node.state not in out:
            return []
        node.isolations.clear()
        actions = self._set(node, NodeState.UP, f"readmitted by {event.by}", now)
        return actions + self._fill(now, f"node {node.name} was readmitted")

    def _set(self, node: Node, state: NodeState, because: str, now: float) -> Actions:
        node.state, node.because, node.since = state, because, now
        return [msg.NodeChanged(node=node.name, state=state, because=because)]

    def _up(self, name: str) -> bool:
        return self.nodes[name].state is NodeState.UP

    # -------------------------------------------------------------- tasks

    def _submitted(self, event: msg.TaskSubmitted, now: float) -> Actions:
        if event.task in self.tasks:
            return []
        self.tasks[event.task] = Task(
            name=event.task,
            job=event.job,
            shape=event.shape,
            steps=event.steps,
            secret=event.secret,
            weight=event.weight,
            has_checkpoints=event.has_checkpoints,
            script=event.script,
            faults=event.faults,
            submitted_at=now,
        )
        return self._fill(now, f"task {event.task} was submitted")

    def _fill(self, now: float, because: str) -> Actions:
        """Give free slots to whoever lacks workers: the heaviest first, then the oldest."""
        actions: Actions = []
        lively = (TaskState.WAITING, TaskState.SEARCHING, TaskState.RUNNING)
        for task in sorted(self.tasks.values(), key=lambda t: (-t.weight, t.submitted_at, t.name)):
            if task.state not in lively:
                continue
            seated = self.roster.seat_workers(task)
            for worker in seated:
                task.failures.pop(worker, None)
            if task.state is TaskState.WAITING and task.seats:
                actions += self._open(task, now)
            elif seated:
                actions += self._grant(task, now, moved=frozenset(seated))
            elif task.state is TaskState.WAITING:
                task.because = f"{task.shape.stages} slots are needed, {len(self.roster.free())} are free"
        return actions + (self._replan(because) if self.planned else [])

    def _open(self, task: Task, now: float) -> Actions:
        """It has its first workers: from which step does it start?"""
        if not task.has_checkpoints:
            return self._begin(task, 0, now)
        task.state, task.because = TaskState.SEARCHING, "its newest checkpoint is looked for"
        node = self.nodes[next(iter(task.seats.values())).node]
        return self._order(node, msg.FindCheckpoint(task=task.name, job=task.job), task.because)

    def _begin(self, task: Task, checkpoint: int, now: float) -> Actions:
        if checkpoint >= task.steps:
            task.state = TaskState.RUNNING
            because = f"its checkpoint of step {checkpoint} is already the end"
            return self._end(task.name, TaskState.FINISHED, because, now, gently=True)
        task.state, task.because = TaskState.RUNNING, f"from step {checkpoint + 1} on"
        task.recovery = Recovery(
            task.shape,
            steps=task.steps,
            policy=Policy(
                rejoin_after_steps=self.patience.rejoin_after_steps,
                max_restarts=self.patience.restarts_per_place,
            ),
            first_step=checkpoint + 1,
            granted=frozenset(task.seats),
            log=self.log.of_task(task.name),
        )
        return self._carry_out(task, task.recovery.begin(), now)

    def _grant(self, task: Task, now: float, moved: frozenset[Worker] = frozenset()) -> Actions:
        places = frozenset(worker for worker, seat in task.seats.items() if not seat.leaving)
        return self._of_task(task.name, ev.PlacesGranted(places=places, moved=moved & places), now)

    def _end(self, name: str, state: TaskState, because: str, now: float, *, gently: bool) -> Actions:
        task = self.tasks.get(name)
        if task is None or task.state in OVER or task.state is TaskState.ENDING:
            return []
        if task.state is TaskState.PAUSED and state is TaskState.PAUSED:
            return []
        if state is TaskState.PAUSED and not task.has_checkpoints:
            return []  # the API has refused it in words already
        task.state, task.after, task.after_because, task.because = TaskState.ENDING, state, because, because
        task.question = None
        task.held.clear()
        task.overdue.clear()
        task.recovery = None if state is TaskState.PAUSED else task.recovery
        actions: Actions = []
        for node in sorted({seat.node for seat in task.seats.values()}):
            actions += self._order(self.nodes[node], msg.CloseTask(task=task.name, gently=gently), because)
        for worker in [w for w, seat in task.seats.items() if seat.incarnation == 0]:
            del task.seats[worker]
        for incident in [i for i in self.log.open_ones() if i.task == task.name]:
            incident.close(now, f"the task ended: {because}")
            actions.append(msg.IncidentClosed(number=incident.number, because=f"the task ended: {because}"))
        return actions + self._ended_if_empty(task, now)

    def _ended_if_empty(self, task: Task, now: float) -> Actions:
        if task.state is not TaskState.ENDING or task.seats:
            return []
        task.state, task.because = task.after, task.after_because
        ended: Actions = [msg.TaskEnded(task=task.name, state=task.state, because=task.because)]
        return ended + self._fill(now, f"task {task.name} is {task.state}")

    def _unpause(self, name: str, now: float) -> Actions:
        task = self.tasks.get(name)
        if task is None or task.state is not TaskState.PAUSED:
            return []
        task.state, task.because = TaskState.WAITING, "it was paused and waits for slots"
        return self._fill(now, f"task {name} goes on")

    def _resize(self, name: str, workers: int, because: str, now: float) -> Actions:
        task = self.tasks.get(name)
        if task is None or task.state in OVER:
            return []
        task.most = max(task.shape.stages, workers)
        return self._shrink(task, because, now) + self._fill(now, because)

    def _shrink(self, task: Task, because: str, now: float) -> Actions:
        """Take away workers until the task has no more than it may; never the last of a stage."""
        actions: Actions = []
        while True:
            staying = [w for w, seat in task.seats.items() if not seat.leaving]
            if len(staying) <= task.wanted():
                return actions
            crowded = [w for w in staying if sum(x.stage == w.stage for x in staying) > 1]
            if not crowded:
                return actions
            worker = max(crowded, key=lambda w: (sum(x.stage == w.stage for x in staying), w.replica))
            actions += self._ask_to_go(task, worker, because, now)

    def _replan(self, because: str) -> Actions:
        self.version += 1
        return [msg.ChooseAssignment(version=self.version, because=because)]

    def _assigned(self, event: msg.AssignmentChosen, now: float) -> Actions:
        if event.version != self.version:
            return []  # something has happened since it was asked
        actions: Actions = []
        for name, workers in event.workers.items():
            task = self.tasks.get(name)
            if task is not None and task.state not in OVER:
                task.most = max(task.shape.stages, workers)
                actions += self._shrink(task, event.because, now)
        planned, self.planned = self.planned, False  # filling does not ask again
        actions += self._fill(now, event.because)
        self.planned = planned
        return actions

    # -------------------------------------------------------------- what nodes report

    def _from_node(self, event: msg.FromNode, now: float) -> Actions:
        node = self.nodes.get(event.node)
        if node is None or event.boot != node.boot or event.number <= node.heard:
            return []
        node.heard = event.number
        match event.report:
            case msg.TaskEvent(task=task, event=inner):
                return self._of_worker(task, inner, now)
            case msg.CheckpointFound(task=name, step=step):
                task_ = self.tasks.get(name)
                if task_ is None or task_.state is not TaskState.SEARCHING:
                    return []
                return self._begin(task_, step, now)
            case msg.PartWritten() as part:
                return self._part_written(part)
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
            case msg.TimesTold():
                return []
            case _:
                assert_never(event.report)

    def _of_worker(self, name: str, event: ev.Event, now: float) -> Actions:
        """An event of a worker's process. Only the process that sits there counts."""
        task = self.tasks.get(name)
        if task is None:
            return []
        if isinstance(event, ev.WorkerStarted | ev.WorkerExited | ev.WorkerRaised | ev.StateCopied):
            seat = task.seats.get(event.worker)
            if seat is None or seat.incarnation != event.incarnation:
                return []
            match event:
                case ev.WorkerStarted():
                    seat.address = event.address
                case ev.WorkerRaised():
                    task.last_words[event.worker] = (event.incarnation, event.error)
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
        judgement = judge("exception", error) if raised else judge("exit", event.reason)
        source = "exception" if raised else "exit"
        incident = self._evidence(task, worker, source, error if raised else event.reason, now)
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
        failures = [*remedies.recent(task.failures.get(worker, []), now, self.patience), now]
        task.failures[worker] = failures
        history = remedies.History(
            failures=len(failures), node=seat.node, could_live_elsewhere=self._could_live_without(seat.node)
        )
        choice = remedies.after_exit(judgement, history, self.patience)
        self._remedy(incident, choice.what, choice.because, now)
        seat.incarnation, seat.address = 0, None
        actions: Actions = []
        if choice.what is remedies.What.ISOLATE:
            del task.seats[worker]
            actions += self._grant(task, now)
            actions += self._isolate(self.nodes[seat.node], choice.because, now)
        elif choice.wait_s:
            task.not_before[worker] = now + choice.wait_s
        actions += self._of_task(task.name, event, now)
        if choice.what is remedies.What.ISOLATE:
            actions += self._fill(now, f"node {seat.node} is isolated")
        return actions

    def _gone(self, task: Task, worker: Worker, seat: Seat, reason: str, now: float) -> Actions:
        """A worker that will not come back where it was: its node is gone, or it was asked to go."""
        task.held.pop(worker, None)
        task.overdue.pop(worker, None)
        actions: Actions = []
        if task.recovery is not None and task.state is TaskState.RUNNING:
            actions += self._grant(task, now)
            place = task.recovery.places[worker]
            incarnation = seat.incarnation or getattr(place, "incarnation", 0)
            exited = ev.WorkerExited(
                worker=worker, incarnation=incarnation, reason=reason, planned=bool(seat.leaving)
            )
            actions += self._of_task(task.name, exited, now)
            return actions + self._fill(now, f"worker {worker} of {task.name} is gone")
        return actions + self._ended_if_empty(task, now)

    def _could_live_without(self, name: str) -> bool:
        """Would every task with workers on this node still have, or find, a worker for each stage?"""
        free = sum(1 for node, _ in self.roster.free() if node != name)
        needed = 0
        for task in {t.name: t for t, _ in self.roster.on_node(name)}.values():
            elsewhere = {w.stage for w, seat in task.seats.items() if seat.node != name}
            needed += task.shape.stages - len(elsewhere)
        return free >= needed and any(n.name != name and n.state is NodeState.UP for n in self.nodes.values())

    def _part_written(self, event: msg.PartWritten) -> Actions:
        task = self.tasks.get(event.task)
        if task is None or task.recovery is None:
            return []
        task.parts.setdefault(event.step, {})[event.stage] = event.part
        return self._commit_parts(task)

    def _commit_parts(self, task: Task) -> Actions:
        """A checkpoint counts once all its parts lie there and its step is on record."""
        actions: Actions = []
        recorded = task.recovery.recorded if task.recovery is not None else 0
        for step in sorted(task.parts):
            if len(task.parts[step]) == task.shape.stages and step <= recorded:
                parts = task.parts.pop(step)
                seats = [seat for seat in task.seats.values() if seat.incarnation]
                if seats:
                    order = msg.CommitCheckpoint(
                        task=task.name, step=step, parts=tuple(parts[stage] for stage in sorted(parts))
                    )
                    because = f"every stage has written its part of step {step}"
                    actions += self._order(self.nodes[seats[0].node], order, because)
        return actions

    # -------------------------------------------------------------- evidence without a death

    def _overdue(self, report: msg.OpOverdue, now: float) -> Actions:
        task = self.tasks.get(report.task)
        seat = task.seats.get(report.worker) if task is not None else None
        if task is None or seat is None or seat.incarnation != report.incarnation:
            return []
        if task.state is not TaskState.RUNNING:
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
        if not self._up(seat.node):
            return []  # the node is in doubt already
        incident = self._evidence(task, found.worker, "progress", found.because, now)
        incident.node = seat.node
        for witness in found.waiting[:8]:
            report = task.overdue[witness]
            text = f"{witness} waits for {report.doing} since {report.elapsed_s:.2f} s: ruled out"
            incident.told(Evidence(at=now, source="progress", text=text))
        judgement = judge("progress", f"task hang: {found.because}")
        self._verdict(incident, judgement, now)
        self._remedy(incident, "end the hung process, then restart the worker", found.because, now)
        task.overdue.clear()
        order = msg.KillProcess(task=task.name, worker=found.worker, incarnation=seat.incarnation)
        return self._order(self.nodes[seat.node], order, found.because)

    def _stalled(self, task: Task, because: str, now: float) -> Actions:
        task.overdue.clear()
        step = task.recovery.recorded + 1 if task.recovery is not None else 0
        incident = self.log.new(task=task.name, workers=[], what="everybody waits", step=step, now=now)
        incident.told(Evidence(at=now, source="progress", text=because))
        judgement = judge("progress", f"link flapping: {because}")
        self._verdict(incident, judgement, now)
        self._remedy(incident, remedies.What.RETRY, "a new epoch: what was lost is sent again", now)
        return self._of_task(task.name, ev.TrainingStalled(because=because), now)

    def _mended(self, event: msg.LinkMended, now: float) -> Actions:
        task = self.tasks.get(event.task)
        if task is None or task.state is not TaskState.RUNNING or event.worker not in task.seats:
            return []
        link = f"{event.worker} - {event.peer}"
        times = [*remedies.recent(task.mends.get(link, []), now, self.patience), now]
        task.mends[link] = times
        text = f"connection reset between {event.worker} and {event.peer}"
        incident = self._evidence(task, event.worker, "link", text, now)
        judgement = judge("exception", text)
        self._verdict(incident, judgement, now)
        choice = remedies.after_mend(judgement, len(times), self.patience)
        self._remedy(incident, choice.what, choice.because, now)
        if choice.what is remedies.What.RETRY:
            incident.stops_training = False
            incident.close(now, "the link was opened again and what may be lost was sent again")
            return [msg.IncidentClosed(number=incident.number, because="the link works again")]
        task.mends.pop(link)
        seat = task.seats[event.worker]
        order = msg.KillProcess(task=task.name, worker=event.worker, incarnation=seat.incarnation)
        return self._order(self.nodes[seat.node], order, choice.because)

    def _kernel_spoke(self, node: Node, text: str, now: float) -> Actions:
        judgement = judge("kernel", text)
        if judgement.severity != 1 or node.state is not NodeState.UP:
            return []
        incident = self.log.new(task="", workers=[], what=f"node {node.name}: {text}", step=0, now=now)
        incident.node, incident.stops_training = node.name, False
        incident.told(Evidence(at=now, source="kernel", text=text))
        self._verdict(incident, judgement, now)
        actions: Actions = []
        if self._could_live_without(node.name):
            self._remedy(incident, remedies.What.ISOLATE, judgement.because, now)
            actions += self._isolate(node, judgement.because, now)
        incident.close(now, "its workers are moved")
        actions.append(msg.IncidentClosed(number=incident.number, because="the node is isolated"))
        return actions + self._fill(now, f"node {node.name} is isolated")

    def _evidence(self, task: Task, worker: Worker, source: str, text: str, now: float) -> Incident:
        step = task.recovery.recorded + 1 if task.recovery is not None else 0
        incident = self.log.of_task(task.name).suspected(worker, text, step, now)
        incident.told(Evidence(at=now, source=source, text=text))
        return incident

    def _verdict(self, incident: Incident, judgement: Judgement, now: float) -> None:
        incident.verdict = Verdict(
            at=now, kind=judgement.kind, severity=int(judgement.severity), because=judgement.because
        )

    def _remedy(self, incident: Incident, what: str, because: str, now: float) -> None:
        incident.tried(Remedy(at=now, what=str(what), because=because))

    # -------------------------------------------------------------- what a task's recovery wants

    def _of_task(self, name: str, event: ev.Event, now: float) -> Actions:
        task = self.tasks.get(name)
        if task is None or task.recovery is None or task.state is not TaskState.RUNNING:
            return []
        if isinstance(event, ev.PlanComputed) and task.question is not None:
            task.question = None if event.epoch == task.question.epoch else task.question
        try:
            wishes = task.recovery.handle(event, now)
        except InternalError as error:  # our bug, in one task: the others go on
            return self._end(name, TaskState.FAILED, f"an internal error: {error}", now, gently=False)
        return self._carry_out(task, wishes, now)

    def _carry_out(self, task: Task, wishes: list[act.Action], now: float) -> Actions:
        actions: Actions = []
        for wish in wishes:
            match wish:
                case act.StartWorker():
                    actions += self._start(task, wish, now)
                case act.InterruptWorkers():
                    for worker in wish.workers:
                        actions += self._tell(task, worker, wish)
                case act.ResumeStep():
                    actions += self._tell(task, wish.worker, wish)
                case act.CopyState() | act.StopFeeding():
                    actions += self._tell(task, wish.source, wish)
                case act.ComputePlan():
                    task.question = wish
                    actions.append(msg.Think(task=task.name, question=wish, because=wish.because))
                case act.RecordStep():
                    actions.append(msg.Record(task=task.name, record=wish, because=wish.because))
                    actions += self._commit_parts(task)
                case act.CloseIncident():
                    number = wish.incident.number
                    actions.append(msg.IncidentClosed(number=number, because=wish.because))
                case act.FinishTask():
                    actions += self._end(task.name, TaskState.FINISHED, wish.because, now, gently=True)
                case act.FailTask():
                    actions += self._end(task.name, TaskState.FAILED, wish.because, now, gently=False)
                case _:
                    assert_never(wish)
        return actions

    def _start(self, task: Task, wish: act.StartWorker, now: float) -> Actions:
        seat = task.seats[wish.worker]
        if task.not_before.get(wish.worker, now) > now:
            task.held[wish.worker] = wish
            return []
        task.not_before.pop(wish.worker, None)
        seat.incarnation, seat.address = wish.incarnation, None
        node = self.nodes[seat.node]
        actions: Actions = []
        if task.name not in node.opened:
            node.opened.add(task.name)
            known = msg.OpenTask(
                task=task.name, job=task.job, secret=task.secret, script=task.script, faults=task.faults
            )
            actions += self._order(node, known, f"a worker of {task.name} comes to {node.name}")
        order = msg.StartProcess(
            task=task.name, worker=wish.worker, incarnation=wish.incarnation, slot=seat.slot
        )
        return actions + self._order(node, order, wish.because)

    def _tell(
        self,
        task: Task,
        worker: Worker,
        words: act.InterruptWorkers | act.ResumeStep | act.CopyState | act.StopFeeding,
    ) -> Actions:
        seat = task.seats.get(worker)
        if seat is None or not seat.incarnation:
            return []
        book: tuple[tuple[Worker, str, int], ...] = ()
        if isinstance(words, act.ResumeStep | act.CopyState):
            book = tuple((w, *s.address) for w, s in task.seats.items() if s.address is not None)
        order = msg.TellWorker(task=task.name, worker=worker, words=words, book=book)
        return self._order(self.nodes[seat.node], order, words.because)

    def _order(self, node: Node, order: Order, because: str) -> Actions:
        if node.state not in REACHABLE:
            return []
        node.sent += 1
        node.pending.append((node.sent, order, because))
        return [msg.Dispatch(node=node.name, number=node.sent, order=order, because=because)]

    def _time_passed(self, now: float) -> Actions:
        actions: Actions = []
        for task in list(self.tasks.values()):
            for worker in [w for w in task.held if task.not_before[w] <= now]:
                actions += self._start(task, task.held.pop(worker), now)
        for node in list(self.nodes.values()):
            over = now - node.since >= self.patience.isolation_s
            if node.state is NodeState.ISOLATED and over:
                actions += self._set(node, NodeState.UP, "its time of isolation is over", now)
                actions += self._fill(now, f"node {node.name} is back from isolation")
        return actions + self._confirm_silence(now)

