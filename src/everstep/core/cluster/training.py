"""Where a task's recovery meets the machines.

`Recovery` knows places and nothing of nodes. Here its actions become orders: a place has a seat on a node or
none, a start may be put off, a message to a worker is an order to its node.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from everstep.core.cluster.checkpoints import Checkpoints
from everstep.core.cluster.context import ClusterContext
from everstep.core.cluster.lives import Lives
from everstep.core.cluster.memory_copies import MemoryCopies
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.skipped_steps import SkippedSteps
from everstep.core.cluster.slowness import Slowness
from everstep.core.cluster.task import Ending, HeldState, Task, TaskState
from everstep.core.task.recovery import Course, Recovery
from everstep.core.task.states import RecoveryPolicy
from everstep.errors import InternalError, clipped
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.moment import Moment
from everstep.protocol.ops import Worker
from everstep.protocol.table import Handlers
from everstep.protocol.work import changes


class Training:
    """Changes `task.progress`, `task.starts`, and the process in a seat."""

    on_wish: ClassVar = Handlers[Actions](act.Action)

    def __init__(
        self, context: ClusterContext, *, slowness: Slowness, checkpoints: Checkpoints, copies: MemoryCopies
    ) -> None:
        self._roster, self._orders, self._incidents = context.roster, context.orders, context.incidents
        self._policy, self._later = context.policy, context.later
        self._slowness, self._checkpoints, self._copies = slowness, checkpoints, copies
        self._skips = SkippedSteps(incidents=context.incidents)

    def begin(self, task: Task, step: int, now: Moment) -> Actions:
        """From the state after this step on."""
        patience, progress = self._policy.patience, task.progress
        if task.request.ranks is not None:
            progress.recovery = Lives(
                task.name,
                task.request.ranks,
                workers=task.shape.workers(),
                granted=frozenset(task.seats),
                now=now.at,
                lived=progress.lived,
                log=self._incidents.of_task(task.name),
            )
            return self._carry_out(task, progress.recovery.begin(), now)
        progress.recovery = Recovery(
            task.shape,
            Course(
                steps=task.steps + task.request.closes,
                first_step=step + 1,
                checkpoint=task.checkpoints.newest if step == task.copies.newest else None,
                closes=task.request.closes,
            ),
            policy=RecoveryPolicy(
                rejoin_after_steps=patience.rejoin_after_steps,
                max_restarts=patience.restarts_per_place,
                looks=task.request.has_checkpoints,
                votes_on_all=task.request.votes_on_all,
            ),
            lived=progress.lived,
            granted=frozenset(task.seats),
            log=self._incidents.of_task(task.name),
        )
        return self._carry_out(task, progress.recovery.begin(), now)

    def inform(self, task: Task, event: ev.Event | msg.RankReport | msg.TimePassed, now: Moment) -> Actions:
        """Something has happened to a task that trains."""
        recovery, progress = task.recovery, task.progress
        if recovery is None or task.state is not TaskState.RUNNING:
            return []
        planned = event if isinstance(event, ev.PlanComputed) else None
        if planned is not None and progress.question is not None and planned.epoch == progress.question.epoch:
            progress.question = None
        actions: Actions = []
        exits = event.exits if isinstance(event, ev.WorkersExited) else (event,)
        for one in exits:
            if isinstance(one, ev.WorkerExited):
                actions += self._slowness.ended(task, one.worker, "its process is gone", now)
        try:
            if isinstance(recovery, Lives):
                wishes = recovery.handle(event, now.at)
            else:
                assert isinstance(event, ev.Event), f"{type(event).__name__} is about a script"
                wishes = recovery.handle(event, now.at)
        except Exception as error:  # our bug, in one task, whose state is half changed: the others continue
            because = f"an internal error: {_told(error)}"
            self._later.endings.append((task, Ending(state=TaskState.FAILED, because=because)))
            return actions
        in_force = planned is not None and planned.epoch == recovery.epoch
        actions += self._carry_out(task, wishes, now)
        if planned is not None and in_force and (because := self._slowness.balanced(task, planned)):
            actions += self.inform(task, ev.ProfileChanged(because=because), now)
        return actions

    def part_written(self, task: Task, event: msg.PartWritten, node: str, now: Moment) -> Actions:
        """A part of a state is on disk, or a copy of it in a node's memory."""
        if event.memory_of is not None:
            return self.count_copies(task, now) if self._copies.add(task, event, event.memory_of) else []
        return self._checkpoints.part_written(task, event, node, now)

    def count_copies(self, task: Task, now: Moment) -> Actions:
        """Which state in memory is the newest whole one may have changed: recovery must know."""
        before = task.copies.newest
        actions = self._copies.count(task, now)
        if task.copies.newest == before:
            return actions
        if task.copies.newest is not None:
            actions += self._checkpoints.copied(task, task.copies.newest, now)
        return actions + self.inform(task, ev.StateKept(step=task.copies.newest), now)

    def unrestored(self, task: Task, event: ev.RestoreFailed, now: Moment) -> Actions:
        """A worker could not load a state: which one is the newest may be another one now."""
        if task.managed is not None and task.managed.loads_from_disk(event):
            because = f"worker {event.worker} could not load the checkpoint of step {event.step}"
            again = self._checkpoints.load_failed(task)
            ending = Ending(state=TaskState.WAITING, because=f"{because}; it is verified", gently=True)
            if not again:
                ending = Ending(state=TaskState.FAILED, because=f"{because}, which passes every check")
            self._later.endings.append((task, ending))
            return []
        given_up = self._copies.give_up(task, event)
        actions = self.count_copies(task, now) if given_up else []
        return actions + self.inform(task, event, now)

    def doubted(self, task: Task, because: str, now: Moment, *, back: bool) -> Actions:
        """A worker had wrong numbers. `back`: they may be in steps that are recorded."""
        actions = self._checkpoints.doubt(task, because, now)
        return actions + (self.inform(task, ev.StateDoubted(because=because), now) if back else [])

    def start_due(self, task: Task, now: Moment) -> Actions:
        """The starts whose time has come, and what the lives of a script have waited for."""
        due = None if task.lives is None else task.lives.due_at()
        actions = self.inform(task, msg.TimePassed(), now) if due is not None and due <= now.at else []
        return actions + self._start_all(task, task.starts.take_due(now.at), now)

    def stop(self, task: Task, *, resumes: bool) -> None:
        """It ends, or pauses: what it waited for does not count any more."""
        progress, recovery = task.progress, task.recovery
        progress.question = None
        task.starts.forget_all()
        if recovery is None:
            return
        progress.recorded = recovery.recorded  # maybe of a state that was gone on from, and never reported
        if resumes:
            progress.lived = recovery.lived()
            task.checkpoints.newest = recovery.checkpoint
            progress.recovery = progress.facts = None

    def unfinished(self) -> Actions:
        """The questions without an answer."""
        return [
            msg.Think(
                task=task.name,
                question=task.progress.question,
                because=task.progress.question.because,
                slow=task.speeds.planned,
            )
            for task in self._roster.tasks.values()
            if task.progress.question is not None and task.state is TaskState.RUNNING
        ]

    def _carry_out(self, task: Task, wishes: list[act.Action], now: Moment) -> Actions:
        starts = [wish for wish in wishes if isinstance(wish, act.StartWorker)]
        actions: Actions = []
        for wish in wishes:
            if not isinstance(wish, act.StartWorker):
                actions += self.on_wish.handler(self, wish)(task, wish, now)
            elif starts:
                actions += self._start_all(task, starts, now)
                starts = []
        return actions

    @on_wish
    def _interrupt(self, task: Task, wish: act.InterruptWorkers, now: Moment) -> Actions:
        """One order per node."""
        actions: Actions = []
        for node, workers in self._by_node(task, wish.workers).items():
            order = msg.InterruptTask(
                task=task.name, epoch=wish.epoch, workers=tuple(workers), because=wish.because
            )
            actions += self._orders.send(node, order, wish.because, now)
        return actions

    @on_wish
    def _resume(self, task: Task, wish: act.ResumeWorkers, now: Moment) -> Actions:
        """One order per node: what all have in common, and what each of its workers does."""
        book = {worker: seat.address for worker, seat in task.seats.items() if seat.address is not None}
        before, facts = task.progress.facts, replace(wish.facts, book=book)
        task.progress.facts = facts
        news = None if before is None else changes(before, facts)
        nodes = self._by_node(task, wish.orders)
        actions, directions = self._copies.directions(task, facts.restore, nodes, now)
        for node, workers in nodes.items():
            resumed = tuple([msg.WorkerResume(w, wish.orders[w], directions[w]) for w in workers])
            order = msg.ResumeTask(task=task.name, facts=facts, news=news, workers=resumed)
            actions += self._orders.send(node, order, wish.because, now)
        return actions

    def _by_node(self, task: Task, workers: Iterable[Worker]) -> dict[str, list[Worker]]:
        """Those of these workers that have a process."""
        found: dict[str, list[Worker]] = {}
        seats = task.seats
        for worker in workers:
            seat = seats.get(worker)
            if seat is not None and seat.incarnation:
                if (here := found.get(seat.node)) is None:
                    here = found[seat.node] = []
                here.append(worker)
        return found

    @on_wish
    def _feed(self, task: Task, wish: act.CopyState | act.StopFeeding, now: Moment) -> Actions:
        """The source is told where the joiner is reached."""
        if isinstance(wish, act.CopyState):
            task.starts.copies(wish.joiner, now.at)
        seat = task.seats.get(wish.source)
        if seat is None or not seat.incarnation:
            return []
        joiner = task.seats.get(wish.joiner)
        at = None if joiner is None or isinstance(wish, act.StopFeeding) else joiner.address
        book = () if at is None else ((wish.joiner, *at),)
        order = msg.NotifyWorker(task=task.name, worker=wish.source, words=wish, book=book)
        return self._orders.send(seat.node, order, wish.because, now)

    @on_wish
    def _close(self, task: Task, wish: act.CloseIncident, now: Moment) -> Actions:
        return [msg.IncidentClosed(number=wish.number, because=wish.because, cause=now.event)]

    @on_wish
    def _finish(self, task: Task, wish: act.FinishTask, now: Moment) -> Actions:
        failed = self._skips.why_failed(task, now)
        state = TaskState.FAILED if failed else TaskState.FINISHED
        return self._hold_last(task, task.steps, state, failed or wish.because, now)

    @on_wish
    def _finish_shape(self, task: Task, wish: act.FinishShape, now: Moment) -> Actions:
        """Its workers go once its state is safe (`Tasks.settle`); they are idle, and have it. Sharded states
        are not waited for: who holds which chunk may change meanwhile, and nobody would leave it.
        """
        if task.after_stop is TaskState.FINISHED:
            return self._hold_last(task, wish.step, task.after_stop, wish.because, now)
        if task.managed is None or task.managed.is_over or task.shape.chunks:
            return self._ends(task, task.after_stop, wish.because, gently=True)
        held = task.progress.held
        if held is not None and held.step == wish.step:
            task.progress.held = replace(held, is_broken=True)
        else:
            task.progress.held = HeldState(wish.step, wish.because, now.at)
        return []

    def _hold_last(self, task: Task, step: int, state: TaskState, because: str, now: Moment) -> Actions:
        """The task is over once its last state is a checkpoint: a worker that dies before leaves others who
        write it.
        """
        if task.managed is None or task.managed.is_over or not task.request.has_checkpoints:
            return self._ends(task, state, because, gently=True)
        ending = Ending(state=state, because=because, gently=True)
        task.progress.held = HeldState(step, because, now.at, ending=ending)
        task.because = f"{because}; its last state is being saved"
        return []

    @on_wish
    def _fail(self, task: Task, wish: act.FailTask, now: Moment) -> Actions:
        return self._ends(task, TaskState.FAILED, wish.because)

    def _ends(self, task: Task, state: TaskState, because: str, *, gently: bool = False) -> Actions:
        self._later.endings.append((task, Ending(state=state, because=because, gently=gently)))
        return []

    @on_wish
    def _think(self, task: Task, wish: act.ComputePlan, now: Moment) -> Actions:
        task.progress.question = wish
        speeds = self._slowness.asked(task)
        return [msg.Think(task=task.name, question=wish, because=wish.because, slow=speeds, cause=now.event)]

    @on_wish
    def _look(self, task: Task, wish: act.LookForCheckpoint, now: Moment) -> Actions:
        return self._checkpoints.look(task, wish.because, now, live=True)

    def looked(self, task: Task, event: ev.CheckpointsLooked, now: Moment) -> Actions:
        """The newest checkpoint in the folder of a task that goes back."""
        known = task.checkpoints
        known.search_at = None
        known.newest = max(known.newest, event.step or 0)
        return self.inform(task, event, now)

    def look_overdue(self, task: Task, now: Moment, *, again: bool) -> Actions:
        """No answer: another node is asked, or the task goes back to what is known."""
        lost = ev.CheckpointsLooked(search=task.checkpoints.search, step=None, again=again)
        return self.looked(task, lost, now)

    @on_wish
    def _order_ranks(
        self,
        task: Task,
        wish: msg.BeginLife
        | msg.EndLife
        | msg.OrderRanks
        | msg.LocateRanks
        | msg.CopySnapshot
        | msg.DrainSnapshot,
        now: Moment,
    ) -> Actions:
        seat = task.seats.get(wish.worker)
        if seat is None or seat.incarnation != wish.incarnation:
            return []
        return self._orders.send(seat.node, wish, wish.because, now)

    @on_wish
    def _stop(self, task: Task, wish: act.StopWorker, now: Moment) -> Actions:
        seat = task.seats.get(wish.worker)
        if seat is None or not seat.incarnation:
            return []
        order = msg.KillProcess(task=task.name, worker=wish.worker, incarnation=seat.incarnation)
        return self._orders.send(seat.node, order, wish.because, now)

    @on_wish
    def _life_failed(self, task: Task, wish: act.LifeFailed, now: Moment) -> Actions:
        self._later.failed_lives.append((task, wish))
        return []

    @on_wish
    def _ranks_slow(self, task: Task, wish: act.RanksSlow, now: Moment) -> Actions:
        self._later.slow_ranks.append((task, wish))
        return []

    @on_wish
    def _record(self, task: Task, wish: act.RecordStep, now: Moment) -> Actions:
        task.progress.recorded = wish.step
        row = msg.RecordRow(task=task.name, record=wish, because=wish.because, cause=now.event)
        found: Actions = [row, *self._skips.recorded(task, wish, now)]
        if wish.suspect is not None:
            self._later.replayed.append((task, wish))
        ahead = task.checkpoints.ahead
        if ahead and ahead <= wish.step:  # it was committed before the last seals were reported
            task.checkpoints.ahead = 0
            found += self._checkpoints.committed(task, ahead, now)
            found += self.inform(task, ev.CheckpointCommitted(step=ahead), now)
        return [*found, *self._checkpoints.commit(task, now), *self.count_copies(task, now)]

    @on_wish
    def _start(self, task: Task, wish: act.StartWorker, now: Moment) -> Actions:
        return self._start_all(task, [wish], now)

    def _start_all(self, task: Task, wishes: list[act.StartWorker], now: Moment) -> Actions:
        """One order per node."""
        nodes: dict[str, list[msg.StartProcess]] = {}
        because: dict[str, str] = {}
        for wish in wishes:
            seat, starts = task.seats[wish.worker], task.starts
            if starts.not_before.get(wish.worker, now.at) > now.at:
                starts.waiting[wish.worker] = wish
                continue
            starts.not_before.pop(wish.worker, None)
            starts.ordered(wish.worker, now.at)
            seat.incarnation, seat.address = wish.incarnation, None
            order = msg.StartProcess(
                task=task.name,
                worker=wish.worker,
                incarnation=wish.incarnation,
                slot=seat.slot,
                more_slots=seat.more,
            )
            nodes.setdefault(seat.node, []).append(order)
            because.setdefault(seat.node, wish.because)
        actions: Actions = []
        for node, found in nodes.items():
            one = found[0] if len(found) == 1 else msg.StartProcesses(task=task.name, starts=tuple(found))
            actions += self._open(task, node, now) + self._orders.send(node, one, because[node], now)
        return actions

    def _open(self, task: Task, name: str, now: Moment) -> Actions:
        """The first worker of a task on a node: what its workers need to know."""
        node, request = self._roster.nodes[name], task.request
        if task.name in node.opened:
            return []
        node.opened.add(task.name)
        order = msg.OpenTask(
            task=task.name,
            job=request.job,
            secret=request.secret,
            script=request.script,
            faults=request.faults,
            shape=task.shape,
            needs=request.needs,
            ranks=request.ranks,
            owner=request.owner,
        )
        return self._orders.send(name, order, f"a worker of {task.name} comes to {name}", now)


def _told(error: Exception) -> str:
    """What it says, and where it was raised."""
    if isinstance(error, InternalError):
        return str(error)
    raised = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{raised.filename.rpartition('/')[2]}:{raised.lineno}"
    return clipped(f"{type(error).__name__} in {place}{f': {error}' if str(error) else ''}")
