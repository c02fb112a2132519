"""The losses of a run without faults: the racers' own loop on eight workers, one microbatch each.

    python bench/peers/racing/clean.py --seconds 90 --out clean.json
    taskset -c 14,15 python bench/peers/racing/clean.py --model large --workers 2 --seconds 700 --out x.json

With more workers only the order of sums differs; that is how the run gets as far as a race in less time. With
two it goes beside a race, on cores that the race leaves free, and nobody gets further.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.race_models import CHOICE, MODELS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, required=True, help="start included")
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    script = Path(__file__).parents[1] / "racers" / "ddp.py"
    with tempfile.TemporaryDirectory(prefix="race-clean-") as folder:
        diary = Path(folder, "diary")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RACE_NODE": "0"}
        env |= {"RACE_DIARY": str(diary), "RACE_FOLDER": folder, CHOICE: given.model}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(given.workers), str(script)]
        with Path(folder, "log").open("wb") as log:
            run = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            time.sleep(given.seconds)
            os.killpg(run.pid, signal.SIGTERM)
            try:
                run.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        if not diary.exists():
            sys.exit(Path(folder, "log").read_text()[-3000:])
        lines = [json.loads(line) for line in diary.read_text().splitlines()]
    losses = {str(row["step"]): row["loss"] for row in lines if row["kind"] == "step" and row["rank"] == 0}
    Path(given.out).write_text(json.dumps({"workers": given.workers, "losses": losses}))
    print(f"{len(losses)} clean steps")


if __name__ == "__main__":
    main()
