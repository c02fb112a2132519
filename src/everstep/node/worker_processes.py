"""The worker processes of one node: the hands and eyes of `core.agent`.

What happens to processes comes from lifelines and pidfds (deaths), Unix sockets (words) and shared memory
(progress); `core.agent.processes` decides what follows, and here it is done. The loop belongs to the caller:
asyncio's in the agent, a selector in a local run.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from everstep.core.agent import agent_messages as ag
from everstep.core.agent.process import Process, ProcessState
from everstep.core.agent.processes import Curiosity, NodeProcesses
from everstep.core.faults.detector import Glance
from everstep.core.faults.lagging_shard import ShardProgress, hung_shard
from everstep.engine.shards.marks import mark_path, read_marks
from everstep.engine.telemetry.beacon import Beacon, BeaconReading
from everstep.engine.telemetry.faults import parse_fault
from everstep.errors import EverstepError, UserError
from everstep.job.worker_spec import WorkerSpec, lifeline_beside
from everstep.log import trim
from everstep.node.checks import at_slots, checked_apart
from everstep.node.disk_orders import commit_whole, failure, work_on_disk
from everstep.node.fork_server import (
    ForkedProcess,
    ForkServer,
    ForkServerDied,
    InheritedServer,
    exit_reason,
)
from everstep.node.lifeline import Bell, Lifeline
from everstep.node.pair_check import PairServer, measured
from everstep.node.shard_group import SHARDS
from everstep.node.slot_devices import NodeDevices, SlotDevice
from everstep.node.worker_lines import Loop, WorkerLines
from everstep.procfs import active_s, born, end_leftovers, is_stopped, parent_of
from everstep.protocol import messages as msg
from everstep.protocol.codec import encode
from everstep.protocol.messages import PlantFaults, RankRules, Sender, TaskNeeds
from everstep.protocol.ops import Worker
from everstep.store.memory_server import MemoryStore
from everstep.store.owned_folders import remove_left
from everstep.store.unix_users import UnixUser, UserTable, acting_as
from everstep.traffic import NodeTraffic

UNKNOWN_END = "ended while no agent ran here; how is unknown"
PROBE_S, MOST_AT_ONCE = 3.0, 8  # for one connection to another node, and such connections
TICK_S = 0.1  # while everybody moves
_PLANTED = ("dies at", "raises at")  # what a beacon shows of a fault that a script asked for
Report = Callable[[msg.NodeReport, Sender | None], None]  # None: the agent speaks for itself
Decide = Callable[[ag.ProcessEvent, float], Sequence[Any]]  # AgentActions
Done = Callable[[Any], None]  # given what the work returned, or the exception it raised


Aside = Callable[[Callable[[], Any], Done], None]  # does some work, and says what came of it


def at_once(work: Callable[[], Any], done: Done) -> None:
    """Where the caller has nothing else to do meanwhile."""
    try:
        found = work()
    except Exception as error:
        found = error
    done(found)


@dataclass(slots=True)
class WorkerProcess:
    sender: Sender
    child: ForkedProcess
    server: ForkServer | InheritedServer
    beacon: Beacon
    lifeline: Lifeline
    glances: Glances
    killed_at: float | None = None
    dead: bool = False  # though the kernel may still be clearing up

    @property
    def incarnation(self) -> int:
        return self.sender.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What the processes of a node have in common. `detect` off leaves pidfds alone to notice anything: to
    measure what the rest costs.
    """

    folder: Path  # for sockets
    memory: Path | None = None  # for beacons and rings: training must not wait for a disk to write them
    node: str = "here"
    host: str = "127.0.0.1"  # where peers reach its workers
    bind: str = ""  # where they listen, if that is another address
    slots: int = 1
    logs: Path | None = None  # for what workers print, if their job names no folder
    detect: bool = True
    traffic: NodeTraffic | None = None
    order: int = 0  # of this node among those of a script task
    other_checks: tuple[str, ...] = ()  # options of `everstep check`
    alone_s: float = 0.0  # so long workers wait for another agent when theirs is gone; 0: they end with it
    users: UserTable | None = None  # as whom the workers of each owner run; None: as the agent


@dataclass(frozen=True, slots=True)
class TaskHere:
    """What this node was told of a task, and its job as workers get it."""

    job: Mapping[str, Any]
    secret: str
    script: tuple[str, ...]
    faults: tuple[str, ...]
    replicas: int
    needs: TaskNeeds
    ranks: RankRules | None = None
    user: UnixUser | None = None  # as whom its workers run; None: as the agent

    @staticmethod
    def of(order: msg.OpenTask, user: UnixUser | None = None) -> TaskHere:
        return TaskHere(
            order.job,
            order.secret,
            order.script,
            order.faults,
            order.shape.replicas,
            order.needs,
            order.ranks,
            user,
        )


class AgentSide(NamedTuple):
    """What an agent brings. A run on one machine needs none of it."""

    decide: Decide | None = None  # where the machine is a part of a larger one
    beside: Aside = at_once  # what takes long
    on_storage: Aside = at_once  # what waits for a file system that may hang
    devices: NodeDevices | None = None
    on_record: Callable[[], None] = lambda: None  # called before workers that outlive their agent are told


class WorkerProcesses:
    def __init__(
        self,
        settings: NodeSettings,
        *,
        loop: Loop,
        machine: NodeProcesses,
        report: Report,
        fork_server: Callable[[TaskHere], ForkServer],
        agent: AgentSide | None = None,
    ) -> None:
        agent = agent or AgentSide()
        self.settings, self.machine, self.report = settings, machine, report
        self.devices = agent.devices or NodeDevices()
        self.memory = MemoryStore()
        self.pairs = PairServer(settings.bind or settings.host)  # an agent opens it
        self.tasks: dict[str, TaskHere] = {}
        self._loop, self._fork_server = loop, fork_server
        self._beside, self._on_storage = agent.beside, agent.on_storage
        self._decide: Decide = agent.decide or machine.handle
        self.logs = WorkerLogs(settings.logs or settings.folder)
        self._all: dict[Sender, WorkerProcess] = {}
        self._unreadable: dict[str, str] = {}  # jobs that make no sense here, and why
        self._forking: dict[Sender, ForkServer] = {}  # asked for, and not made yet
        self._early: set[Sender] = set()  # of these, the ones that have called already
        self._bell = Bell()
        self.opened: list[msg.OpenTask | msg.OpenMemory] = []  # for the record
        self.lines = WorkerLines(
            loop,
            settings.folder / "agent",
            knows=self._knows,
            happened=self.happened,
            keeps=settings.alone_s > 0,
            for_all=settings.users is not None,
            on_record=agent.on_record,
        )
        self._events: deque[ag.ProcessEvent] = deque()
        self._deciding = False
        self._tick_at = self._trim_at = 0.0
        self._num_on_disk = 0  # orders that threads are carrying out

    # -------------------------------------------------------------- life

    def open(self) -> None:
        self.lines.open()
        self._loop.watch(self._bell.fd, self._rung)

    def close(self) -> None:
        """End every process still there, at once."""
        self._decide = lambda event, now: ()
        for process in list(self._all.values()):
            _kill(process)
            self._bury(process)
        self.memory.close()
        self._close()

    def let_go(self) -> None:
        """Leave all processes, and what is in memory, to the next agent."""
        for process in self._all.values():
            self._loop.unwatch(process.child.pidfd)
        self._close()

    def _close(self) -> None:
        self._loop.unwatch(self._bell.fd)
        self.lines.close()
        self._bell.close()
        self.pairs.close()

    def adopt(
        self, servers: Sequence[InheritedServer], opened: Iterable[msg.OpenTask | msg.OpenMemory]
    ) -> None:
        """Before it opens: the processes that another agent has left, dead or alive."""
        for order in opened:
            self._use_memory(order)
        made = {sender: (pid, server) for server in servers for sender, pid in server.children.items()}
        for sender, known in list(self.machine.processes.items()):
            found = made.pop(sender, None)
            if found is not None:  # not reaped, so the number is its own, even if it is dead
                pid, server = found
                child = ForkedProcess(pid, os.pidfd_open(pid), 0, born(pid))
                self._adopted(sender, known, child, server)
            elif known.is_up and (pidfd := _pidfd(known.pid, known.born)) is not None:
                child = ForkedProcess(known.pid, pidfd, 0, known.born)
                self._adopted(sender, known, child, ForkServer())
            elif known.is_up:
                end_leftovers(known.pid, known.born)
                self.happened(ag.ProcessDied(sender, UNKNOWN_END))
                self.happened(ag.ProcessGone(sender))
            elif known.state is ProcessState.STARTING:
                self._spawn(ag.Spawn(known.order))
            else:
                self.happened(ag.SpawnFailed(sender, "it was ended before it was made"))
        for server in servers:
            self.attach(server)

    def attach(self, server: InheritedServer) -> None:
        """It reaps its children; those of which the record says nothing end, and without any it ends too."""
        for sender, pid in list(server.children.items()):
            process = self._all.get(sender)
            if process is not None and process.child.pid == pid:
                process.server = server
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            server.reap(ForkedProcess(pid, os.pidfd_open(pid), 0, born(pid)))
        if not server.children and server.is_open:
            server.close()

    def _adopted(
        self, sender: Sender, known: Process, child: ForkedProcess, server: ForkServer | InheritedServer
    ) -> None:
        path = self._beacon_path(sender)
        if sender.task in self.tasks:
            self.log_path(sender.task, sender.worker)
        with self.acting_for(sender.task):
            beacon = Beacon(path, create=not path.exists())
            life = lifeline_beside(path)
            lifeline = Lifeline(life, create=not life.exists())
        glances = Glances(sender, child.pid, beacon, 1 + len(known.order.more_slots))
        process = self._all[sender] = WorkerProcess(sender, child, server, beacon, lifeline, glances)
        self._loop.watch(child.pidfd, lambda: self._exited(process))
        if not known.is_up:
            self.happened(ag.ProcessSpawned(sender, child.pid, child.born))
        elif known.state is ProcessState.KILLED:
            _kill(process)

    def passes_over(self, now: float) -> bool:
        """Many times per second: can a `tick` be left out, because everybody moves?"""
        ask_after_s = self.machine.limits.look_s
        return now < self._tick_at and all(
            process.dead or process.glances.passes_over(ask_after_s, now) for process in self._all.values()
        )

    def tick(self, now: float) -> None:
        """Some times per second: has everybody moved, and do those who were asked to end, end?"""
        self._tick_at = now + TICK_S
        self.lines.acknowledge(now)
        self.lines.flush()
        if self.settings.detect:
            for process in list(self._all.values()):
                if not process.dead:
                    self._look(process, now)
        if now >= self._trim_at:
            self._trim_at = math.inf  # until this time is over: the file system may hang
            here = list(self.processes)
            self._on_storage(lambda: self.logs.trim(here), self._trimmed)
        due = self.machine.due_at()
        if due is not None and due <= now:
            self.happened(msg.TimePassed())

    def _trimmed(self, done: object) -> None:
        self._trim_at = time.monotonic() + TRIM_EVERY_S

    def carry_out(self, order: msg.Order) -> None:
        self.happened(ag.OrderGiven(order))

    @property
    def processes(self) -> dict[tuple[str, Worker], WorkerProcess]:
        return {(s.task, s.worker): process for s, process in self._all.items() if not process.dead}

    @property
    def works_on_disk(self) -> bool:
        return self._num_on_disk > 0

    @property
    def is_idle(self) -> bool:
        """No process is left, and no work on a disk."""
        return not self._all and not self._forking and not self.works_on_disk

    def log_path(self, task: str, worker: Worker) -> Path:
        """The file with what a worker printed."""
        here = self.tasks[task]
        return self.logs.path(task, worker, here.needs.log, here.user)

    def acting_for(self, task: str) -> contextlib.AbstractContextManager[None]:
        """Files of a task are opened with the rights of its user: a link in their place leads no further."""
        here = self.tasks.get(task)
        return acting_as(None if here is None else here.user)

    def _user(self, owner: str) -> UnixUser | None:
        return None if self.settings.users is None else self.settings.users.of(owner)

    def slots_by_pid(self) -> dict[int, int]:
        known = self.machine.processes
        return {p.child.pid: known[s].order.slot for s, p in self._all.items() if s in known}

    def tasks_by_slot(self) -> dict[int, set[str]]:
        """Of those with a live process."""
        found: dict[int, set[str]] = {}
        for sender, process in self._all.items():
            if not process.dead and (known := self.machine.processes.get(sender)) is not None:
                for slot in (known.order.slot, *known.order.more_slots):
                    found.setdefault(slot, set()).add(sender.task)
        return found

    def carriers(self, process: WorkerProcess) -> dict[str, str]:
        """By peer: the transport that carries tensors to it, as the worker said last."""
        known = self.machine.processes.get(process.sender)
        return {} if known is None else dict(known.carriers)

    def readings(self, task: str) -> dict[Worker, BeaconReading | None]:
        """What every live worker of a task is doing right now."""
        return {worker: p.beacon.read() for (name, worker), p in self.processes.items() if name == task}

    def readings_document(self, task: str) -> list[dict[str, Any]]:
        """The same as JSON, with what each of them is."""
        return [
            {
                "worker": str(worker),
                "incarnation": process.incarnation,
                "pid": process.child.pid,
                "reading": encode(process.beacon.read()),
                "carriers": self.carriers(process),
            }
            for (name, worker), process in self.processes.items()
            if name == task
        ]

    def kill(self, task: str, worker: Worker) -> None:
        """SIGKILL, and remember when: for demonstrations."""
        process = self.processes[task, worker]
        process.killed_at = time.monotonic()
        _kill(process)

    def plant(self, task: str, worker: Worker, faults: tuple[str, ...]) -> None:
        """These faults and no others from now on, in this process: for demonstrations."""
        self.lines.send(self.processes[task, worker].sender, PlantFaults(faults=faults))
        self.lines.flush()

    # -------------------------------------------------------------- decisions and deeds

    def happened(self, event: ag.ProcessEvent) -> None:
        """One event after the other: what a deed leads to waits until the decision before is carried out."""
        self._events.append(event)
        self.perform(())

    def perform(self, actions: Sequence[ag.AgentAction]) -> None:
        """Do these, then decide what follows from what they led to."""
        if self._deciding and not actions:
            return
        nested, self._deciding = self._deciding, True
        try:
            for action in actions:
                self._do(action)
            while self._events and not nested:
                for action in self._decide(self._events.popleft(), time.monotonic()):
                    self._do(action)
        finally:
            self._deciding = nested
        if not nested:
            self.lines.flush()

    def _do(self, action: ag.AgentAction) -> None:
        match action:
            case ag.Spawn():
                self._spawn(action)
            case ag.Kill(sender=sender):
                _kill(self._all[sender])
            case ag.PassOn(sender=sender, order=order):
                self.lines.send(sender, order)
            case ag.SendToCoordinator(report=report, sender=speaker):
                self.report(report, speaker)
            case ag.UseMemory(order=asked):
                self._use_memory(asked)
            case ag.RunChecks(order=asked_for):
                others, because = self.settings.other_checks, asked_for.because
                self._beside(
                    lambda: at_slots(checked_apart(others), self.devices.known, self.settings.slots),
                    lambda found: self.report(
                        msg.NodeChecked(
                            results=() if isinstance(found, Exception) else found, because=because
                        ),
                        None,
                    ),
                )
            case ag.CheckPair(order=msg.AnswerPair(key=key)):
                self.pairs.expect(key)
            case ag.CheckPair(order=msg.MeasurePair() as pair):
                self._beside(lambda: measured(pair), lambda found: self._measured(pair, found))
            case ag.WorkOnDisk(order=given):
                self._num_on_disk += 1
                if isinstance(given, ag.CommitWhole):
                    self._on_storage(partial(self._commit_whole, given), partial(self._committed, given))
                else:
                    self._on_storage(partial(self._work_on_disk, given), partial(self._worked, given))
            case ag.ProbeFromHere(order=wanted):
                self._beside(lambda: probed(wanted), lambda found: self.report(found, None))

    def _measured(self, order: msg.MeasurePair, found: Any) -> None:
        if isinstance(found, Exception):
            found = msg.PairMeasured(peer=order.peer, key=order.key, error=str(found)[:200])
        self.report(found, None)

    def _use_memory(self, order: msg.OpenTask | msg.OpenMemory | msg.DropCopies) -> None:
        if isinstance(order, msg.DropCopies):
            self.memory.drop(order.task, order.before)
            return
        self.opened.append(order)
        if isinstance(order, msg.OpenTask):
            self.tasks.pop(order.task, None)
        try:
            user = self._user(order.owner)
            if isinstance(order, msg.OpenTask):
                self.tasks[order.task] = TaskHere.of(order, user)
        except EverstepError as error:  # its starts fail, with this sentence
            self._unreadable[order.task] = str(error)
            return
        self.memory.open_task(order.task, order.secret, user)

    def _work_on_disk(self, order: ag.DiskOrder) -> msg.NodeReport | None:
        """Touches nothing of this class but what it was told of a task, so any thread may do it."""
        here = self.tasks.get(order.task)
        user = None if here is None else here.user
        if isinstance(order, msg.FindCheckpoint):
            user = self._user(order.owner)
        with acting_as(user):
            return work_on_disk(order, None if here is None else here.needs.checkpoints)

    def _commit_whole(self, order: ag.CommitWhole) -> Any:
        here = self.tasks.get(order.task)
        with self.acting_for(order.task):
            return commit_whole(order, None if here is None else here.needs.checkpoints)

    def _committed(self, order: ag.CommitWhole, found: Any) -> None:
        self._num_on_disk -= 1
        if isinstance(found, Exception):  # a store that is away: it is looked at again
            self.happened(ag.PartialsLooked(order.task, (0,)))
            return
        report, looked = found
        if report is not None:
            self.report(report, None)
        self.happened(looked)

    def _worked(self, order: ag.DiskOrder, found: Any) -> None:
        self._num_on_disk -= 1
        answer = failure(order, found) if isinstance(found, Exception) else found
        if answer is not None:
            self.report(answer, None)

    # -------------------------------------------------------------- starts

    def _spawn(self, action: ag.Spawn) -> None:
        order = action.order
        sender = Sender(order.task, order.worker, order.incarnation)
        if order.task not in self.tasks:
            because = self._unreadable.get(order.task, "its job is not here")
            self.happened(ag.SpawnFailed(sender, because))
            return
        try:
            server = self._fork_server(self.tasks[order.task])
            if action.fresh_server:
                server.replace()
        except UserError as error:  # its Python is not on this node
            self.happened(ag.SpawnFailed(sender, str(error)))
            return
        self._forking[sender] = server
        self._beside(lambda: self._forked(sender, server), lambda found: self._fork_ended(sender, found))

    def _forked(self, sender: Sender, server: ForkServer) -> WorkerProcess:
        """Beside the loop: a fork server may be loading torch, or be stopped; so may nvidia-smi."""
        here, order = self.tasks[sender.task], self.machine.processes[sender].order
        devices: tuple[SlotDevice, ...] = ()
        if here.needs.device == "cuda":
            devices = self.devices.for_slots(self.settings.slots)
        elif here.ranks is not None and len(order.more_slots) + 1 < self.settings.slots:
            devices = self.devices.find()  # others may use the rest of them
        if not server.warm:
            server.warm_up()
        path = self._beacon_path(sender)
        spec = self._spec(sender, path, devices)
        assert spec.lifeline is not None
        with self.acting_for(sender.task):
            beacon = Beacon(path, create=True)
            lifeline = Lifeline(spec.lifeline, create=True)
        output = self.log_path(sender.task, sender.worker)
        child = server.spawn(spec.to_dict(), output=output)
        glances = Glances(sender, child.pid, beacon, len(spec.slots))
        return WorkerProcess(sender, child, server, beacon, lifeline, glances)

    def _beacon_path(self, sender: Sender) -> Path:
        name = f"{sender.task}-{sender.worker.replica}-{sender.worker.stage}-{sender.incarnation}"
        folder, here = self.settings.memory or self.settings.folder, self.tasks.get(sender.task)
        if here is not None and here.user is not None:
            folder = here.user.make_folder(folder / f"of-{here.user.name}")
        return folder / f"beacon-{name}"

    def _fork_ended(self, sender: Sender, found: Any) -> None:
        self._forking.pop(sender, None)
        if isinstance(found, Exception):  # whatever it is, the others on this node continue
            self._not_forked(sender, found)
            return
        process: WorkerProcess = found
        self._all[sender] = process
        if sender in self._early:
            self._early.discard(sender)
            self._watch_life(process)
        self._loop.watch(process.child.pidfd, lambda: self._exited(process))
        self.happened(ag.ProcessSpawned(sender, process.child.pid, process.child.born))

    def _not_forked(self, sender: Sender, error: Exception) -> None:
        died = isinstance(error, ForkServerDied)
        said = isinstance(error, EverstepError)
        because = str(error) if said else f"{type(error).__name__}: {error}"
        self.happened(ag.SpawnFailed(sender, because, server_died=died))

    def _spec(self, sender: Sender, beacon: Path, devices: tuple[SlotDevice, ...]) -> WorkerSpec:
        here, settings, order = self.tasks[sender.task], self.settings, self.machine.processes[sender].order
        first = sender.incarnation == 1
        return WorkerSpec(
            sender=sender,
            job=here.job,
            secret=here.secret,
            node=settings.node,
            host=settings.host,
            bind=settings.bind,
            slots=(order.slot, *order.more_slots),
            slots_on_node=settings.slots,
            devices=tuple((device.uuid, device.bus, device.gpu) for device in devices),
            agent=str(self.lines.path),
            alone_s=settings.alone_s,
            memory=str(self.memory.folder),
            beacon=str(beacon) if settings.detect else None,
            faults=tuple(f for f in here.faults if first and parse_fault(f).worker == sender.worker),
            script=here.script,
            traffic=None
            if settings.traffic is None
            else settings.traffic.settings(settings.folder, (order.slot, *order.more_slots)),
            ranks=here.ranks,
            order=settings.order,
            logs="" if here.ranks is None else here.ranks.logs or str(self.logs.folder / sender.task),
        )

    def _knows(self, sender: Sender, pid: int) -> bool:
        """Is this the process of that worker? It may call before the fork server's answer is heard."""
        if sender in self._forking and parent_of(pid) == self._forking[sender].pid:
            self._early.add(sender)
            return True
        process = self._all.get(sender)
        if process is None or process.child.pid != pid:
            return False
        self._watch_life(process)
        return True

    def _watch_life(self, process: WorkerProcess) -> None:
        if self.settings.detect:
            process.lifeline.watch(lambda: self._bell.ring(process))

    # -------------------------------------------------------------- deaths and delays

    def _rung(self) -> None:
        for process in self._bell.take():
            assert isinstance(process, WorkerProcess)
            self._died(process)

    def _exited(self, process: WorkerProcess) -> None:
        """The process is gone for good."""
        self._died(process)
        self._bury(process)
        self.happened(ag.ProcessGone(process.sender))

    def _died(self, process: WorkerProcess) -> None:
        """It is dead. Its last words come first."""
        if process.dead or process.sender not in self._all:
            return
        self.lines.drain(process.sender)
        process.dead = True
        reading, killed_at = process.beacon.read(), process.killed_at
        if killed_at is None and reading is not None and reading.doing.startswith(_PLANTED):
            killed_at = reading.at_ns / 1e9
        done_ops, step = (reading.done, reading.step) if reading is not None else (0, 0)
        reason = exit_reason(process.child.pid)
        self.happened(ag.ProcessDied(process.sender, reason, done_ops, step, killed_at))

    def _bury(self, process: WorkerProcess) -> None:
        self._loop.unwatch(process.child.pidfd)
        process.server.reap(process.child)
        self.lines.forget(process.sender)
        process.beacon.close()
        for left in _files(process.beacon.path, process.glances.shards):
            with contextlib.suppress(OSError):
                left.unlink()
        if process.glances.shards > 1:
            remove_left(SHARDS, process.beacon.path.parent)
        process.dead = True
        self._all.pop(process.sender, None)

    def _look(self, process: WorkerProcess, now: float) -> None:
        if process.glances.passes_over(self.machine.limits.look_s, now):
            return
        with self.acting_for(process.sender.task):
            glanced = process.glances.look(self.machine.curious, now)
        if glanced is not None:
            self.happened(glanced)


def _files(beacon: Path, shards: int) -> Iterator[Path]:
    """What a process writes into the memory of its node."""
    yield beacon
    for name in ("life", "ring", "stacks"):
        yield beacon.with_name(f"{beacon.name}.{name}")
    for shard in range(shards):
        yield mark_path(beacon, shard)


def _pidfd(pid: int, started: int) -> int | None:
    """Of the process that had this number when it started then; None: it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if born(pid) == started:  # and the number is its own as long as the pidfd does not say that it is gone
        return pidfd
    os.close(pidfd)
    return None


def _kill(process: WorkerProcess) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process.child.pidfd, signal.SIGKILL)


# ------------------------------------------------------------------
# One look at a worker: its beacon, and where that stands still, what the kernel says of its processes.
#
# A worker with shards is several processes. The marks of its shards say which one the others wait for; it
# is that one which the kernel is asked about, and which the report names.


@dataclass(frozen=True, slots=True)
class SuspectedProcess:
    shard: int | None  # None: the worker, which is one process or has not said more
    pid: int


@dataclass(slots=True)
class Glances:
    """At one worker."""

    sender: Sender
    pid: int
    beacon: Beacon
    shards: int = 1
    _active_since: tuple[int, float] | None = None  # pid, and what `active_s` said when the beacon stopped
    _closely: tuple[int, float, float] = (-1, 0.0, 0.0)  # the last close look: step, when, for how long

    def passes_over(self, ask_after_s: float, now: float) -> bool:
        """Is it all as it should be, at first sight? Looks are many, and their time is that of the cores that
        train. `ask_after_s` without a sign of it, the kernel is asked whether it is stopped.
        """
        seen, closely_at, quiet_s = self._closely
        if now - closely_at >= quiet_s or (first := self.beacon.moment()) is None:
            return False
        at_ns, step = first
        age_s = now - at_ns / 1e9
        if step != seen or age_s >= quiet_s or (age_s > ask_after_s and is_stopped(self.pid)):
            return False
        self._active_since = None
        return True

    def look(self, curious: Callable[[Sender, Glance], Curiosity], now: float) -> ag.Glanced | None:
        reading = self.beacon.read()
        if reading is None:
            return None
        glance = Glance(
            moment=reading.at_ns,
            step=reading.step,
            busy=reading.busy,
            doing=reading.doing,
            age_s=max(0.0, now - reading.at_ns / 1e9),
        )
        ask = curious(self.sender, glance)
        # Of several processes only a close look tells which one is stopped.
        self._closely = glance.step, now, ask.passes_over_s if self.shards == 1 else 0.0
        active, suspect = 0.0, SuspectedProcess(None, self.pid)
        if ask.stopped or ask.slow:
            suspect = suspected(self.beacon.path, self.shards, self.pid)
        if not ask.slow:
            self._active_since = None
        elif self._active_since is None or self._active_since[0] != suspect.pid:
            self._active_since = suspect.pid, active_s(suspect.pid)
        elif ask.active:
            active = active_s(suspect.pid) - self._active_since[1]
        stopped = ask.stopped and is_stopped(suspect.pid)
        return ag.Glanced(self.sender, glance, stopped=stopped, active_s=active, shard=suspect.shard)


def suspected(beacon: Path, shards: int, pid: int) -> SuspectedProcess:
    """Which of a worker's processes do the others wait for?"""
    marks = read_marks(beacon, shards) if shards > 1 else None
    if marks is None:
        return SuspectedProcess(None, pid)
    shard = hung_shard(
        [
            ShardProgress(
                entered=mark.entered, is_inside=mark.entered > mark.left, stopped=is_stopped(mark.pid)
            )
            for mark in marks
        ]
    )
    return SuspectedProcess(None, pid) if shard is None else SuspectedProcess(shard, marks[shard].pid)


# ------------------------------------------------------------------
# The files with what workers print: where each is, also once its task is over, and parts of them.

MOST_PATHS = 10_000
TRIM_EVERY_S = 10.0


class WorkerLogs:
    def __init__(self, folder: Path) -> None:
        """`folder`: for jobs that name none."""
        self.folder = folder
        self._paths: dict[tuple[str, Worker], tuple[Path, UnixUser | None]] = {}

    def path(self, task: str, worker: Worker, folder: str | None, user: UnixUser | None = None) -> Path:
        """Where a worker is to print. `folder`: of its job, if that names one. `user`: as whom it runs."""
        own = self.folder if user is None else self.folder / f"of-{user.name}"
        found = own / f"{task}-{_log_name(worker)}" if folder is None else Path(folder, _log_name(worker))
        with contextlib.suppress(OSError):  # it trains without
            if user is not None and folder is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                user.make_folder(own)
            with acting_as(user):
                found.parent.mkdir(parents=True, exist_ok=True)
        self._paths[task, worker] = found, user
        while len(self._paths) > MOST_PATHS:
            del self._paths[next(iter(self._paths))]
        return found

    def trim(self, workers: Iterable[tuple[str, Worker]]) -> None:
        """Of workers that run: their logs keep to a size."""
        for known in workers:
            if (kept := self._paths.get(known)) is not None:
                path, user = kept
                with acting_as(user):
                    trim(path)

    def read(self, task: str, worker: Worker, *, most: int, start: int | None = None) -> dict[str, Any]:
        """The end of what a worker has printed here, or what follows `start`: text, where it ends, and when
        it was written.
        """
        usual = self.folder / f"{task}-{_log_name(worker)}"
        path, user = self._paths.get((task, worker), (usual, None))
        with acting_as(user):
            if not path.is_file():
                raise UserError(f"worker {worker} of {task} has printed nothing here.")
            file = path.open("rb")
        with file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - most) if start is None or start > size else start
            file.seek(begin)
            data = file.read(most)
            at = os.fstat(file.fileno()).st_mtime
        return {"text": data.decode(errors="replace"), "next": begin + len(data), "at": at}


def _log_name(worker: Worker) -> str:
    return f"worker-{worker.replica}-{worker.stage}.log"


def probed(order: msg.ProbeLinks) -> msg.LinksProbed:
    """Which of these nodes this one can reach. It only connects: what listens there closes it again."""

    def is_reached(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, timeout=PROBE_S).close()
        except ConnectionRefusedError:
            return True  # its machine has answered: the process is gone
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        found = dict(zip(order.addresses, threads.map(is_reached, order.addresses.values()), strict=True))
    reached = tuple(node for node, is_there in found.items() if is_there)
    return msg.LinksProbed(
        task=order.task, reached=reached, unreached=tuple(node for node in found if node not in reached)
    )
