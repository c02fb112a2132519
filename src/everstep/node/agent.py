"""The agent of a node: its worker processes, and one WebSocket to the coordinator.

`core.agent` decides; here its decisions meet processes (`WorkerProcesses`) and the line. The line may break
at any moment, for as long as it likes: workers keep training, reports are kept, and when it is back both
sides say up to where they have heard.

    agent ──► {"hello": …, "done": 7, …}       coordinator ──► {"welcome": …, "heard": 12}
          ──► {"number": 13, "report": …}                  ──► {"heard": 13}
          ──► {"beat": …, "done": 8}                       ──► {"number": 8, "order": …, "because": …}
          ──► {"left": true}      its last word, if it ends in good order
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from everstep import outbound
from everstep.core.agent import agent_messages as ag
from everstep.core.agent.agent import (
    AgentEvent,
    AgentSaid,
    AgentState,
    LeaveLine,
    LineClosed,
    LineEvent,
    LineOpened,
    OrderHeard,
    ReportsKept,
)
from everstep.core.faults.detector import DetectorLimits
from everstep.core.faults.severity import ErrorKind, judge
from everstep.core.faults.xids import place_of_xid
from everstep.drive.order_lines import unpacked
from everstep.errors import PeerError, UserError, clipped
from everstep.job.compiling import why_unable
from everstep.log import say, warn
from everstep.net.sockets import watch_path
from everstep.net.strangers import StrangerLimit
from everstep.node.agent_record import AgentRecord, Left, line_row, report_row
from everstep.node.cloud_notice import ASK_EVERY_S, CloudNotice
from everstep.node.coordinator_address import current
from everstep.node.fork_server import WARM_S, ForkServer, InheritedServer, Lasting
from everstep.node.leave_notice import LOOK_S, LeaveNotice
from everstep.node.recent_ops import recorded
from everstep.node.slot_devices import JobFiles, NodeDevices, slots_named
from everstep.node.stacks import stacks_of
from everstep.node.worker_processes import AgentSide, NodeSettings, TaskHere, WorkerProcesses
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.ops import parse_worker
from everstep.protocol.table import PROTOCOL
from everstep.ranks.snapshots import remove_left_files
from everstep.store.memory_server import MemoryServer
from everstep.store.owned_folders import share, temporary_folder
from everstep.store.unix_users import UnixUser, UserTable
from everstep.traffic import NodeTraffic

BEAT_EVERY_S = 0.25
LOOK_EVERY_S = 0.02
PING_S = 8.0  # unanswered for half as long: a machine that lost its power closes no connection
ELSEWHERE_MS = 3_000  # of several coordinators, one whose machine acknowledges nothing for so long is left
ASK_LEADER_S = 1.0
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
ALONE_S = 3.0  # without a coordinator an agent that was told to end waits no longer than this
QUIET_S = 0.2  # after the last of its workers has gone: a commit of their state may be ordered here
MAX_MESSAGE = 64 << 20
MOST_ON_STORAGE = 4  # threads that wait for file systems
SOON_S = 1.0  # for a fork server of the agent before to say who its children are
STUCK_S = 10.0  # without a look at its workers, after which the agent is not alive


# Threads, modules, whether it trains, user, Python.
ServerKey = tuple[int, tuple[str, ...], bool, UnixUser | None, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    node: str
    slots: int
    coordinators: Sequence[str]  # http(s) addresses, or @FILE that holds one now; tried in turn
    host: str = "127.0.0.1"  # where this node's workers are reached by their peers
    bind: str = ""  # where they listen, if that is another address
    token: Callable[[], str] = lambda: ""  # asked at every attempt: a file may hold another one by then
    tls: Callable[[], ssl.SSLContext | None] = lambda: None  # asked, too: certificates are replaced
    beat_s: float = BEAT_EVERY_S
    words: Path | None = None  # a folder for what workers print
    traffic: NodeTraffic | None = None  # workers follow the coordinator's routes
    notice: Path | None = None  # a file that says when this machine will be taken away
    cloud: str = ""  # the provider whose notices are asked for
    order: int = 0  # of this node among those of a script task; the first one has rank 0
    grace_s: float = 25.0  # for its workers to leave with their state safe, once the agent is told to end
    limits: DetectorLimits = field(default_factory=DetectorLimits)
    checks: tuple[msg.CheckResult, ...] = ()  # what was found before it joins
    other_checks: tuple[str, ...] = ()  # options of `everstep check`, for later ones
    checks_network: bool = False  # it gets no workers before its network is checked
    state: Path | None = None  # where workers wait for the next agent; None: they end with this one
    alone_s: float = 120.0  # and for how long
    job_files: Path | None = None  # where dcgm-exporter reads which task is on which GPU
    rack: str = ""  # it shares power or a switch with the nodes that say the same
    probe_port: int = 0  # where a launcher asks how it is; 0: nowhere
    users: UserTable | None = None  # as whom the workers of each owner run; None: as the agent


def probed(path: str, *, has_joined: bool, is_joined: bool, looked_s: float) -> tuple[int, str]:
    """Kubernetes' three questions, as HTTP status and sentence. An agent without a coordinator lives: its
    workers keep training, and a restart would end them.
    """
    if path == "/live":
        if looked_s > STUCK_S:
            return 503, f"the agent has not looked at its workers for {looked_s:.0f} s"
        return 200, "alive"
    if path == "/startup":
        return (200, "started") if has_joined else (503, "it has not joined a coordinator yet")
    if path == "/ready":
        return (200, "joined") if is_joined else (503, "it is not connected to a coordinator")
    return 404, "ask for /startup, /ready or /live"


class Agent:
    def __init__(
        self,
        settings: AgentSettings,
        *,
        say: Callable[[str], None] = say,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self.settings, self.say, self.warn = settings, say, warn
        self._record: AgentRecord | None = None
        self._recorded: dict[str, Any] = {}  # the last image
        self._num_recorded = self._num_kept = 0  # the last report; the last one that the coordinator has
        self._is_changed = False  # since then, perhaps
        self._is_replaced = asyncio.Event()
        self._inherited: list[InheritedServer] = []  # fork servers of the agent before
        self._late: list[InheritedServer] = []  # that have not said yet who their children are
        self._opened: list[msg.OpenTask | msg.OpenMemory] = []
        self._warm: bool | None = (
            None  # a fork server is started at once: for workers, or for keepers of ranks
        )
        self.boot = secrets.token_hex(8)
        self._cannot_compile = why_unable("cuda")  # once: it looks at disks
        ahead_s = time.time() - time.monotonic()  # workers speak monotonic time; the coordinator, wall time
        self.state = AgentState(detector=settings.limits, ahead_s=ahead_s)
        self.devices = NodeDevices()
        self._job_files = None if settings.job_files is None else JobFiles(settings.job_files)
        self._mapped: dict[int, set[str]] | None = None  # tasks by slot, as last written
        self._news = asyncio.Event()
        self._servers: dict[ServerKey, ForkServer] = {}
        self._welcomed = False
        self._troubles: dict[str, str] = {}  # by address: why it is not connected, as last printed
        self._beside: set[asyncio.Task[None]] = set()
        self._storage_turns = asyncio.Semaphore(MOST_ON_STORAGE)
        self._line: aiohttp.ClientWebSocketResponse | None = None
        self._alone_since = 0.0
        self._told_to_end = asyncio.Event()
        self._leaves_because = ""
        self._noticed = False
        self._has_joined = False
        self._looked_at = time.monotonic()

    async def run(self) -> None:
        """Until cancelled, or until it has left. Workers end with the agent, unless it has a folder for its
        state: then only if it was told to leave.
        """
        if self.settings.state is None:
            with (
                temporary_folder("everstep-node-") as folder,
                temporary_folder("everstep-beacons-", in_memory=True) as memory,
            ):
                await self._run(folder, memory, None)
            return
        folder = self.settings.state.absolute()
        record = AgentRecord(folder)
        left = await asyncio.to_thread(self._what_is_left, record, folder)
        self._record = record
        await self._run(folder, folder, left)  # beacons outlive the agent

    def hand_over(self) -> None:
        """End at once; the workers train on, and wait for the next agent."""
        self._is_replaced.set()

    def _what_is_left(self, record: AgentRecord, folder: Path) -> Left | None:
        """By the agent before. What cannot be used is ended."""
        left: Left | None = None
        try:
            left = record.read()
        except (OSError, ValueError, KeyError, TypeError, PeerError) as error:
            self.warn(f"the record in {folder} is of no use ({error}): the workers of the agent before end")
        there = [
            server
            for path in folder.glob("fork-*")
            if path.is_socket() and (server := InheritedServer(path)).ask()
        ]
        # Else its processes are found by their numbers, and a server that is late can be waited for later.
        waits = left is not None and any(not each["is_up"] for each in left.image["processes"])
        with ThreadPoolExecutor(len(there) or 1) as pool:
            answers = list(pool.map(lambda one: one.answers(WARM_S if waits else SOON_S), there))
        self._inherited = [server for server, answered in zip(there, answers, strict=True) if answered]
        self._late = [server for server in there if server not in self._inherited]
        (folder / "agent").unlink(missing_ok=True)
        if left is None:
            for server in there:
                server.close()
            self._inherited, self._late = [], []
            for path in (*folder.glob("beacon-*"), *folder.glob("of-*/beacon-*")):
                path.unlink(missing_ok=True)
            return None
        return left

    def leave(self, because: str) -> None:
        """Let the workers go with their state safe, as a drain does, then end; within the grace period."""
        self._leaves_because = because
        self._told_to_end.set()

    def notice(self, leaves_in_s: float, by: str) -> None:
        """This machine will be taken away. Said twice, it counts once: a scheduler may tell several of us."""
        if not self._noticed:
            self._noticed = True
            self.say(f"node {self.settings.node} leaves in {leaves_in_s:.0f} s, says {by}")
            self._report(msg.LeaveNoticed(leaves_in_s=leaves_in_s, by=by), None)

    async def _run(self, folder: Path, memory: Path, left: Left | None) -> None:
        probes = await self._answer_probes() if self.settings.probe_port else None
        node = NodeSettings(
            folder=folder,
            memory=memory,
            node=self.settings.node,
            host=self.settings.host,
            bind=self.settings.bind,
            slots=self.settings.slots,
            logs=self.settings.words,
            traffic=self.settings.traffic,
            order=self.settings.order,
            other_checks=self.settings.other_checks,
            alone_s=0.0 if self._record is None else self.settings.alone_s,
            users=self.settings.users,
        )
        if self.settings.users is not None:  # they may enter, and see nothing
            folder.chmod(0o711)
            memory.chmod(0o711)
        self.workers = WorkerProcesses(
            node,
            loop=_Loop(asyncio.get_running_loop()),
            machine=self.state.processes,
            report=self._report,
            fork_server=self._fork_server,
            agent=AgentSide(
                decide=self._decide,
                beside=self._do_beside,
                on_storage=self._do_on_storage,
                devices=self.devices,
                on_record=self._commit,
            ),
        )
        if left is not None:
            self._continue(left)
        if self._record is not None:
            share(self.workers.memory.lock)
        self.workers.open()
        self.workers.pairs.open()
        # Now: when a GPU breaks, its slots must be known, and nvidia-smi may no longer answer.
        self._do_beside(self.devices.find, lambda found: None)
        self._do_beside(remove_left_files, lambda found: None)
        port = 0 if left is None else left.memory_port
        self._door = MemoryServer(self.workers.memory, self.settings.bind or self.settings.host, port)
        self._door.open()
        if self._record is not None:
            self._write_record()
        kernel = KernelLog()
        if kernel.fd is not None:
            asyncio.get_running_loop().add_reader(kernel.fd, kernel.read, self._kernel_spoke)
        else:
            self.warn(
                f"node {self.settings.node}: the kernel's log cannot be read ({kernel.error}): errors "
                "of GPUs and memory go unheard; give the agent CAP_SYSLOG, or read access to it"
            )
        if self._warm is not None and self.settings.users is None:  # else it is not known whose it will be
            self._started((1, (), self._warm, None, ()))
        self._look()
        if self.settings.notice is not None:
            notice = LeaveNotice(self.settings.notice, self.warn)
            self._beside.add(asyncio.create_task(self._look_for_notice(notice, LOOK_S)))
        if self.settings.cloud:
            cloud = CloudNotice(self.settings.cloud, self.warn)
            self._beside.add(asyncio.create_task(self._look_for_notice(cloud, ASK_EVERY_S)))
        ends = [
            asyncio.create_task(self._stay_connected()),
            asyncio.create_task(self._has_left()),
            asyncio.create_task(self._is_replaced.wait()),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._next_look.cancel()
            for task in (*ends, *self._beside):
                task.cancel()
            if probes is not None:
                await probes.cleanup()
            self._door.close()
            if lasts := self._record is not None and not self._told_to_end.is_set():
                self._let_go()
            else:
                self.workers.close()
            if kernel.fd is not None:
                asyncio.get_running_loop().remove_reader(kernel.fd)
                kernel.close()
            if not lasts:
                servers: list[ForkServer | InheritedServer] = [*self._servers.values(), *self._inherited]
                for server in servers:
                    server.close()
                if self._record is not None:
                    self._record.remove()

    # -------------------------------------------------------------- what it leaves to the next agent

    def _continue(self, left: Left) -> None:
        """As the agent before, under its name for this boot."""
        workers, now = self.workers, time.monotonic()
        self.boot = left.boot
        self.state.restore(left.image, now)
        self.state.reports.restore(left.reports.values(), left.number)
        if not workers.memory.adopt(Path(left.memory)):
            self.warn(f"node {self.settings.node}: the copies of states in memory are gone")
        workers.lines.counts.update(left.counts)
        workers.adopt(self._inherited, left.opened.values())
        for late in self._late:
            self._do_beside(late.answers, lambda found, late=late: workers.attach(late))  # type: ignore[misc]
        self._inherited = [server for server in (*self._inherited, *self._late) if server.is_open]
        self.say(f"node {self.settings.node} takes over {len(workers.processes)} workers of the agent before")

    def _commit(self) -> None:
        """Whatever was decided or heard is on record when this returns."""
        if self._record is None or not self._record.is_open:
            return
        reports = self.state.reports
        line: dict[str, Any] = {}
        if reports.number != self._num_recorded:
            line["reports"] = [
                report_row(kept) for kept in reports.after(self._num_recorded, at_most=1 << 30)
            ]
            line["number"] = self._num_recorded = reports.number
        if reports.num_heard != self._num_kept:
            line["kept"] = self._num_kept = reports.num_heard
        if self._is_changed:
            self._is_changed = False
            if (image := self.state.image()) != self._recorded:
                line["image"] = self._recorded = image
        if news := self.workers.lines.news():
            line["lines"] = [line_row(sender, *one) for sender, one in news.items()]
        if self.workers.opened:
            line["opened"] = [encode(order) for order in self.workers.opened]
            self._opened += self.workers.opened
            self.workers.opened = []
        if line and not self._put(lambda record: record.append(line)):
            self._write_record()

    def _write_record(self) -> None:
        """All of it."""
        reports, lines = self.state.reports, self.workers.lines
        lines.news()
        opened = {
            f"{type(order).__name__} {order.task}": order for order in (*self._opened, *self.workers.opened)
        }
        self._opened, self.workers.opened = list(opened.values()), []
        self._recorded, self._is_changed = self.state.image(), False
        self._num_recorded, self._num_kept = reports.number, reports.num_heard
        line = {
            "boot": self.boot,
            "memory": str(self.workers.memory.folder),
            "memory_port": self._door.port,
            "image": self._recorded,
            "opened": [encode(order) for order in self._opened],
            "reports": [report_row(kept) for kept in reports.after(0, at_most=1 << 30)],
            "number": reports.number,
            "lines": [line_row(sender, one, list(one.kept)) for sender, one in lines.counts.items()],
        }
        self._put(lambda record: record.rewrite(line))

    def _put(self, write: Callable[[AgentRecord], bool]) -> bool:
        """A record that cannot be written would be wrong: the next agent must not believe it. False: write
        all of it again.
        """
        assert self._record is not None
        try:
            return write(self._record)
        except OSError as error:
            self.warn(
                f"node {self.settings.node}: {self.settings.state} cannot be written ({error.strerror}): if "
                "this agent is replaced, its workers end"
            )
            record, self._record = self._record, None
            with contextlib.suppress(OSError):
                record.remove()
            return True

    def _let_go(self) -> None:
        self._commit()
        self.say(f"node {self.settings.node} leaves {len(self.workers.processes)} workers to the next agent")
        self.workers.let_go()
        for server in self._inherited:
            server.let_go()

    def warm_up(self, *, trains: bool = True) -> None:
        """Load torch before the first worker is asked for; for a script's ranks, what their keeper needs."""
        self._warm = trains

    # -------------------------------------------------------------- decisions

    def _decide(self, event: AgentEvent, now: float) -> Sequence[Any]:
        last = self.state.reports.number
        self._is_changed = self._is_changed or not _leaves_no_trace(event)
        try:
            return self.state.handle(event, now)
        finally:
            if self.state.reports.number != last:  # most looks at workers find nothing to report
                self._news.set()

    def _report(self, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        self._decide(AgentSaid(report, sender), time.monotonic())

    def _kernel_spoke(self, text: str) -> None:
        slots: tuple[int, ...] = ()
        if (place := place_of_xid(text)) is not None:
            pids = self.workers.slots_by_pid()
            slots = slots_named(place, self.devices.known, slots=self.settings.slots, pids=pids)
        self._report(msg.KernelSpoke(text=text, slots=slots), None)

    def _look(self) -> None:
        """And again later, by a timer: a task that sleeps takes two turns of the loop for each look."""
        try:
            self._looked_at = time.monotonic()
            if not self.workers.passes_over(self._looked_at):
                self.workers.tick(self._looked_at)
                self._tell_dcgm()
        finally:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _tell_dcgm(self) -> None:
        if (files := self._job_files) is None or not (devices := self.devices.known):
            return
        tasks = self.workers.tasks_by_slot()
        if tasks != self._mapped:
            self._mapped = tasks
            self._do_on_storage(lambda: files.write(devices, tasks), lambda done: None)

    async def _answer_probes(self) -> web.AppRunner:
        async def answer(request: web.Request) -> web.Response:
            status, text = probed(
                request.path,
                has_joined=self._has_joined,
                is_joined=self._line is not None,
                looked_s=time.monotonic() - self._looked_at,
            )
            return web.Response(status=status, text=f"{text}\n")

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = StrangerLimit().runner(app)
        await runner.setup()
        host, port = self.settings.bind or self.settings.host, self.settings.probe_port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise UserError(f"--probe-port {port} on {host} cannot be used: {error.strerror}.") from None
        return runner

    async def _look_for_notice(self, notice: LeaveNotice | CloudNotice, every_s: float) -> None:
        """In a thread: a file system or a metadata service may hang."""
        while True:
            if (found := await asyncio.to_thread(notice.look)) is not None:
                self.say(f"node {self.settings.node} leaves in {found.leaves_in_s:.0f} s, says {found.by}")
                self._report(found, None)
            await asyncio.sleep(every_s)

    def _fork_server(self, task: TaskHere) -> ForkServer:
        needs, trains = task.needs, task.ranks is None
        return self._started((needs.threads, needs.modules, trains, task.user, needs.python))

    def _started(self, key: ServerKey) -> ForkServer:
        if key not in self._servers:
            threads, modules, trains, user, python = key
            lasts = None
            if self.settings.state is not None:
                folder, keep = self.settings.state.absolute(), (self.workers.memory.lock,)
                name = "" if user is None else f"{user.name}-"
                lasts = Lasting(folder=folder, alone_s=self.settings.alone_s, keep=keep, user=name)
            made = ForkServer(
                threads=threads, preload=modules, trains=trains, lasts=lasts, user=user, python=python
            )
            self._servers[key] = made.start()
        return self._servers[key]

    async def _has_left(self) -> None:
        await self._told_to_end.wait()
        node, grace_s, workers = self.settings.node, self.settings.grace_s, len(self.workers.processes)
        first = f"; its {workers} workers leave first, within {grace_s:g} s" if workers and grace_s else ""
        self.say(f"node {node} leaves: {self._leaves_because}{first}")
        if grace_s:
            self._report(msg.LeaveNoticed(leaves_in_s=grace_s, by=self._leaves_because, at_once=True), None)
        until, quiet_at = time.monotonic() + grace_s, time.monotonic()
        while (now := time.monotonic()) < until and now < quiet_at + QUIET_S:
            if self._line is None and now > self._alone_since + ALONE_S:
                break
            if not self.workers.is_idle or self.state.reports.num_awaited:
                quiet_at = now
            await asyncio.sleep(LOOK_EVERY_S)
        self.workers.happened(ag.AgentEnds())
        while self.workers.works_on_disk and time.monotonic() < until:
            await asyncio.sleep(LOOK_EVERY_S)
        if workers := len(self.workers.processes):
            self.warn(f"node {node} ends, and with it {workers} workers")
        if self._line is not None:
            with contextlib.suppress(OSError, aiohttp.ClientError):
                await self._line.send_str(json.dumps({"left": True}))
                await self._line.close()

    def _do_on_storage(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Apart from what else is done beside: a file system that hangs keeps its threads, and nothing else
        may wait for one of them, nor the end of this process.
        """
        self._do_beside(work, done, apart=True)

    def _do_beside(
        self, work: Callable[[], Any], done: Callable[[Any], None], *, apart: bool = False
    ) -> None:
        """In a thread: heartbeats and healing must continue meanwhile."""

        async def run() -> None:
            try:
                if apart:
                    async with self._storage_turns:
                        found = await _in_own_thread(work)
                else:
                    found = await asyncio.to_thread(work)
            except Exception as error:
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                self.warn(f"node {self.settings.node}: {kind}{error}")
                found = error
            done(found)

        task = asyncio.get_running_loop().create_task(run())
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    # -------------------------------------------------------------- the line

    async def _stay_connected(self) -> None:
        """Until it is told to end. No word of a coordinator and no fault of the line ends workers: only an
        order does.
        """
        wait, turn = RETRY_FIRST_S, 0
        async with outbound.session() as session:
            while True:
                known = [current(place) for place in self.settings.coordinators]
                address = known[turn % len(known)]
                if len(known) > 1:
                    address = await self._leader(session, known) or address
                self._welcomed = False
                reason, began = "it has closed the line", time.monotonic()
                try:
                    if address:
                        await self._connected(session, address)
                except Exception as error:  # the main loop: whatever it is, the workers train on
                    reason = _plain(error)
                if address:
                    self._tell_trouble(address, reason)
                if self._welcomed and time.monotonic() - began > RETRY_MOST_S:
                    wait = RETRY_FIRST_S
                await asyncio.sleep(wait * random.uniform(0.75, 1.25))
                wait, turn = min(wait * 2, RETRY_MOST_S), turn + 1

    async def _leader(self, session: aiohttp.ClientSession, known: Sequence[str]) -> str:
        """Which of several coordinators leads; empty: none says so. All are asked at once: in turn, each one
        whose machine is gone would be waited for.
        """

        async def leads(address: str) -> str:
            url, context = f"{address.rstrip('/')}/v1/ready", None
            if address.startswith("https"):
                context = self.settings.tls()
            async with session.get(url, ssl=context or True) as answer:
                return address if answer.status == 200 else ""

        asked = [asyncio.create_task(leads(address)) for address in known if address]
        found = ""
        try:
            for each in asyncio.as_completed(asked, timeout=ASK_LEADER_S):
                with contextlib.suppress(aiohttp.ClientError, OSError, UserError):
                    found = found or await each
                if found:
                    break
        except TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return found

    def _tell_trouble(self, address: str, reason: str) -> None:
        """Once for each reason: it is tried again several times per second."""
        if self._troubles.get(address) == reason:
            return
        self._troubles[address] = reason
        workers = len(self.workers.processes)
        going_on = f"; its {workers} workers keep training" if workers else ""
        node = self.settings.node
        self.warn(f"node {node} is not connected to {address}: {reason}{going_on}; trying again")

    async def _connected(self, session: aiohttp.ClientSession, address: str) -> None:
        token = self.settings.token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        context = self.settings.tls() if address.startswith("https") else None
        url = f"{address.rstrip('/')}/v1/agent"
        timeout = aiohttp.ClientWSTimeout(ws_close=1.0)
        connect = session.ws_connect(
            url,
            headers=headers,
            ssl=context or True,
            max_msg_size=MAX_MESSAGE,
            timeout=timeout,
            heartbeat=PING_S,
        )
        try:
            line = await asyncio.wait_for(connect, 5.0)
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403):
                raise PeerError(
                    "it refuses this agent's token; correct the token file, or start the agent with the "
                    "right --token-file or EVERSTEP_TOKEN: that of this node, or of an admin"
                ) from None
            raise
        _watch(line.get_extra_info("socket"), is_one_of=len(self.settings.coordinators) > 1)
        try:
            await self._converse(line, address)
        finally:
            await line.close()

    async def _converse(self, line: aiohttp.ClientWebSocketResponse, address: str) -> None:
        hello = {
            "node": self.settings.node,
            "boot": self.boot,
            "slots": self.settings.slots,
            "host": self.settings.host,
            "memory_port": self._door.port,
            "protocol": PROTOCOL,
            "checks": [encode(one) for one in self.settings.checks],
            "pair_port": self.workers.pairs.port,
            "checks_network": self.settings.checks_network,
            "journal": self.state.journal,
            "runs": encode(self.state.processes.runs()),
            "alone_s": 0.0 if self._record is None else self.settings.alone_s,
            "rack": self.settings.rack,
            "cannot_compile": self._cannot_compile,
        }
        self._commit()
        facts = {task: facts.epoch for task, facts in self.state.processes.facts.items()}
        done, term = self.state.done, self.state.term
        said = {"hello": hello, "done": done, "facts": facts, "term": term}
        await line.send_str(json.dumps(said))
        welcome = await line.receive_json(timeout=10.0)
        if "refused" in welcome:
            raise PeerError(welcome["refused"])
        if welcome.get("protocol") != PROTOCOL:
            raise PeerError(
                f"the coordinator speaks protocol {clipped(str(welcome.get('protocol')), 20)}, this agent "
                f"{PROTOCOL}; give both the same version of Everstep"
            )
        journal = str(welcome.get("journal", ""))
        self._hear(LineOpened(int(welcome.get("term", 0)), welcome["heard"], journal))
        self._welcomed = self._has_joined = True
        self._troubles.clear()
        self._line = line
        self.say(f"node {self.settings.node} is connected to {address}")
        speaking = asyncio.create_task(self._speak(line, welcome["heard"]))
        beating = asyncio.create_task(self._beat(line))
        try:
            async for message in line:
                if message.type is aiohttp.WSMsgType.ERROR:
                    raise PeerError(f"the connection broke ({message.data or 'no reason is known'})")
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise PeerError("the coordinator sent something that is not text")
                heard = json.loads(message.data)
                if heard.get("what") == "stacks":
                    self._answer_later(line, heard, self._stacks(heard["task"]), self._do_beside)
                elif heard.get("what") == "log":  # the folder of logs may be on a file system that hangs
                    self._answer_later(line, heard, partial(self._answer, heard), self._do_on_storage)
                elif "ask" in heard:
                    await line.send_str(json.dumps({"answer": heard["ask"], "value": self._answer(heard)}))
                else:
                    self._take(heard)
        finally:
            self._line, self._alone_since = None, time.monotonic()
            self._hear(LineClosed())
            speaking.cancel()
            beating.cancel()
            # Not one by one with CancelledError suppressed: it may be our own, and the agent would go on.
            await asyncio.gather(speaking, beating, return_exceptions=True)

    def _take(self, message: dict[str, Any]) -> None:
        term = int(message.get("term", 0))
        if "heard" in message:
            self._hear(ReportsKept(message["heard"], term))
        if "order" in message:
            order = decode(msg.Order, unpacked(message["order"]))
            self._hear(OrderHeard(message["number"], order, term))
        if "routes" in message and self.settings.traffic is not None:
            self.settings.traffic.take(self.workers.settings.folder, message["routes"])

    def _hear(self, event: LineEvent) -> None:
        """Of a coordinator that is deposed nothing counts, and its line is left."""
        self._is_changed = True
        found = self.state.handle(event, time.monotonic())
        self._news.set()
        for left in (action for action in found if isinstance(action, LeaveLine)):
            raise PeerError(left.because)
        self.workers.perform([action for action in found if not isinstance(action, LeaveLine)])

    def _stacks(self, of_task: str) -> Callable[[], list[dict[str, Any]]]:
        """How to read those of a task's workers: each takes a moment."""
        found = {
            str(worker): (process.child.pid, process.beacon.path)
            for (task, worker), process in self.workers.processes.items()
            if task == of_task
        }

        def read() -> list[dict[str, Any]]:
            def one(place: tuple[int, Path]) -> dict[str, Any]:
                with self.workers.acting_for(of_task):
                    return stacks_of(*place)

            with ThreadPoolExecutor(min(32, len(found) or 1)) as pool:
                told = pool.map(one, found.values())
                return [
                    {"worker": worker, "pid": pid} | stacks
                    for (worker, (pid, _)), stacks in zip(found.items(), told, strict=True)
                ]

        return read

    def _answer_later(
        self,
        line: aiohttp.ClientWebSocketResponse,
        asked: dict[str, Any],
        read: Callable[[], Any],
        beside: Callable[[Callable[[], Any], Callable[[Any], None]], None],
    ) -> None:
        async def answer(value: Any) -> None:
            with contextlib.suppress(OSError, aiohttp.ClientError):
                await line.send_str(json.dumps({"answer": asked["ask"], "value": value}))

        def done(value: Any) -> None:
            task = asyncio.get_running_loop().create_task(
                answer({"error": str(value)} if isinstance(value, Exception) else value)
            )
            self._beside.add(task)
            task.add_done_callback(self._beside.discard)

        beside(read, done)

    def _answer(self, asked: dict[str, Any]) -> Any:
        """For people who look: the end of a worker's log, what every worker does now or did lately."""
        with self.workers.acting_for(asked["task"]):
            return self._found(asked)

    def _found(self, asked: dict[str, Any]) -> Any:
        try:
            match asked["what"]:
                case "log":
                    worker = parse_worker(asked["worker"])
                    start = None if asked.get("from") is None else int(asked["from"])
                    return self.workers.logs.read(
                        asked["task"], worker, most=int(asked["bytes"]), start=start
                    )
                case "trace":
                    first, last = int(asked["first"]), int(asked["last"])
                    return {
                        str(worker): recorded(process.beacon.path, first, last)
                        for (task, worker), process in self.workers.processes.items()
                        if task == asked["task"]
                    }
                case "readings":
                    return self.workers.readings_document(asked["task"])
        except (OSError, KeyError, ValueError, UserError) as error:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            return {"error": f"{kind}{error}"}
        return None

    async def _speak(self, line: aiohttp.ClientWebSocketResponse, sent: int) -> None:
        while True:
            self._news.clear()
            self._commit()
            while waiting := list(self.state.reports.after(sent)):
                for kept in waiting:
                    said = {
                        "number": kept.number,
                        "report": encode(kept.report),
                        "sender": encode(kept.sender),
                    }
                    await line.send_str(json.dumps(said))
                    sent = kept.number
            await self._news.wait()

    async def _beat(self, line: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            self._commit()
            said: dict[str, Any] = {"beat": round(time.time(), 3), "done": self.state.done}
            if (traffic := self.settings.traffic) is not None:
                said["traffic"] = traffic.seen
                if (look := traffic.due_look(self.settings.host, time.monotonic())) is not None:
                    self._do_beside(look, traffic.looked)
            await line.send_str(json.dumps(said))
            await asyncio.sleep(self.settings.beat_s)


def _leaves_no_trace(event: AgentEvent) -> bool:
    """A look at a worker, or most of what it says: reports are on record as reports."""
    if isinstance(event, ag.ProcessSpoke):
        said = event.report.event if isinstance(event.report, msg.TaskEvent) else event.report
        return not isinstance(said, ev.WorkerRaised | msg.ShardEnded | msg.OrderTaken)
    return isinstance(event, ag.Glanced | AgentSaid)


def _watch(sock: Any, *, is_one_of: bool) -> None:
    with contextlib.suppress(OSError):
        if sock is not None:
            watch_path(sock)
            if is_one_of:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ELSEWHERE_MS)


async def _in_own_thread(work: Callable[[], Any]) -> Any:
    """Not of a pool: the interpreter waits for those before it ends."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not found.done():
            found.set_result(value) if error is None else found.set_exception(error)

    def run() -> None:
        value, failed = None, None
        try:
            value = work()
        except BaseException as error:  # it belongs to the waiter
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, value, failed)

    threading.Thread(target=run, name="storage", daemon=True).start()
    return await found


class _Loop:
    """An asyncio loop as the loop of worker processes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        self._loop.add_reader(fd, ready)

    def unwatch(self, fd: int) -> None:
        self._loop.remove_reader(fd)


def _plain(error: Exception) -> str:
    """Why a line could not be opened, or broke, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    return str(error) or type(error).__name__


# ------------------------------------------------------------------
# Listens to the kernel's log for lines that name a device's fault (an Xid, an ECC error, a dead disk).

KERNEL_LOG = "/dev/kmsg"
_MAX_LINE = 8192


class KernelLog:
    """From now on; what was said before is not this run's business. Needs read permission on /dev/kmsg."""

    def __init__(self, *, path: str = KERNEL_LOG) -> None:
        self.fd: int | None = None
        self.error = ""  # why there is none
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self.error = f"{path}: {error.strerror}"
            return
        with contextlib.suppress(OSError):
            os.lseek(self.fd, 0, os.SEEK_END)

    def read(self, found: Callable[[str], None]) -> None:
        """All lines there are; `found` gets those that name a fault."""
        assert self.fd is not None
        while True:
            try:
                data = os.read(self.fd, _MAX_LINE)
            except BrokenPipeError:  # lines were overwritten before we read them: continue with the next
                continue
            except OSError:
                return
            if not data:
                return
            text = data.decode(errors="replace").partition(";")[2].partition("\n")[0].strip()
            if text and judge("kernel", text).kind is not ErrorKind.OTHER:
                found(text)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
