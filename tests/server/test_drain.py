"""A drained node that has all workers of a stage: real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.job.job import Job
from everstep.launch.local.api import run_job
from harness.cluster import Cluster, small_job

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
