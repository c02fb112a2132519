"""A script that clears its output folder clears it once, whoever is replaced."""

import subprocess
import sys
from pathlib import Path

import everstep

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
import everstep

folder = Path(sys.argv[1])
if not everstep.in_worker():
    (folder / "launched").write_text((folder / "launched").read_text() + "x")
with (folder / "all").open("a") as file:
    file.write("x")
result = everstep.train(
    model=[lambda: nn.Linear(2, 2)],
    loss=nn.functional.mse_loss,
    data=lambda step, microbatch: (torch.ones(2, 2), torch.ones(2, 2)),
    replicas=2, microbatches=1, steps=4, page=False,
)
print(len(result.incidents))
"""


def test_the_launcher_is_no_worker_and_workers_are(tmp_path: Path) -> None:
    assert not everstep.in_worker()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "launched").write_text("")
    command = [
        sys.executable,
        "-m",
        "everstep.cli.main",
        "run",
        "--no-web",
        "--kill",
        "stage=0,replica=1,step=2",
    ]
    ran = subprocess.run(
        [*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240, check=True
    )
    assert ran.stdout.split()[-1] == "1"
    assert (tmp_path / "launched").read_text() == "x"
    assert len((tmp_path / "all").read_text()) >= 3, "the launcher and two workers"
