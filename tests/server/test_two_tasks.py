"""Two tasks of different weight share six slots; a node dies and returns. Real processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.job.job import Job
from everstep.launch.local.api import run_job
from harness.cluster import Cluster, small_job

pytestmark = pytest.mark.slow
STEPS = 80


def job(folder: Path) -> dict[str, Any]:
    return small_job(folder, steps=STEPS, replicas=4, stages=1, microbatches=2)


def test_the_heavier_task_keeps_what_the_optimum_gives_it_and_both_grow_back(tmp_path: Path) -> None:
    outcome = run_job(Job.from_dict(job(tmp_path)))
    clean = {step: row.loss for step, row in outcome.by_step().items()}
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        for node in "abc":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(3)
        cluster.submit(job(tmp_path), "heavy", weight=2.0)
        cluster.submit(job(tmp_path), "light", weight=1.0)

        def workers() -> tuple[int, int]:
            return cluster.task("heavy")["workers"], cluster.task("light")["workers"]

        cluster.until(lambda: workers() == (4, 2), "six slots are shared four to two")
        seats = [seat for name in ("heavy", "light") for seat in cluster.task(name)["seats"]]
        assert len({(seat["node"], seat["slot"]) for seat in seats}) == len(seats) == 6, "no slot has two"
        cluster.step_reached(3, "heavy")
        cluster.step_reached(3, "light")
        cluster.signal_node("a", signal.SIGKILL)
        cluster.until(lambda: workers() == (3, 1), "four slots are shared three to one")
        cluster.step_reached(cluster.task("light")["step"] + 2, "light")
        cluster.start_agent("a", slots=2)
        cluster.until(lambda: workers() == (4, 2), "both have grown back")
        for name in ("heavy", "light"):
            told = cluster.finished(name, within_s=400)
            assert told["state"] == "finished", told["because"]
            assert {row["step"]: row["loss"] for row in told["rows"]} == clean, name
        assert all(incident["closed_at"] for incident in cluster.incidents())
