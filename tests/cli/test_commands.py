"""The commands with real workers: what they print, what they leave on disk, and that nobody stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.cli import demo
from harness.cluster import descendants
from tests.support.processes import lives

Everstep = Callable[..., Any]
EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_training_through_a_kill_has_the_losses_of_a_clean_run(everstep: Everstep, job_file: Path) -> None:
    job_file.write_text(job_file.read_text().partition("[checkpoint]")[0])
    clean = everstep("train", job_file, "--json").document()
    log = job_file.parent / "log" / "steps.jsonl"
    log.unlink()
    ran = everstep(
        "train",
        job_file,
        "--json",
        "--kill",
        "stage=1,replica=0,step=3,op=I1",
        "--kill",
        "stage=0,replica=1,step=5,op=R",
    )
    healed = ran.document()
    assert ran.code == 0
    assert healed["losses"] == clean["losses"]
    assert healed["microbatches"] == {"issued": 24, "committed": 24} == clean["microbatches"]
    assert [(i["worker"], i["step"], i["replayed_ops_elsewhere"]) for i in healed["incidents"]] == [
        ("0:1", 3, 0),
        ("1:0", 5, 0),
    ]
    assert all(0 < i["noticed_ms"] < i["resumed_ms"] for i in healed["incidents"])
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {str(row["step"]): row["loss"] for row in rows} == clean["losses"]
    assert all(
        row.keys() == {*["step", "loss", "grad_norm", "seconds", "epoch", "attempt", "at"]} for row in rows
    )
    assert "worker 0:1 killed by SIGKILL" in ran.err


def test_training_goes_on_from_its_newest_sound_checkpoint(everstep: Everstep, job_file: Path) -> None:
    first = everstep("train", job_file, "--json").document()
    folder = job_file.parent / "checkpoints"
    steps = [f"step-0000000{step}" for step in (2, 4, 6)]
    assert sorted(path.name for path in folder.iterdir()) == ["history.jsonl", *steps]
    torn = min((folder / "step-00000006").glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-5])
    ran = everstep("train", job_file, "--json")
    again = ran.document()
    assert again["resumed_from"] == 4
    assert again["losses"] == first["losses"], "also those of the first start"
    assert len(again["refused_checkpoints"]) == 1
    assert "step-00000006" in again["refused_checkpoints"][0]
    assert "resumes after step 4" in ran.err
    assert "refused" in ran.err
    done = everstep("train", job_file)
    assert done.code == 0
    assert "nothing left to do" in done.err


def test_the_example_runs_by_everstep_run(everstep: Everstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    ran = everstep(
        "run",
        "--json",
        "--replicas",
        "4",
        "--kill",
        "stage=1,replica=2,step=3,op=F1",
        EXAMPLES / "own_model.py",
        "--steps",
        "5",
    )
    told = ran.document()
    assert ran.code == 0
    assert len(told["losses"]) == 5
    assert told["microbatches"] == {"issued": 40, "committed": 40}, "the batch of the script, on 4 replicas"
    assert [i["worker"] for i in told["incidents"]] == ["2:1"]
    assert "1 incidents healed" in ran.err  # the script's own print, kept off stdout


@pytest.mark.slow
def test_the_hugging_face_example_heals_exports_and_speaks(
    everstep: Everstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    script = EXAMPLES / "hf_finetune.py"
    ran = everstep("run", "--json", "--kill", "stage=1,replica=0,step=2,op=I1", script, "--steps", "4")
    assert ran.code == 0
    assert [i["worker"] for i in ran.document()["incidents"]] == ["0:1"]
    assert "runs/tuned: LlamaForCausalLM" in ran.err
    assert (tmp_path / "runs" / "tuned" / "model.safetensors").exists()


def test_the_demo_proves_what_it_claims(everstep: Everstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_DATA", {"kind": "synthetic", "rows": 1, "sequence": 8})
    monkeypatch.setattr(demo, "_MODEL", {"preset": "gpt-tiny", "depth": 2})
    ran = everstep("demo", "--json", "--steps", "12")
    told = ran.document()
    assert ran.code == 0
    assert told["max_relative_loss_difference"] <= 1e-6
    assert told["microbatches"] == {"issued": 96, "committed": 96}
    assert [i["worker"] for i in told["incidents"]] == ["0:1", "1:0"]
    for incident in told["incidents"]:
        assert incident["replayed_ops"] > 0
        assert incident["replayed_ops_elsewhere"] == 0
        assert 0 < incident["noticed_ms"] < incident["resumed_ms"]
        assert incident["steps_lost"] >= 0


@pytest.mark.slow
def test_the_whole_demo_has_the_two_incidents_that_it_makes(everstep: Everstep) -> None:
    """Long enough for the states of workers that joined to be compared with their peers'."""
    ran = everstep("demo", "--json")
    assert [one["what"] for one in ran.document()["incidents"]] == ["killed by SIGKILL"] * 2


def test_help_needs_no_torch() -> None:
    code = "import sys; from everstep.cli.main import run; run(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# By default `tests/launch/test_stopping.py` sends the signals to a run with a warm fork server, and
# `tests/node/test_fork_server.py` ends the owner of one.
@pytest.mark.slow
def test_ctrl_c_leaves_no_process(job_file: Path) -> None:
    """With everything real: its own process, its own fork server, a SIGINT in the middle of training."""
    job_file.write_text(job_file.read_text().replace("steps = 6", "steps = 100000"))
    with subprocess.Popen(
        [sys.executable, "-m", "everstep.cli.main", "train", str(job_file)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        log = job_file.parent / "log" / "steps.jsonl"
        deadline = time.monotonic() + 300
        while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        children = list(descendants(process.pid))
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(timeout=120) == 130
    assert "stopped" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert len(children) == 5, "a fork server and four workers"
    assert not [pid for pid in children if lives(pid)]


def test_training_does_not_start_over_in_silence_when_no_checkpoint_is_sound(
    everstep: Everstep, job_file: Path
) -> None:
    everstep("train", job_file, "--no-web")
    folder = job_file.parent / "checkpoints"
    for index in folder.glob("step-*/index.json"):
        index.write_text("{")
    ran = everstep("train", job_file, "--no-web")
    assert ran.code == 1
    assert str(folder) in ran.err
    assert "--start-over" in ran.err
    assert "Traceback" not in ran.err
    again = everstep("train", job_file, "--no-web", "--start-over", "--json").document()
    assert again["resumed_from"] == 0
    assert len(list(folder.glob("*.corrupt"))) >= 2


def test_ctrl_c_before_a_command_is_loaded_prints_nothing(tmp_path: Path) -> None:
    """It printed the traceback of an import."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def ended(before: str) -> tuple[int, bytes]:
        # Where the tests run in the background, their processes would ignore it.
        heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        code = f"{heard}\n{before}\nfrom everstep.cli import start\nstart()"
        process = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            check=False,
        )
        return process.returncode, process.stderr[-200:]

    assert ended("") == (-signal.SIGINT, b"")
    ignored = ended("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert ignored[0] == 1, "it went on, and met a typer without anything in it"
    assert b"AttributeError" in ignored[1]


PLAIN = """
import everstep, torch
from torch import nn

def batch(step, microbatch):
    return torch.ones(2, 3), torch.ones(2, 1)

layers, loss = [lambda: nn.Linear(3, 1)], nn.functional.mse_loss
result = everstep.train(model=layers, data=batch, loss=loss, steps=4, page=False)
"""


def test_a_script_that_is_started_plainly_says_how_its_run_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("4 of 4 steps, loss "), done.stderr
