"""A coordinator that moves, or dies without a word, is found again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from everstep.node import agent as module
from everstep.node.agent import Agent, AgentSettings
from everstep.node.coordinator_address import current
from everstep.protocol.table import PROTOCOL


def test_an_address_is_itself_and_a_file_is_read_anew(tmp_path: Path) -> None:
    assert current("http://a:7077") == "http://a:7077"
    place = f"@{tmp_path / 'coordinator'}"
    assert current(place) == ""
    for address in ("http://a:7077", "http://b:7077"):
        (tmp_path / "coordinator").write_text(address + "\n")
        assert current(place) == address


class Coordinator:
    """Welcomes an agent; answers its pings, or is as silent as a machine without power."""

    def __init__(self, *, mute: bool) -> None:
        self.mute, self.visits, self.address = mute, 0, ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/v1/agent", self._serve)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        line = web.WebSocketResponse(autoping=not self.mute, timeout=0.1)
        await line.prepare(request)
        self.visits += 1
        await line.receive_json()
        await line.send_json({"welcome": "n1", "heard": 0, "protocol": PROTOCOL})
        async for _ in line:
            pass
        return line


def test_an_agent_leaves_a_line_that_nobody_answers_and_goes_where_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.2)
    place = tmp_path / "coordinator"

    async def play() -> tuple[int, int]:
        dead, alive = Coordinator(mute=True), Coordinator(mute=False)
        runners = [await dead.start(), await alive.start()]
        agent = Agent(AgentSettings(node="n1", slots=1, coordinators=(f"@{place}",)), say=print, warn=print)
        job = asyncio.create_task(agent.run())
        await asyncio.sleep(0)  # no file yet: it waits
        place.write_text(dead.address)
        async with asyncio.timeout(20):
            while not dead.visits:
                await asyncio.sleep(0.01)
            place.write_text(alive.address)
            while not alive.visits:
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)  # five pings, all answered
        job.cancel()
        for runner in runners:
            await runner.cleanup()
        return dead.visits, alive.visits

    dead_visits, alive_visits = asyncio.run(play())
    assert dead_visits >= 1
    assert alive_visits == 1, "a line that answers is kept"
