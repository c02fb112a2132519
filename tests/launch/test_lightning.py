"""`everstep.fit` trains a LightningModule as Lightning's own Trainer does, and recovers from a kill."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed (pip install 'everstep[lightning]')")
SCRIPT = Path(__file__).with_name("lit.py")


def run(*arguments: str, kill: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    if kill is not None:
        command[1:1] = ["-m", "everstep.cli.main", "run", "--no-web", "--kill", kill]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)


def trained(path: Path, *arguments: str, kill: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    ended = run(str(path), *arguments, kill=kill)
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = next(line for line in ended.stdout.splitlines() if line.startswith("{"))
    return json.loads(line), torch.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(), ("--whole", "--stages", "1")], ids=["2 stages", "whole"])
def test_a_module_trains_as_with_lightnings_trainer_and_a_kill_changes_no_bit(
    tmp_path: Path, cut: Any
) -> None:
    stage = "0" if cut else "1"
    plain, theirs = trained(tmp_path / "plain", "--plain")
    clean, ours = trained(tmp_path / "clean", *cut)
    killed, healed = trained(tmp_path / "killed", *cut, kill=f"stage={stage},replica=0,step=3,op=F1")
    assert clean["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert clean["scores"]["val_loss"] == pytest.approx(plain["scores"]["val_loss"], rel=1e-5)
    assert clean["scores"]["hits"] == pytest.approx(plain["scores"]["hits"], abs=1e-6)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=1e-5), name
    assert killed["incidents"] >= 1
    assert killed["losses"] == clean["losses"]
    assert killed["scores"] == clean["scores"]
    assert all(torch.equal(healed[name], ours[name]) for name in ours)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        ("manual", "automatic_optimization = False"),
        ("hook", "has the hook on_after_backward"),
        ("nothing", "training_step returned nothing; it must return the loss"),
        ("plateau", "follows a metric and not the step"),
        ("residual", "a residual that is added outside of it"),
        ("global_step", "asks its trainer for 'global_step'"),
    ],
)
def test_what_is_not_supported_is_said_in_one_sentence(tmp_path: Path, spoil: str, sentence: str) -> None:
    ended = run(str(tmp_path / "x"), "--spoil", spoil)
    assert ended.returncode != 0
    assert sentence in ended.stderr.splitlines()[-1], ended.stderr[-2000:]
