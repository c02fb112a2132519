"""A machine of a script that waits for the rendezvous endpoint."""

from __future__ import annotations

import asyncio
import io

import pytest

from everstep.errors import UserError
from everstep.launch.client import Client
from everstep.launch.script_nodes import NodeRun, RunOnNodes
from harness.etcd import free_ports


def waiting(join_timeout_s: float) -> RunOnNodes:
    return RunOnNodes(
        NodeRun(
            run_id="waiting",
            endpoint=("127.0.0.1", free_ports(1)[0]),
            is_endpoint=False,
            order=None,
            host="",
            token="",
            ranks={"ranks": 1},
            output=io.BytesIO(),
            join_timeout_s=join_timeout_s,
        )
    )


def test_a_coordinator_that_never_leads_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Client, "get", lambda self, path: {"leads": False})
    with pytest.raises(UserError, match=r"after 0\.2 s: the coordinator at .* does not lead$"):
        asyncio.run(asyncio.wait_for(waiting(0.2).go(), 20))


def test_a_machine_that_waits_for_its_endpoint_leaves_when_told() -> None:
    here = waiting(600.0)

    async def told() -> int:
        going = asyncio.create_task(here.go())
        await asyncio.sleep(0.1)
        here.leave("SIGTERM")
        return await asyncio.wait_for(going, 20)

    assert asyncio.run(told()) == 143
