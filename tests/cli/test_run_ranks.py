"""`everstep run --nproc`: its mistakes, its one document, and a real DDP script that loses a rank."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.log import MOST_LOG

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


def test_a_script_that_raises_at_import_is_tried_once_more_and_told_with_its_line(
    tmp_path: Path, idle_everstep: Everstep
) -> None:
    (tmp_path / "script.py").write_text("import os\nimport no_such_module_anywhere\n")
    ran = idle_everstep("run", "--nproc", 2, "--log-dir", tmp_path, "--json", tmp_path / "script.py")
    told = ran.document()
    assert (ran.code, told["restarts"]) == (1, 1), ran.err
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in told["incidents"][0]["what"]
    assert 'script.py", line 2, in <module>' in told["incidents"][0]["traceback"]
    assert "rank_main" not in ran.err


@pytest.mark.slow
def test_a_gibibyte_without_a_newline_fills_neither_memory_nor_the_disk(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\nfor _ in range(1024): os.write(1, b'x' * (1 << 20))\nprint('the end')"
    )
    command = [
        sys.executable,
        "-m",
        "everstep.cli.main",
        "run",
        "--nproc",
        "1",
        "--log-dir",
        "logs",
        "script.py",
    ]
    # A process's peak counts what the one that forked it held: a small one stands between it and the tests.
    between = (
        "import os, resource, subprocess, sys\n"
        "code = subprocess.run(sys.argv[1:], stderr=subprocess.DEVNULL).returncode\n"
        "os.write(2, str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss).encode())\n"
        "sys.exit(code)"
    )
    with (tmp_path / "shown").open("wb") as shown:
        ran = subprocess.run(
            [sys.executable, "-c", between, *command], cwd=tmp_path, stdout=shown, stderr=subprocess.PIPE
        )
    assert ran.returncode == 0
    assert int(ran.stderr) < 300 << 10, "KiB"
    kept = [path for path in (tmp_path / "logs").rglob("stdout.log*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 3 * MOST_LOG
    assert max(kept, key=lambda path: path.stat().st_mtime).read_bytes().endswith(b"the end\n")
    with (tmp_path / "shown").open("rb") as file:
        assert file.seek(0, os.SEEK_END) >= 1 << 30, "all of it went to the terminal"


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
