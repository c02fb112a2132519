"""A drained node that has all workers of a stage: real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.coordinator import SAME_SIGNAL_S
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.launch.local.api import run_job
from everstep.store.folder import complete_steps
from harness.cluster import Cluster, descendants, small_job

pytestmark = pytest.mark.slow
STEPS = 40


@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_a_drain_costs_no_step(tmp_path: Path, kept: str) -> None:
    """It was refused, or with --force the task went back to its last checkpoint."""
    job = small_job(tmp_path, steps=STEPS, replicas=1, stages=2)
    clean = run_job(Job.from_dict(job)).by_step()
    if kept == "disk":
        job["checkpoint"] = {"folder": str(tmp_path / "kept"), "interval": 1000}
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=1)
        cluster.start_agent("b", slots=1)
        cluster.nodes_up(2)
        cluster.submit(job)
        cluster.step_reached(5)
        cluster.client.post("/v1/nodes/b/drain")
        cluster.until(lambda: cluster.task()["state"] == "waiting", "the task has left the node")
        told = cluster.task()
        protected = told["saved"]["protected"]
        assert protected == told["rows"][-1]["step"], told["because"]
        if kept == "disk":
            assert (tmp_path / "kept" / f"step-{protected:08d}").is_dir(), list((tmp_path / "kept").iterdir())
        cluster.agents["b"].kill()  # the machine is taken away
        cluster.start_agent("c", slots=1)
        told = cluster.finished()
        steps = [row["step"] for row in told["rows"]]
        assert steps == list(range(1, STEPS + 1)), "every step once"
        assert {row["step"]: row["loss"] for row in told["rows"]} == {s: row.loss for s, row in clean.items()}


def test_a_drain_that_cannot_make_the_state_safe_is_refused(tmp_path: Path) -> None:
    job: dict[str, Any] = small_job(tmp_path, steps=400, replicas=1, stages=1)
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=1)
        cluster.nodes_up(1)
        cluster.submit(job)
        cluster.step_reached(2)
        with pytest.raises(UserError, match="neither a checkpoint folder nor another node"):
            cluster.client.post("/v1/nodes/a/drain")
        assert cluster.task()["state"] == "running"


@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_sigterm_of_an_agent_costs_no_step(tmp_path: Path, kept: str) -> None:
    """`systemctl stop`, an eviction, a reboot: the task began again at step 1, or at its last checkpoint."""
    job = small_job(tmp_path, steps=STEPS, replicas=1, stages=2)
    clean = run_job(Job.from_dict(job)).by_step()
    if kept == "disk":
        job["checkpoint"] = {"folder": str(tmp_path / "kept"), "interval": 1000}
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=2, grace=120)
        cluster.nodes_up(1)
        cluster.submit(job)
        cluster.step_reached(5)
        cluster.start_agent("b", slots=2)
        cluster.nodes_up(2)
        cluster.agents["a"].terminate()
        assert cluster.agents["a"].wait(120) == 143
        nodes = {row["node"]: row["state"] for row in cluster.client.get("/v1/status")["nodes"]}
        assert nodes["a"] == "left"
        told = cluster.finished()
        assert [row["step"] for row in told["rows"]] == list(range(1, STEPS + 1)), "every step once"
        assert {row["step"]: row["loss"] for row in told["rows"]} == {s: row.loss for s, row in clean.items()}
        assert cluster.incidents() == []
        cluster.start_agent("a", slots=2)
        cluster.nodes_up(2)


def test_sigterm_to_all_processes_of_a_cluster_costs_no_step(tmp_path: Path) -> None:
    """As a scheduler ends a job: the coordinator went at once, workers before their agents had drained."""
    job = small_job(tmp_path, steps=100_000)
    job["checkpoint"] = {"folder": str(tmp_path / "kept"), "interval": 100_000}
    with Cluster(tmp_path, options=["--grace", "60"]) as cluster:
        cluster.start_coordinator()
        for node in ("a", "b"):
            cluster.start_agent(node, slots=2, grace=60)
        cluster.nodes_up(2)
        cluster.submit(job)
        cluster.step_reached(5)
        ours = [*cluster.coordinators.values(), *cluster.agents.values()]
        for pid in [pid for one in ours for pid in (one.pid, *descendants(one.pid))]:
            os.kill(pid, signal.SIGTERM)
        assert [one.wait(120) for one in ours] == [143] * 3
    (saved,) = complete_steps(tmp_path / "kept")
    assert saved == last_step(tmp_path)


def last_step(folder: Path) -> int:
    (log,) = folder.rglob("tasks/*.jsonl")
    return int(json.loads(log.read_text().splitlines()[-1])["step"])


def test_a_second_sigterm_ends_an_agent_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=1, grace=3600)
        cluster.nodes_up(1)
        cluster.submit(small_job(tmp_path, steps=100_000, replicas=1, stages=1, microbatches=64))
        cluster.step_reached(1)
        agent = cluster.agents["a"]
        coordinator = cluster.coordinators["first"]
        coordinator.send_signal(signal.SIGSTOP)  # nobody lets its worker go
        try:
            agent.terminate()
            log = tmp_path / "agent-a.log"
            cluster.until(lambda: "node a leaves" in log.read_text(), "it says so")
            time.sleep(SAME_SIGNAL_S)  # two within this time are one
            agent.terminate()
            assert agent.wait(60) == 143
        finally:
            coordinator.send_signal(signal.SIGCONT)
