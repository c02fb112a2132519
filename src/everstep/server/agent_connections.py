"""The WebSockets of the agents in one term of leadership: one connection per node, numbered both ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from everstep.core.cluster import fences
from everstep.drive.order_lines import FactTexts, OrderLine
from everstep.errors import PeerError, clipped
from everstep.net.sockets import watch_path
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode
from everstep.protocol.events import Event
from everstep.protocol.table import PROTOCOL, rows
from everstep.server.access import CALLER, Role
from everstep.server.journal import MAX_ENTRY_BYTES, LostLeadership

if TYPE_CHECKING:
    from everstep.server.term import Term

MAX_MESSAGE = 64 << 20
MAX_QUEUED = 100_000  # messages to one agent that does not read
MAX_SLOTS = 4096
MAX_PORT = 65_535
# Until an agent is told which of its reports are durable; and where more than a few agents wait for that.
HEARD_S, HEARD_BY_MANY_S, FEW = 0.02, 0.5, 64

Queued = msg.Dispatch | dict[str, Any]


class AgentConnections:
    def __init__(self, term: Term) -> None:
        self._term = term
        self._queues: dict[str, asyncio.Queue[Queued | None]] = {}
        self._facts = FactTexts()
        self._boots: dict[str, str] = {}
        self._heard: dict[str, int] = {}  # by node: its last report that is durable, if it was not told yet
        self._telling: asyncio.TimerHandle | None = None
        self._asked: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # the node that was asked, its answer
        self._questions = 0
        self._greeted: set[str] = set()  # nodes that have said hello in this term
        self.routes: Any = None  # over the fabric, for agents that are there and for those that come

    @property
    def nodes(self) -> set[str]:
        """Who is connected now."""
        return set(self._queues)

    def send(self, action: msg.Dispatch) -> None:
        """To a node that is connected; else it is kept with its pending orders, and sent when it comes."""
        self._send(action.node, action)

    def received(self, node: str, number: int) -> None:
        """Told with the next order, or soon: a ledger of each of 2,000 nodes would be as many messages more
        in the middle of a recovery, and an agent only keeps its report a little longer.
        """
        if node in self._queues:
            self._heard[node] = number
            if self._telling is None:
                self._telling = asyncio.get_running_loop().call_later(HEARD_S, self._tell_heard, FEW)

    def _tell_heard(self, most: float = math.inf) -> None:
        if len(self._heard) > most:
            self._telling = asyncio.get_running_loop().call_later(HEARD_BY_MANY_S, self._tell_heard)
            return
        self._telling = None
        for node in self._heard:
            self._send(node, {})

    def give_routes(self, routes: Any) -> None:
        """They are advice: whole every time, without a number, and not in the journal."""
        self.routes = routes
        for node in list(self._queues):  # one that does not read is dropped
            self._send(node, {"routes": routes})

    def close(self) -> None:
        """The term is over: agents look for the coordinator that leads now."""
        for queue in self._queues.values():
            queue.put_nowait(None)
        self._queues.clear()
        self._heard.clear()
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for asked in {node for node, _ in self._asked.values()}:
            self._unanswered(asked, f"node {asked} cannot be asked: this coordinator no longer leads")

    def _unanswered(self, node: str, because: str) -> None:
        """Who asked this node need not wait any longer."""
        for asked, answer in self._asked.values():
            if asked == node and not answer.done():
                answer.set_exception(PeerError(because))

    def _send(self, node: str, message: Queued) -> None:
        queue = self._queues.get(node)
        if queue is not None:
            if queue.qsize() >= MAX_QUEUED:
                queue.put_nowait(None)
                del self._queues[node]
            else:
                queue.put_nowait(message)

    async def ask(self, node: str, question: dict[str, Any], *, within_s: float = 5.0) -> Any:
        """A node's answer, for people who look. PeerError if it does not come."""
        if node not in self._queues:
            raise PeerError(f"node {node} is not connected")
        self._questions += 1
        number = self._questions
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = (node, answer)
        self._send(node, {"ask": number, **question})
        try:
            return await asyncio.wait_for(answer, within_s)
        except TimeoutError:
            raise PeerError(f"node {node} does not answer") from None
        finally:
            del self._asked[number]

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        line = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, heartbeat=None, timeout=1.0, compress=False)
        await line.prepare(request)
        if (sock := request.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                watch_path(sock)
        try:
            first = await line.receive_json(timeout=10.0)
            hello, term = _hello(first)
            orders = OrderLine(hello.epochs)
        except (
            PeerError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
            TimeoutError,
        ) as error:
            await line.send_json({"refused": f"this agent's hello is refused: {error}"})
            await line.close()
            return line
        caller = CALLER.get()
        if caller.role is Role.NODE and caller.name != hello.node:
            sentence = (
                f"its credential is that of node {caller.name}; start the agent with --node {caller.name}"
            )
        elif self._busy(hello):
            sentence = f"node {hello.node} is connected already; give this agent another --node."
        else:
            sentence = ""
        if sentence:
            await line.send_json({"refused": sentence})
            await line.close()
            return line
        try:
            if because := self.put_back(hello, term):
                await self._term.begin_journal(f"it was put back: {because}")
                self.close()  # the others are told its new id, and say what they have done
            await self._converse(line, hello, orders)
        except LostLeadership:
            await line.close()
        return line

    def put_back(self, hello: msg.NodeJoined, term: int) -> str:
        """Why this journal must be an older copy of the one that the agent followed; empty: it is not.

        An agent has never carried out an order that was not in the journal before. Orders of this term do not
        count when it says its first hello: it could not hear them yet. Only that first one is believed: a new
        journal id costs every node something, and a node must not be able to ask for it again and again.
        """
        machine = self._term.machine
        is_first = hello.node not in self._greeted
        self._greeted.add(hello.node)
        node, before = machine.nodes.get(hello.node), self._term.sent_before.pop(hello.node, None)
        if not hello.journal or hello.journal != machine.policy.journal:
            return ""
        if is_first and term > self._term.number:
            return "an agent has heard a later term of it"
        if node is not None and node.boot == hello.boot and before is not None and hello.done > before:
            return (
                f"the agent of {hello.node} has carried out {hello.done} orders, and it has {before} of them"
            )
        return ""

    def _busy(self, hello: msg.NodeJoined) -> bool:
        """Another agent of the same name is connected, and alive."""
        age = self._term.hearts.age_s(hello.node, time.monotonic())
        other = self._boots.get(hello.node, hello.boot) != hello.boot
        return hello.node in self._queues and other and age is not None and age < 1.0

    async def _converse(self, line: web.WebSocketResponse, hello: msg.NodeJoined, orders: OrderLine) -> None:
        node, journal = hello.node, self._term.machine.policy.journal
        known = self._term.machine.nodes.get(node)
        if known is not None and known.boot == hello.boot and hello.journal in ("", journal):
            self._term.machine.acknowledged(node, hello.done)
        old = self._queues.pop(node, None)
        if old is not None:
            old.put_nowait(None)
        self._term.hearts.heard(node, time.monotonic())
        await self._term.handle(hello)
        self._term.hearts.heard(node, time.monotonic())  # a new one was no node yet, and may be forgotten
        queue: asyncio.Queue[Queued | None] = asyncio.Queue()
        state = self._term.machine.nodes[node]
        self._heard.pop(node, None)
        self._queues[node], self._boots[node] = queue, hello.boot
        self._term.closed.discard(node)
        journal = self._term.machine.policy.journal
        self._send(node, {"welcome": node, "heard": state.heard, "journal": journal, "protocol": PROTOCOL})
        for order in state.pending:
            self.send(order)
        if self.routes is not None:
            self._send(node, {"routes": self.routes})
        writing = asyncio.create_task(self._write(node, line, queue, orders))
        try:
            async for message in line:
                if self._queues.get(node) is not queue:
                    break  # the agent has another line, or another agent has this name
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._take(hello, json.loads(message.data), len(message.data))
                    await self._term.has_room()
        except (PeerError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            self._term.record.say(f"node {node} sent an invalid message: {error}")
        finally:
            writing.cancel()
            if self._queues.get(node) is queue:
                del self._queues[node]
                del self._boots[node]
                self._heard.pop(node, None)
                self._unanswered(node, f"node {node} is not connected any more")
                self._term.closed.add(node)
                if self._term.traffic is not None:
                    self._term.traffic.heard(node, None)

    async def _write(
        self,
        node: str,
        line: web.WebSocketResponse,
        queue: asyncio.Queue[Queued | None],
        orders: OrderLine,
    ) -> None:
        """Orders are encoded here, one at a time: the loop turns between two of them."""
        around = {"term": self._term.number}
        while (message := await queue.get()) is not None:
            is_current = self._queues.get(node) is queue
            number = self._heard.pop(node, None) if is_current else None
            heard = {} if number is None else {"heard": number}
            if isinstance(message, msg.Dispatch):
                await line.send_str(orders.text(message, self._facts, **around, **heard))
            elif message or heard:
                await line.send_str(json.dumps({**around, **heard, **message}, separators=(",", ":")))
        await line.close()

    def _take(self, hello: msg.NodeJoined, message: Mapping[str, Any], size: int) -> None:
        node = hello.node
        if self._term.hearts.heard(node, time.monotonic()):
            self._term.hear(hello)  # it was silent and is back
        if "beat" in message:
            self._term.machine.acknowledged(node, int(message["done"]))
            if self._term.traffic is not None:
                self._term.traffic.heard(node, message.get("traffic"))
            return
        if "left" in message:
            self._term.hear(msg.NodeLeft(node=node))
            return
        if "answer" in message:
            asked, answer = self._asked.get(message["answer"], ("", None))
            if answer is not None and asked == node and not answer.done():
                answer.set_result(message["value"])
            return
        try:
            report = decode(msg.NodeReport, message["report"])
        except PeerError:
            if not (kind := _unknown_kind(message["report"])):
                raise
            what = clipped(kind, 60)
            self._term.hear(msg.ReportUnknown(node=node, report=int(message["number"]), what=what))
            return
        said = msg.FromNode(
            node=node,
            boot=hello.boot,
            number=int(message["number"]),
            report=report,
            sender=decode(msg.Sender | None, message["sender"]),
        )
        if isinstance(said.report, msg.TimesReported):
            machine = self._term.machine
            known = machine.nodes.get(node)
            if known is not None and not fences.refused(known, said.report, said.sender, machine.tasks):
                self._term.learn(said.report)
            return
        if size > MAX_ENTRY_BYTES and (packed := self._term.packed_bytes(said)) > MAX_ENTRY_BYTES:
            self._term.hear(_refused(said, packed))
        else:
            self._term.hear(said)


def _refused(said: msg.FromNode, packed: int) -> msg.ClusterEvent:
    """In place of a report that no journal entry holds. It counts as heard, or it would come again."""
    because = f"{packed} bytes are more than the {MAX_ENTRY_BYTES} that one journal entry holds"
    report = said.report
    if isinstance(report, msg.PartWritten):
        failed = msg.SaveFailed(
            task=report.task,
            step=report.step,
            attempt=report.attempt,
            because=f"the description of its part: {because}",
            memory_of=report.memory_of,
        )
        return replace(said, report=failed)
    inner = report.event if isinstance(report, msg.TaskEvent) else report
    what = type(inner).__name__
    return msg.EventSetAside(number=0, what=what, error=because, node=said.node, report=said.number)


def _unknown_kind(report: Any) -> str:
    """Its name, if it is of a kind that this version does not have; empty: it is malformed."""
    is_event = isinstance(report, dict) and report.get("is") == "TaskEvent"
    said = report.get("event") if is_event else report
    kind = said.get("is") if isinstance(said, dict) else None
    known = {row.kind.__name__ for wire in (msg.NodeReport, Event) for row in rows(wire)}
    return kind if isinstance(kind, str) and kind not in known else ""


def _hello(message: Any) -> tuple[msg.NodeJoined, int]:
    """Who it is, what it runs and has done; and the term of the coordinator that it followed last."""
    told = {"epochs": message.get("facts", {}), "done": message["done"]}
    if (spoken := message["hello"].get("protocol")) != PROTOCOL:
        raise PeerError(
            f"it speaks protocol {clipped(str(spoken), 20)}, this coordinator {PROTOCOL}; give both the same "
            "version of Everstep"
        )
    hello = decode(msg.NodeJoined, {**message["hello"], **told})
    if not 1 <= hello.slots <= MAX_SLOTS:
        raise PeerError(f"{hello.slots} slots; a node has 1 to {MAX_SLOTS}")
    for what, port in (("memory_port", hello.memory_port), ("pair_port", hello.pair_port)):
        if not 0 <= port <= MAX_PORT:
            raise PeerError(f"{what} is {port}, which is not a port")
    texts = [("node", hello.node, 64), ("host", hello.host, 255), ("boot", hello.boot, 128)]
    may_be_empty = [("rack", hello.rack, 64), ("cannot_compile", hello.cannot_compile, 255)]
    for what, text, most in [*texts, *(one for one in may_be_empty if one[1])]:
        if not 1 <= len(text) <= most or not text.isprintable() or text != text.strip():
            raise PeerError(f"{what} is {clipped(repr(text), 100)}; give 1 to {most} printable characters")
    if "/" in hello.node or hello.node in (".", ".."):
        raise PeerError(f"node is {hello.node!r}, which is no part of an address; leave the / out")
    return hello, int(message.get("term", 0))
