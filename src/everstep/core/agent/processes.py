"""The worker processes of one node: which to start, which wait, which to end, and what is reported of them.

    StartProcess ──► starting ──► running ──► ending ──► killed ──► dead ──► gone
                        │             │          ▲   finish, leave, SIGKILL     ▲
                        └─────────────┴──────────┴──────────────────────────────┘
    killed for too long ──► stuck: reported as ended, since nothing can end it; its slot stays taken

A start waits until whatever held its slot, or was the same worker, is gone: a dead process still owns its
device's memory while the kernel clears up. A waiting start that is not wanted any more is dropped; else it
would start when it is no longer expected.

Whatever is asked of a process is asked with a deadline, and what outlives SIGKILL (a process in
uninterruptible sleep) is reported instead of being killed again and again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, assert_never

from everstep.core.agent.agent_messages import (
    AgentAction,
    AgentEnds,
    CheckPair,
    CommitWhole,
    Glanced,
    Kill,
    OrderGiven,
    PartialsLooked,
    PassOn,
    ProbeFromHere,
    ProcessDied,
    ProcessEvent,
    ProcessGone,
    ProcessGreeted,
    ProcessMisspoke,
    ProcessSpawned,
    ProcessSpoke,
    RunChecks,
    SendToCoordinator,
    Spawn,
    SpawnFailed,
    UseMemory,
    WorkOnDisk,
)
from everstep.core.agent.process import ALIVE, AgentLimits, Process
from everstep.core.agent.process import ProcessState as _S
from everstep.core.faults.detector import PAUSED, DetectorLimits, Glance, ProgressWatch
from everstep.errors import clipped
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import InterruptWorkers
from everstep.protocol.codec import decode, encode
from everstep.protocol.messages import (
    SAVING,
    EndWorker,
    OrderTaken,
    Sender,
    ShardEnded,
    StartProcess,
    WorkerOrder,
)
from everstep.protocol.ops import Worker
from everstep.protocol.table import Document, Handlers
from everstep.protocol.work import EpochFacts, applied

Actions = list[AgentAction]


@dataclass(frozen=True, slots=True)
class Curiosity:
    """What of a process the kernel should be asked: small files, so not at every look. And for how long one
    that moves need not be looked at closely.
    """

    stopped: bool
    slow: bool  # how active it is from now on may become a question
    active: bool  # how active it has been since then
    passes_over_s: float


@dataclass(slots=True)
class Unattended:
    """A task's checkpoints, of which a coordinator that is away would order no commit. The node whose worker
    wrote the first part of a step looks after it.
    """

    run: str
    sealed: int = 0  # the newest step that a worker here has sealed
    look_at: float | None = None  # when to look at what is written and perhaps not committed
    is_away: bool = False  # the last look found what a coordinator would have committed


@dataclass(slots=True)
class NodeProcesses:
    """`handle` is its only way to change."""

    on_order: ClassVar = Handlers[Actions](msg.Order)
    detector: DetectorLimits
    limits: AgentLimits = field(default_factory=AgentLimits)
    processes: dict[Sender, Process] = field(default_factory=dict)
    waiting: dict[tuple[str, object], StartProcess] = field(default_factory=dict)  # by task and worker
    tasks: set[str] = field(default_factory=set)
    facts: dict[str, EpochFacts] = field(default_factory=dict)  # by task: of its last epoch
    unattended: dict[str, Unattended] = field(default_factory=dict)  # by task
    # By task: from an order to work until a worker here did something.
    longest_begin_s: dict[str, float] = field(default_factory=dict)
    dead_servers: set[str] = field(default_factory=set)  # tasks whose fork server is known to be dead
    progress: ProgressWatch = field(init=False)

    def __post_init__(self) -> None:
        self.progress = ProgressWatch(self.detector)

    def handle(self, event: ProcessEvent, now: float) -> Actions:
        match event:
            case OrderGiven(order=order):
                return self.on_order.handler(self, order)(order, now)
            case ProcessSpawned():
                return self._spawned(event, now)
            case SpawnFailed():
                return self._not_spawned(event)
            case ProcessGreeted():
                return self._greeted(event.sender)
            case ProcessSpoke():
                return self._spoke(event, now)
            case ProcessMisspoke():
                return self._misspoke(event, now)
            case ProcessDied():
                return self._died(event)
            case ProcessGone():
                return self._gone(event.sender)
            case PartialsLooked():
                return self._looked_at_partials(event, now)
            case AgentEnds():
                return self._commit_unattended(math.inf)
            case Glanced():
                return self._glanced(event, now)
            case msg.TimePassed():
                pressed = [a for p in list(self.processes.values()) for a in self._press(p, now)]
                return pressed + self._commit_unattended(now)
            case _:
                assert_never(event)

    def due_at(self) -> float | None:
        """When `TimePassed` is wanted next."""
        deadlines = [p.deadline for p in self.processes.values()]
        deadlines += [one.look_at for one in self.unattended.values()]
        return min((at for at in deadlines if at is not None), default=None)

    def runs(self) -> tuple[Sender, ...]:
        """Every process that lives here, or is about to."""
        dying = (_S.KILLED, _S.STUCK, _S.DEAD)
        here = [p.sender for p in self.processes.values() if p.state not in dying]
        return (*here, *(Sender(w.task, w.worker, w.incarnation) for w in self.waiting.values()))

    def image(self) -> Document:
        """For the agent that comes after this one. Facts are not in it: it says that it knows none, and is
        told all.
        """
        return {
            "processes": [process.image() for process in self.processes.values()],
            "waiting": [encode(order) for order in self.waiting.values()],
            "tasks": sorted(self.tasks),
            "unattended": {task: [saves.run, saves.sealed] for task, saves in self.unattended.items()},
        }

    def restore(self, image: Document, now: float) -> None:
        """What another agent has left. Of its fork servers none makes workers any more."""
        for each in map(Process.of_image, image["processes"]):
            self.processes[each.sender] = each
        for order in (decode(StartProcess, each) for each in image["waiting"]):
            self.waiting[order.task, order.worker] = order
        self.tasks = set(image["tasks"])
        for task, (run, sealed) in image["unattended"].items():
            self.unattended[task] = Unattended(run, sealed, look_at=now + self.limits.commit_s)

    def validate(self) -> None:
        """What must hold between events."""
        places = [p.sender[:2] for p in self.processes.values()]
        assert len(places) == len(set(places)), "a worker has two processes here"
        held = [slot for p in self.processes.values() for slot in _slots(p.order)]
        assert len(held) == len(set(held)), "a slot is held by two processes"
        for order in self.waiting.values():
            assert any(True for _ in self._in_the_way(order)), f"{order.worker} waits for nothing"
        for process in self.processes.values():
            bounded = process.deadline is not None or process.state not in (_S.ENDING, _S.KILLED)
            assert bounded or not process.is_up, f"{process.sender.worker} {process.state}: no deadline"

    # -------------------------------------------------------------- orders

    @on_order
    def _open(self, order: msg.OpenTask, now: float) -> Actions:
        self.tasks.add(order.task)
        self.unattended.setdefault(order.task, Unattended(msg.run_of(order.secret)))
        return [UseMemory(order)]

    @on_order
    def _use_memory(self, order: msg.OpenMemory | msg.DropCopies, now: float) -> Actions:
        return [UseMemory(order)]

    @on_order
    def _work_on_disk(
        self, order: msg.FindCheckpoint | msg.CommitCheckpoint | msg.DiscardPartial, now: float
    ) -> Actions:
        return [WorkOnDisk(order)]

    @on_order
    def _check(self, order: msg.CheckNode, now: float) -> Actions:
        return [RunChecks(order)]

    @on_order
    def _check_pair(self, order: msg.MeasurePair | msg.AnswerPair, now: float) -> Actions:
        return [CheckPair(order)]

    @on_order
    def _probe(self, order: msg.ProbeLinks, now: float) -> Actions:
        return [ProbeFromHere(order)]

    @on_order
    def _start_ordered(self, order: StartProcess, now: float) -> Actions:
        return self._start(order)

    @on_order
    def _start_several(self, order: msg.StartProcesses, now: float) -> Actions:
        return [action for start in order.starts for action in self._start(start)]

    def _start(self, order: StartProcess) -> Actions:
        if order.task not in self.tasks:
            return [_never_started(order, f"task {order.task} is not known on this node")]
        in_the_way = list(self._in_the_way(order))
        if stuck := [p for p in in_the_way if p.state is _S.STUCK]:
            because = f"worker {stuck[0].sender.worker} cannot be killed and holds slot {order.slot}"
            return [_never_started(order, because)]
        if in_the_way:
            self.waiting[order.task, order.worker] = order
            return []
        process = Process(order)
        self.processes[process.sender] = process
        return [self._spawn(order)]

    def _spawn(self, order: StartProcess) -> Spawn:
        """By its task's fork server, or by a new one."""
        dead = order.task in self.dead_servers
        self.dead_servers.discard(order.task)
        return Spawn(order, fresh_server=dead)

    def _in_the_way(self, order: StartProcess) -> Iterator[Process]:
        """Those who hold its slot, and an earlier process of the same worker."""
        for process in self.processes.values():
            shared = _slots(process.order) & _slots(order)
            if shared or process.sender[:2] == (order.task, order.worker):
                yield process

    @on_order
    def _kill_ordered(self, order: msg.KillProcess, now: float) -> Actions:
        waiting = self.waiting.get((order.task, order.worker))
        if waiting is not None and waiting.incarnation == order.incarnation:
            return self._drop([waiting])
        process = self.processes.get(Sender(order.task, order.worker, order.incarnation))
        return [] if process is None else self._kill(process, now)

    def _kill(self, process: Process, now: float) -> Actions:
        if process.state not in (_S.STARTING, *ALIVE):
            return []
        process.become(_S.KILLED)
        if not process.is_up:
            return []  # as soon as it is
        process.deadline = now + self.limits.kill_s
        return [Kill(process.sender)]

    @on_order
    def _pass_on(self, order: msg.NotifyWorker, now: float) -> Actions:
        return self._tell(order.task, {order.worker: order}, now)

    @on_order
    def _interrupt(self, order: msg.InterruptTask, now: float) -> Actions:
        words = InterruptWorkers(workers=order.workers, epoch=order.epoch, because=order.because)
        notices = {
            worker: msg.NotifyWorker(task=order.task, worker=worker, words=words) for worker in order.workers
        }
        return self._tell(order.task, notices, now)

    @on_order
    def _resume(self, order: msg.ResumeTask, now: float) -> Actions:
        """Each worker gets the facts as far as it does not know them: a process that is new knows none."""
        task, news = order.task, order.news
        facts = order.facts if order.facts is not None else applied(self.facts.get(task), news)
        self.facts[task] = facts
        orders: dict[Worker, WorkerOrder] = {}
        processes = self._alive_of(task)
        for worker, own, states in order.workers:
            if (process := processes.get(worker)) is not None:
                is_up_to_date = news is not None and process.facts_epoch == news.since
                told = news if news is not None and is_up_to_date else facts
                process.facts_epoch = facts.epoch
                orders[worker] = msg.ResumeWorker(
                    task=task, worker=worker, facts=told, own=own, states=states
                )
        return self._tell(task, orders, now)

    def understands(self, order: msg.Order) -> bool:
        """News say what has changed since an epoch, of which this node must know the facts."""
        if not isinstance(order, msg.ResumeTask) or order.facts is not None:
            return True
        known = self.facts.get(order.task)
        return known is not None and order.news is not None and order.news.since == known.epoch

    def _tell(self, task: str, orders: Mapping[Worker, WorkerOrder], now: float) -> Actions:
        """Pass orders on to the processes that these workers have."""
        actions: Actions = []
        for worker, process in self._alive_of(task).items():
            if worker in orders:
                process.unanswered.append(now)
                match orders[worker]:
                    case msg.ResumeWorker():
                        process.resumed_at, process.has_begun = now, False
                    case msg.NotifyWorker(words=InterruptWorkers()):
                        process.resumed_at = None
                actions.append(PassOn(process.sender, orders[worker]))
        return actions

    def _alive_of(self, task: str) -> dict[Worker, Process]:
        return {p.order.worker: p for p in self.processes.values() if p.order.task == task and _alive(p)}

    @on_order
    def _tell_keeper(
        self,
        order: msg.BeginLife
        | msg.EndLife
        | msg.OrderRanks
        | msg.LocateRanks
        | msg.CopySnapshot
        | msg.DrainSnapshot,
        now: float,
    ) -> Actions:
        process = self.processes.get(Sender(order.task, order.worker, order.incarnation))
        return [PassOn(process.sender, order)] if process is not None and _alive(process) else []

    @on_order
    def _close(self, order: msg.CloseTask, now: float) -> Actions:
        self.facts.pop(order.task, None)
        self.longest_begin_s.pop(order.task, None)
        if order.task in self.unattended and self.unattended[order.task].look_at is None:
            del self.unattended[order.task]
        actions = self._drop([w for w in self.waiting.values() if w.task == order.task])
        for process in [p for p in self.processes.values() if p.sender.task == order.task]:
            if process.state is _S.STARTING:
                actions += self._kill(process, now)  # it has nothing in hand
            elif process.state is _S.RUNNING or (
                process.state is _S.ENDING and process.gently and not order.gently
            ):
                process.closed_at, process.may_save = now, order.gently
                actions += self._end(process, now, gently=order.gently)
        return actions

    def _end(self, process: Process, now: float, *, gently: bool) -> Actions:
        process.become(_S.ENDING)
        process.gently = gently
        process.deadline = now + (self.limits.finish_s if gently else self.limits.leave_s)
        return [PassOn(process.sender, EndWorker(gently=gently))]

    @on_order
    def _keep_only(self, order: msg.KeepOnly, now: float) -> Actions:
        """What was given up while the line was cut ends here, whether it runs or waits."""
        keep = {Sender(*kept) for kept in order.keep}
        actions = self._drop(
            [w for w in self.waiting.values() if Sender(w.task, w.worker, w.incarnation) not in keep]
        )
        for process in [p for p in self.processes.values() if p.sender not in keep]:
            actions += self._kill(process, now)
        return actions

    def _drop(self, starts: list[StartProcess]) -> Actions:
        for order in starts:
            del self.waiting[order.task, order.worker]
        return [_never_started(order, "it was ended before its turn came") for order in starts]

    # -------------------------------------------------------------- processes

    def _spawned(self, event: ProcessSpawned, now: float) -> Actions:
        process = self.processes[event.sender]
        process.is_up, process.pid, process.born = True, event.pid, event.born
        if process.state is _S.KILLED:
            process.deadline = now + self.limits.kill_s
            return [Kill(event.sender)]
        process.become(_S.RUNNING)
        return []

    def _not_spawned(self, event: SpawnFailed) -> Actions:
        process = self.processes[event.sender]
        if event.server_died:
            self.dead_servers.add(process.order.task)
            if process.state is _S.STARTING and process.tries < self.limits.spawn_tries:
                process.tries += 1
                return [self._spawn(process.order)]
        return [_never_started(process.order, event.because), *self._remove(process)]

    def _greeted(self, sender: Sender) -> Actions:
        process = self.processes.get(sender)
        if process is None or process.state is not _S.ENDING:
            return []
        return [PassOn(sender, EndWorker(gently=process.gently))]  # it was not there to hear it

    def _spoke(self, event: ProcessSpoke, now: float) -> Actions:
        process = self.processes.get(event.sender)
        if process is None or process.state in (_S.STUCK, _S.DEAD):
            return []
        match event.report:
            case msg.TaskEvent(event=ev.WorkerRaised(error=error)):
                process.raised = f"raised {error}"
            case OrderTaken():
                del process.unanswered[:1]
                return []
            case ShardEnded(shard=shard, how=how):
                process.raised = f"lost its shard {shard} ({how})"
                return []
            case msg.TimesReported(times=times, carriers=carriers):
                self.progress.expects(process.sender.task, process.sender.worker, times)
                process.carriers = dict(carriers)
            case msg.TaskEvent(event=ev.StepSealed(step=step)) if event.sender.task in self.unattended:
                saves = self.unattended[event.sender.task]
                saves.sealed = max(saves.sealed, step)
            case msg.PartWritten(memory_of=None, stage=0, share=(0, _)) if (
                event.sender.task in self.unattended
            ):
                saves = self.unattended[event.sender.task]
                saves.look_at = saves.look_at or now + self._commit_s(saves)
        assert isinstance(event.report, msg.NodeReport), event.report
        return [SendToCoordinator(event.report, event.sender)]

    def _commit_unattended(self, now: float) -> Actions:
        """Time for a commit has passed: the coordinator may be away. If it is not, nothing is found."""
        actions: Actions = []
        for task, saves in self.unattended.items():
            if saves.look_at is not None and saves.look_at <= now:
                saves.look_at = None
                actions.append(WorkOnDisk(CommitWhole(task, saves.run, saves.sealed)))
        return actions

    def _looked_at_partials(self, event: PartialsLooked, now: float) -> Actions:
        saves = self.unattended.get(event.task)
        if saves is not None:
            saves.is_away = event.committed
            if event.left:
                saves.look_at = now + self._commit_s(saves)
        return []

    def _commit_s(self, saves: Unattended) -> float:
        return self.limits.commit_alone_s if saves.is_away else self.limits.commit_s

    def _misspoke(self, event: ProcessMisspoke, now: float) -> Actions:
        process = self.processes.get(event.sender)
        if process is None:
            return []
        process.raised = clipped(event.because)
        return self._kill(process, now)

    def _died(self, event: ProcessDied) -> Actions:
        process = self.processes.get(event.sender)
        if process is None or process.state is _S.DEAD:
            return []
        reported = process.state is _S.STUCK
        process.become(_S.DEAD)
        process.deadline = None
        self.progress.forget(process.sender.task, process.sender.worker)
        reason = process.raised or clipped(event.reason)
        return [] if reported else [_exited(process.order, reason, event)]

    def _gone(self, sender: Sender) -> Actions:
        process = self.processes.get(sender)
        if process is None:
            return []
        actions = self._died(ProcessDied(sender, "ended"))
        if process.was_stuck:
            for slot in sorted(_slots(process.order)):
                actions.append(SendToCoordinator(msg.SlotFreed(slot=slot), None))
        return actions + self._remove(process)

    def _remove(self, process: Process) -> Actions:
        """Its slot is free: a start may have waited for that."""
        del self.processes[process.sender]
        actions: Actions = []
        for order in [w for w in self.waiting.values() if not any(True for _ in self._in_the_way(w))]:
            del self.waiting[order.task, order.worker]
            actions += self._start(order)
        return actions

    # -------------------------------------------------------------- time

    def _press(self, process: Process, now: float) -> Actions:
        """It had its time."""
        if process.deadline is None or now < process.deadline:
            return []
        if process.state is _S.KILLED:
            return self._give_up(process)
        since = max(process.closed_at, process.moved_at)
        if process.may_save and process.doing == SAVING and now < since + self.limits.save_s:
            process.deadline = now + self.limits.finish_s
            return []
        return self._end(process, now, gently=False) if process.gently else self._kill(process, now)

    def _give_up(self, process: Process) -> Actions:
        """A process in uninterruptible sleep ends when the kernel lets it; nothing can hurry it."""
        process.become(_S.STUCK)
        process.was_stuck = True
        process.deadline = None
        self.progress.forget(process.sender.task, process.sender.worker)
        because = f"it is still there {self.limits.kill_s:g} s after SIGKILL (uninterruptible sleep)"
        blocked = [w for w in self.waiting.values() if process in list(self._in_the_way(w))]
        return [_exited(process.order, because, stuck=True), *self._drop(blocked)]

    def curious(self, sender: Sender, glance: Glance) -> Curiosity:
        """A beacon that stands still is worth asking the kernel about."""
        slow = glance.busy and glance.age_s > self.limits.ask_kernel_s
        return Curiosity(
            stopped=glance.age_s > self.limits.look_s,
            slow=slow,
            active=slow and self.progress.is_overdue(sender.task, sender.worker, glance),
            passes_over_s=self.progress.passes_over(glance),
        )

    def _glanced(self, event: Glanced, now: float) -> Actions:
        process = self.processes.get(event.sender)
        if process is None or not _alive(process):
            return []
        process.doing = event.glance.doing
        if process.moment != event.glance.moment:
            process.moment, process.moved_at = event.glance.moment, now
            self._begun(process, now)
        if process.state is _S.ENDING:
            return []  # no order waits for it any more, and its deadline is set
        sent = process.unanswered[:1]
        resumed_at, limit_s = process.resumed_at, self._begin_limit_s(process.order.task)
        if event.glance.doing == PAUSED and resumed_at is not None and now - resumed_at > limit_s:
            sent.append(resumed_at)  # it took that order, and has done nothing since
        found = self.progress.look(
            event.sender.task,
            event.sender.worker,
            event.sender.incarnation,
            event.glance,
            stopped=event.stopped,
            now=now,
            active_s=event.active_s,
            shard=event.shard,
            unanswered_s=now - min(sent) if sent else 0.0,
        )
        return [] if found is None else [SendToCoordinator(found, event.sender)]

    def _begun(self, process: Process, now: float) -> None:
        """Does it work for the first time since it was told to? How long that takes is learned by task."""
        if process.resumed_at is not None and not process.has_begun and process.doing != PAUSED:
            process.has_begun = True
            task, took_s = process.order.task, now - process.resumed_at
            self.longest_begin_s[task] = max(self.longest_begin_s.get(task, 0.0), took_s)

    def _begin_limit_s(self, task: str) -> float:
        """From an order to work until something is done: usually milliseconds. Loading a state is shown."""
        limits, longest_s = self.progress.limits, self.longest_begin_s.get(task)
        if longest_s is None:
            return limits.first_op_s
        return min(limits.first_op_s, max(limits.begin_floor_s, limits.begin_factor * longest_s))


def _alive(process: Process) -> bool:
    return process.state in ALIVE


def _slots(order: StartProcess) -> frozenset[int]:
    return frozenset((order.slot, *order.more_slots))


def _never_started(order: StartProcess, because: str) -> SendToCoordinator:
    return _exited(order, clipped(f"could not be started: {because}"))


def _exited(
    order: StartProcess,
    reason: str,
    died: ProcessDied | None = None,
    stuck: bool = False,
) -> SendToCoordinator:
    event = ev.WorkerExited(
        worker=order.worker,
        incarnation=order.incarnation,
        reason=reason,
        done_ops=died.done_ops if died is not None else 0,
        step=died.step if died is not None else 0,
        killed_at=died.killed_at if died is not None else None,
        stuck=stuck,
    )
    sender = Sender(order.task, order.worker, order.incarnation)
    return SendToCoordinator(msg.TaskEvent(task=order.task, event=event), sender)
