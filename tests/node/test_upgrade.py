"""A rolling upgrade across a change of the protocol, while a task trains: real processes of two versions.

The newer version is this source with its protocol number raised: it takes agents and workers of this one for
those of the version before, and speaks the older dialect with them (`protocol.older`), which is the one that
the last change of the protocol left.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.cli.client import Client
from everstep.job.job import Job
from everstep.launch.local.api import run_job
from everstep.protocol.table import PROTOCOL
from harness.cluster import Cluster, small_job
from tests.node.test_agent_replaced import nodes, pids, pids_or_none, until

pytestmark = pytest.mark.slow
COMPARED = 25


def altered(folder: Path, path: str, before: str, after: str) -> list[str]:
    """The command of a copy of this source with one line changed."""
    shutil.copytree(Path(everstep.__file__).parent, folder / "everstep")
    file = folder / "everstep" / path
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))
    return ["env", f"PYTHONPATH={folder}", sys.executable, "-m", "everstep.cli.main"]


def version(folder: Path, protocol: int) -> list[str]:
    """The command of a copy of this source that speaks this protocol."""
    line = "\nPROTOCOL = {} "
    return altered(folder, "protocol/table.py", line.format(PROTOCOL), line.format(protocol))


def test_workers_outlive_an_upgrade_of_coordinator_and_agents_across_a_protocol_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, newer = version(tmp_path / "this", PROTOCOL), version(tmp_path / "newer", PROTOCOL + 1)
    monkeypatch.setenv("EVERSTEP_TOKEN", "harness")
    job = small_job(tmp_path, steps=1_000_000, optimizer={"decay": "constant"})
    with Cluster(tmp_path, program=this, eager=True) as cluster:
        address = cluster.start_coordinator()
        with nodes(tmp_path, address, "a", "b", program=this) as both:
            client = Client(address=address, token="harness")

            def step() -> int:
                return int(client.get("/v1/tasks/t")["step"])

            def trains_on() -> dict[str, Any]:
                until(lambda: len(pids_or_none(client)) == 4, "four workers")
                done = step()
                until(lambda: step() > done + 2, "its steps are heard")
                return pids(client)

            def one_dies(before: dict[str, Any], worker: str) -> dict[str, Any]:
                """In a mix of versions: the others stay, and all of them are told of the new epoch."""
                os.kill(before[worker][0], signal.SIGKILL)
                until(lambda: pids_or_none(client).get(worker, before[worker]) != before[worker], "replaced")
                cluster.all_members("t")
                after = trains_on()
                assert {name: pid for name, pid in after.items() if name != worker} == {
                    name: pid for name, pid in before.items() if name != worker
                }
                return after

            until(lambda: len(client.get("/v1/status")["nodes"]) == 2, "both nodes are there")
            client.post("/v1/tasks", {"name": "t", "job": job})
            cluster.all_members("t")
            there = trains_on()

            cluster.coordinators["first"].terminate()
            cluster.coordinators["first"].wait(60)
            cluster.program = newer
            cluster.start_coordinator()
            assert trains_on() == there, "a newer coordinator, agents and workers of the version before"
            there = one_dies(there, "0:0")

            both[0].upgrade(newer)
            assert trains_on() == there, "a newer agent with workers of the version before"
            there = one_dies(there, "1:1")
            both[1].upgrade(newer)
            assert trains_on() == there

            until(lambda: step() >= COMPARED, "enough steps to compare")
            rows = client.get("/v1/tasks/t")["rows"]
    assert [row["step"] for row in rows[:COMPARED]] == list(range(1, COMPARED + 1))
    clean = run_job(Job.from_dict(job | {"steps": COMPARED})).by_step()
    assert [row["loss"] for row in rows[:COMPARED]] == [clean[s].loss for s in range(1, COMPARED + 1)]


@pytest.mark.parametrize("comes", ["newer", "older"])
def test_a_replacement_whose_version_sums_otherwise_takes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """The workers that train keep training, and their losses are those of a clean run."""
    before, after = 'NEW_SUMS = {"strict40": "40 bits"}', "NEW_SUMS: dict[str, str] = {}"
    older = altered(tmp_path / "older", "node/worker.py", before, after)
    newer = [sys.executable, "-m", "everstep.cli.main"]
    first, second = (older, newer) if comes == "newer" else (newer, older)
    monkeypatch.setenv("EVERSTEP_TOKEN", "harness")
    job = small_job(tmp_path, steps=1_000_000, stages=1, precision="bf16", optimizer={"decay": "constant"})
    with Cluster(tmp_path) as cluster:
        address = cluster.start_coordinator()
        with nodes(tmp_path, address, "a", "b", program=first) as both:
            client = Client(address=address, token="harness")
            until(lambda: len(client.get("/v1/status")["nodes"]) == 2, "both nodes are there")
            client.post("/v1/tasks", {"name": "t", "job": job})
            cluster.all_members("t")
            seats = {seat["node"]: seat["worker"] for seat in client.get("/v1/tasks/t")["seats"]}
            both[1].upgrade(second)
            until(lambda: len(pids_or_none(client)) == 2, "both agents answer")
            known = pids(client)
            os.kill(known[seats["b"]][0], signal.SIGKILL)
            kinds = lambda: [(one["verdict"] or {}).get("kind") for one in client.get("/v1/incidents")]  # noqa: E731
            until(lambda: "mixed versions" in kinds(), "it is refused")
            cluster.step_reached(int(client.get("/v1/tasks/t")["step"]) + 20, "t")
            task, alive = client.get("/v1/tasks/t"), pids_or_none(client)
            assert task["state"] == "running"
            assert alive[seats["a"]] == known[seats["a"]]
            states = {node["node"]: node["state"] for node in client.get("/v1/status")["nodes"]}
            assert states == {"a": "up", "b": "up"}
            rows = task["rows"][: min(int(task["step"]), 200)]
    clean = run_job(Job.from_dict(job | {"steps": len(rows)})).by_step()
    assert [row["loss"] for row in rows] == [clean[s].loss for s in range(1, len(rows) + 1)]
