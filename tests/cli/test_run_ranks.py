"""`everstep run --nproc`: its mistakes, its one document, and a real DDP script that loses a rank."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "torchrun_style.py"
Everstep = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nproc", "two"], "--nproc is 'two'; give a number from 1, gpu or cpu."),
        (["--nproc", "0"], "--nproc is '0'; give a number from 1, gpu or cpu."),
        (["--nproc", "2", "--max-restarts", "-1"], "--max-restarts is -1; give at least 0."),
        (["--nproc", "2", "--hang-after", "0.2"], "--hang-after is 0.2; give at least 1."),
        (["--nproc", "2", "--hang-after", "nan"], "--hang-after is nan; give at least 1."),
        (["--nproc", "2", "--rdzv-port", "70000"], "--rdzv-port is 70000; give a port from 1 to 65535"),
        (["--nproc", "2", "--replicas", "2"], "--replicas is for scripts that call everstep.train"),
        (["--hang-after", "9"], "--hang-after is for scripts that torchrun can start; give --nproc too."),
        (["--nproc", "1", "--snapshot-dir", "/proc/x"], "--snapshot-dir /proc/x cannot be written: "),
        (["--nproc", "1", "--log-dir", "/dev/null/x"], "--log-dir /dev/null/x cannot be written: "),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, idle_everstep: Everstep
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('this must not run')")
    ran = idle_everstep("run", *arguments, script)
    assert ran.code == 2, ran.err
    assert ran.err.startswith("everstep: ")
    assert sentence in ran.err
    assert len(ran.err.splitlines()) == 1
    assert ran.out == ""


def test_a_script_that_is_away_is_told_so(idle_everstep: Everstep) -> None:
    ran = idle_everstep("run", "--nproc", 2, "away.py")
    assert (ran.code, ran.err) == (2, "everstep: script 'away.py' is not a file.\n")


def test_json_is_one_document_and_the_code_is_the_failing_ranks(
    tmp_path: Path, idle_everstep: Everstep
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('out')\nsys.exit(7 * int(os.environ['RANK']))")
    ran = idle_everstep(
        "run", "--nproc", 2, "--max-restarts", 0, "--log-dir", tmp_path, "--json", script, "--json"
    )
    told = ran.document()
    assert ran.code == told["exit_code"] == 7
    assert [rank["exit_code"] for rank in told["ranks"]][1] == 7
    assert told["command"] == [str(script), "--json"]
    (incident,) = told["incidents"]
    keys = {"what", "rank", "evidence", "verdict", "severity", "remedy", "because", "noticed_ms"}
    assert keys <= incident.keys()
    assert incident["rank"] == 1
    assert "[1] out" in ran.err
    assert told["because"] in ran.err


def test_a_module_runs_as_python_m_does(tmp_path: Path, idle_everstep: Everstep) -> None:
    ran = idle_everstep("run", "--nproc", 1, "--log-dir", tmp_path, "-m", "platform")
    assert ran.code == 0
    assert ran.out.startswith("[0] Linux")


# By default `tests/docs/test_copy_paste.py` runs the example through a kill, as its page says.
@pytest.mark.slow
def test_ddp_goes_on_from_its_own_checkpoint_after_a_kill(tmp_path: Path, idle_everstep: Everstep) -> None:
    """gloo, two ranks, torch loaded once. Rank 1 kills itself in step 5; the checkpoint is of step 3."""
    ran = idle_everstep(
        *("run", "--nproc", 2, "--preload", "torch", "--hang-after", 10, "--log-dir", tmp_path, "--json"),
        *(EXAMPLE, "--steps", 6, "--every", 3, "--die-at", 5, "--checkpoint", tmp_path / "newest.pt"),
    )
    told = ran.document()
    assert ran.code == 0, ran.err
    assert told["restarts"] == 1
    assert [(each["rank"], each["verdict"]) for each in told["incidents"]] == [(1, "killed")]
    losses = [
        dict(
            re.findall(
                r"step (\d+) loss (\S+)", Path(told["logs"], f"attempt_{life}/0/stdout.log").read_text()
            )
        )
        for life in (0, 1)
    ]
    assert list(losses[0])[:4] == ["1", "2", "3", "4"]
    assert list(losses[1]) == ["4", "5", "6"]
    assert losses[0]["4"] == losses[1]["4"], "the same step with the same weights"
    assert json.dumps(told)
