"""Who reads the output may go away: training goes on to its end, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, everstep
from torch import nn
def batch(step, microbatch):
    x = torch.ones(2, 4) * step
    return x, x[:, :1]
everstep.train(model=[lambda: nn.Linear(4, 1)], data=batch, loss=nn.functional.mse_loss,
               optimizer=lambda named: torch.optim.SGD(named, lr=1e-3), microbatches=2, steps=30)
open("done", "w").write("30 steps")
"""


def test_a_closed_pipe_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "everstep.cli.main", "run", "train.py"]
    with subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as training:
        assert training.stdout is not None
        training.stdout.readline()
        training.stdout.close()  # as `| head -1` does
        training.wait(timeout=90)
    assert (tmp_path / "done").read_text() == "30 steps"
