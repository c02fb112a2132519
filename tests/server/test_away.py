"""Checkpoints while the coordinator is away, with real processes."""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from everstep.store.folder import complete_steps
from harness.cluster import Cluster, small_job

pytestmark = pytest.mark.slow
KEEP = 3


def newest(folder: Path) -> int:
    return max(complete_steps(folder), default=0)


def rows(folder: Path) -> list[int]:
    text = (folder / "state-first" / "tasks" / "job.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_checkpoints_go_on_while_the_coordinator_is_away_and_none_is_passed_over(tmp_path: Path) -> None:
    """The folder had two checkpoints and 78 whole `.partial` folders, and 395 trained steps were lost."""
    saved = tmp_path / "saved"
    job = small_job(tmp_path, steps=100_000, replicas=2, stages=1, microbatches=2)
    job |= {"checkpoint": {"folder": str(saved), "interval": 5, "keep": KEEP}}
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("a", slots=2)
        cluster.nodes_up(1)
        cluster.submit(job)
        cluster.step_reached(12)

        cluster.kill_coordinator()
        before = newest(saved)
        cluster.until(lambda: newest(saved) >= before + 30, "checkpoints are committed without a coordinator")
        assert len(complete_steps(saved)) <= KEEP + 1  # one may be removed just now
        first = newest(saved)
        cluster.until(lambda: newest(saved) > first, "and more of them")
        partials = len(list(saved.glob("*.partial")))
        alone = newest(saved)

        cluster.start_coordinator()
        cluster.until(lambda: cluster.task()["saved"]["protected"] >= alone, "the coordinator adopts them")
        assert not cluster.incidents()
        assert partials <= 40  # those of the last second, and being written

        # Not while it changes the schedule: workers that it has interrupted wait for it.
        cluster.step_reached(alone + 25)
        cluster.until(lambda: cluster.task()["phase"] == "running", "no epoch is under way")
        cluster.kill_coordinator()
        again = max(newest(saved), rows(tmp_path)[-1])  # commits come after the steps
        cluster.until(lambda: newest(saved) >= again + 20, "committed without a coordinator")
        cluster.signal_node("a", signal.SIGKILL)  # the machine loses power: no report outlives it
        last = newest(saved)
        recorded = rows(tmp_path)[-1]
        assert last > recorded
        cluster.start_coordinator()
        cluster.start_agent("a", slots=2)
        cluster.until(lambda: rows(tmp_path)[-1] > last, "training goes on")
        # A row may be in the journal and not in the log yet; the first one that does not follow is after the
        # newest checkpoint, or after a whole one that is newer.
        after = rows(tmp_path)
        jumps = [step for before, step in pairwise(after[after.index(recorded) :]) if step != before + 1]
        assert jumps[0] > last
        cluster.client.post("/v1/tasks/job/cancel")
