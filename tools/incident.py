"""A real incident, made and told: `docs/reading-an-incident.md` is written around what this prints.

    python -m tools.incident hang      an op of one worker never ends
    python -m tools.incident stop      a worker is stopped (SIGSTOP)
    python -m tools.incident kill      a worker is killed
    python -m tools.incident node      a node dies with all its workers

A coordinator, three agents of two slots and a small model on 2 x 2 workers: real processes, one machine. Once
training goes, the fault strikes; when the task has finished, `everstep explain` tells each incident. Layers
rest for some milliseconds, as if a device did the work: so the story does not depend on how busy two cores
are.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.cluster import EVERSTEP, Cluster

STRIKE_AT_STEP = 8
STEPS = 60
VICTIM = "0:1"
MODEL = """
import os, time, torch
from torch import nn
import everstep

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if x.device.type != "meta":
            time.sleep(3600 if os.path.exists(f"{FOLDER}/stuck-{os.getpid()}") else 0.01)
        return x + self.linear(x)

def model():
    return everstep.Model(layers=[Block] * 4, loss=nn.functional.mse_loss)

class Data:
    def batch(self, step, microbatch):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + microbatch))
        return x, x.sin()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fault", choices=["hang", "stop", "kill", "node"])
    parser.add_argument("--json", action="store_true", dest="as_json", help="as the API has them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="incident-") as folder, Cluster(Path(folder)) as cluster:
        address = cluster.start_coordinator()
        for node in ("a", "b", "c"):
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(3)
        cluster.submit(job(Path(folder)))
        cluster.all_members()
        cluster.step_reached(STRIKE_AT_STEP)
        strike(cluster, options.fault)
        cluster.until(lambda: cluster.incidents() or None, "the incident is seen")
        cluster.finished()
        numbers = [incident["number"] for incident in cluster.incidents()]
        more = ["--json"] if options.as_json else []
        for number in numbers:
            words = ["explain", str(number), "--address", address, "--token", cluster.token, *more]
            subprocess.run([*EVERSTEP, *words], check=True)


def job(folder: Path) -> dict[str, Any]:
    (folder / "resting.py").write_text(MODEL.replace("{FOLDER}", str(folder)))
    return {
        "base": str(folder),
        "replicas": 2,
        "stages": 2,
        "microbatches": 4,
        "steps": STEPS,
        "model": {"build": "resting:model"},
        "data": {"build": "resting:Data"},
    }


def strike(cluster: Cluster, fault: str) -> None:
    victim = cluster.workers()[VICTIM]
    match fault:
        case "hang":
            (cluster.folder / f"stuck-{victim['pid']}").touch()
        case "stop":
            os.kill(victim["pid"], signal.SIGSTOP)
        case "kill":
            os.kill(victim["pid"], signal.SIGKILL)
        case "node":
            cluster.signal_node(victim["node"], signal.SIGKILL)


if __name__ == "__main__":
    main()
