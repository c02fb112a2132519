"""The agent of a node: its crew, and one WebSocket to the coordinator.

What the crew reports is numbered and kept until the coordinator has it on disk; orders are numbered by the
coordinator, and one heard twice is carried out once. So the line may break at any moment, for as long as it
likes: workers train on, reports pile up, and when it is back both sides say up to where they have heard.

    agent ──► {"hello": …, "done": 7}          coordinator ──► {"welcome": …, "heard": 12}
          ──► {"number": 13, "report": …}                  ──► {"heard": 13}
          ──► {"beat": …, "done": 8}                       ──► {"number": 8, "order": …, "because": …}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import shutil
import ssl
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from everstep.core.faults.detector import DetectorLimits
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.core.words.codec import decode, encode
from everstep.core.words.ops import parse_worker
from everstep.engine.job import Job
from everstep.errors import EverstepError, PeerError, UserError
from everstep.node.coordinator_address import current
from everstep.node.fork_server import ForkServer
from everstep.node.kernel import KernelLog
from everstep.node.memory_store import MemoryServer
from everstep.node.recent_ops import last_steps
from everstep.node.worker_processes import WorkerProcesses

BEAT_EVERY_S = 0.25
LOOK_EVERY_S = 0.02
PING_S = 8.0  # unanswered for half as long: a machine that lost its power closes no connection
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
MAX_KEPT_REPORTS = 1_000_000  # days of steps without a coordinator, some 300 MB
MAX_MESSAGE = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    node: str
    slots: int
    coordinators: Sequence[str]  # http(s) addresses, or @FILE that holds one now; tried in turn
    host: str = "127.0.0.1"  # where this node's workers are reached by their peers
    token: Callable[[], str] = lambda: ""  # asked at every attempt: a file may hold another one by then
    ca: Path | None = None
    beat_s: float = BEAT_EVERY_S
    words: Path | None = None  # a folder for what workers print
    limits: DetectorLimits = field(default_factory=DetectorLimits)


class Agent:
    def __init__(
        self,
        settings: AgentSettings,
        *,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        self.settings, self.say = settings, say
        self.boot = secrets.token_hex(8)
        self.done = 0  # the last order carried out
        self._taken = 0  # the last order put in line
        self._orders: asyncio.Queue[tuple[int, msg.Order]] = asyncio.Queue()
        self._kept: deque[tuple[int, msg.NodeReport, msg.Sender | None]] = deque()
        self._reports = 0
        self._news = asyncio.Event()
        self._nurseries: dict[tuple[int, tuple[str, ...]], ForkServer] = {}
        self._clock = time.time() - time.monotonic()  # workers speak monotonic; the coordinator, wall time
        self._welcomed = False
        self._troubles: dict[str, str] = {}  # by address: why it is not connected, as last told
        self._term = 0  # of the newest coordinator heard: an older one may not know that it is deposed

    async def run(self) -> None:
        """Until cancelled. Workers end with the agent."""
        folder = Path(tempfile.mkdtemp(prefix="everstep-"))
        self.crew = WorkerProcesses(
            loop=_Loop(asyncio.get_running_loop()),
            report=self._report,
            folder=folder,
            nursery=self._nursery,
            host=self.settings.host,
            node=self.settings.node,
            limits=self.settings.limits,
            words=self.settings.words,
        )
        self.crew.open()
        self._door = MemoryServer(self.crew.shelf, self.settings.host)
        self._door.open()
        kernel = KernelLog()
        if kernel.fd is not None:
            asyncio.get_running_loop().add_reader(kernel.fd, kernel.read, self._kernel_spoke)
        jobs = [asyncio.create_task(self._look()), asyncio.create_task(self._obey())]
        try:
            await self._stay_connected()
        finally:
            for job in jobs:
                job.cancel()
            self._door.close()
            self.crew.close()
            if kernel.fd is not None:
                asyncio.get_running_loop().remove_reader(kernel.fd)
                kernel.close()
            for nursery in self._nurseries.values():
                nursery.close()
            shutil.rmtree(folder, ignore_errors=True)

    def warm_up(self, threads: int = 1) -> None:
        """Load torch before the first worker is asked for."""
        self._nurseries[threads, ()] = ForkServer(threads=threads).start()

    # -------------------------------------------------------------- reports

    def _report(self, report: msg.NodeReport, sender: msg.Sender | None = None) -> None:
        if isinstance(report, msg.TimesReported) and not self._welcomed:
            return  # of no use later
        self._reports += 1
        self._kept.append((self._reports, self._on_wall_time(report), sender))
        if len(self._kept) > MAX_KEPT_REPORTS:
            raise EverstepError(
                f"{MAX_KEPT_REPORTS} reports wait for a coordinator that stays away; the agent gives up"
            )
        self._news.set()

    def _on_wall_time(self, report: msg.NodeReport) -> msg.NodeReport:
        match report:
            case msg.TaskEvent(event=ev.WorkerResumed() as event):
                return replace(report, event=replace(event, at=event.at + self._clock))
            case msg.TaskEvent(event=ev.WorkerExited(killed_at=float(at)) as event):
                return replace(report, event=replace(event, killed_at=at + self._clock))
            case _:
                return report

    def _kernel_spoke(self, text: str) -> None:
        self._report(msg.KernelSpoke(text=text))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.crew.tick(time.monotonic())

    def _nursery(self, job: Job) -> ForkServer:
        key = (job.threads, job.modules())
        if key not in self._nurseries:
            self._nurseries[key] = ForkServer(threads=job.threads, preload=job.modules()).start()
        return self._nurseries[key]

    # -------------------------------------------------------------- the line

    async def _stay_connected(self) -> None:
        """For ever. No word of a coordinator and no fault of the line ends workers: only an order does."""
        wait, turn = RETRY_FIRST_S, 0
        async with aiohttp.ClientSession() as session:
            while True:
                address = current(self.settings.coordinators[turn % len(self.settings.coordinators)])
                self._welcomed = False
                reason, began = "it has closed the line", time.monotonic()
                try:
                    if address:
                        await self._connected(session, address)
                except Exception as error:  # the main loop: whatever it is, the workers train on
                    reason = str(error) or type(error).__name__
                if address:
                    self._tell_trouble(address, reason)
                if self._welcomed and time.monotonic() - began > RETRY_MOST_S:
                    wait = RETRY_FIRST_S
                await asyncio.sleep(wait * random.uniform(0.75, 1.25))
                wait, turn = min(wait * 2, RETRY_MOST_S), turn + 1

    def _tell_trouble(self, address: str, reason: str) -> None:
        """Once for each reason: it is tried again several times per second."""
        if self._troubles.get(address) == reason:
            return
        self._troubles[address] = reason
        workers = len(self.crew.processes)
        going_on = f"; its {workers} workers train on" if workers else ""
        self.say(f"node {self.settings.node} is not connected to {address}: {reason}{going_on}; trying again")

    async def _connected(self, session: aiohttp.ClientSession, address: str) -> None:
        token = self.settings.token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        context = ssl.create_default_context(cafile=str(self.settings.ca)) if self.settings.ca else None
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
                    "right --token-file or EVERSTEP_TOKEN"
                ) from None
            raise
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
            "shelf_port": self._door.port,
        }
        await line.send_str(json.dumps({"hello": hello, "done": self.done}))
        welcome = await line.receive_json(timeout=10.0)
        if "refused" in welcome:
            raise PeerError(welcome["refused"])
        self._check_term(welcome)
        self._heard(welcome["heard"])
        self._welcomed = True
        self._troubles.clear()
        self.say(f"node {self.settings.node} is connected to {address}")
        speaking = asyncio.create_task(self._speak(line, welcome["heard"]))
        beating = asyncio.create_task(self._beat(line))
        try:
            async for message in line:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise PeerError("the coordinator sent something that is not text")
                heard = json.loads(message.data)
                self._check_term(heard)
                if "ask" in heard:
                    await line.send_str(json.dumps({"answer": heard["ask"], "value": self._answer(heard)}))
                else:
                    self._take(heard)
        finally:
            for job in (speaking, beating):
                job.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError, aiohttp.ClientError):
                    await job

    def _check_term(self, message: dict[str, Any]) -> None:
        """A deposed coordinator may not have noticed yet: its orders are refused, and its line is left."""
        term = int(message.get("term", 0))
        if term < self._term:
            raise PeerError(
                f"it is of term {term}, and one of term {self._term} leads; its orders are refused"
            )
        self._term = term

    def _take(self, message: dict[str, Any]) -> None:
        if "heard" in message:
            self._heard(message["heard"])
        if "order" in message and message["number"] > self._taken:
            self._taken = message["number"]
            self._orders.put_nowait((message["number"], decode(msg.Order, message["order"])))

    async def _obey(self) -> None:
        """One order after the other. What takes long is done beside the loop: heartbeats must go on."""
        while True:
            number, order = await self._orders.get()
            try:
                await self._carry_out(order)
            except Exception as error:  # the main loop: an order that fails must not take the others along
                self._order_failed(order, error)
            self.done = number

    async def _carry_out(self, order: msg.Order) -> None:
        if isinstance(order, msg.FindCheckpoint | msg.CommitCheckpoint):
            for report in await asyncio.to_thread(self.crew.at_leisure, order):
                self._report(report)
            return
        if isinstance(order, msg.StartProcess):
            nursery = self.crew.nursery_of(order.task)
            if not nursery.warm:
                await asyncio.to_thread(nursery.warm_up)
        self.crew.carry_out(order)

    def _answer(self, asked: dict[str, Any]) -> Any:
        """For people who look: the end of a worker's log, what every worker does now or did lately."""
        try:
            match asked["what"]:
                case "log":
                    path = self.crew.words(asked["task"], parse_worker(asked["worker"]))
                    return _tail(path, int(asked["bytes"]))
                case "ops":
                    return {
                        str(worker): last_steps(process.beacon.path)
                        for (task, worker), process in self.crew.processes.items()
                        if task == asked["task"]
                    }
                case "readings":
                    return [
                        {
                            "worker": str(worker),
                            "incarnation": process.incarnation,
                            "pid": process.child.pid,
                            "reading": encode(process.beacon.read()),
                        }
                        for (task, worker), process in self.crew.processes.items()
                        if task == asked["task"]
                    ]
        except (OSError, KeyError, ValueError, UserError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return None

    def _order_failed(self, order: msg.Order, error: Exception) -> None:
        self.say(f"{type(order).__name__} failed: {type(error).__name__}: {error}")
        if isinstance(order, msg.FindCheckpoint):
            because = f"its checkpoints cannot be looked at: {type(error).__name__}: {error}"
            unusable = msg.CheckpointUnusable(
                task=order.task, because=because, passing=True, search=order.search
            )
            self._report(unusable)
        if isinstance(order, msg.StartProcess):
            exited = ev.WorkerExited(
                worker=order.worker,
                incarnation=order.incarnation,
                reason=f"could not be started: {type(error).__name__}: {error}",
            )
            sender = msg.Sender(order.task, order.worker, order.incarnation)
            self._report(msg.TaskEvent(task=order.task, event=exited), sender)

    def _heard(self, number: int) -> None:
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    async def _speak(self, line: aiohttp.ClientWebSocketResponse, sent: int) -> None:
        while True:
            for number, report, sender in [kept for kept in self._kept if kept[0] > sent]:
                said = {"number": number, "report": encode(report), "sender": encode(sender)}
                await line.send_str(json.dumps(said))
                sent = number
            self._news.clear()
            if not self._kept or self._kept[-1][0] <= sent:
                await self._news.wait()

    async def _beat(self, line: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await line.send_str(json.dumps({"beat": round(time.time(), 3), "done": self.done}))
            await asyncio.sleep(self.settings.beat_s)


def _tail(path: Path, most: int) -> str:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - most))
        return file.read(most).decode(errors="replace")


class _Loop:
    """An asyncio loop as a crew's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        self._loop.add_reader(fd, ready)

    def unwatch(self, fd: int) -> None:
        self._loop.remove_reader(fd)
