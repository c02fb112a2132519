"""One cluster of real processes, without failures: its token is nowhere to be found, a task is paused, and
scores and logs of another are read while it runs and once it is over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import Cluster, descendants, paced_job

TALKING = """
import time
from pathlib import Path
import torch, everstep
from torch import nn

FOLLOWED = Path(__file__).with_name("followed")

def model():
    layers = [lambda: nn.Linear(4, 8), lambda: nn.Linear(8, 1)]
    return everstep.Model(layers=layers, loss=nn.functional.mse_loss)

class Data:
    def batch(self, step, microbatch):
        print(f"asked for {step} {microbatch}", flush=True)
        while step == 2 and not FOLLOWED.exists():
            time.sleep(0.01)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + microbatch))
        return x, x.sum(1, keepdim=True)

def error(output, targets):
    return (output - targets).abs().mean()
"""
STEPS = 6
SECRET = "s3cret-of-the-cluster"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its processes get the token in their environment, as systemd and scripts give it."""
    with Cluster(tmp_path_factory.mktemp("cluster"), token=SECRET) as running:
        running.start_coordinator()
        running.start_agent("a", slots=2)
        running.nodes_up(1)
        yield running


def test_the_token_is_in_no_environment_and_in_no_log(cluster: Cluster) -> None:
    daemons = {cluster.coordinators["first"].pid, cluster.agents["a"].pid}
    pids = daemons | set(descendants(cluster.agents["a"].pid))
    assert len(pids) >= 3, "the agent's fork server, too"
    for pid in pids:
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), pid
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes(), pid
    logs = "".join(path.read_text() for path in cluster.folder.glob("*.log"))
    assert "dashboard: http" in logs
    assert SECRET not in logs


def test_a_paused_task_does_no_step_twice(cluster: Cluster, tmp_path: Path) -> None:
    """It was ended at once, and went back to its last checkpoint."""
    job = paced_job(tmp_path, steps=24, replicas=1, stages=2)
    job |= {"checkpoint": {"folder": str(tmp_path / "saved"), "interval": 100}}
    cluster.submit(job, "paused")
    cluster.step_reached(4, "paused")
    cluster.client.post("/v1/tasks/paused/pause")
    cluster.until(lambda: cluster.task("paused")["state"] == "paused", "the task is paused")
    assert cluster.task("paused")["step"] >= 4, "a paused task was shown at step 0"
    cluster.client.post("/v1/tasks/paused/unpause")
    assert cluster.finished("paused")["state"] == "finished"
    rows = (cluster.folder / "state-first" / "tasks" / "paused.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 25))


def command(cluster: Cluster, *words: str) -> list[str]:
    address = cluster.addresses["first"]
    called = [sys.executable, "-m", "everstep.cli.main", *words]
    return [*called, "--address", address, "--token", cluster.token]


def test_scores_and_logs_are_there_while_it_runs_and_afterwards(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text(TALKING)
    job: dict[str, Any] = {
        "base": str(tmp_path),
        "steps": STEPS,
        "replicas": 2,
        "stages": 1,
        "microbatches": 2,
        "model": {"build": "talking:model"},
        "data": {"build": "talking:Data"},
        "evaluation": {
            "every": 2,
            "batches": 3,
            "data": {"build": "talking:Data"},
            "metrics": ["talking:error"],
        },
    }
    cluster.submit(job, "talks")
    follows = subprocess.Popen(
        command(cluster, "logs", "talks", "--follow"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follows.stdout is not None
    first = follows.stdout.readline()
    (tmp_path / "followed").touch()
    told = cluster.finished("talks")
    rest, err = follows.communicate(timeout=60)
    out = first + rest
    assert follows.returncode == 0, err
    assert f"asked for {STEPS} 0" in out
    assert out.count("asked for 3 0\n") == 1
    assert f"evaluation after step {STEPS}: loss " in out
    assert out.count(f"step 3/{STEPS}  loss ") == 1
    assert "everstep: worker 0:0 of talks (replica 0 of " in out
    assert "is on node a, slot " in out
    assert [one["step"] for one in told["evaluations"]] == [2, 4, 6]
    assert set(told["evaluation"]["values"]) == {"loss", "error"}
    after = subprocess.run(
        command(cluster, "logs", "talks", "--worker", "1:0", "--json"), capture_output=True, text=True
    )
    assert f"asked for {STEPS} 2" in json.loads(after.stdout)["text"], after.stderr
    shown = subprocess.run(
        command(cluster, "status"),
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "220"},
    )
    assert "(step 6)" in shown.stdout + shown.stderr
    cluster.kill_coordinator()
    cluster.start_coordinator()
    assert cluster.task("talks")["evaluation"] == told["evaluation"]
