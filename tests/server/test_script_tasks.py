"""A script task over three nodes: a rank is killed, a machine is lost and returns. Real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import Cluster

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
import everstep
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
step = int(open("step").read()) if os.path.exists("step") else 0
open(f"pids/{rank}", "w").write(str(os.getpid()))
while not os.path.exists("stop"):
    time.sleep(0.05)
    step += 1
    if rank == 0:
        open("step.new", "w").write(str(step)); os.replace("step.new", "step")
    everstep.progress(step, saved=rank == 0)
"""


def test_a_script_heals_over_nodes_and_grows_back(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        ranks = {"command": ["train.py"], "folder": str(tmp_path), "ranks": 2, "least": 1, "most": 2}
        cluster.client.post("/v1/tasks", {"name": "job", "ranks": ranks})

        def script() -> Any:
            return cluster.task()["script"]

        cluster.until(lambda: script()["world"] == 4, "both nodes take part")
        cluster.step_reached(3)
        pid = tmp_path / "pids" / "3"
        cluster.until(lambda: pid.exists() and pid.read_text(), "rank 3 runs")
        before = script()["life"]  # a node that was slow to start may have been let in by a second one
        os.kill(int(pid.read_text()), signal.SIGKILL)
        cluster.until(lambda: script()["life"] > before, "another life has begun")
        (incident,) = cluster.incidents()
        assert incident["what"] == "rank 3 killed by SIGKILL"
        assert incident["node"] == script()["groups"][1]["node"]
        lost = script()["groups"][1]["node"]
        cluster.signal_node(lost, signal.SIGKILL)
        cluster.until(lambda: script()["world"] == 2, "one node goes on")
        assert script()["restarts"] == 1, "a lost node is no failure of the script"
        cluster.step_reached(cluster.task()["step"] + 3)
        cluster.start_agent(lost, slots=2)
        cluster.until(lambda: script()["world"] == 4, "it takes part again")
        (tmp_path / "stop").touch()
        told = cluster.finished()
        assert told["state"] == "finished", told["because"]
        assert all(each["closed_at"] for each in cluster.incidents())
