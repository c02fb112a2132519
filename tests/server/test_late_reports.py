"""An agent that was stopped, given up and continued, with its workers training all the while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.client import Client
from everstep.job.job import Job
from everstep.launch.local.api import run_job
from everstep.protocol.messages import Patience
from harness.cluster import descendants, small_job
from tests.support.processes import until
from tests.support.served import served

STEPS = 60


@pytest.mark.slow
def test_what_a_given_up_node_did_is_not_on_record(tmp_path: Path) -> None:
    """Its workers went on behind a stopped agent; elsewhere the task had started again."""
    job = small_job(tmp_path, steps=STEPS)
    job.pop("checkpoint", None)
    clean = {step: row.loss for step, row in run_job(Job.from_dict(job)).by_step().items()}
    agents: dict[str, subprocess.Popen[bytes]] = {}
    # Slowly, on both nodes: else all is over before the stopped agent is given up.
    slow = ("stage=0,replica=0,step=1,how=slow,factor=30",)
    with served(tmp_path / "state", patience=Patience(cut_silence_s=2.0)) as address:
        client = Client(address=address)

        def start(node: str) -> None:
            log = (tmp_path / f"{node}.log").open("ab")
            command = [sys.executable, "-m", "everstep.cli.main", "agent", "--node", node, "--slots", "4"]
            agents[node] = subprocess.Popen(
                [*command, "--coordinator", address], stdout=log, stderr=log, start_new_session=True
            )

        def node(name: str) -> Any:
            return next((n for n in client.get("/v1/status")["nodes"] if n["node"] == name), {"state": ""})

        def task() -> Any:
            return client.get("/v1/tasks/t")

        try:
            start("a")
            until(lambda: node("a")["state"] == "up", "node a is up")
            client.post("/v1/tasks", {"name": "t", "job": job, "faults": slow})
            until(lambda: task()["step"] >= 3, "it trains")
            os.kill(agents["a"].pid, signal.SIGSTOP)
            start("b")
            until(lambda: node("a")["state"] == "gone", "node a is given up")
            until(lambda: {seat["node"] for seat in task()["seats"]} == {"b"}, "its workers are on b")
            until(lambda: task()["step"] >= 1, "it trains there")
            left = descendants(agents["a"].pid)
            assert left, "its workers live"
            os.kill(agents["a"].pid, signal.SIGCONT)
            until(lambda: node("a")["state"] == "up", "node a is back")
            over = until(lambda: (t := task())["state"] in ("finished", "failed") and t, "it is over", 240)
        finally:
            for process in agents.values():
                process.send_signal(signal.SIGCONT)
                process.terminate()
            for process in agents.values():
                process.wait(30)
    assert over["state"] == "finished", over["because"]
    rows = [(row["step"], row["loss"]) for row in over["rows"]]
    last_life = rows[max(i for i, (step, _) in enumerate(rows) if step == 1) :]
    assert last_life == sorted(clean.items()), "every step once, in order, with the clean run's loss"
