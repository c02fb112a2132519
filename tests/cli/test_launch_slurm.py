"""`everstep launch slurm`: what is submitted, and mistakes before anything is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.launch.slurm import shell as slurm_shell


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job_file: Path) -> list[tuple[Any, ...]]:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    heard: list[tuple[Any, ...]] = []

    def submit(options: Any, arguments: Any, environment: Any) -> str:
        heard.append((options, arguments))
        return "7"

    monkeypatch.setattr(slurm_shell, "submit", submit)
    return heard


def test_a_script_keeps_its_own_options_and_its_number_of_nodes_may_vary(
    idle_everstep: Callable[..., Any], submitted: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    line = ["launch", "slurm", "--nodes", "2:4", "--nproc-per-node", "8", "--hang-after", "60", "--run", "R"]
    ran = idle_everstep(*line, "--json", "train.py", "--", "--nodes", "9", "--lr=1")
    assert ran.code == 0, ran.err
    assert ran.document()["job"] == "7"
    [(options, arguments)] = submitted
    assert options[0] == "--nodes=2-4"
    assert arguments[arguments.index("--slots") + 1] == "8"
    task = json.loads(Path(arguments[0]).read_text())
    assert task["command"] == ["train.py", "--nodes", "9", "--lr=1"]
    assert task["folder"] == str(tmp_path)
    assert (task["ranks"], task["least"], task["most"], task["hang_after_s"]) == (8, 2, 4, 60.0)


def test_a_job_file_is_read_by_the_keepers_themselves(
    idle_everstep: Callable[..., Any], submitted: list[tuple[Any, ...]], job_file: Path
) -> None:
    assert idle_everstep("launch", "slurm", job_file, "--nodes", "4").code == 0
    [(options, arguments)] = submitted
    assert options[0] == "--nodes=4"
    assert arguments[0] == str(job_file)
    assert "--slots" not in arguments, "every node counts its own"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("absent.py --nodes 2", "'absent.py' is not a file; give a job file or a script."),
        ("job.toml --nodes 2:4", "--nodes is '2:4', and a job file needs one number of nodes; give 4."),
        ("job.toml --nodes 2 -- --lr 1", "'--lr' follows a job file, which takes no arguments; remove it."),
        ("train.py --nodes 4:2", "--nodes is '4:2'; give MIN from 1, and MAX at least MIN."),
        ("train.py --nodes 2 --nproc-per-node gpu", "--nproc-per-node is 'gpu'; give a number"),
        ("train.py --nodes 2 --nproc-per-node 0", "--nproc-per-node is '0'; give a number from 1"),
        ("train.py --nodes 2 --hang-after 0", "--hang-after is 0; give at least 1."),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_submitted(
    idle_everstep: Callable[..., Any], submitted: list[tuple[Any, ...]], line: str, sentence: str
) -> None:
    ran = idle_everstep("launch", "slurm", *line.split())
    assert ran.code == 2
    assert sentence in " ".join(ran.err.split())
    assert not submitted
