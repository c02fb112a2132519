"""A model that nearly fills one GPU, its workers sharing it: trains, one is killed, the losses are equal.

python bench/gpu/large.py                            gpt-3b, 2 x 2, bf16, sharded states
python bench/gpu/large.py --preset gpt-tiny --device cpu --sequence 64
python bench/gpu/large.py --shape 1x1 --kill ''      does it fit with one worker?
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where nothing can be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from everstep.engine.telemetry.faults import parse_fault
from everstep.job.job import Job
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.schedule.profile import PEAK
from harness.quick_weights import quick_job

GIB = 2.0**30


def job_of(args: argparse.Namespace) -> Job:
    replicas, stages = map(int, args.shape.split("x"))
    options = json.loads(args.options)
    return Job.from_dict(
        {
            "model": {"preset": args.preset, **options},
            "data": {"kind": "synthetic", "rows": 1, "sequence": args.sequence},
            **(quick_job(args.preset, options, 1, args.sequence) if args.quick else {}),
            "steps": args.steps,
            "replicas": replicas,
            "stages": stages,
            "microbatches": args.microbatches,
            "precision": "fp32" if args.device == "cpu" else "bf16",
            "accumulate": args.accumulate,
            "recompute": True,
            "device": args.device,
            "optimizer": {"decay": "constant", "shard": replicas > 1, "stagger": "never"},
        }
    )


def run(server: ForkServer, job: Job, kill: str) -> dict[str, Any]:
    peaks: dict[str, float] = {}

    def watch(kind: str, what: Any) -> None:
        if kind == "times":
            peaks[str(what.worker)] = max(peaks.get(str(what.worker), 0.0), what.times.get(PEAK, 0.0) / GIB)
            print(f"worker {what.worker} peak {peaks[str(what.worker)]:.2f} GiB", file=sys.stderr, flush=True)
        elif kind == "step":
            print(f"step {what.step} loss {what.loss:.6f} {what.seconds:.2f} s", file=sys.stderr, flush=True)

    began = time.monotonic()
    faults = (parse_fault(kill),) if kill else ()
    outcome = LocalTask(job, fork_server=server, faults=faults, watch=watch).run()
    rows = list(outcome.by_step().values())
    return {
        "failure": outcome.failure,
        "losses": [row.loss for row in rows],
        "step_s": [round(row.seconds, 3) for row in rows],
        "incidents": [incident.what for incident in outcome.incidents],
        "issued": outcome.issued,
        "committed": outcome.committed,
        "peak_gib": {worker: round(peak, 2) for worker, peak in sorted(peaks.items())},
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-3b")
    parser.add_argument("--options", default="{}", help="of the model, as JSON")
    parser.add_argument("--shape", default="2x2")
    parser.add_argument("--quick", action="store_true", help="first weights that need no time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--accumulate", default="strict32")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kill", default="stage=1,replica=0,step=3,op=F1")
    args = parser.parse_args()
    job = job_of(args)
    server = ForkServer().start()
    found: dict[str, Any] = {"preset": args.preset, "shape": args.shape}
    try:
        for name, kill in (("clean", ""), ("killed", args.kill)):
            if name == "clean" or kill:
                found[name] = run(server, job, kill)
                print(json.dumps(found), flush=True)
    finally:
        server.close()
    if args.kill:
        found["equal"] = found["killed"]["losses"] == found["clean"]["losses"]
        print(json.dumps({"equal": found["equal"]}))
    return int(any(found[name]["failure"] for name in ("clean", "killed") if name in found))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main())
