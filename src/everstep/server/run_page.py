"""The page of a run that has no coordinator to serve it: `everstep train`, `everstep demo`.

    launcher (decides, heals) ──► every event it handles, as a line of JSON ──► follower (shows)
                              ◄── what a reader clicked, what a reader asked ──┘

A process of its own, beside the workers, started when a browser first calls: so looking costs the launcher a
line an event, and nothing that happens here can slow or break a training. It has the launcher's state from a
snapshot and from then on handles the same events with the same machine, as a coordinator does that reads its
journal; what follows from them it shows and does not do. When the launcher ends, it ends.

Rejected: the web server as a thread of the launcher (a slow page would hold the lock healing needs), and the
whole coordinator with agent and journal (`everstep train` would write to disk before each decision).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from aiohttp import web

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest, thaw
from everstep.core.cluster.task import OVER
from everstep.core.faults.detector import Heartbeats
from everstep.drive.driver import Handled
from everstep.errors import PeerError, UserError
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode
from everstep.schedule.task_scheduler import TaskScheduler
from everstep.server import requests, views
from everstep.server.access import Caller, Credentials
from everstep.server.api import Api
from everstep.server.record import SILENCE_S, ClusterRecord

NICENESS = 5
MAX_LINE = 1 << 26
ANSWER_S = 5.0
FAREWELL_S = 0.3  # to send the last news before the end
_HURTS = ("kill", "stop", "slow")


class Launcher:
    """The line to the process that decides."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def ask(self, **question: Any) -> Any:
        self._number += 1
        number = self._number
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps({"ask": number, **question}).encode() + b"\n")
            message = await asyncio.wait_for(self._asked[number], ANSWER_S)
        except (TimeoutError, ConnectionError):
            raise PeerError("the run does not answer; it may be over") from None
        finally:
            del self._asked[number]
        if isinstance(message, dict) and "error" in message:
            raise UserError(message["error"])
        return message

    async def hear(self) -> dict[str, Any] | None:
        """The next thing that is no answer; None: it has ended."""
        while line := await self._reader.readline():
            message: dict[str, Any] = json.loads(line)
            if "answer" not in message:
                return message
            asked = self._asked.get(message["answer"])
            if asked is not None and not asked.done():
                asked.set_result(message["value"])
        return None


class RunFollower:
    """Handles what the launcher has handled, a moment later; carries out nothing."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.record = ClusterRecord(say=lambda line: None)
        self.lines = RunLines(self)
        self.schedulers: dict[str, TaskScheduler] = {}  # they are the launcher's
        self.without_faults: dict[str, float] = {}  # of another run of the same job, to compare with

    def begin(self, state: dict[str, Any]) -> None:
        """A run as it stands; `ahead_s` brings its clock to the wall's."""
        machine, record = Coordinator(), self.record
        thaw(machine, state["state"])
        record.begin(machine, Heartbeats(patience_s=SILENCE_S), machine.events, state["steps"])
        record.ahead_s, record.leads = state["ahead_s"], True
        for steps in record.steps.values():
            steps.shift(record.ahead_s)
        for at, action in state["actions"]:
            shown = [decode(msg.ClusterAction, action)]
            record.handled(Handled(machine.events, at, None, shown, replayed=True))
        self.without_faults = {}
        self.renewed()

    def renewed(self) -> None:
        news = {"at": time.time(), "kind": "begin", "because": "a new snapshot replaces the state"}
        self.record.publish(news)

    def follow(self, at: float, event: Any) -> None:
        known, machine = decode(msg.ClusterEvent, event), self.record.machine
        actions = machine.handle(known, at)
        for action in actions:
            if isinstance(action, msg.Dispatch):
                machine.acknowledged(action.node, action.number)
        self.record.handled(Handled(machine.events, at, known, actions, replayed=True))

    async def handle(self, event: msg.ClusterEvent) -> None:
        assert isinstance(event, msg.CancelRequested), "nothing else can be asked of a run"
        await self.launcher.ask(what="cancel", task=event.task)

    async def digest(self) -> tuple[int, str]:
        return self.record.number, digest(self.record.machine)


class RunLines:
    """In place of the lines to agents: there is one node, and the launcher speaks for it."""

    def __init__(self, follower: RunFollower) -> None:
        self._follower = follower
        self.routes: Any = None  # there is no fabric

    @property
    def nodes(self) -> set[str]:
        return set(self._follower.record.machine.nodes)

    async def ask(self, node: str, question: dict[str, Any], *, within_s: float = ANSWER_S) -> Any:
        return await self._follower.launcher.ask(**question)

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        raise web.HTTPForbidden(text="this is the page of one run; agents have no business here")


class RunApi(Api):
    """The coordinator's API as far as it makes sense for one run on one machine."""

    def __init__(self, follower: RunFollower, *, token: str, may_hurt: bool) -> None:
        super().__init__(follower, credentials=Credentials(token=token, clock=time.time))
        self._follower, self._may_hurt = follower, may_hurt

    def may(self, caller: Caller) -> tuple[str, ...]:
        return ("follow", *(_HURTS if self._may_hurt else ("cancel",)))

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post("/v1/tasks/{task}/workers/{worker}/{verb}", self._hurt)
        return app

    async def _hurt(self, request: web.Request) -> web.Response:
        """In a demo only: a worker is killed, stopped, or slowed."""
        verb, worker = request.match_info["verb"], request.match_info["worker"]
        if not self._may_hurt:
            return _refuse(403, "workers may be hurt in a demo only: everstep demo --web.")
        if verb not in _HURTS:
            return _refuse(404, f"{verb!r} is not kill, stop or slow.")
        task = self._named_task(request)
        if task.state in OVER:
            return _refuse(400, "the run has ended; it has no workers.")
        said = await self._follower.launcher.ask(what=verb, task=task.name, worker=worker)
        return web.json_response({"said": said})

    async def _task(self, request: web.Request) -> web.Response:
        rows = requests.whole(request.query["rows"], "rows") if "rows" in request.query else None
        document = views.task(self.record, self._named_task(request), rows=rows)
        if rows != 0:
            document["without_faults"] = self._follower.without_faults or None
        return web.json_response(document)

    async def _submit(self, request: web.Request) -> web.Response:
        return _refuse(403, "this is the page of one run; submit tasks to a coordinator.")

    async def _task_verb(self, request: web.Request) -> web.Response:
        if request.match_info["verb"] != "cancel" or self._may_hurt:
            return _refuse(403, "only a run can be asked to end, and no demo.")
        return await super()._task_verb(request)

    async def _node_verb(self, request: web.Request) -> web.Response:
        return _refuse(403, "its workers have no other node to go to; cancel the task instead.")


async def follow(listener: socket.socket, line: socket.socket) -> None:
    """Serve on `listener` what arrives on `line`, until that ends."""
    launcher = Launcher(*await asyncio.open_connection(sock=line, limit=MAX_LINE))
    hello = await launcher.hear()
    if hello is None:
        return
    follower = RunFollower(launcher)
    api = RunApi(follower, token=hello["token"], may_hurt=hello["may_hurt"])
    runner = api.strangers.runner(api.app(), shutdown_timeout=0.2)
    await runner.setup()
    try:
        serving = False
        while (message := await launcher.hear()) is not None:
            if "state" in message:
                follower.begin(message)
                if not serving:
                    serving = True
                    await web.SockSite(runner, listener).start()
            elif "without_faults" in message:
                follower.without_faults = message["without_faults"]
                follower.renewed()
            else:
                follower.follow(message["at"], message["event"])
        await asyncio.sleep(FAREWELL_S)
    finally:
        await runner.cleanup()


def _refuse(status: int, sentence: str) -> web.Response:
    return web.json_response({"error": sentence}, status=status)


def main() -> None:
    """`python -m everstep.server.run_page LISTENER LINE`: two inherited file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the launcher; its end is ours
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    listener, line = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    asyncio.run(follow(listener, line))


if __name__ == "__main__":
    main()
