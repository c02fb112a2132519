"""The life of a task: submitted, given slots, begun, resized, reshaped, paused, ended; and what its recovery
wishes.

A task's `Recovery` knows nothing of nodes. Here its wishes meet the machines: a place has a seat on a node or
none, a start may be put off, a word to a worker is an order to its node.
"""

from __future__ import annotations

from typing import assert_never

from everstep.core.cluster.dispatch import Actions
from everstep.core.cluster.memory_copies import ShelfDesk
from everstep.core.cluster.roster import (
    OVER,
    KeptState,
    NextShape,
    Seat,
    Task,
    TaskState,
    WrittenParts,
)
from everstep.core.task.recovery import Recovery
from everstep.core.task.states import RecoveryPolicy
from everstep.core.words import actions as act
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.ops import Worker
from everstep.errors import InternalError


class TaskDesk(ShelfDesk):
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
                actions += self._grant(task, now, clean=frozenset(seated))
            elif task.state is TaskState.WAITING:
                task.because = f"{task.shape.stages} slots are needed, {len(self.roster.free())} are free"
        return actions + (self._replan(because) if self.planned else [])

    def _open(self, task: Task, now: float) -> Actions:
        """It has its first workers: from which step does it start?"""
        if task.kept_step is not None and task.kept_step > task.on_disk:
            return self._begin(task, task.kept_step, now)
        if not task.has_checkpoints:
            return self._begin(task, 0, now)
        task.searches = 0
        return self._search(task)

    def _search(self, task: Task) -> Actions:
        """Each time on another node, where there are several: one may see what another does not."""
        task.search_at = None
        if not task.seats:  # they were asked to go meanwhile
            task.state, task.because = TaskState.WAITING, "it waits for slots"
            return []
        task.state, task.because = TaskState.SEARCHING, "its newest checkpoint is looked for"
        nodes = sorted({seat.node for seat in task.seats.values()})
        node = self.nodes[nodes[task.searches % len(nodes)]]
        task.search += 1
        order = msg.FindCheckpoint(task=task.name, job=task.job, known=task.on_disk, search=task.search)
        return self._order(node, order, task.because)

    def _not_found(self, event: msg.CheckpointUnusable, now: float) -> Actions:
        """A read that failed is no reason to start from nothing: look again, then fail with the reason."""
        task = self.tasks.get(event.task)
        if task is None or task.state is not TaskState.SEARCHING or event.search != task.search:
            return []
        if not event.passing or task.searches >= self.patience.checkpoint_retries:
            return self._end(task.name, TaskState.FAILED, event.because, now, gently=False)
        wait_s = min(self.patience.backoff_most_s, self.patience.backoff_s * 2**task.searches)
        task.searches += 1
        task.search_at = now + wait_s
        task.because = f"{event.because}; tried again in {wait_s:.0f} s"
        return []

    def _found(self, event: msg.CheckpointFound, now: float) -> Actions:
        """Its newest checkpoint on disk is known."""
        task = self.tasks.get(event.task)
        if task is None or task.state is not TaskState.SEARCHING or event.search != task.search:
            return []
        task.on_disk, task.search_at = event.step, None
        return self._begin(task, event.step, now)

    def _begin(self, task: Task, step: int, now: float) -> Actions:
        """From the state after this step on."""
        if step >= task.steps:
            task.state = TaskState.RUNNING
            because = f"its checkpoint of step {step} is already the end"
            return self._end(task.name, TaskState.FINISHED, because, now, gently=True)
        task.state, task.because, task.recorded = TaskState.RUNNING, f"from step {step + 1} on", step
        task.recovery = Recovery(
            task.shape,
            steps=task.steps,
            policy=RecoveryPolicy(
                rejoin_after_steps=self.patience.rejoin_after_steps,
                max_restarts=self.patience.restarts_per_place,
            ),
            first_step=step + 1,
            checkpoint=task.on_disk if step == task.kept_step else None,
            lived=task.lived,
            granted=frozenset(task.seats),
            log=self.log.of_task(task.name),
        )
        return self._carry_out(task, task.recovery.begin(), now)

    def _grant(self, task: Task, now: float, clean: frozenset[Worker] = frozenset()) -> Actions:
        places = frozenset(worker for worker, seat in task.seats.items() if not seat.leaving)
        return self._of_task(task.name, ev.PlacesGranted(places=places, clean=clean & places), now)

    def _end(self, name: str, state: TaskState, because: str, now: float, *, gently: bool) -> Actions:
        task = self.tasks.get(name)
        if task is None or task.state in OVER:
            return []
        if task.state is TaskState.ENDING:
            if task.after is TaskState.WAITING and state in OVER:  # it was to go on in another shape
                task.after, task.after_because = state, because
            return []
        if task.state is TaskState.PAUSED and state is TaskState.PAUSED:
            return []
        if state is TaskState.PAUSED and not task.has_checkpoints:
            return []  # the API has refused it in words already
        task.state, task.after, task.after_because, task.because = TaskState.ENDING, state, because, because
        task.question, task.search_at = None, None
        task.held.clear()
        task.overdue.clear()
        task.slow.clear()
        if state not in OVER and task.recovery is not None:
            task.lived, task.on_disk = task.recovery.lived(), task.recovery.checkpoint
            task.recovery = None
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
        actions: Actions = []
        if task.state is TaskState.WAITING:
            actions += self._take_shape(task)
        else:
            actions.append(msg.TaskEnded(task=task.name, state=task.state, because=task.because))
        if task.state in OVER:
            actions += self._drop_shelved(task, None)
        return actions + self._fill(now, f"task {task.name} is {task.state}")

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

    def _reshape(self, event: msg.ReshapeRequested, now: float) -> Actions:
        """At the next step boundary: its workers leave their states in memory and go, others come."""
        task = self.tasks.get(event.task)
        if task is None or task.state in OVER:
            return []
        task.next_shape = NextShape(event.job, event.shape)
        shape = event.shape
        if task.state is TaskState.RUNNING:
            because = f"it takes the shape {shape.replicas} x {shape.stages}"
            return self._of_task(task.name, ev.StopRequested(because=because), now)
        if task.state in (TaskState.WAITING, TaskState.PAUSED):
            return self._take_shape(task) + self._fill(now, f"task {task.name} has another shape")
        return []  # it is on its way to begin or to end; the API refuses this in words

    def _take_shape(self, task: Task) -> Actions:
        after = task.next_shape
        if after is None:
            return []
        task.job, task.shape, task.most, task.next_shape = after.job, after.shape, None, None
        task.faults = ()  # they name workers of the old shape
        task.parts.clear()
        for node in self.nodes.values():
            node.opened.discard(task.name)
        return [msg.TaskReshaped(task=task.name, shape=task.shape, because=task.because)]

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

    def _replan(self, because: str) -> Actions:
        self.version += 1
        self.asked = True
        return [msg.ChooseAssignment(version=self.version, because=because)]

    def _assigned(self, event: msg.AssignmentChosen, now: float) -> Actions:
        if event.version != self.version:
            return []  # something has happened since it was asked
        self.asked = False
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

    def _part_written(self, event: msg.PartWritten, now: float) -> Actions:
        task = self.tasks.get(event.task)
        if task is not None and event.shelf is not None:
            return self._shelved(task, event, event.shelf, now)
        if task is None or task.recovery is None:
            return []
        written = task.parts.get(event.step)
        if written is None or written.attempt != event.attempt:
            written = task.parts[event.step] = WrittenParts(event.attempt)
        written.add(event.stage, event.share, event.part)
        return self._commit_parts(task)

    def _commit_parts(self, task: Task) -> Actions:
        """A checkpoint counts once all its parts lie there and its step is on record."""
        actions: Actions = []
        recorded = task.recovery.recorded if task.recovery is not None else 0
        for step in sorted(step for step in task.parts if step <= recorded):
            parts = task.parts[step].whole(task.shape.stages)
            seats = [seat for seat in task.seats.values() if seat.incarnation]
            if parts is not None and seats:
                for older in [s for s in task.parts if s <= step]:
                    del task.parts[older]  # what is not whole by now never will be
                order = msg.CommitCheckpoint(task=task.name, step=step, parts=parts)
                because = f"every stage has written its part of step {step}"
                actions += self._order(self.nodes[seats[0].node], order, because)
        return actions

    def _shelved(self, task: Task, event: msg.PartWritten, node: str, now: float) -> Actions:
        """A copy of a stage's state is in a node's memory."""
        if task.state in OVER or node not in self.nodes or not self.nodes[node].reachable:
            return []
        kept = task.kept.get(event.step)
        if kept is None or kept.attempt != event.attempt:
            kept = task.kept[event.step] = KeptState(task.shape.stages, event.attempt)
        kept.copies.setdefault(event.stage, {})[node] = event.part
        return self._settle_kept(task, now)

    def _settle_kept(self, task: Task, now: float) -> Actions:
        """Which state in memory is the newest whole one may have changed: recovery must know."""
        before = task.kept_step
        actions = self._count_kept(task)
        if task.kept_step == before:
            return actions
        return actions + self._of_task(task.name, ev.StateKept(step=task.kept_step), now)

    def _of_task(self, name: str, event: ev.Event, now: float) -> Actions:
        task = self.tasks.get(name)
        if task is None or task.recovery is None or task.state is not TaskState.RUNNING:
            return []
        if isinstance(event, ev.PlanComputed) and task.question is not None:
            task.question = None if event.epoch == task.question.epoch else task.question
        actions: Actions = []
        if isinstance(event, ev.WorkerExited):
            actions = self._fast_again(task, event.worker, "its process is gone", now)
        try:
            wishes = task.recovery.handle(event, now)
        except InternalError as error:  # our bug, in one task: the others go on
            return self._end(name, TaskState.FAILED, f"an internal error: {error}", now, gently=False)
        in_force = isinstance(event, ev.PlanComputed) and event.epoch == task.recovery.epoch
        actions += self._carry_out(task, wishes, now)
        if isinstance(event, ev.PlanComputed) and in_force:
            self._balanced(task, event, now)
            if task.planned_slow != task.slow:  # found while it was planned
                actions += self._of_task(
                    name, ev.ProfileChanged(because="speeds have changed meanwhile"), now
                )
        return actions

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
                    task.question, task.planned_slow = wish, dict(task.slow)
                    actions.append(
                        msg.Think(task=task.name, question=wish, because=wish.because, slow=task.planned_slow)
                    )
                case act.RecordStep():
                    actions.append(msg.RecordRow(task=task.name, record=wish, because=wish.because))
                    task.recorded = wish.step
                    actions += self._commit_parts(task) + self._settle_kept(task, now)
                case act.CloseIncident():
                    number = wish.incident.number
                    actions.append(msg.IncidentClosed(number=number, because=wish.because))
                case act.FinishTask():
                    actions += self._end(task.name, TaskState.FINISHED, wish.because, now, gently=True)
                case act.FinishShape():
                    actions += self._end(task.name, TaskState.WAITING, wish.because, now, gently=True)
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
        order = msg.NotifyWorker(task=task.name, worker=worker, words=words, book=book)
        actions: Actions = []
        if isinstance(words, act.ResumeStep):
            actions += self._open_shelf(task, worker)
            order = self._with_shelves(order, task, words.order.restore)
        return actions + self._order(self.nodes[seat.node], order, words.because)
