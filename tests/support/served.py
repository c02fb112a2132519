"""A coordinator served on loopback, in a thread of the test; and an agent that is only words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from everstep.cli.client import Client
from everstep.drive.order_lines import unpacked
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.ops import Worker
from everstep.protocol.table import PROTOCOL
from everstep.server.serve import ServerSettings, serve

JOB: dict[str, Any] = {  # of one worker, which is never started by a `WordyAgent`
    "replicas": 1,
    "stages": 1,
    "microbatches": 2,
    "steps": 3,
    "base": ".",
    "model": {"preset": "gpt-tiny"},
    "data": {"kind": "synthetic"},
}


@contextlib.contextmanager
def served(
    folder: Path,
    *,
    token: str | None = None,
    patience: msg.Patience | None = None,
    port: int = 0,
    ca: Path | None = None,
    leads: bool = True,
    **settings_more: Any,
) -> Iterator[str]:
    """Its address. `leads` false: another one does, and it is not waited for."""
    told: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(over.set))
        settings = ServerSettings(folder=folder, port=port, token=token, **settings_more)
        serving = asyncio.create_task(serve(settings, ready=told.put, patience=patience))
        await asyncio.wait({serving, asyncio.create_task(over.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            told.put(serving.exception() or RuntimeError("it ended"))
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        address = told.get(timeout=90)
        assert isinstance(address, str), address
        while leads and not Client(address=address, ca=ca).get("/v1/health")["leads"]:
            threading.Event().wait(0.01)
        yield address
    finally:
        stop[0]()
        thread.join(60)
        assert not thread.is_alive()


def call(address: str, path: str, *, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(f"{address}{path}", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class WordyAgent:
    """Speaks the agents' protocol by hand. What it hears is kept, what it says is up to the test."""

    def __init__(self, line: aiohttp.ClientWebSocketResponse, welcome: dict[str, Any]) -> None:
        self.line, self.welcome = line, welcome
        self.orders: list[tuple[int, msg.Order]] = []
        self.heard = welcome.get("heard", 0)

    async def say(self, number: int, report: msg.NodeReport, sender: msg.Sender | None = None) -> None:
        """By default as the first process of the worker that the report is about."""
        said = report.event if isinstance(report, msg.TaskEvent) else report
        worker = getattr(said, "worker", Worker(0, getattr(said, "stage", 0)))
        task = getattr(report, "task", "")
        told = encode(sender or msg.Sender(task, worker, getattr(said, "incarnation", 1)))
        await self.line.send_str(json.dumps({"number": number, "report": encode(report), "sender": told}))

    async def beat(self, done: int = 0) -> None:
        await self.line.send_str(json.dumps({"beat": 0, "done": done}))

    async def until(self, kind: type, *, within_s: float = 300.0) -> Any:
        """The next order of this kind."""
        while True:
            message = await self.line.receive_json(timeout=within_s)
            self.heard = max(self.heard, message.get("heard", 0))
            if "order" in message:
                order = decode(msg.Order, unpacked(message["order"]))
                self.orders.append((message["number"], order))
                if isinstance(order, kind):
                    return order

    async def acknowledged(self, number: int, *, within_s: float = 300.0) -> None:
        while self.heard < number:
            message = await self.line.receive_json(timeout=within_s)
            self.heard = max(self.heard, message.get("heard", 0))


@contextlib.asynccontextmanager
async def agent(
    address: str, node: str, *, slots: int = 2, boot: str = "1", done: int = 0, token: str = "", **more: Any
) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{address}/v1/agent", headers=headers) as line,
    ):
        hello = {"node": node, "boot": boot, "slots": slots, "host": "127.0.0.1", "protocol": PROTOCOL} | more
        await line.send_str(json.dumps({"hello": hello, "done": done}))
        yield WordyAgent(line, await line.receive_json(timeout=60))
