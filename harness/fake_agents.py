"""Agents as far as a real coordinator can tell: lines, heartbeats, numbered reports that are kept until they
are heard; without processes. What workers answer is in `harness.crew`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from everstep.core.agent.agent_messages import DiskOrder
from everstep.drive.order_lines import unpacked
from everstep.node.disk_orders import work_on_disk
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.ops import Worker
from everstep.protocol.table import PROTOCOL
from everstep.protocol.work import EpochFacts, FactChanges
from harness.crew import Crew

RETRY_S = 0.3


@dataclass(slots=True)
class Crowd:
    """`resumed`: by epoch and node, when its order to resume was there; `complete`: by epoch, when the last
    node with a member had its order.
    """

    addresses: Sequence[str]  # of coordinators: one of them leads
    headers: dict[str, str]
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    resumed: dict[int, dict[str, float]] = field(default_factory=dict)
    complete: dict[int, float] = field(default_factory=dict)

    attempts: tuple[tuple[int, int], ...] = ()  # as the last orders say
    microbatches: int = 1  # of a step
    beat_s: float = 0.25
    restored: int | None = None  # the step whose state the last orders say to load
    checkpoints: msg.CheckpointFolder | None = None  # where disk orders are carried out; None: they are not
    crew: Crew = field(init=False)
    _read: dict[str, Any] = field(default_factory=dict)  # the last packed facts

    def __post_init__(self) -> None:
        self.crew = Crew(self._says, clock=time.time, host="127.0.0.1")

    def _says(self, node: str, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        self.agents[node].report(report, sender)

    def attempt_of(self, step: int) -> int:
        return max(number for first, number in self.attempts if first <= step)

    def read(self, order: Any) -> msg.Order:
        """As its agent would, but packed facts once for all nodes of this process."""
        packed = {name: order[name] for name in ("facts", "news") if isinstance(order.get(name), str)}
        for name, text in packed.items():
            if text not in self._read:
                kind = EpochFacts if name == "facts" else FactChanges
                self._read = {text: decode(kind, unpacked({name: text})[name])}  # type: ignore[index,call-overload]
        bare = decode(msg.Order, {**order, **dict.fromkeys(packed)})
        return replace(bare, **{name: self._read[text] for name, text in packed.items()})

    def num_members(self) -> int:
        return sum(not one.joining for one in self.crew.actors.values())

    def standing(self) -> tuple[int | None, tuple[int, ...]]:
        """The earliest step that members are in, and the stages of those that are in it."""
        members = [
            (worker.stage, one.step) for (_, worker), one in self.crew.actors.items() if not one.joining
        ]
        first = min((step for _, step in members), default=None)
        return first, tuple(sorted({stage for stage, step in members if step == first}))

    def seal(self, step: int | None = None, stages: Sequence[int] | None = None) -> None:
        """These stages, or all, seal this step, or the one that their members are in; members go on."""
        first, present = self.standing()
        step = first if step is None else step
        assert step is not None, "no worker takes part"
        members = [(key, one) for key, one in self.crew.actors.items() if not one.joining]
        for stage in present if stages is None else stages:
            task, worker = next(key for key, one in members if key[1].stage == stage and one.step == step)
            sealed = ev.StepSealed(
                step=step,
                stage=stage,
                attempt=self.attempt_of(step),
                microbatches=self.microbatches,
                executed=3 * self.microbatches,
                sum_of_squares=1.0,
            )
            self.crew.says(task, worker, sealed)
        for _, one in members:
            one.step = max(one.step, step + 1)

    def has_resumed(self, node: str, epoch: int) -> None:
        """Asked at each order: a worker that joins later is not missed by the epoch before. One worker at a
        time is dead here, so that a start is not complete with its first node.
        """
        there = self.resumed.setdefault(epoch, {})
        there[node] = time.monotonic()
        if epoch not in self.complete:
            members = {one.node for one in self.crew.actors.values() if not one.joining}
            if members <= there.keys() and len(there) >= max(1, len(self.agents) - 1):
                self.complete[epoch] = there[node]

    def epoch(self) -> int:
        return max(self.resumed, default=0)

    async def live(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=self.headers) as session:
            await asyncio.gather(*(agent.live(session) for agent in self.agents.values()))

    def kill(self, worker: Worker) -> float:
        """A worker dies; the time at which its agent says so."""
        task = next(task for task, one in self.crew.actors if one == worker)
        self.crew.ends(task, worker, "killed by SIGKILL")
        return time.monotonic()

    async def all_resumed(self, after: int, within_s: float) -> float | None:
        """When every node with a member had its order of an epoch after this one; None: not in time."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if later := [epoch for epoch in self.complete if epoch > after]:
                return self.complete[min(later)]
            await asyncio.sleep(0.01)
        return None


class FakeAgent:
    def __init__(self, name: str, crowd: Crowd, *, slots: int = 1, rack: str = "") -> None:
        self.name, self.crowd, self.slots, self.rack = name, crowd, slots, rack
        self._done = self._term = 0
        self._journal = ""
        self._number = 0
        self._kept: list[tuple[int, str]] = []
        self._epochs: dict[str, int] = {}
        self._line: aiohttp.ClientWebSocketResponse | None = None
        self._sent = 0
        self._news = asyncio.Event()
        self._working: set[asyncio.Task[None]] = set()

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
        actors = self.crowd.crew.actors.items()
        runs = tuple((*key, one.incarnation) for key, one in actors if one.node == self.name)
        hello = {
            "node": self.name,
            "boot": "1",
            "slots": self.slots,
            "host": "127.0.0.1",
            "memory_port": 0,
            "rack": self.rack,
            "protocol": PROTOCOL,
            "journal": self._journal,
            "runs": encode(runs),
        }
        said = {
            "hello": hello,
            "done": self._done,
            "facts": self._epochs,
            "term": self._term,
        }
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
            await asyncio.sleep(self.crowd.beat_s)

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
            self._obey(self.crowd.read(message["order"]))

    def _obey(self, order: msg.Order) -> None:
        if isinstance(order, DiskOrder) and self.crowd.checkpoints is not None:
            self._working.add(asyncio.create_task(self._work_on_disk(order)))
            return
        if isinstance(order, msg.ResumeTask):
            facts = order.facts if order.news is None else order.news.facts
            assert facts is not None
            self.crowd.attempts, self._epochs[order.task] = facts.attempts, facts.epoch
            self.crowd.restored = facts.restore
        self.crowd.crew.obey(self.name, order)
        if isinstance(order, msg.ResumeTask):
            self.crowd.has_resumed(self.name, self._epochs[order.task])

    async def _work_on_disk(self, order: DiskOrder) -> None:
        """As an agent does."""
        report = await asyncio.to_thread(work_on_disk, order, self.crowd.checkpoints)
        if report is not None:
            self.report(report, None)

    def report(self, report: msg.NodeReport, sender: msg.Sender | None) -> None:
        self._number += 1
        said = {"number": self._number, "report": encode(report), "sender": encode(sender)}
        self._kept.append((self._number, json.dumps(said, separators=(",", ":"))))
        self._news.set()
