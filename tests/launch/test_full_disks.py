"""A run on this machine whose disks are full to the last byte: training and healing go on, and it says so."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.main import run
from everstep.job.job import CheckpointSpec, DataSpec, Job, ModelSpec
from everstep.launch.local import api
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import LocalTask
from everstep.log import MOST_LOG
from everstep.node.fork_server import ForkServer
from everstep.protocol.ops import Worker
from everstep.ranks.output import OutputStream
from everstep.store.folder import complete_steps
from everstep.store.state_keeper import StateKeeper
from tests.support.processes import fill

STEPS = 12


def job_in(disk: Path) -> Job:
    return Job(
        model=ModelSpec(preset="gpt-tiny", options={"depth": 2}),
        data=DataSpec(build="waiting:Data", options={"step": 11, "file": str(disk / "filler")}),
        base=str(Path(__file__).parent),
        checkpoint=CheckpointSpec(folder=str(disk / "checkpoints"), interval=4),
        log=str(disk / "log"),
        steps=STEPS,
        replicas=2,
        stages=1,
        microbatches=2,
    )


def test_a_run_goes_on_where_all_its_files_are_on_a_full_disk(
    fork_server: ForkServer, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher died of its history or its step log, and nobody committed checkpoints any more; workers
    died of a line in their own logs.
    """
    clean = api.run_with_callbacks(
        job_in(small_disk / "clean"), watch=lambda kind, what: None, fork_server=fork_server
    )
    fill(small_disk)
    tasks: list[LocalTask] = []
    warnings: list[str] = []

    def watch(kind: str, what: Any) -> None:
        if kind == "tick" and not tasks:
            tasks.append(what)
        if kind == "warning":
            warnings.append(what)
        if kind == "step" and what.step == 5:
            tasks[0].kill(Worker(1, 0))
        if kind == "step" and what.step == 10:
            (small_disk / "filler").unlink()

    outcome = api.run_with_callbacks(job_in(small_disk), watch=watch, fork_server=fork_server)
    assert outcome.failure is None
    assert [incident.workers for incident in outcome.incidents if incident.workers] == [[Worker(1, 0)]]
    assert outcome.all_losses() == clean.all_losses()
    assert not outcome.unsaved
    assert complete_steps(small_disk / "checkpoints")[-1] == STEPS
    rows = [json.loads(line) for line in (small_disk / "checkpoints" / "history.jsonl").open()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, STEPS + 1))
    said = capsys.readouterr().err
    assert said.count("history.jsonl cannot be written (No space left on device)") == 1
    assert said.count("steps.jsonl cannot be written (No space left on device)") == 1
    assert [w for w in warnings if w.startswith("the state of step 4 is not saved")], "while it lasts"


def test_a_run_whose_last_state_is_not_saved_does_not_exit_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.toml"
    job.write_text('steps = 1\n[model]\npreset = "gpt-tiny"\n[data]\nkind = "synthetic"\n')
    for unsaved in (False, True):
        monkeypatch.setattr(api, "run_with_callbacks", lambda *a, u=unsaved, **k: Outcome(unsaved=u))
        assert run(["train", str(job), "--no-web"]) == int(unsaved)


def test_a_failed_save_is_reported_before_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The print raised on the same full disk, and the coordinator never heard of it."""
    states, said = StateKeeper.__new__(StateKeeper), []
    states._task, states._say = "t", said.append

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    states._not_saved(100, 0, "OSError: [Errno 28] No space left on device")
    monkeypatch.undo()
    assert [report.step for report in said] == [100]


# ------------------------------------------------------------------ ranks


def test_ranks_are_read_though_their_log_is_full(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that reads all pipes died, and the ranks waited in `print` for ever."""
    script = small_disk / "script.py"
    script.write_text("for n in range(3000): print('x' * 100)\nprint('done')\n")
    fill(small_disk)
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--nproc", "2"]
    command += ["--log-dir", str(small_disk / "logs"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert "stdout.log cannot be written (No space left on device); the ranks continue" in done.stderr


def test_a_rank_s_log_keeps_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.ranks.output.MOST_LOG", 1000)
    assert MOST_LOG > 1000
    with (tmp_path / "terminal").open("wb") as terminal:
        stream = OutputStream(0, tmp_path / "out.log", terminal)
        for _ in range(50):
            os.write(stream.writer, b"x" * 99 + b"\n")
            stream.take()
        stream.started()
        stream.close()
    os.close(stream.reader)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir() if path.name != "terminal"}
    assert sizes.keys() == {"out.log", "out.log.1"}
    assert max(sizes.values()) <= 1100
