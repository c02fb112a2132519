"""One run of a script, whose reader goes away after the first line, and of which a worker is killed.

Training goes on to its end, nothing hangs, and what the launcher does is done once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import everstep

SCRIPT = """
from pathlib import Path
import torch, everstep
from torch import nn

folder = Path("said")
folder.mkdir(exist_ok=True)
if not everstep.in_worker():
    with (folder / "launched").open("a") as file:
        file.write("x")
with (folder / "all").open("a") as file:
    file.write("x")

def batch(step, microbatch):
    x = torch.ones(2, 4) * step
    return x, x[:, :1]
result = everstep.train(model=[lambda: nn.Linear(4, 1)], data=batch, loss=nn.functional.mse_loss,
                        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
                        replicas=2, microbatches=1, steps=30)
(folder / "done").write_text(f"{len(result.losses)} steps, {len(result.incidents)} incident")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the script writes; its run has ended."""
    folder = tmp_path_factory.mktemp("pipe")
    (folder / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "everstep.cli.main", "run", "--kill", "stage=0,replica=1,step=2", "train.py"]
    with subprocess.Popen(run, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as training:
        assert training.stdout is not None
        training.stdout.readline()
        training.stdout.close()  # as `| head -1` does
        training.wait(timeout=240)
    return folder / "said"


def test_a_closed_pipe_does_not_stop_training(said: Path) -> None:
    assert (said / "done").read_text() == "30 steps, 1 incident"


def test_the_launcher_is_no_worker_and_workers_are(said: Path) -> None:
    """A script that clears its output folder clears it once, whoever is replaced."""
    assert not everstep.in_worker()
    assert (said / "launched").read_text() == "x"
    assert len((said / "all").read_text()) >= 3, "the launcher and two workers"
