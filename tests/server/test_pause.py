"""A task is paused between two checkpoints, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

from harness.cluster import Cluster, small_job


def test_a_paused_task_does_no_step_twice(tmp_path: Path) -> None:
    """It was ended at once, and went back to its last checkpoint."""
    job = small_job(tmp_path, steps=24, replicas=1, stages=2)
    job |= {"checkpoint": {"folder": str(tmp_path / "saved"), "interval": 100}}
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=2)
        cluster.nodes_up(1)
        cluster.submit(job)
        cluster.step_reached(4)
        cluster.client.post("/v1/tasks/job/pause")
        cluster.until(lambda: cluster.task()["state"] == "paused", "the task is paused")
        assert cluster.task()["step"] >= 4, "a paused task was shown at step 0"
        cluster.client.post("/v1/tasks/job/unpause")
        assert cluster.finished()["state"] == "finished"
        rows = (tmp_path / "state-first" / "tasks" / "job.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == list(range(1, 25))
