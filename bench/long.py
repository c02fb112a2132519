"""Every feature for many steps, its processes' memory sampled: is it flat?

    python bench/long.py                          each feature, 500 steps on 2 x 2 workers
    python bench/long.py --only shards,recompute --steps 200
    python bench/long.py --device cuda            GPU memory too
    python bench/long.py --json

A small GPT is trained as in `bench/pairs.py`. Resident memory of all processes of a run together (on a GPU
also what they have there) is sampled twice per second, with the step that was reached. The growth is the
slope of a line through the samples after the first fifth of the steps, in KiB per step; a run fails if that
line rises by more than 5 % over the sampled steps. `none`: no feature, `everything`: those that go together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
TOGETHER = "bf16 recompute evaluation ema sharded lora weighted stream"
ALONE = "bf16 recompute compile evaluation ema shards sharded tied frozen lora weighted stream"
FEATURES: dict[str, str] = {
    "none": "",
    **{name: name for name in ALONE.split()},
    "checkpoints": "folder={folder}",
    "shards-recompute": "shards recompute",
    "everything": TOGETHER,
}
MOST_GROWTH = 0.05
SETTLED = 0.2  # of the steps: buffers, caches and the allocator have their size
EVERY_S = 0.5
KIB, MIB = 2.0**10, 2.0**20


def run(feature: str, steps: int, device: str, limit_s: float) -> dict[str, Any]:
    """One run, and what it held at which step."""
    with tempfile.TemporaryDirectory() as folder:
        words = FEATURES[feature].format(folder=folder).split()
        words += [f"steps={steps}", *([f"device={device}"] if device != "cpu" else [])]
        command = [sys.executable, "-m", "everstep.cli.main", "run", "--no-web", "--every", "1"]
        command += [str(ROOT / "harness" / "pair_script.py"), *words]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        reached = Reached()
        reader = threading.Thread(target=reached.read, args=(process,), daemon=True)
        reader.start()
        samples: list[tuple[int, float, float]] = []  # step, resident bytes, bytes on the GPU
        until = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < until:
            samples.append((reached.step, *held(process.pid, device)))
            time.sleep(EVERY_S)
        timed_out = process.poll() is None
        if timed_out:
            process.terminate()
        process.wait()
        reader.join()
    found: dict[str, Any] = {"feature": feature, "steps": reached.step, "samples": len(samples)}
    if process.returncode and not timed_out:
        return found | {"error": reached.last}
    for index, name in ((1, "resident"), (2, "gpu")) if device != "cpu" else ((1, "resident"),):
        found |= {f"{name}_{key}": value for key, value in line(samples, index, steps).items()}
    return found


class Reached:
    def __init__(self) -> None:
        self.step, self.last = 0, ""

    def read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            words = text.split()
            self.last = text.strip() or self.last
            if len(words) > 1 and words[0] == "step":
                number = words[1].split("/")[0]
                self.step = int(number) if number.isdigit() else self.step


def held(pid: int, device: str) -> tuple[float, float]:
    """Of a process and all below it. What several share counts once per process."""
    total, pids = 0, set()
    try:
        root = psutil.Process(pid)
        for one in [root, *root.children(recursive=True)]:
            try:
                total += one.memory_info().rss
                pids.add(one.pid)
            except psutil.Error:
                continue
    except psutil.Error:
        return 0.0, 0.0
    return float(total), on_gpu(pids) if device != "cpu" else 0.0


def on_gpu(pids: set[int]) -> float:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = [row.split(",") for row in subprocess.check_output(query, text=True).splitlines()]
    return sum(float(mib) * MIB for pid, mib in rows if int(pid) in pids)


def line(samples: list[tuple[int, float, float]], index: int, steps: int) -> dict[str, Any]:
    """The line of least squares through what was held once all had settled."""
    points = [(one[0], one[index]) for one in samples if SETTLED * steps <= one[0] < steps]
    if len(points) < 4 or points[0][0] == points[-1][0]:
        return {"flat": None}
    mean_x, mean_y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    growth = slope * (points[-1][0] - points[0][0]) / mean_y
    return {
        "mib": round(mean_y / MIB, 1),
        "kib_per_step": round(slope / KIB, 2),
        "growth": round(growth, 4),
        "flat": growth <= MOST_GROWTH,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(FEATURES)}")
    parser.add_argument("--steps", type=int, default=500, metavar="N")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds per feature")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(FEATURES)
    if unknown := set(chosen) - set(FEATURES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(FEATURES)}")
    rows = []
    for feature in chosen:
        rows.append(run(feature, options.steps, options.device, options.limit))
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        print(json.dumps({"runs": rows}))
    failed = [
        row for row in rows if "error" in row or not all(v for k, v in row.items() if k.endswith("flat"))
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
