"""What `everstep submit` says besides that a task is on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from everstep.cli import main
from everstep.cli.cluster import copies_told
from everstep.job.job import Job, ModelSpec
from everstep.store import folder
from tests.support.served import served


@pytest.mark.parametrize(
    ("interval", "nodes", "told"),
    [
        (0, 2, "copies in memory are off: memory_interval is 0"),
        (None, 1, "are off: they need a second node, and there is only one; memory_interval = 10 keeps them"),
        (None, 0, "are off: they need a second node, and none is connected yet"),
        (
            None,
            2,
            "are on: every 10 steps the state of each stage is copied to the memory of its own node and",
        ),
        (
            5,
            2,
            "are on: every 5 steps the state of each stage is copied to the memory of its own node and of",
        ),
        (5, 1, "are on: every 5 steps the state of each stage is copied to the memory of its own node"),
    ],
)
def test_it_says_whether_copies_in_memory_are_on_and_where_they_go(
    interval: int | None, nodes: int, told: str
) -> None:
    job = Job(model=ModelSpec(preset="gpt-tiny"), memory_interval=interval)
    assert told in copies_told(job, nodes)


def test_a_job_that_is_over_takes_no_slots_from_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It took two of another task's, and was finished at once."""
    root, file = tmp_path / "checkpoints", tmp_path / "again.toml"
    for step in (3, 4):
        part = folder.write_part(root, step, "stage-0", {"model/a": torch.ones(2)})
        folder.commit(root, step, [part], {"seed": 0}, 3)
    text = 'steps = 4\n[model]\npreset = "gpt-tiny"\n[checkpoint]\nfolder = "checkpoints"\n'
    file.write_text(text)
    with served(tmp_path / "s", token="one") as address:
        submit = ["submit", str(file), "--address", address, "--token", "one"]
        assert main.run([*submit, "--json", "--wait"]) == 0
        said = capfd.readouterr()
        assert "nothing is left to do: the checkpoint of step 4 in checkpoints is the job's last" in said.err
        assert json.loads(said.out)["task"] is None
        assert main.run(["status", *submit[2:], "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["tasks"] == []
        file.write_text(text.replace("steps = 4", "steps = 5"))
        assert main.run(submit) == 0
        assert "task again is waiting" in capfd.readouterr().err
