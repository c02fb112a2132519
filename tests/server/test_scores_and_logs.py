"""On a cluster: the scores of evaluations, and what workers print, while a task runs and once it is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from everstep.server.scalars import RunScalars
from harness.cluster import Cluster

TALKING = """
import torch, everstep
from torch import nn

def model():
    layers = [lambda: nn.Linear(4, 8), lambda: nn.Linear(8, 1)]
    return everstep.Model(layers=layers, loss=nn.functional.mse_loss)

class Data:
    def batch(self, step, microbatch):
        print(f"asked for {step} {microbatch}", flush=True)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + microbatch))
        return x, x.sum(1, keepdim=True)

def error(output, targets):
    return (output - targets).abs().mean()
"""
STEPS = 6


def command(cluster: Cluster, *words: str) -> list[str]:
    address = cluster.addresses["first"]
    called = [sys.executable, "-m", "everstep.cli.main", *words]
    return [*called, "--address", address, "--token", cluster.token]


def test_scores_and_logs_are_there_while_it_runs_and_afterwards(tmp_path: Path) -> None:
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
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=2)
        cluster.nodes_up(1)
        cluster.submit(job)
        follows = subprocess.Popen(
            command(cluster, "logs", "job", "--follow"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        told = cluster.finished()
        out, err = follows.communicate(timeout=60)
        assert follows.returncode == 0, err
        assert f"asked for {STEPS} 0" in out
        assert out.count("asked for 3 0\n") == 1
        assert f"evaluation after step {STEPS}: loss " in out
        assert out.count(f"step 3/{STEPS}  loss ") == 1
        assert "everstep: worker 0:0 of job (replica 0 of " in out
        assert "is on node a, slot " in out
        assert [one["step"] for one in told["evaluations"]] == [2, 4, 6]
        assert set(told["evaluation"]["values"]) == {"loss", "error"}
        after = subprocess.run(
            command(cluster, "logs", "job", "--worker", "1:0", "--json"), capture_output=True, text=True
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
        assert cluster.task()["evaluation"] == told["evaluation"]


def test_tensorboard_has_the_scores(tmp_path: Path) -> None:
    run = RunScalars(tmp_path)
    run.evaluation(4, {"loss": 0.5, "error": float("nan")}, 1000.0)
    run.close()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"eval/loss" in written
    assert b"eval/error" not in written
