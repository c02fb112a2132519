"""Everything that accepts something from outside, as targets of a fuzz: each takes a seed and a count.

coordinator    events and reports of nodes, on the machine itself; its invariants hold after each
agent          orders and answers of a coordinator, on the machine itself
worker lines   bytes between a worker and its agent, in both directions
frames         bytes between two workers, and the handshake before them
api            every route of the coordinator over HTTP: no 500
agent line     a real WebSocket of an agent: the coordinator answers afterwards
memory         the server of states in memory over HTTP
records        files that `everstep diagnose` reads, and rings that agents read: `fuzz_records.py`
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import torch

from everstep.core.agent.agent import AgentState, LineOpened, OrderHeard, ReportsKept
from everstep.core.cluster.coordinator import Coordinator
from everstep.errors import PeerError, UserError
from everstep.net import frames
from everstep.net.envelope import PIECES, VALUES, Envelope, Where
from everstep.net.handshake import Acceptor, Opener
from everstep.net.seal import Suite
from everstep.protocol import messages as msg
from everstep.protocol.codec import Unpacker, decode
from everstep.protocol.messages import FromWorker, WorkerOrder
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.shape import Shape
from everstep.protocol.table import PROTOCOL
from everstep.store.memory import CopyRequest, memory_key
from everstep.store.memory_server import MemoryServer, MemoryStore
from tests.attacks.fuzz_records import records, rings
from tests.attacks.fuzzing import FuzzReport, Maker

REFUSALS = (PeerError, UserError)
MOST_BYTES = 1 << 20
ANSWER_S = 0.05


def coordinator(seed: int, count: int) -> FuzzReport:
    maker, report = Maker(seed), FuzzReport("coordinator")
    machine, now = _machine(), 0.0
    for number in range(count):
        if number % 500 == 499:
            machine = _machine()
        now += maker.random.random()
        kind = msg.FromNode if maker.random.random() < 0.7 else msg.ClusterEvent
        told = maker.made(kind)
        if isinstance(told, dict) and told.get("is") == "FromNode":
            told |= {"number": 1 + number, "boot": "1"}
        document = told if maker.random.random() < 0.5 else maker.broken(told)

        def handle(document: Any = document, machine: Coordinator = machine, now: float = now) -> None:
            event = decode(msg.ClusterEvent, json.loads(json.dumps(document)))
            if _plausible(event):
                machine.handle(event, now)
                machine.validate()

        report.tried(handle, REFUSALS, document)
    return report


def _machine() -> Coordinator:
    machine = Coordinator()
    for node in "ab":
        machine.handle(msg.NodeJoined(node=node, boot="1", slots=3, host=node, memory_port=1), 0.0)
    for task in "tu":
        shape = Shape(1 + (task == "t"), 2, 2)
        asked = msg.TaskSubmitted(task=task, job={}, shape=shape, steps=9, secret="00" * 32)
        machine.handle(asked, 0.0)
    return machine


def _plausible(event: msg.ClusterEvent) -> bool:
    """What an operator asks for has passed the API's own checks, and slots those of the agent's hello."""
    if isinstance(event, msg.TaskSubmitted | msg.ReshapeRequested | msg.UpdateRequested):
        shape = event.shape
        counts = (shape.replicas, shape.stages, shape.microbatches, shape.shards)
        return all(0 < count < 9 for count in counts)
    if isinstance(event, msg.NodeJoined):
        return 1 <= event.slots <= 4096
    own = (msg.PlanAnswered, msg.AssignmentChosen, msg.PolicySet, msg.SlownessFound, msg.SlownessEnded)
    return not isinstance(event, own)


def agent(seed: int, count: int) -> FuzzReport:
    maker, report = Maker(seed), FuzzReport("agent")
    state, now = AgentState(), 0.0
    for number in range(count):
        if number % 500 == 0:
            state = AgentState()
            state.handle(LineOpened(1, 0), now)
        now += maker.random.random()
        document = maker.broken({"number": number + 1, "order": maker.made(msg.Order), "term": 1, "heard": 0})

        def hear(document: Any = document, state: AgentState = state, now: float = now) -> None:
            message = json.loads(json.dumps(document))
            term = int(message.get("term", 0))
            if "heard" in message:
                state.handle(ReportsKept(int(message["heard"]), min(term, 1)), now)
            order = decode(msg.Order, message["order"])
            state.handle(OrderHeard(int(message["number"]), order, min(term, 1)), now)
            state.validate()

        report.tried(
            hear, (*REFUSALS, KeyError, TypeError, ValueError, OverflowError, AttributeError), document
        )
    return report


def worker_lines(seed: int, count: int) -> FuzzReport:
    maker, report = Maker(seed), FuzzReport("worker lines")
    for number in range(count):
        kind = (FromWorker, WorkerOrder)[number % 2]
        body = json.dumps(maker.broken(maker.made(kind))).encode(errors="surrogatepass")
        data = bytearray(len(body).to_bytes(4, "little") + body)
        _flip(maker, data, 0.3)
        report.tried(
            lambda kind=kind, data=data: list(Unpacker(kind).feed(bytes(data))), REFUSALS, bytes(data)
        )
    return report


def worker_frames(seed: int, count: int) -> FuzzReport:
    maker, report = Maker(seed), FuzzReport("frames")
    kinds = list(ParcelKind)
    for number in range(count):
        if number % 10 == 0:
            _handshake(maker, report)
            continue
        parcel = Parcel(maker.random.choice(kinds), 0, 1, 0)
        value, piece = (maker.made(types.get(parcel.what, NoneType)) for types in (VALUES, PIECES))
        told = [value, None, maker.made(Where), piece]
        body = json.dumps(maker.broken(told)).encode(errors="surrogatepass")
        empty = frames.encode(parcel, Envelope(), torch.zeros(3), torch.zeros(2, 2))
        head = list(frames.HEAD.unpack_from(empty))
        head[4] = len(body)
        data = bytearray(frames.HEAD.pack(*head) + empty[frames.HEAD.size :] + body + bytes(28))
        _flip(maker, data, 0.8)
        report.tried(lambda data=data: _arrive(bytes(data)), (*REFUSALS, ValueError), bytes(data))
    return report


def _arrive(data: bytes) -> None:
    frame, at = frames.Incoming(_empty), 0
    while at < len(data):
        want = frame.want
        taken = data[at : at + len(want)]
        want[: len(taken)] = taken
        at += len(taken)
        if frame.took(len(taken)):
            frame = frames.Incoming(_empty)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What the shape says is checked before memory is taken; here a large one is not really taken."""
    if torch.Size(shape).numel() * dtype.itemsize > MOST_BYTES:
        raise PeerError("too large for this test")
    return torch.empty(shape, dtype=dtype)


def _handshake(maker: Maker, report: FuzzReport) -> None:
    data = bytearray(Opener(b"s" * 32).hello() + maker.random.randbytes(40))
    _flip(maker, data, 0.7)

    def greet() -> None:
        acceptor, rest = Acceptor(b"s" * 32), bytes(data)
        while acceptor.wants and rest:
            part, rest = rest[: acceptor.wants], rest[acceptor.wants :]
            acceptor.feed(part)
        opener, rest = Opener(b"s" * 32), bytes(data)
        while opener.wants and rest:
            part, rest = rest[: opener.wants], rest[opener.wants :]
            opener.feed(part)

    report.tried(greet, REFUSALS, bytes(data))


def _flip(maker: Maker, data: bytearray, chance: float) -> None:
    draw = maker.random
    if draw.random() < chance:
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
            data += b"\x00"


# ------------------------------------------------------------------ over real sockets

ROUTES = (
    ("GET", "/v1/{w}"),
    ("GET", "/v1/status"),
    ("GET", "/v1/events/{w}"),
    ("GET", "/v1/incidents?last={w}"),
    ("GET", "/v1/incidents/{w}"),
    ("GET", "/v1/tasks/{t}?rows={w}"),
    ("GET", "/v1/tasks/{t}/logs?worker={w}&bytes={w}"),
    ("GET", "/v1/tasks/{t}/readings"),
    ("GET", "/v1/digest"),
    ("GET", "/v1/news"),
    ("GET", "/v1/health"),
    ("GET", "/metrics"),
    ("GET", "/web/{w}"),
    ("GET", "/v1/agent"),
    ("GET", "/v1/watch"),
    ("POST", "/v1/tickets"),
    ("POST", "/v1/tasks"),
    ("POST", "/v1/tasks/{t}/resize"),
    ("POST", "/v1/tasks/{t}/reshape"),
    ("POST", "/v1/tasks/{t}/pause"),
    ("POST", "/v1/tasks/{t}/unpause"),
    ("POST", "/v1/tasks/{t}/{w}"),
    ("POST", "/v1/nodes/{n}/drain"),
    ("POST", "/v1/nodes/{n}/readmit"),
    ("POST", "/v1/nodes/{n}/{w}"),
    ("PUT", "/v1/tasks"),
    ("DELETE", "/v1/tasks/{t}"),
)
JOB: dict[str, Any] = {
    "replicas": 1,
    "stages": 2,
    "microbatches": 2,
    "steps": 5,
    "model": {"preset": "gpt-tiny"},
    "data": {"kind": "synthetic"},
    "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]},
    "checkpoint": {"folder": "ckpt", "interval": 2},
}


def api(seed: int, count: int, address: str, token: str = "") -> FuzzReport:
    """Against a coordinator that listens at `address`."""
    maker, report = Maker(seed), FuzzReport("api")
    line: http.client.HTTPConnection | None = None
    host = urlsplit(address).netloc
    for _ in range(count):
        method, route = maker.random.choice(ROUTES)
        words = {"w": _word(maker), "t": maker.random.choice(("t", "job", _word(maker))), "n": _word(maker)}
        path = route.format(
            **{key: quote(text[:300], safe="", errors="replace") for key, text in words.items()}
        )
        body = None if method == "GET" else _body(maker, route)
        headers = {} if maker.random.random() < 0.9 else {"Host": _word(maker)[:40].strip() or "x"}
        headers |= {"Authorization": f"Bearer {token if maker.random.random() < 0.95 else _word(maker)}"}
        report.inputs += 1
        try:
            line = line or http.client.HTTPConnection(host, timeout=30)
            line.request(method, path, body, _sendable(headers))
            answer = line.getresponse()
            answer.read()
            status = answer.status
            if answer.will_close:
                line.close()
                line = None
        except (http.client.HTTPException, OSError, ValueError):
            report.refused += 1
            line = None
            continue
        report.refused += 400 <= status < 500
        if status >= 500:
            report.failures.append(f"HTTP {status} for {method} {path[:200]} {body!r:.400}")
    return report


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    return {key: text.encode("latin-1", "replace").decode("latin-1") for key, text in headers.items()}


def _word(maker: Maker) -> str:
    words = (
        "0",
        "1",
        "7",
        "0:0",
        "-1",
        "9" * 30,
        "t",
        "a",
        "%00",
        "../../x",
        "é\ud800",
        "x" * 300,
        "drain",
        "true",
    )
    return maker.random.choice(words) or "_"


def _body(maker: Maker, route: str) -> bytes:
    draw = maker.random
    asked: Any = {"workers": 2, "replicas": 1, "stages": 2, "force": True}
    if route == "/v1/tasks":  # a broken one: tasks that are accepted would pile up
        name = draw.choice(("t", "", "a b", 5, None))
        asked = {"name": name, "job": maker.broken(JOB), "weight": draw.choice((1, -1, "x")), "script": []}
    text = (
        json.dumps(maker.broken(asked))
        if draw.random() < 0.95
        else draw.choice(("", "{", "[" * 5000, "\x00"))
    )
    return text.encode(errors="surrogatepass")


def agent_line(seed: int, count: int, address: str, token: str = "") -> FuzzReport:
    """A real WebSocket; it is opened again whenever the coordinator closes it."""
    maker, report = Maker(seed), FuzzReport("agent line")

    async def play() -> None:
        async with aiohttp.ClientSession() as session:
            while report.inputs < count:
                headers = {"Authorization": f"Bearer {token}"}
                async with session.ws_connect(f"{address}/v1/agent", headers=headers) as line:
                    await _talk(maker, report, line, count)

    asyncio.run(play())
    return report


async def _talk(maker: Maker, report: FuzzReport, line: Any, count: int) -> None:
    hello = {"node": "a", "boot": "f", "slots": 2, "host": "127.0.0.1", "protocol": PROTOCOL}
    greeting = {"hello": hello, "done": 0}
    odd = maker.random.random() < 0.2
    report.inputs += 1
    await line.send_str(json.dumps(maker.broken(greeting) if odd else greeting))
    try:
        welcome = await line.receive_json(timeout=30)
    except (TypeError, ValueError):
        report.refused += 1
        return
    if "refused" in welcome:
        report.refused += 1
        return
    for number in range(60):
        if line.closed or report.inputs >= count:
            return
        said = {"number": number + 1, "report": maker.made(msg.NodeReport), "sender": maker.made(msg.Sender)}
        text = json.dumps(maker.broken(said))
        report.inputs += 1
        try:
            await line.send_str(text.encode(errors="replace").decode())
            answer = await line.receive(timeout=ANSWER_S)
        except TimeoutError:
            continue  # nothing is answered to some
        except ConnectionError:
            report.refused += 1
            return
        if answer.type is not aiohttp.WSMsgType.TEXT:
            report.refused += 1  # it closes a line on which nonsense comes
            return


def memory(seed: int, count: int) -> FuzzReport:
    maker, report = Maker(seed), FuzzReport("memory")
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    store = MemoryStore()
    store.open_task("t", "00" * 32)
    server = MemoryServer(store, "127.0.0.1")
    server.open()
    outside = Path(tempfile.gettempdir(), f"fuzz-outside-{os.getpid()}")
    try:
        for _ in range(count):
            _ask_memory(maker, report, server.port)
        if outside.exists():
            report.failures.append("a file outside of the store")
    finally:
        server.close()
        store.close()
    return report


def _ask_memory(maker: Maker, report: FuzzReport, port: int) -> None:
    draw = maker.random
    parts = [
        draw.choice(("t", _word(maker))),
        draw.choice(("1", _word(maker))),
        draw.choice(("p.json", _word(maker))),
    ]
    path = "/" + "/".join(quote(part[:200], safe="", errors="replace") for part in parts)
    key = draw.choice((memory_key("00" * 32), memory_key("00" * 32), b"wrong"))
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    report.inputs += 1
    try:
        method = draw.choice(("GET", "PUT", "POST"))
        span = draw.choice(("bytes=0-1", "bytes=9-1", "bytes=-", "x", "bytes=99999999999-"))
        headers = {"Range": span} if draw.random() < 0.2 else {}
        body = bytes(draw.randrange(3000)) if method == "PUT" else None
        suite = draw.choice((Suite.PLAIN, Suite.BLAKE2B))
        size = str(draw.choice((len(body or b""), draw.randrange(5000))))
        headers |= {"Everstep-Size": size} if method == "PUT" else {}
        said = size if method == "PUT" else headers.get("Range", "")
        headers |= CopyRequest.new(method, path, said, suite).headers(key)
        line.request(method, path, body, headers)
        status = line.getresponse().status
    except (http.client.HTTPException, OSError, ValueError):
        report.refused += 1
        return
    finally:
        line.close()
    report.refused += 400 <= status < 500
    if status >= 500:
        report.failures.append(f"HTTP {status} for {method} {path[:200]}")


PURE: tuple[Callable[[int, int], FuzzReport], ...] = (
    coordinator,
    agent,
    worker_lines,
    worker_frames,
    memory,
    records,
    rings,
)


def still_there(address: str) -> bool:
    """Does a coordinator answer, and lead?"""
    host = urlsplit(address).netloc
    line = http.client.HTTPConnection(host, timeout=30)
    try:
        line.request("GET", "/v1/health")
        return bool(json.loads(line.getresponse().read())["leads"])
    finally:
        line.close()


def resident_mib() -> float:
    """Of this process."""
    time.sleep(0.01)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
