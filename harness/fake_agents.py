"""Agents as far as a real coordinator can tell: lines, heartbeats, numbered reports that are kept until they
are heard; without processes. Workers answer at once, as in `harness.fleet`: started, ledger, resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.ops import Worker
from everstep.protocol.table import PROTOCOL
from everstep.protocol.work import Ledger

BEAT_S = 0.25
RETRY_S = 0.3


@dataclass(slots=True)
class FakeWorker:
    incarnation: int
    step: int = 1
    joining: bool = True


@dataclass(slots=True)
class Crowd:
    """`resumed`: by epoch and node, when its order to resume was there."""

    addresses: Sequence[str]  # of coordinators: one of them leads
    headers: dict[str, str]
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    resumed: dict[int, dict[str, float]] = field(default_factory=dict)

    attempts: tuple[tuple[int, int], ...] = ()  # as the last orders say
    microbatches: int = 1  # of a step

    def seal(self) -> None:
        """Every stage seals the step that its members are in."""
        members = [
            (w, one, a) for a in self.agents.values() for w, one in a.workers.items() if not one.joining
        ]
        step = min(one.step for _, one, _ in members)
        attempt = max(number for first, number in self.attempts if first <= step)
        for stage in sorted({worker.stage for worker, _, _ in members}):
            worker, one, agent = next(m for m in members if m[0].stage == stage and m[1].step == step)
            sealed = ev.StepSealed(
                step=step,
                stage=stage,
                attempt=attempt,
                microbatches=self.microbatches,
                executed=3 * self.microbatches,
                sum_of_squares=1.0,
            )
            agent.says(worker, one.incarnation, sealed)
        for _, one, _ in members:
            one.step = max(one.step, step + 1)

    def epoch(self) -> int:
        return max(self.resumed, default=0)

    def agent_of(self, worker: Worker) -> FakeAgent | None:
        return next((agent for agent in self.agents.values() if worker in agent.workers), None)

    async def live(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=self.headers) as session:
            await asyncio.gather(*(agent.live(session) for agent in self.agents.values()))

    async def kill(self, worker: Worker) -> float:
        """A worker dies; the time at which its agent says so."""
        agent = self.agent_of(worker)
        assert agent is not None, f"{worker} is not there"
        gone = agent.workers.pop(worker)
        exited = ev.WorkerExited(worker=worker, incarnation=gone.incarnation, reason="killed by SIGKILL")
        agent.says(worker, gone.incarnation, exited)
        return time.monotonic()

    async def all_resumed(self, after: int, within_s: float) -> float | None:
        """When every node with a member had its order of an epoch after this one; None: not in time."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            members = {n for n, a in self.agents.items() if any(not w.joining for w in a.workers.values())}
            for epoch in sorted(e for e in self.resumed if e > after):
                if members and members <= self.resumed[epoch].keys():
                    return max(self.resumed[epoch][node] for node in members)
            await asyncio.sleep(0.01)
        return None


class FakeAgent:
    def __init__(self, name: str, crowd: Crowd, *, task: str, slots: int = 1) -> None:
        self.name, self.crowd, self.task, self.slots = name, crowd, task, slots
        self.workers: dict[Worker, FakeWorker] = {}
        self._done = self._term = 0
        self._journal = ""
        self._number = 0
        self._kept: list[tuple[int, str]] = []
        self._epochs: dict[str, int] = {}
        self._line: aiohttp.ClientWebSocketResponse | None = None
        self._sent = 0
        self._news = asyncio.Event()

    async def live(self, session: aiohttp.ClientSession) -> None:
        turn = 0
        while True:
            address = self.crowd.addresses[turn % len(self.crowd.addresses)]
            with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError, KeyError, TypeError):
                connect = session.ws_connect(f"{address}/v1/agent", max_msg_size=1 << 26)
                async with await asyncio.wait_for(connect, 5.0) as line:
                    await self._converse(line)
            self._line = None
            turn += 1
            await asyncio.sleep(RETRY_S)

    async def _converse(self, line: aiohttp.ClientWebSocketResponse) -> None:
        hello = {
            "node": self.name,
            "boot": "1",
            "slots": self.slots,
            "host": "127.0.0.1",
            "memory_port": 0,
            "protocol": PROTOCOL,
            "journal": self._journal,
            "runs": encode(tuple((self.task, w, one.incarnation) for w, one in self.workers.items())),
        }
        said = {"hello": hello, "done": self._done, "facts": self._epochs, "term": self._term}
        await line.send_str(json.dumps(said))
        welcome = await line.receive_json(timeout=10.0)
        self._sent, self._journal = welcome["heard"], welcome["journal"]
        self._term = int(welcome.get("term", 0))
        self._line = line
        jobs = [asyncio.create_task(self._beat(line)), asyncio.create_task(self._speak(line))]
        try:
            async for message in line:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                self._take(json.loads(message.data))
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _beat(self, line: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            await line.send_str(json.dumps({"beat": 0, "done": self._done}))
            await asyncio.sleep(BEAT_S)

    async def _speak(self, line: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            self._news.clear()
            for number, text in [kept for kept in self._kept if kept[0] > self._sent]:
                await line.send_str(text)
                self._sent = number
            await self._news.wait()

    def _take(self, message: dict[str, Any]) -> None:
        if "heard" in message:
            self._kept = [kept for kept in self._kept if kept[0] > message["heard"]]
        if "order" in message and message["number"] > self._done:
            self._done = message["number"]
            self._obey(decode(msg.Order, message["order"]))

    def _obey(self, order: msg.Order) -> None:
        match order:
            case msg.StartProcess():
                self._start(order)
            case msg.StartProcesses(starts=starts):
                for start in starts:
                    self._start(start)
            case msg.InterruptTask(workers=workers, epoch=epoch):
                for worker in [w for w in workers if w in self.workers]:
                    one = self.workers[worker]
                    ledger = Ledger(step=one.step, joining=one.joining)
                    reported = ev.LedgerReported(worker=worker, epoch=epoch, ledger=ledger)
                    self.says(worker, one.incarnation, reported)
            case msg.ResumeTask(facts=facts, news=news, workers=resumed):
                told = facts if facts is not None else news.facts if news is not None else None
                assert told is not None
                epoch, self.crowd.attempts = told.epoch, told.attempts
                self._epochs[order.task] = epoch
                self.crowd.resumed.setdefault(epoch, {})[self.name] = time.monotonic()
                for worker, own, _ in [one for one in resumed if one[0] in self.workers]:
                    one = self.workers[worker]
                    one.step, one.joining = own.step, False
                    again = ev.WorkerResumed(worker=worker, epoch=epoch, at=time.time())
                    self.says(worker, one.incarnation, again)
            case msg.KillProcess(worker=worker, incarnation=incarnation):
                one_ = self.workers.get(worker)
                if one_ is not None and one_.incarnation == incarnation:
                    del self.workers[worker]
                    exited = ev.WorkerExited(worker=worker, incarnation=incarnation, reason="SIGKILL")
                    self.says(worker, incarnation, exited)
            case msg.NotifyWorker(worker=worker, words=act.CopyState(joiner=joiner, transfer=transfer)):
                other, source = self.crowd.agent_of(joiner), self.workers.get(worker)
                if other is not None and source is not None:
                    step = other.workers[joiner].step = source.step
                    number = other.workers[joiner].incarnation
                    copied = ev.StateCopied(
                        worker=joiner, incarnation=number, transfer=transfer, state_step=step - 1
                    )
                    other.says(joiner, number, copied)
            case msg.FindCheckpoint(search=search, live=True):
                looked = ev.CheckpointsLooked(search=search, step=0)
                self.report(msg.TaskEvent(task=self.task, event=looked), None)
            case msg.FindCheckpoint(search=search):
                self.report(msg.CheckpointFound(task=self.task, step=0, search=search), None)

    def _start(self, order: msg.StartProcess) -> None:
        self.workers[order.worker] = FakeWorker(order.incarnation)
        address = ("127.0.0.1", 20_000 + order.slot)
        started = ev.WorkerStarted(worker=order.worker, incarnation=order.incarnation, address=address)
        self.says(order.worker, order.incarnation, started)

    def says(self, worker: Worker, incarnation: int, event: ev.Event) -> None:
        self.report(msg.TaskEvent(task=self.task, event=event), msg.Sender(self.task, worker, incarnation))

    def report(self, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        self._number += 1
        said = {"number": self._number, "report": encode(report), "sender": encode(sender)}
        self._kept.append((self._number, json.dumps(said, separators=(",", ":"))))
        self._news.set()
