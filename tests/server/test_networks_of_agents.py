"""Real agents and a real coordinator measure the network between nodes before these get workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.client import Client
from everstep.node.agent import Agent, AgentSettings
from everstep.node.worker_processes import WorkerProcesses
from everstep.protocol import messages as msg
from tests.support.served import served

GOOD = ("a", "b", "c", "d")


@contextlib.asynccontextmanager
async def agents(address: str, *names: str) -> AsyncIterator[None]:
    runs = []
    for name in names:
        settings = AgentSettings(
            node=name, slots=1, coordinators=(address,), checks_network=True, token=lambda: "t"
        )
        agent = Agent(settings, say=lambda _: None, warn=lambda _: None)
        runs.append(asyncio.create_task(agent.run()))
    try:
        yield
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


async def until(client: Client, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The nodes, by name."""
    for _ in range(1200):
        status = await asyncio.to_thread(client.get, "/v1/status")
        nodes = {node["node"]: node for node in status["nodes"]}
        if true(nodes):
            return nodes
        await asyncio.sleep(0.05)
    raise TimeoutError(str(nodes))


def test_agents_measure_each_other_and_a_bad_network_is_isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = WorkerProcesses._measured

    def cut_off(self: WorkerProcesses, order: msg.MeasurePair, found: Any) -> None:
        is_bad = "bad" in (self.settings.node, order.peer)
        report(self, order, replace(found, error="no answer in time") if is_bad else found)

    monkeypatch.setattr(WorkerProcesses, "_measured", cut_off)

    async def scene(address: str) -> None:
        client = Client(address=address, token="t")
        async with agents(address, *GOOD):
            nodes = await until(
                client, lambda found: {n["state"] for n in found.values()} == {"up"} and len(found) == 4
            )
            assert all("MB/s" in node["because"] for node in nodes.values()), nodes
            async with agents(address, "bad"):
                nodes = await until(client, lambda found: found.get("bad", {}).get("state") == "isolated")
                assert "network to" in nodes["bad"]["because"]
                assert {nodes[name]["state"] for name in GOOD} == {"up"}
                incidents = await asyncio.to_thread(client.get, "/v1/incidents")
                # On a busy machine a node may be silent for a moment: that is another incident.
                failing = [one["node"] for one in incidents if one["what"].endswith("fails its checks")]
                assert failing == ["bad"], [one["what"] for one in incidents]

    with served(tmp_path, token="t") as address:
        asyncio.run(scene(address))
