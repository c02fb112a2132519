"""New code for a task that trains, in real processes: no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.cli import main
from everstep.errors import UserError
from harness.cluster import Cluster

DATA = """import torch
class Data:
    def batch(self, step, microbatch):
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(0, 32, (2, 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
"""
JOB = """steps = {steps}
replicas = 2
microbatches = 2
memory_interval = 1
[model]
preset = "gpt-tiny"
[data]
build = "mine:Data"
"""


@pytest.mark.slow
def test_new_code_takes_over_and_the_losses_are_those_of_a_clean_run(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "mine.py").write_text(DATA)
    (folder / "job.toml").write_text(JOB.format(steps=60))
    with Cluster(tmp_path, eager=True) as cluster:
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=1)
        cluster.nodes_up(2)
        options = ["--address", cluster.addresses["first"], "--token", cluster.token]

        def told(*words: str) -> None:
            assert main.run([*words, *options]) == 0

        told("submit", str(folder / "job.toml"), "--name", "clean", "--wait")
        told("submit", str(folder / "job.toml"), "--name", "job")
        cluster.step_reached(3)
        seen = tmp_path / "seen"
        (folder / "mine.py").write_text(DATA + f"open({str(seen)!r}, 'w').close()\n")
        told("update", "job", str(folder / "job.toml"))
        cluster.until(seen.exists, "the new code runs")
        (folder / "job.toml").write_text(JOB.format(steps=61))
        with pytest.raises(UserError, match="steps of the new job is not that of task job"):
            cluster.client.post("/v1/tasks/job/update", {"job": _job(folder)})
        assert cluster.finished()["state"] == "finished"
        assert cluster.losses() == cluster.losses("clean")
    assert len(list((folder / ".everstep" / "code").iterdir())) == 2


def _job(folder: Path) -> dict:
    from everstep.job.job import load_job

    return load_job(folder / "job.toml").to_dict()
