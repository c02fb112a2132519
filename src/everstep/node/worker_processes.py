"""The workers of one node: started, watched, heard, told and ended here.

Deaths come from lifelines and pidfds, words from Unix sockets, progress from shared memory; all of it becomes
reports for the coordinator, whose orders are carried out here. Nothing blocks, and the loop is somebody
else's: an asyncio loop in the agent, a selector in `everstep train`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, assert_never

from everstep.checkpoint.search import NoStart
from everstep.core.faults.detector import DetectorLimits, Glance, ProgressWatch
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.agent_messages import (
    PROTOCOL,
    EndWorker,
    FromWorker,
    PlantFaults,
    WorkerHello,
    WorkerOrder,
)
from everstep.core.words.framing import Unpacker, pack
from everstep.core.words.ops import Worker
from everstep.core.words.text import clipped
from everstep.engine.beacon import Beacon, Reading
from everstep.engine.faults import parse_fault
from everstep.engine.job import Job
from everstep.errors import PeerError
from everstep.node.checkpoints import Checkpoints
from everstep.node.fork_server import ForkedProcess, ForkServer, exit_reason
from everstep.node.lifeline import Bell, Lifeline
from everstep.node.memory_store import MemoryStore
from everstep.node.ring_watch import RingWatch

FINISH_S = 5.0  # for a worker asked to finish, before it is told to stop
STOP_S = 20.0  # for a worker told to stop, before it is killed
SOON_S = 0.03  # a beacon younger than this is not asked about
ASK_KERNEL_S = 0.1  # in one op for so long: what has its process been doing?
_PLANTED = ("dies at", "raises at")  # what a beacon says of a fault that a script asked for
Report = Callable[[msg.NodeReport, msg.Sender | None], None]  # None: of the agent itself


class Loop(Protocol):
    """What a crew needs of the loop it lives in."""

    def watch(self, fd: int, ready: Callable[[], object]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


@dataclass(slots=True)
class WorkerProcess:
    task: str
    worker: Worker
    incarnation: int
    child: ForkedProcess
    beacon: Beacon
    lifeline: Lifeline
    line: socket.socket | None = None
    unpacker: Unpacker = field(default_factory=lambda: Unpacker(FromWorker))
    raised: str | None = None
    killed_at: float | None = None
    active_since: float | None = None  # what `_active_s` said when its beacon last stood still
    dead: bool = False  # told, though the kernel may still be clearing up

    @property
    def sender(self) -> msg.Sender:
        return msg.Sender(self.task, self.worker, self.incarnation)


@dataclass(slots=True)
class _TaskHere:
    job: Job
    secret: str
    script: tuple[str, ...]
    faults: tuple[str, ...]
    closing: str = ""  # what its workers were told last
    deadline: float = 0.0


class WorkerProcesses:
    def __init__(
        self,
        *,
        loop: Loop,
        report: Report,
        folder: Path,
        nursery: Callable[[Job], ForkServer],
        host: str = "127.0.0.1",
        node: str = "here",
        limits: DetectorLimits | None = None,
        words: Path | None = None,
        detect: bool = True,
    ) -> None:
        """`folder`: for sockets and beacons; `words`: for what workers print, if the job names no folder.
        `detect` off leaves pidfds alone to notice anything: to measure what the rest costs.
        """
        self.loop, self.report, self.folder, self.host, self.node = loop, report, folder, host, node
        self.shelf = MemoryStore()
        self._nursery = nursery
        self._words, self._detect = words, detect
        self.tasks: dict[str, _TaskHere] = {}
        self.processes: dict[tuple[str, Worker], WorkerProcess] = {}
        self.progress = ProgressWatch(limits or DetectorLimits())
        self._rings: dict[str, RingWatch] = {}
        self._greeting: dict[int, tuple[socket.socket, Unpacker]] = {}
        self._bell = Bell()
        self._dying: dict[tuple[str, Worker], WorkerProcess] = {}
        self._starts: dict[tuple[str, Worker], msg.StartProcess] = {}  # that wait for a death

    # -------------------------------------------------------------- life

    def open(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "agent"))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.loop.watch(self._listener.fileno(), self._accept)
        self.loop.watch(self._bell.fd, self._rung)

    def close(self) -> None:
        """End every process still there, at once."""
        self.loop.unwatch(self._bell.fd)
        self._starts.clear()
        for process in [*self.processes.values(), *self._dying.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.child.pid, signal.SIGKILL)
            self._bury(process)
        for fd, (sock, _) in list(self._greeting.items()):
            self.loop.unwatch(fd)
            sock.close()
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._bell.close()
        self.shelf.close()

    def tick(self, now: float) -> None:
        """A few times a second: has everybody moved, and do those who were asked to end, end?"""
        for process in list(self.processes.values()) if self._detect else ():
            self._look(process, now)
        for name in self.tasks if self._detect else ():
            self._look_into_rings(name, now)
        for name, task in list(self.tasks.items()):
            if task.closing and now >= task.deadline:
                self._press(name, task, now)

    def nursery_of(self, task: str) -> ForkServer:
        return self._nursery(self.tasks[task].job)

    def words(self, task: str, worker: Worker) -> Path:
        """The file with what a worker printed."""
        folder = self._words or self.folder
        here = self.tasks[task].job
        if here.log is not None:
            folder = here.path(here.log)
        folder.mkdir(parents=True, exist_ok=True)
        prefix = "" if here.log is not None else f"{task}-"
        return folder / f"{prefix}worker-{worker.replica}-{worker.stage}.log"

    def readings(self, task: str) -> dict[Worker, Reading | None]:
        """What every live worker of a task is doing right now."""
        return {worker: p.beacon.read() for (name, worker), p in self.processes.items() if name == task}

    def kill(self, task: str, worker: Worker) -> None:
        """SIGKILL, and remember when."""
        process = self.processes[task, worker]
        process.killed_at = time.monotonic()
        os.kill(process.child.pid, signal.SIGKILL)

    def plant(self, task: str, worker: Worker, faults: tuple[str, ...]) -> None:
        """These faults and no others, from now on, in this life of the worker: for demonstrations."""
        self._tell(self.processes[task, worker], PlantFaults(faults=faults))

    # -------------------------------------------------------------- orders

    def carry_out(self, order: msg.Order) -> None:
        match order:
            case msg.OpenTask():
                job = Job.from_dict(order.job)
                self.tasks[order.task] = _TaskHere(job, order.secret, order.script, order.faults)
                self.shelf.open_task(order.task, order.secret)
            case msg.OpenMemory():
                self.shelf.open_task(order.task, order.secret)
            case msg.DropCopies():
                self.shelf.drop(order.task, order.before)
            case msg.StartProcess():
                self._start(order)
            case msg.KillProcess():
                self._kill(order)
            case msg.NotifyWorker():
                self._pass_on(order)
            case msg.CloseTask():
                self._close_task(order)
            case msg.KeepOnly():
                for process in list(self.processes.values()):
                    if (process.task, process.worker, process.incarnation) not in order.keep:
                        os.kill(process.child.pid, signal.SIGKILL)
            case msg.FindCheckpoint() | msg.CommitCheckpoint():
                for report in self.at_leisure(order):
                    self.report(report, None)
            case _:
                assert_never(order)

    def _start(self, order: msg.StartProcess) -> None:
        if (order.task, order.worker) in self._dying or (order.task, order.worker) in self.processes:
            self._starts[order.task, order.worker] = order
            return
        here, worker = self.tasks[order.task], order.worker
        here.closing = ""
        name = f"{order.task}-{worker.replica}-{worker.stage}-{order.incarnation}"
        path = self.folder / f"beacon-{name}"
        beacon = Beacon(path, create=True)
        lifeline = Lifeline(path.with_suffix(".life"), create=True)
        first = order.incarnation == 1
        spec = {
            "task": order.task,
            "worker": str(worker),
            "incarnation": order.incarnation,
            "agent": str(self.folder / "agent"),
            "token": here.secret,
            "host": self.host,
            "beacon": str(path) if self._detect else None,
            "lifeline": str(path.with_suffix(".life")) if self._detect else None,
            "faults": [f for f in here.faults if first and parse_fault(f).worker == worker],
            "script": list(here.script) or None,
            "job": here.job.to_dict(),
            "node": self.node,
            "slot": order.slot,
            "shelf": str(self.shelf.folder),
        }
        child = self._nursery(here.job).spawn(spec, output=self.words(order.task, worker))
        process = WorkerProcess(order.task, worker, order.incarnation, child, beacon, lifeline)
        self.processes[order.task, worker] = process
        self.loop.watch(child.pidfd, lambda: self._exited(process))

    def _kill(self, order: msg.KillProcess) -> None:
        place = order.task, order.worker
        process, waiting = self.processes.get(place), self._starts.get(place)
        if process is not None and process.incarnation == order.incarnation:
            os.kill(process.child.pid, signal.SIGKILL)
        elif waiting is not None and waiting.incarnation == order.incarnation:
            del self._starts[place]
            exited = ev.WorkerExited(
                worker=order.worker, incarnation=order.incarnation, reason="ended before it was started"
            )
            sender = msg.Sender(order.task, order.worker, order.incarnation)
            self.report(msg.TaskEvent(task=order.task, event=exited), sender)

    def _pass_on(self, order: msg.NotifyWorker) -> None:
        process = self.processes.get((order.task, order.worker))
        if process is not None:
            self._tell(process, order)

    def _close_task(self, order: msg.CloseTask) -> None:
        here = self.tasks.get(order.task)
        if here is None:
            return
        here.closing = "finish" if order.gently else "stop"
        here.deadline = time.monotonic() + (FINISH_S if order.gently else STOP_S)
        for process in self._of(order.task):
            self._tell(process, EndWorker(gently=order.gently))

    def _press(self, name: str, task: _TaskHere, now: float) -> None:
        """They had their time."""
        left = list(self._of(name))
        if not left:
            task.closing = ""
        elif task.closing == "finish":
            task.closing, task.deadline = "stop", now + STOP_S
            for process in left:
                self._tell(process, EndWorker(gently=False))
        else:
            for process in left:
                os.kill(process.child.pid, signal.SIGKILL)

    def at_leisure(self, order: msg.FindCheckpoint | msg.CommitCheckpoint) -> list[msg.NodeReport]:
        """Work on the disk, which may take long; touches nothing of the crew, so any thread may do it."""
        if isinstance(order, msg.FindCheckpoint):
            try:
                found = Checkpoints(Job.from_dict(order.job)).newest(order.known)
            except NoStart as error:
                because = str(error)
                unusable = msg.CheckpointUnusable(
                    task=order.task, because=because, passing=error.passing, search=order.search
                )
                return [unusable]
            step, refused = found.step, found.refused
            return [msg.CheckpointFound(task=order.task, step=step, refused=refused, search=order.search)]
        checkpoints = Checkpoints(self.tasks[order.task].job)
        checkpoints.commit(order.step, list(order.parts))
        return [msg.TaskEvent(task=order.task, event=ev.CheckpointCommitted(step=order.step))]

    def _tell(self, process: WorkerProcess, order: WorkerOrder) -> None:
        if process.line is None:
            return
        with contextlib.suppress(OSError):  # it is dying: its pidfd says so
            process.line.sendall(pack(order))

    def _of(self, task: str) -> Iterator[WorkerProcess]:
        return (process for process in list(self.processes.values()) if process.task == task)

    # -------------------------------------------------------------- words

    def _accept(self) -> None:
        """Processes call. Their first words say which one each is."""
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(True)
                fd = sock.fileno()
                self._greeting[fd] = (sock, Unpacker(FromWorker))
                self.loop.watch(fd, lambda fd=fd: self._greet(fd))  # type: ignore[misc]

    def _greet(self, fd: int) -> None:
        sock, unpacker = self._greeting[fd]
        try:
            data = sock.recv(1 << 12, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        try:
            hello = next(unpacker.feed(data), None)
        except PeerError:
            hello, data = None, b""
        if hello is None and data:
            return
        self.loop.unwatch(fd)
        del self._greeting[fd]
        process = None
        if isinstance(hello, WorkerHello) and hello.protocol == PROTOCOL:
            process = self.processes.get((hello.task, hello.worker))
        if process is None or hello is None or process.child.pid != hello.pid:
            sock.close()
            return
        process.line, process.unpacker = sock, unpacker
        self.loop.watch(fd, lambda: self._listen(process))
        if self._detect:
            process.lifeline.watch(lambda: self._bell.ring(process))
        self._heard(process, b"")

    def _listen(self, process: WorkerProcess) -> bool:
        """Hear what there is. False: nothing now."""
        if process.line is None:
            return False
        try:
            data = process.line.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self._hang_up(process)
            return False
        try:
            self._heard(process, data)
        except PeerError as error:  # nothing it says can be relied on
            process.raised = clipped(f"said what is no report: {error}")
            self._hang_up(process)
            os.kill(process.child.pid, signal.SIGKILL)
            return False
        return True

    def _heard(self, process: WorkerProcess, data: bytes) -> None:
        for said in process.unpacker.feed(data):
            match said:
                case msg.TaskEvent(event=ev.WorkerRaised(error=error)):
                    process.raised = f"raised {error}"
                case msg.TimesReported(times=times):
                    self.progress.expects(process.task, process.worker, times)
            if not isinstance(said, WorkerHello):
                self.report(said, process.sender)

    def _hang_up(self, process: WorkerProcess) -> None:
        if process.line is not None:
            self.loop.unwatch(process.line.fileno())
            process.line.close()
            process.line = None

    # -------------------------------------------------------------- deaths and delays

    def _rung(self) -> None:
        for process in self._bell.take():
            assert isinstance(process, WorkerProcess)
            self._died(process)

    def _exited(self, process: WorkerProcess) -> None:
        """The process is gone for good."""
        self._died(process)
        self._bury(process)
        waiting = self._starts.pop((process.task, process.worker), None)
        if waiting is not None:
            self._start(waiting)

    def _died(self, process: WorkerProcess) -> None:
        """It is dead. Hear its last words first; it may have died at the door."""
        if process.dead:
            return
        if process.line is None:
            self._accept()
            for fd in list(self._greeting):
                self._greet(fd)
        while self._listen(process):
            pass
        reading = process.beacon.read()
        reason = process.raised or exit_reason(process.child.pid)
        process.dead = True
        del self.processes[process.task, process.worker]
        self._dying[process.task, process.worker] = process
        killed_at = process.killed_at
        if killed_at is None and reading is not None and reading.doing.startswith(_PLANTED):
            killed_at = reading.at_ns / 1e9
        self.report(
            msg.TaskEvent(
                task=process.task,
                event=ev.WorkerExited(
                    worker=process.worker,
                    incarnation=process.incarnation,
                    reason=reason,
                    done_ops=reading.done if reading is not None else 0,
                    killed_at=killed_at,
                ),
            ),
            process.sender,
        )

    def _bury(self, process: WorkerProcess) -> None:
        self.loop.unwatch(process.child.pidfd)
        self._nursery(self.tasks[process.task].job).reap(process.child)
        self._hang_up(process)
        process.beacon.close()
        self.progress.forget(process.task, process.worker)
        for table in (self.processes, self._dying):
            if table.get((process.task, process.worker)) is process:
                del table[process.task, process.worker]

    def _look_into_rings(self, task: str, now: float) -> None:
        rings = {p.worker: p.beacon.path.with_name(f"{p.beacon.path.name}.ring") for p in self._of(task)}
        if len(rings) < 2:
            return
        replicas = self.tasks[task].job.replicas
        if task not in self._rings or self._rings[task].replicas != replicas:
            self._rings[task] = RingWatch(task, replicas)
        for news in self._rings[task].look(rings, now):
            watched = self.processes.get((task, news.worker))
            if watched is not None:
                self.report(news, watched.sender)

    def _look(self, process: WorkerProcess, now: float) -> None:
        reading = process.beacon.read()
        if reading is None:
            return
        glance = Glance(
            moment=reading.at_ns,
            step=reading.step,
            busy=reading.busy,
            doing=reading.doing,
            age_s=max(0.0, now - reading.at_ns / 1e9),
        )
        still = self.progress.stands_still(process.task, process.worker, glance)
        if not still:
            process.active_since = None
        active_s = 0.0
        if still and glance.busy and glance.age_s > ASK_KERNEL_S:  # many small files: not for every op
            active = _active_s(process.child.pid)
            process.active_since = active if process.active_since is None else process.active_since
            active_s = active - process.active_since
        report = self.progress.look(
            process.task,
            process.worker,
            process.incarnation,
            glance,
            stopped=still and glance.age_s > SOON_S and _stopped(process.child.pid),
            now=now,
            active_s=active_s,
        )
        if report is not None:
            self.report(report, process.sender)


def _active_s(pid: int) -> float:
    """For how long its threads have run or stood in line for a CPU, since they were born."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):
            ran, waited, _ = path.read_text().split()
            total += int(ran) + int(waited)
    return total / 1e9


def _stopped(pid: int) -> bool:
    """Does the kernel say this process is stopped, as by SIGSTOP?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
