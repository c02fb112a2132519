"""Where a single worker's step goes: the host's launches and the device's kernels of F, I and W, by variant.

    python bench/gpu/one_worker.py                     gpt-350m: sums, exact kernels, compiled regions
    python bench/gpu/one_worker.py --kernels           and the kernels that take the most time
    python bench/gpu/one_worker.py --variants strict,strict+compile --json

`host_ms` is what the host needs to launch an op, `device_ms` what the device needs to run it; the larger one
bounds the step. No other process, no link, no optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # where nothing can be installed

VARIANTS = "fp32,fp32+exact,strict+exact,strict32+exact,strict+exact+compile"


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    import torch

    from everstep.engine import device as devices
    from everstep.engine.layers import regions
    from everstep.engine.prepare.program import Program
    from everstep.job.job import Job

    words = spec["variant"].split("+")
    device = devices.pick("cuda")
    if "exact" in words:
        devices.exact(device)
    if "compile" in words:
        regions.enable()
    job = Job.from_dict(
        {
            "model": {"preset": spec["preset"]},
            "data": {"kind": "synthetic", "rows": spec["rows"]},
            "microbatches": spec["microbatches"],
            "precision": "bf16",
            "accumulate": words[0],
            "device": "cuda",
        }
    )
    stage, _ = Program.of(job).build(0, device=device)
    host: dict[str, list[float]] = {"data": [], "F": [], "I": [], "W": []}
    events: dict[str, list[Any]] = {"F": [], "I": [], "W": []}

    def op(kind: str, do: Any) -> None:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.monotonic()
        first.record()
        do()
        last.record()
        host[kind].append(time.monotonic() - began)
        events[kind].append((first, last))

    def step(number: int) -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        for microbatch in range(spec["microbatches"]):
            op("F", lambda m=microbatch: stage.forward(number, m))
            op("I", lambda m=microbatch: stage.input_grad(number, m))
            op("W", lambda m=microbatch: stage.weight_grad(number, m))
        torch.cuda.synchronize()
        took = time.monotonic() - began
        stage.sums.begin(number + 1, stage.sums.limits)
        return took

    times = [step(number) for number in range(1, 5)]
    for table in (host, events):
        for values in table.values():
            values.clear()
    began = time.monotonic()
    for microbatch in range(spec["microbatches"]):
        stage.data.batch(5, microbatch)
    data_s = (time.monotonic() - began) / spec["microbatches"]
    times = [step(number) for number in range(5, 8)]
    found: dict[str, Any] = {
        "variant": spec["variant"],
        "microbatch_ms": round(statistics.median(times) / spec["microbatches"] * 1e3, 2),
        "data_ms": round(data_s * 1e3, 2),
        "host_ms": {k: round(statistics.median(v) * 1e3, 2) for k, v in host.items() if v},
        "device_ms": {
            k: round(statistics.median(a.elapsed_time(b) for a, b in v), 2) for k, v in events.items() if v
        },
    }
    if spec["kernels"]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(8)
        rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:22]
        found["kernels_ms"] = [
            (row.key[:90], row.count, round(row.self_device_time_total / 1e3, 2)) for row in rows
        ]
        total = sum(row.self_device_time_total for row in profile.key_averages())
        found["kernels_total_ms"] = round(total / 1e3, 1)
    return found


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-350m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.spec:
        print(json.dumps(measure(json.loads(given.spec))))
        return
    rows = []
    for variant in given.variants.split(","):
        spec = {**vars(given), "variant": variant}
        command = [sys.executable, __file__, "--spec", json.dumps(spec)]
        try:
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
        except subprocess.SubprocessError as error:
            rows.append({"variant": variant, "failed": str(error)[-300:]})
        else:
            rows.append(json.loads(ran.stdout.strip().splitlines()[-1]))
        print(json.dumps(rows[-1]), file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
