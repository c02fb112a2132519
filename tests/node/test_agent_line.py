"""Nothing that a coordinator or the line to it does ends an agent, or the workers of its node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from everstep.cli.client import Client
from everstep.cli.coordinator import Signalled, until_signalled
from everstep.core.agent.agent import AgentSaid
from everstep.errors import UserError
from everstep.net.sockets import UNANSWERED_MS, watch_path
from everstep.node import agent as module
from everstep.node.agent import Agent, AgentSettings
from everstep.node.worker_processes import WorkerLogs
from everstep.protocol.codec import decode
from everstep.protocol.messages import LeaveNoticed, NodeReport
from everstep.protocol.ops import Worker
from everstep.protocol.table import PROTOCOL
from everstep.ranks import snapshots
from harness.cluster import small_job
from tests.support.processes import until
from tests.support.served import served


def _welcome(**more: Any) -> str:
    return json.dumps({"welcome": "n1", "heard": 0, "protocol": PROTOCOL} | more)


class RudeCoordinator:
    """Does one thing after the other to whoever calls, then welcomes."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.rude = [
            self._status(401),
            self._status(403),
            self._status(500),
            self._says('{"refused": "node n1 is connected already"}'),
            self._says("this is no JSON"),
            self._says("[1, 2]"),
            self._says("{}"),
            self._says(_welcome(protocol=PROTOCOL - 1)),
            self._says(None),
            self._says(_welcome(heard="x")),
            self._says(_welcome(term=7), '{"number": 1, "order": {"is": "Nothing"}}'),
            self._says(_welcome(term=7), '{"ask": 1}'),
            self._says(_welcome(term=6)),  # deposed
        ]
        self.welcomed = asyncio.Event()

    @staticmethod
    def _status(number: int) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(status=number)

        return answer

    @staticmethod
    def _says(*texts: str | None) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.StreamResponse:
            line = web.WebSocketResponse()
            await line.prepare(request)
            await line.receive()
            for text in texts:
                if text is not None:
                    await line.send_str(text)
            await line.close()
            return line

        return answer

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization", ""))
        if self.rude:
            found: web.StreamResponse = await self.rude.pop(0)(request)
            return found
        line = web.WebSocketResponse()
        await line.prepare(request)
        await line.receive()
        await line.send_str(_welcome(term=7))
        self.welcomed.set()
        async for _ in line:
            pass
        return line


def test_of_a_coordinator_that_answers_no_ping_the_agent_says_that_the_connection_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.2)
    said: list[str] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        """Its machine has lost its power."""
        line = web.WebSocketResponse(autoping=False)
        await line.prepare(request)
        await line.receive()
        await line.send_str(_welcome(term=7))
        async for _ in line:
            pass
        return line

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        settings = AgentSettings(node="n1", slots=1, coordinators=(address,))
        job = asyncio.create_task(Agent(settings, say=said.append, warn=said.append).run())
        async with asyncio.timeout(20):
            while len(said) < 2:
                await asyncio.sleep(0.01)
        job.cancel()
        await runner.cleanup()

    asyncio.run(play())
    assert "is connected to" in said[0]
    assert "the connection broke" in said[1]
    assert "PONG" in said[1]


def test_an_agent_that_is_told_to_end_announces_it_and_says_when_it_has_left() -> None:
    """It ended at once: its node was given up by silence, with an incident of a lost connection."""
    heard: list[dict[str, Any]] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        await line.receive()
        await line.send_str(_welcome(term=7))
        async for message in line:
            said = json.loads(message.data)
            if "beat" not in said:
                heard.append(said)
            if "number" in said:
                await line.send_json({"heard": said["number"], "term": 7})
        return line

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        agent = Agent(AgentSettings(node="n1", slots=1, coordinators=(address,), grace_s=60), say=said.append)
        job = asyncio.create_task(agent.run())
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0.01)
            agent.leave("an upgrade")
            await job
        await runner.cleanup()

    said: list[str] = []
    asyncio.run(play())
    notice, left = heard
    assert decode(NodeReport, notice["report"]) == LeaveNoticed(leaves_in_s=60, by="an upgrade", at_once=True)
    assert left == {"left": True}
    assert said[1] == "node n1 leaves: an upgrade"


def test_an_agent_without_a_coordinator_does_not_use_up_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALONE_S", 0.2)

    async def play() -> None:
        settings = AgentSettings(node="n1", slots=1, coordinators=("http://127.0.0.1:9",), grace_s=3600)
        agent = Agent(settings, say=lambda line: None, warn=lambda line: None)
        agent.leave("it is late")
        async with asyncio.timeout(30):
            await agent.run()

    asyncio.run(play())


def test_a_log_on_storage_that_hangs_stops_neither_heartbeats_nor_what_is_done_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was read on the event loop: an agent that was asked for a log fell silent with the storage."""
    answers = threading.Event()

    def read(logs: WorkerLogs, task: str, worker: Worker, **most: Any) -> dict[str, Any]:
        assert answers.wait(60)
        return {"text": "", "next": 0, "at": 0.0}

    monkeypatch.setattr(WorkerLogs, "read", read)
    heard: list[dict[str, Any]] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        await line.receive_json()
        await line.send_str(_welcome(term=1, journal="j"))
        for number in range(40):
            asked = {"ask": number, "what": "log", "task": "t", "worker": "0:0", "bytes": 10, "from": None}
            await line.send_json({"term": 1, **asked})
        await line.send_json({"term": 1, "ask": 99, "what": "readings", "task": "t"})
        async for message in line:
            heard.append(json.loads(message.data))
        return line

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        settings = AgentSettings(node="n1", slots=1, coordinators=(f"http://127.0.0.1:{port}",), beat_s=0.05)
        agent = Agent(settings, say=lambda line: None, warn=lambda line: None)
        job = asyncio.create_task(agent.run())
        async with asyncio.timeout(60):
            while {"answer": 99, "value": []} not in heard or sum("beat" in one for one in heard) < 5:
                await asyncio.sleep(0.01)
            done = asyncio.Event()
            agent._do_beside(lambda: None, lambda found: done.set())  # as processes are started
            await done.wait()
            assert not any(one.get("answer") == 0 for one in heard)
            answers.set()
            while sum("answer" in one for one in heard) < 41:
                await asyncio.sleep(0.01)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        await runner.cleanup()

    asyncio.run(play())


def test_whatever_a_coordinator_does_the_agent_tries_again_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(module, "RETRY_MOST_S", 0.004)
    said: list[str] = []
    asked = iter(range(1000))

    def token() -> str:
        number = next(asked)
        if number == 3:
            raise UserError("the token file x cannot be read.")  # while it is being replaced
        return f"token-{number}"

    async def play() -> RudeCoordinator:
        coordinator = RudeCoordinator()
        app = web.Application()
        app.router.add_get("/v1/agent", coordinator.serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        settings = AgentSettings(node="n1", slots=1, coordinators=(f"http://127.0.0.1:{port}",), token=token)
        job = asyncio.create_task(Agent(settings, say=said.append, warn=said.append).run())
        welcomed = asyncio.create_task(coordinator.welcomed.wait())
        async with asyncio.timeout(20):
            await asyncio.wait({job, welcomed}, return_when=asyncio.FIRST_COMPLETED)
        assert not job.done(), job.exception()
        job.cancel()
        await runner.cleanup()
        return coordinator

    coordinator = asyncio.run(play())
    assert coordinator.tokens[:3] == ["Bearer token-0", "Bearer token-1", "Bearer token-2"]
    assert coordinator.tokens[3] == "Bearer token-4"
    assert sum("refuses this agent's token" in line for line in said) == 1, "401, then 403: one reason"
    assert any("token file x cannot be read" in line for line in said)
    assert any("connected already" in line for line in said)
    assert any("of term 6" in line for line in said)
    assert all("\n" not in line for line in said)


@pytest.mark.slow
def test_workers_live_through_a_rotation_of_the_token(tmp_path: Path) -> None:
    """The coordinator has the new token before the node's file has it."""
    file, log = tmp_path / "token", tmp_path / "agent.log"
    file.touch(mode=0o600)
    file.write_text("the old one\n")
    job = small_job(tmp_path, steps=1_000_000, replicas=1, stages=1)
    agent: subprocess.Popen[bytes] | None = None

    def workers(client: Client) -> dict[str, int]:
        rows = client.get("/v1/tasks/t/readings")["workers"]
        return {row["worker"]: row["pid"] for row in rows}

    try:
        with served(tmp_path / "state", token="the old one") as address:
            port = int(address.rpartition(":")[2])
            command = [sys.executable, "-m", "everstep.cli.main", "agent", "--node", "a", "--slots", "1"]
            with log.open("wb") as out:
                agent = subprocess.Popen(
                    [*command, "--coordinator", address, "--token-file", str(file)],
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            client = Client(address=address, token="the old one")
            until(lambda: client.get("/v1/status")["nodes"], "the node is there")
            client.post("/v1/tasks", {"name": "t", "job": job})
            until(lambda: client.get("/v1/tasks/t")["step"] >= 1, "it trains")
            before = workers(client)
        with served(tmp_path / "state", token="the new one", port=port) as address:
            client = Client(address=address, token="the new one")
            until(lambda: "refuses this agent's token" in log.read_text(), "the agent says what is wrong")
            os.kill(before["0:0"], 0)
            step = client.get("/v1/tasks/t")["step"]
            file.write_text("the new one\n")
            until(lambda: client.get("/v1/tasks/t")["step"] > step, "its steps are heard again")
            assert workers(client) == before
            assert client.get("/v1/incidents") == []
            assert agent.poll() is None
    finally:
        if agent is not None:
            agent.send_signal(signal.SIGTERM)
            agent.wait(20)


def test_an_agent_that_is_ended_while_its_line_closes_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a whole cluster is stopped: the coordinator closes the line, and SIGTERM comes a moment later,
    while the agent waits for the tasks that used it.
    """
    speaks, closing = asyncio.Event(), asyncio.Event()

    async def speak(self: Agent, line: Any, heard: int) -> None:
        speaks.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            closing.set()
            await asyncio.sleep(0.2)
            raise

    monkeypatch.setattr(Agent, "_speak", speak)

    async def serve(request: web.Request) -> web.WebSocketResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        await line.receive()
        await line.send_str(_welcome(term=7))
        await speaks.wait()
        await line.close()
        return line

    async def play() -> bool:
        app = web.Application()
        app.router.add_get("/v1/agent", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = AgentSettings(
            node="n1", slots=1, coordinators=(f"http://127.0.0.1:{runner.addresses[0][1]}",)
        )
        job = asyncio.create_task(Agent(settings, say=lambda line: None).run())
        await asyncio.wait_for(closing.wait(), 20)
        job.cancel()
        await asyncio.wait([job], timeout=5)
        ended = job.done()
        job.cancel()  # a second time, so that a test that fails ends as well
        await runner.cleanup()
        return ended

    assert asyncio.run(play())


def test_both_ends_of_an_agents_connection_notice_a_dead_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without these options a machine that lost its power keeps its connection for hours."""
    seen: dict[str, int] = {}

    def watched(name: str) -> Callable[[Any], None]:
        def watch(sock: Any) -> None:
            watch_path(sock)
            seen[name] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

        return watch

    monkeypatch.setattr("everstep.node.agent.watch_path", watched("agent"))
    monkeypatch.setattr("everstep.server.agent_connections.watch_path", watched("coordinator"))

    async def connect(address: str) -> None:
        job = asyncio.create_task(
            Agent(AgentSettings(node="n1", slots=1, coordinators=(address,)), say=print, warn=print).run()
        )
        async with asyncio.timeout(20):
            while len(seen) < 2:
                await asyncio.sleep(0.01)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)

    with served(tmp_path) as address:
        asyncio.run(connect(address))
    assert seen == {"agent": UNANSWERED_MS, "coordinator": UNANSWERED_MS}


def test_of_several_coordinators_those_that_do_not_answer_are_not_waited_for(tmp_path: Path) -> None:
    """Each was given 5 s, one after the other, before the one that leads was tried."""
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]  # the kernel accepts, and that is all
    lost = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in silent]

    async def joined(address: str) -> float:
        settings = AgentSettings(node="n1", slots=1, coordinators=(*lost, address), grace_s=0.0)
        agent, began = Agent(settings, say=lambda line: None, warn=lambda line: None), time.monotonic()
        running = asyncio.create_task(agent.run())
        while not agent._has_joined:
            await asyncio.sleep(0.01)
        took_s = time.monotonic() - began
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return took_s

    with served(tmp_path) as address:
        assert asyncio.run(joined(address)) < 5.0
    for one in silent:
        one.close()


def test_a_warning_by_a_signal_is_reported_once() -> None:
    """Slurm's --signal=USR1@120 reaches the agent, and its keeper passes it on as well."""
    said: list[str] = []
    agent = Agent(AgentSettings(node="n1", slots=1, coordinators=()), say=said.append)
    handle, events = agent.state.handle, []
    agent.state.handle = lambda event, now: events.append(event) or handle(event, now)
    agent.notice(120.0, "SIGUSR1")
    agent.notice(120.0, "SIGUSR1")
    reports = [kept.report for kept in agent.state.reports.after(0)]
    assert reports == [LeaveNoticed(leaves_in_s=120.0, by="SIGUSR1")]
    assert events == [AgentSaid(reports[0])], "its machine changes through its events only"
    assert len(said) == 1


def test_a_daemon_is_not_ended_by_a_warning() -> None:
    warned: list[int] = []

    async def work(signalled: Signalled) -> None:
        signalled.warned = lambda: warned.append(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not warned:
            await asyncio.sleep(0.01)

    assert until_signalled(work) == 0


def test_an_agent_removes_the_files_of_keepers_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of scripts stayed in memory until another script ran on the node."""
    monkeypatch.setattr(snapshots, "MEMORY", tmp_path)
    left = tmp_path / "everstep-snapshots-left"
    left.mkdir()
    (left / "step-3").write_bytes(b"x")

    async def play() -> bool:
        living = snapshots.NodeMemory("127.0.0.1", "s")
        left.mkdir(exist_ok=True)  # a living keeper has removed it
        job = asyncio.create_task(
            Agent(AgentSettings(node="n1", slots=1, coordinators=()), say=print, warn=print).run()
        )
        try:
            async with asyncio.timeout(20):
                while left.exists():
                    await asyncio.sleep(0.02)
            return living.folder.is_dir()
        finally:
            living.close()
            job.cancel()
            await asyncio.wait([job], timeout=20)

    assert asyncio.run(play())
