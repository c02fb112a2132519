"""The life of a task: submitted, given slots, begun, resized, reshaped, paused, ended.

    waiting ──► searching ──► running ──► ending ──► finished, failed, cancelled
       ▲            its newest                │
       │            checkpoint                ├──► paused
       └──────────────────────────────────────┘    in another shape, from where it was

`settle` ends every event: it ends the tasks whose recovery says so, and gives free slots to those that lack
workers. So what an event leads to is decided on the whole of what it changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from everstep.core.cluster.checkpoints import UNSAVED, Checkpoints
from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.memory_copies import MemoryCopies
from everstep.core.cluster.node_states import NodeState
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.staffing import CHANGES_STAGE, Staffing
from everstep.core.cluster.task import OVER, BadLinks, Bounds, Ending, HeldState, NextShape, Task, TaskState
from everstep.core.cluster.training import Training
from everstep.core.faults.severity import ErrorKind, known
from everstep.core.task.states import Member, Running
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.incidents import Incident
from everstep.protocol.moment import Moment

WANTS_WORKERS = frozenset({TaskState.WAITING, TaskState.SEARCHING, TaskState.RUNNING})


@dataclass(slots=True)
class PlannerQuestion:
    """How many workers each task gets is asked again at every change; only the last question counts."""

    version: int = 0
    is_open: bool = False
    review_at: float | None = None  # when it is asked again, though nothing has changed


class Tasks:
    """Changes the state of tasks, and asks the planner how many workers each gets."""

    def __init__(
        self,
        context: ClusterContext,
        *,
        checkpoints: Checkpoints,
        copies: MemoryCopies,
        training: Training,
        staffing: Staffing,
        question: PlannerQuestion,
    ) -> None:
        self._roster, self._orders, self._incidents = context.roster, context.orders, context.incidents
        self._policy, self._later = context.policy, context.later
        self._checkpoints, self._copies, self._training = checkpoints, copies, training
        self._staffing, self._question = staffing, question

    # -------------------------------------------------------------- requests

    def submit(self, event: msg.TaskSubmitted, now: Moment) -> Actions:
        if event.task not in self._roster.tasks:
            self._roster.add_task(Task(request=event, submitted_at=now.at))
            self._later.slots_changed(f"task {event.task} was submitted")
        return []

    def cancel(self, task: Task, by: str, now: Moment) -> Actions:
        return self.end(task, Ending(state=TaskState.CANCELLED, because=f"{by} cancelled it"), now)

    def finish_early(self, task: Task, because: str, now: Moment) -> Actions:
        """After the step it is in, whose state is saved."""
        if task.state is not TaskState.RUNNING or task.after_stop is TaskState.FINISHED:
            return []
        task.after_stop = TaskState.FINISHED
        return self._stop(task, ev.StopRequested(because=because, final=True), now)

    def pause(self, task: Task, by: str, now: Moment, *, force: bool = False) -> Actions:
        """After the step it is in, once its state is saved; at once with `force`, if asked again, or if it
        does not train.
        """
        if task.state is TaskState.PAUSED or task.after_stop is TaskState.FINISHED:
            return []
        if not task.request.has_checkpoints and not task.is_script:
            return []  # the API has refused it
        because, at_once = f"{by} paused it", force or task.after_stop is TaskState.PAUSED
        if at_once or task.state is not TaskState.RUNNING or not task.has_every_stage or task.is_script:
            return self.end(task, Ending(state=TaskState.PAUSED, because=because, gently=True), now)
        task.after_stop, task.because = TaskState.PAUSED, f"{because}: its state is saved first"
        return self._stop(task, ev.StopRequested(because=because, saves=True), now)

    def unpause(self, task: Task) -> Actions:
        if task.after_stop is TaskState.PAUSED:
            task.after_stop = TaskState.WAITING
        if task.ending is not None and task.ending.state is TaskState.PAUSED:  # its workers are still leaving
            task.ending = replace(task.ending, state=TaskState.WAITING)
        if task.state is TaskState.PAUSED:
            task.enter(TaskState.WAITING, "it was paused and waits for slots")
            self._later.slots_changed(f"task {task.name} goes on")
        return []

    def resize(self, task: Task, workers: int, because: str, now: Moment) -> Actions:
        if task.state in OVER:
            return []
        task.bounds.workers, task.most = max(task.least, workers), None
        self._later.slots_changed(because)
        return self._staffing.shrink(task, because, now)

    def release(self, task: Task) -> Actions:
        """An operator's size and shape do not bind the planner any more."""
        task.bounds = Bounds()
        self._later.slots_changed(f"the size of task {task.name} is released")
        return []

    def reshape(self, task: Task, event: msg.ReshapeRequested, now: Moment) -> Actions:
        """At the next step boundary: its workers leave their states in memory and go, others come."""
        if task.state in OVER:
            return []
        task.bounds = Bounds(is_shape_kept=True)
        return self._reshape(task, NextShape(event.job, event.shape), now)

    def update(self, task: Task, event: msg.UpdateRequested, now: Moment) -> Actions:
        """Like another shape."""
        if task.state is not TaskState.RUNNING or task.next_shape is not None:
            return []  # the API has refused it
        because = f"{event.by} updates it at the end of this step"
        return self._reshape(task, NextShape(event.job, event.shape), now, because)

    def _reshape(self, task: Task, after: NextShape, now: Moment, because: str = "") -> Actions:
        task.next_shape = after
        if task.state is TaskState.RUNNING:
            shards = f" x {after.shape.shards}" if after.shape.shards > 1 else ""
            shape = f"it takes the shape {after.shape.replicas} x {after.shape.stages}{shards}"
            return self._leave(task, because or shape, now)
        if task.state in (TaskState.WAITING, TaskState.PAUSED):
            self._later.slots_changed(f"task {task.name} has another shape")
            return self._take_shape(task, now)
        return []  # it is on its way to begin or to end; the API refuses this in words

    def _leave(self, task: Task, because: str, now: Moment) -> Actions:
        """At the next step boundary, with its states in memory; at once where it does not train anyway."""
        if task.has_every_stage:
            return self._stop(task, ev.StopRequested(because=because), now)
        self._later.endings.append((task, Ending(state=TaskState.WAITING, because=because, gently=True)))
        return []

    def leave_safely(self, task: Task, why: str, now: Moment, *, node: str = "") -> Actions:
        """All workers of a stage are to leave their node: at the next step boundary the task leaves with its
        state in memory, also in that of another node, and as a checkpoint where it has those.
        """
        task.because = f"{why}: its state is made safe at the end of this step"
        is_alone = task.managed is not None and not task.managed.is_stopping
        actions = self._stop(task, ev.StopRequested(because=why, saves=True), now)
        task.leaves = node if is_alone else ""
        return actions

    def _stop(self, task: Task, stop: ev.StopRequested, now: Moment) -> Actions:
        task.leaves = ""
        return self._training.inform(task, stop, now)

    def need_not_leave(self, task: Task, node: str, why: str, now: Moment) -> Actions:
        """If it was to stop only to leave this node, it goes on where it is."""
        if task.leaves != node or task.state is not TaskState.RUNNING:
            return []
        task.leaves, task.progress.held = "", None
        because = f"node {node}, which it was to leave, {why}"
        return self._training.inform(task, ev.StopAbandoned(because=because), now)

    def assigned(self, event: msg.AssignmentChosen, now: Moment) -> Actions:
        """The planner has said how many workers each task gets."""
        if event.version != self._question.version:
            return []  # something has happened since it was asked
        self._question.is_open = False
        self._question.review_at = None if event.review_s is None else now.at + event.review_s
        given = {
            name: (task, workers)
            for name, workers in event.workers.items()
            if (task := self._roster.tasks.get(name)) is not None and task.state not in OVER
        }
        lacking = sum(
            max(0, workers - len(task.staying())) * task.shape.shards for task, workers in given.values()
        )
        is_short = lacking > self._roster.num_free
        actions: Actions = []
        for task, workers in given.values():
            actions += self._give(task, workers, event, is_short, now)
        self._later.slots_changed(event.because)
        self._later.keep_plan = True
        return actions

    def _give(
        self, task: Task, workers: int, event: msg.AssignmentChosen, is_short: bool, now: Moment
    ) -> Actions:
        """What the planner has chosen for one task. `is_short`: others need slots that are not free."""
        task.stage_costs = event.costs.get(task.name, ())
        after = event.shapes.get(task.name)
        if after is not None and not task.bounds.is_shape_kept and task.next_shape is None:
            return self._reshape(task, NextShape(after.job, after.shape), now)
        # A task that lacks a stage or has fewer workers than its user wants, and whose slots no other task
        # needs, keeps the workers it has.
        waits = not workers and task.state is TaskState.RUNNING and not is_short
        kept = len(task.staying()) if task.request.least_workers else 0
        task.most = max(task.shape.stages, kept) if waits else workers
        if not workers and not waits and task.state is TaskState.RUNNING:
            return self._leave(task, f"the planner gives its slots to others: {event.because}", now)
        actions = self._staffing.shrink(task, event.because, now)
        if task.name in event.spread:
            actions += self._staffing.spread(task, f"{CHANGES_STAGE}: {event.because}", now)
        return actions

    # -------------------------------------------------------------- where it starts

    def checkpoint_found(self, task: Task, event: msg.CheckpointFound, now: Moment) -> Actions:
        if task.state is not TaskState.SEARCHING:
            return []
        task.checkpoints.newest = event.step
        task.checkpoints.search_at = task.checkpoints.searched_at = None
        follows = event.step and event.compiled is not None
        if follows and not task.progress.recorded and task.request.compile_because:
            # It continues another task's run, and its bits: a choice of ours gives way.
            compiled = "compiled" if event.compiled else "not compiled"
            because = f"the run whose checkpoint of step {event.step} it resumes was {compiled}"
            job = {**task.job, "compile": event.compiled}
            task.request = replace(task.request, job=job, compile_because=because)
        return self._begin(task, event.step, now)

    def checkpoint_unusable(self, task: Task, event: msg.CheckpointUnusable, now: Moment) -> Actions:
        """A read that failed is no reason to start from nothing: look again, then fail with the reason."""
        if task.state is not TaskState.SEARCHING:
            return []
        task.checkpoints.searched_at = None
        wait_s = self._checkpoints.look_later(task, now) if event.passing else None
        if wait_s is None:
            return self.end(task, Ending(state=TaskState.FAILED, because=event.because), now)
        task.because = f"{event.because}; tried again in {wait_s:.0f} s"
        return []

    def give_up_search(self, task: Task) -> None:
        """The answer may have died with a node."""
        if task.state is TaskState.SEARCHING:
            task.enter(TaskState.WAITING, task.because)
            task.checkpoints.search_at = task.checkpoints.searched_at = None

    def answers_lost(self, node: str, now: Moment) -> None:
        """A node is gone: the search it was asked for, and the checkpoints it was committing, have no answer.
        It need not have a worker of the task any more: it may have been drained.
        """
        for task in self._roster.tasks.values():
            self._checkpoints.node_lost(task, node, now)
            if task.checkpoints.searcher == node:
                self.give_up_search(task)
                if task.state is TaskState.RUNNING and task.checkpoints.search_at is not None:
                    task.checkpoints.search_at = now.at

    def time_passed(self, task: Task, now: Moment) -> Actions:
        actions, known = self._training.start_due(task, now), task.checkpoints
        self._checkpoints.time_passed(task, now)
        if any(due_at <= now.at for due_at in known.search_due_at(self._policy.patience)):
            because = f"node {known.searcher} has not answered the search for checkpoints"
            actions += self.checkpoint_unusable(
                task,
                msg.CheckpointUnusable(task=task.name, because=because, passing=True, search=known.search),
                now,
            )
        if known.search_at is not None and known.search_at <= now.at:
            if task.state is TaskState.RUNNING:
                is_lost = known.searcher not in self._roster.nodes_of(task)
                actions += self._training.look_overdue(task, now, again=is_lost)
            else:
                actions += self._search(task, now)
        return actions

    def _open(self, task: Task, now: Moment) -> Actions:
        """It has its first workers: from which step does it start?"""
        in_memory = task.copies.newest
        if in_memory is not None and in_memory > task.checkpoints.newest:
            return self._begin(task, in_memory, now)
        if not task.request.has_checkpoints:
            return self._begin(task, 0, now)
        task.checkpoints.failed_searches = 0
        return self._search(task, now)

    def _search(self, task: Task, now: Moment) -> Actions:
        if not task.seats:  # they were asked to go meanwhile
            self.give_up_search(task)
            task.because = "it waits for slots"
            return []
        task.enter(TaskState.SEARCHING, "its newest checkpoint is looked for")
        return self._checkpoints.look(task, task.because, now)

    def _begin(self, task: Task, step: int, now: Moment) -> Actions:
        """From the state after this step on."""
        task.progress.recorded = step
        if not task.is_script and step >= task.steps + task.request.closes:
            because = f"its checkpoint of step {step} is already the end"
            return self.end(task, Ending(state=TaskState.FINISHED, because=because, gently=True), now)
        task.enter(TaskState.RUNNING, f"started at step {step + 1}")
        return self._training.begin(task, step, now)

    # -------------------------------------------------------------- how it ends

    def end(self, task: Task, ending: Ending, now: Moment) -> Actions:
        if task.state in OVER:
            return []
        if task.state is TaskState.ENDING:
            if task.ending is not None and task.ending.state not in OVER:
                task.ending = ending if ending.state is not TaskState.WAITING else task.ending
            return []
        if ending.state is TaskState.WAITING and task.after_stop is TaskState.PAUSED:
            ending = replace(ending, state=TaskState.PAUSED)
        because = ending.because
        task.enter(TaskState.ENDING, because)
        task.ending = ending
        task.checkpoints.search_at = task.checkpoints.searched_at = None
        task.failures.overdue.clear()
        task.failures.links, task.progress.held, task.leaves = BadLinks(), None, ""
        task.speeds.slow.clear()
        self._training.stop(task, resumes=ending.state not in OVER)
        actions: Actions = []
        for node in sorted(self._roster.nodes_of(task)):
            order = msg.CloseTask(task=task.name, gently=ending.gently)
            actions += self._orders.send(node, order, because, now)
        for worker in [w for w, seat in task.seats.items() if seat.incarnation == 0]:
            self._roster.unseat(task, worker)
        # Of its last state more parts may fail to be saved: that incident is open until all have left.
        over = [incident for incident in self._incidents.open_ones(task.name) if incident.stops_training]
        actions += self._close(over, because, now)
        return actions + self._ended_if_empty(task, now)

    def _close(self, incidents: Iterable[Incident], because: str, now: Moment) -> Actions:
        actions: Actions = []
        for incident in incidents:
            actions += self._incidents.close(incident, f"the task ended: {because}", now)
        return actions

    def _unsaved(self, task: Task) -> str:
        """What a finished task says of a last state that is on no disk."""
        is_early = task.after_stop is TaskState.FINISHED
        last = task.progress.recorded if is_early else task.steps
        if not task.request.has_checkpoints or task.checkpoints.newest >= last:
            return ""
        why = task.checkpoints.failing or "its last part was not written"
        return f"; {UNSAVED} ({why}), protected up to step {task.checkpoints.newest}"

    def _ended_if_empty(self, task: Task, now: Moment) -> Actions:
        if task.state is not TaskState.ENDING or task.ending is None or task.seats:
            return []
        if task.checkpoints.committing:
            return []  # its last state is not saved yet
        ending, task.ending = task.ending, None
        unsaved = self._unsaved(task) if ending.state is TaskState.FINISHED else ""
        task.enter(ending.state, ending.because + unsaved)
        task.ended_at = now.at if ending.state in OVER else 0.0
        closing = self._close(self._incidents.open_ones(task.name), ending.because, now)
        self._later.slots_changed(f"task {task.name} is {ending.state}")
        if ending.state is TaskState.WAITING:
            return closing + self._take_shape(task, now)
        actions: Actions = [
            *closing,
            *self._checkpoints.clean(task, self._roster.nodes.values(), now),
            msg.TaskEnded(task=task.name, state=ending.state, because=task.because, cause=now.event),
        ]
        if ending.state is TaskState.PAUSED:
            return actions + self._take_shape(task, now)
        return actions + self._copies.drop(task, None, now)

    def _take_shape(self, task: Task, now: Moment) -> Actions:
        after = task.next_shape
        if after is None:
            return []
        task.most, task.next_shape = None, None
        # Planted faults name workers of the old shape.
        task.request = replace(task.request, job=after.job, shape=after.shape, faults=())
        task.checkpoints.parts.clear()
        for node in self._roster.nodes.values():
            node.opened.discard(task.name)
        return [msg.TaskReshaped(task=task.name, shape=task.shape, because=task.because, cause=now.event)]

    # -------------------------------------------------------------- after every event

    def look_at_held(self, tasks: Iterable[Task], now: Moment) -> Actions:
        actions: Actions = []
        for task in tasks:
            if task.progress.held is not None:
                actions += self._look_at_held(task, task.progress.held, now)
        return actions

    def settle(self, now: Moment) -> Actions:
        """Do what the event has left to do; it may lead to more of it."""
        later = self._later
        actions: Actions = []
        while not later.clear():
            endings, later.endings = later.endings, []
            for task, ending in endings:
                actions += self.end(task, ending, now)
            pauses, later.pauses = later.pauses, []
            for task, rule in pauses:
                actions += self.pause(task, rule, now)
            vacated, later.vacated = later.vacated, []
            for task in vacated:
                actions += self._ended_if_empty(task, now)
            if later.vacancy and not later.endings:
                why, later.vacancy = later.vacancy, ""
                actions += self._fill(why, now)
        later.keep_plan = False
        return actions

    def _look_at_held(self, task: Task, held: HeldState, now: Moment) -> Actions:
        """Its workers have stopped, and hold the state. They go once it is safe; if it cannot be made safe,
        the task keeps running and says why.
        """
        if task.state is not TaskState.RUNNING or task.managed is None or task.managed.recorded < held.step:
            task.progress.held = None  # if it went back meanwhile, it comes here again
            return []
        if held.ending is not None:
            return self._end_if_saved(task, held, held.ending, now)
        if self._is_safe(task, held.step):
            task.progress.held = None
            ending = Ending(state=task.after_stop, because=held.because, gently=True)
            self._later.endings.append((task, ending))
            return []
        if held.is_broken:
            return self._stop_later(task, held, "workers changed before that state was safe", now)
        known = task.checkpoints
        if known.uncopied == held.step and task.request.has_checkpoints and not task.managed.saves_last:
            return self._stop_later(task, held, f"no memory keeps that state ({known.uncopied_because})", now)
        why = self._why_not_safe(task, held, now)
        return self._go_on(task, held, why, now) if why else []

    def _end_if_saved(self, task: Task, held: HeldState, ending: Ending, now: Moment) -> Actions:
        """It is not waited for without end; workers that are asked to leave still write what they have. While
        they heal it is not given up: what could not be written may be, or the state is not the last one.
        """
        assert task.managed is not None
        known, is_late = task.checkpoints, now.at >= held.since + self._policy.patience.disk_answer_s
        is_lost = isinstance(task.managed.phase, Running) and (is_late or held.step in known.broken)
        if known.newest >= held.step or is_lost:
            task.progress.held = None
            self._later.endings.append((task, ending))
        elif is_late:
            task.progress.held = replace(held, since=now.at)
        return []

    def _stop_later(self, task: Task, held: HeldState, why: str, now: Moment) -> Actions:
        """Workers leave their state once, after the last step: so there is to be another one, whose state is
        saved too, where it has checkpoints.
        """
        task.progress.held = None
        because = f"{held.because}; {why}: after another step"
        go_on, stop = ev.StopAbandoned(because=because), ev.StopRequested(because=held.because, saves=True)
        return self._training.inform(task, go_on, now) + self._training.inform(task, stop, now)

    def _is_safe(self, task: Task, step: int) -> bool:
        """On disk; or, where it is only to change its shape or its place, in the memory of nodes that stay:
        of each stage on two, if it is on two.
        """
        if task.checkpoints.newest >= step:
            return True
        if task.after_stop is TaskState.PAUSED:
            return False
        keeping = self._keeping(task)
        if not keeping and not task.request.has_checkpoints:
            return True  # nothing can keep it
        kept = task.copies.states.get(step)
        if kept is None or not kept.whole:
            return False
        nodes = self._roster.nodes
        stays = {name for name, node in nodes.items() if node.memory_port and node.state is NodeState.UP}
        least = [1] * task.shape.stages
        if not task.shape.chunks:
            at = Counter(stage for n in keeping & stays for stage in self._stages_on(task, n))
            least = [max(1, min(2, at[stage])) for stage in range(task.shape.stages)]
        per_stage = max(1, task.shape.chunks)
        return all(
            len(stays & set(holders)) >= least[part // per_stage] for part, holders in kept.copies.items()
        )

    def _keeping(self, task: Task) -> set[str]:
        """The nodes in whose memory its workers leave their states."""
        return {name for name in self._roster.nodes_of(task) if self._roster.nodes[name].memory_port}

    def _stages_on(self, task: Task, node: str) -> set[int]:
        """Of members: one that joins has no state to leave."""
        assert task.managed is not None
        places = task.managed.places
        here = self._roster.seats_on(task, node)
        return {worker.stage for worker in here if isinstance(places[worker], Member)}

    def _why_not_safe(self, task: Task, held: HeldState, now: Moment) -> str:
        """Empty: it is waited for."""
        known, limit_s = task.checkpoints, self._policy.patience.disk_answer_s
        is_unsaved = held.step in known.broken or not task.request.has_checkpoints
        if task.after_stop is not TaskState.PAUSED and self._keeping(task):
            if is_unsaved and known.uncopied == held.step:
                return known.uncopied_because
        elif held.step in known.broken:
            return known.failing
        return f"not saved within {limit_s:.0f} s" if now.at >= held.since + limit_s else ""

    def _go_on(self, task: Task, held: HeldState, why: str, now: Moment) -> Actions:
        because = f"{held.because}; but that state could not be made safe ({why}), so it keeps running"
        task.progress.held, task.next_shape, task.leaves = None, None, ""
        task.after_stop, task.because = TaskState.WAITING, because
        incident = self._incidents.new(task=task, what="it was not stopped", now=now, step=held.step)
        incident.stops_training = False
        self._incidents.tell(incident, "coordinator", (because,), now)
        self._incidents.judge(incident, known(ErrorKind.OTHER, why), now)
        self._incidents.treat(incident, "keep it running", "its workers have the only copy of it", now)
        actions = self._incidents.close(incident, f"it trains on; protected up to step {task.protected}", now)
        return actions + self._training.inform(task, ev.StopAbandoned(because=because), now)

    def review_if_due(self, now: Moment) -> None:
        """Nothing has happened for so long that another plan may be the best one."""
        if self._question.review_at is not None and self._question.review_at <= now.at:
            self._question.review_at = None
            self._later.slots_changed("nothing has come or gone for a while")

    def unfinished(self) -> Actions:
        """The planner's answer, if one is waited for."""
        because = "the coordinator has started"
        question = msg.ChooseAssignment(version=self._question.version, because=because)
        return [question] if self._question.is_open else []

    def _fill(self, because: str, now: Moment) -> Actions:
        """Give free slots to the tasks that lack workers: the heaviest first, then the oldest."""
        actions: Actions = []
        tasks = self._roster.tasks.values()
        for task in sorted(tasks, key=lambda t: (-t.weight, t.submitted_at, t.name)):
            if task.state not in WANTS_WORKERS:
                continue
            seated = self._roster.seat_workers(task)
            for worker in seated:
                task.failures.times.pop(worker, None)
                task.failures.short_lives.pop(worker, None)
            if task.state is TaskState.WAITING and task.seats:
                actions += self._open(task, now)
            elif seated:
                actions += self._staffing.grant(task, now, clean=frozenset(seated))
            elif task.state is TaskState.WAITING:
                needed = task.starts_with * task.shape.shards
                task.because = f"slots needed: {needed}, free: {self._roster.num_free}"
        if self._policy.planned and not self._later.keep_plan:
            self._question.version += 1
            self._question.is_open, self._question.review_at = True, None
            version = self._question.version
            actions.append(msg.ChooseAssignment(version=version, because=because, cause=now.event))
        return actions
