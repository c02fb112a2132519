"""`everstep launch ray`, on a Ray of several nodes on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="no Ray; pip install ray")

SCRIPT = """
import os, sys, time
import everstep
for step in range(1_000_000):
    time.sleep(0.1)
    everstep.progress(step + 1)
    if os.environ["RANK"] == "0":
        with open(sys.argv[1], "a") as file: file.write(os.environ["WORLD_SIZE"] + "\\n")
    if os.path.exists(sys.argv[1] + ".end"): break
"""


class Launched:
    def __init__(self, address: str, folder: Path) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.worlds_file, self.folder = folder / "worlds", folder
        command = ["launch", "ray", "--nodes", "1:3", "--cpu", "--address", address, "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "everstep.cli.main", *command, "train.py", "--", "worlds"],
            cwd=folder,
            stdout=(folder / "stdout").open("w"),
            stderr=(folder / "stderr").open("w"),
        )

    @property
    def world(self) -> int:
        """The number of ranks in the newest step."""
        lines = self.worlds_file.read_text().splitlines() if self.worlds_file.exists() else []
        return int(lines[-1]) if lines else 0

    def until(self, is_so: Callable[[], Any], limit_s: float = 400) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert self.process.poll() is None, (self.folder / "stderr").read_text()[-4000:]
            assert time.monotonic() < deadline, (self.folder / "stderr").read_text()[-4000:]
            time.sleep(0.1)


@pytest.mark.slow
def test_a_script_on_ray_survives_a_killed_node_and_leaves_a_drained_one(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    here = {"node_ip_address": "127.0.0.1"}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **here}
    )
    nodes = [cluster.add_node(num_cpus=1, **here) for _ in range(3)]
    cluster.wait_for_nodes()
    launched = Launched(cluster.address, tmp_path)
    try:
        launched.until(lambda: launched.world == 3)
        cluster.remove_node(nodes[0], allow_graceful=False)
        launched.until(lambda: launched.world == 2)
        drain = ["drain-node", "--address", cluster.address, "--node-id", nodes[1].node_id]
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        program = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        subprocess.run([*program, *drain, *why, "--deadline-remaining-seconds", "20"], check=True)
        launched.until(lambda: launched.world == 1)
        (tmp_path / "worlds.end").write_text("")
        assert launched.process.wait(timeout=300) == 0, (tmp_path / "stderr").read_text()[-4000:]
    finally:
        launched.process.kill()
        launched.process.wait()
        cluster.shutdown()
    told = json.loads((tmp_path / "stdout").read_text())
    assert (told["state"], told["because"]) == ("finished", "it ended with code 0")
    assert told["script"]["restarts"] == 0, "a lost or drained node counts as no failure of the script"
    assert "takes node" in (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_more_nodes_than_ray_has_is_a_sentence(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    (tmp_path / "train.py").write_text("")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        command = ["launch", "ray", "--nodes", "2", "--cpu", "--wait", "1", "--address", cluster.address]
        ran = subprocess.run(
            [sys.executable, "-m", "everstep.cli.main", *command, "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    finally:
        cluster.shutdown()
    assert ran.returncode == 2, ran.stderr
    assert "Ray has not given 2 nodes with 1 CPU each within 1 s; give fewer --nodes" in ran.stderr
