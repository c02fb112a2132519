"""What an agent answers to the probes of a launcher."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from everstep.errors import UserError
from everstep.node.agent import STUCK_S, Agent, AgentSettings, probed


@pytest.mark.parametrize(
    ("path", "has_joined", "is_joined", "looked_s", "status"),
    [
        ("/startup", False, False, 0.0, 503),
        ("/startup", True, False, 0.0, 200),
        ("/ready", True, False, 0.0, 503),
        ("/ready", True, True, 0.0, 200),
        ("/live", True, False, 0.0, 200),  # without a coordinator its workers keep training
        ("/live", True, True, STUCK_S + 1, 503),
        ("/metrics", True, True, 0.0, 404),
    ],
)
def test_a_lost_coordinator_is_no_reason_to_restart_an_agent(
    path: str, has_joined: bool, is_joined: bool, looked_s: float, status: int
) -> None:
    found, says = probed(path, has_joined=has_joined, is_joined=is_joined, looked_s=looked_s)
    assert found == status
    assert says


def settings(port: int) -> AgentSettings:
    return AgentSettings(node="n", slots=1, coordinators=("http://127.0.0.1:1",), probe_port=port)


def test_an_agent_that_has_not_joined_answers_that_it_lives_and_is_not_ready() -> None:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]

    async def ask() -> dict[str, int]:
        running = asyncio.create_task(Agent(settings(port), say=lambda _: None, warn=lambda _: None).run())
        found = {}
        async with aiohttp.ClientSession() as session:
            for path in ("live", "startup", "ready"):
                while path not in found:
                    assert not running.done()
                    try:
                        async with session.get(f"http://127.0.0.1:{port}/{path}") as answer:
                            found[path] = answer.status
                    except aiohttp.ClientConnectionError:
                        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        return found

    assert asyncio.run(ask()) == {"live": 200, "startup": 503, "ready": 503}


def test_a_probe_port_that_is_taken_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--probe-port {port} on 127.0.0.1 cannot be used"):
            asyncio.run(Agent(settings(port), say=lambda _: None, warn=lambda _: None).run())
