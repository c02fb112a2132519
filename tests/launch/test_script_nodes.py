"""A machine of a script that waits for the rendezvous endpoint."""

from __future__ import annotations

import asyncio
import io

from everstep.launch.script_nodes import NodeRun, RunOnNodes
from harness.etcd import free_ports


def test_a_machine_that_waits_for_its_endpoint_leaves_when_told() -> None:
    here = RunOnNodes(
        NodeRun(
            run_id="waiting",
            endpoint=("127.0.0.1", free_ports(1)[0]),
            is_endpoint=False,
            order=None,
            host="",
            token="",
            ranks={"ranks": 1},
            output=io.BytesIO(),
        )
    )

    async def told() -> int:
        going = asyncio.create_task(here.go())
        await asyncio.sleep(0.1)
        here.leave("SIGTERM")
        return await asyncio.wait_for(going, 20)

    assert asyncio.run(told()) == 143
