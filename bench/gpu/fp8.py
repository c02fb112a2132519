"""fp8 beside bf16 on one GPU: products, steps, losses, and the bits after a kill. About three minutes.

    python bench/gpu/fp8.py                      16 blocks of gpt-3b, 4 microbatches of 16,384 tokens
    python bench/gpu/fp8.py --json
    python bench/gpu/fp8.py --device cpu --preset gpt-tiny --rows 1 --steps 4 --learn 4      does it run?

products   F, I and W of a block's Linears, microseconds; in fp8 with the scaling of activations and
           gradients; weights are scaled once per step
steps      one worker, compiled regions, `--depth` blocks; the median of the steps after the first three
losses     gpt-125m, the same data, `--learn` steps
kill       two replicas that share the GPU, one killed in a backward: are all losses equal?
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where nothing can be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from everstep.engine.telemetry.faults import parse_fault
from everstep.job.job import Job
from everstep.job.presets import GptShape, shape
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from harness.quick_weights import quick_job

KILL = "stage=0,replica=1,step=3,op=I1"


def products(form: GptShape, tokens: int, device: str) -> list[dict[str, Any]]:
    import torch

    from everstep.engine.layers.fp8 import in_rows, product

    wide = (form.hidden, form.width)
    found = []
    for name, outputs, inputs in (("q", form.width, form.width), ("gate", *wide), ("down", *reversed(wide))):
        x, grad, weight = (
            torch.randn(a, b, device=device, dtype=torch.bfloat16)
            for a, b in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
        )
        row, other, matrix, across = in_rows(x), in_rows(grad), in_rows(weight), in_rows(weight.t())
        wanted = (values(row)[:64] @ values(matrix).t()).float()
        close = (product(row, matrix)[:64].float() - wanted).abs().max() / wanted.abs().max()
        runs: dict[str, Any] = {
            "F bf16": lambda x=x, w=weight: x @ w.t(),
            "F fp8": lambda x=x, b=matrix: product(in_rows(x), b),
            "F fp8, product alone": lambda a=row, b=matrix: product(a, b),
            "scaling x": lambda x=x: in_rows(x),
            "scaling W": lambda w=weight: in_rows(w),
            "scaling W across": lambda w=weight: in_rows(w.t()),
            "I bf16": lambda g=grad, w=weight: g @ w,
            "I fp8": lambda g=grad, b=across: product(in_rows(g), b),
            "I fp8, product alone": lambda a=other, b=across: product(a, b),
            "I fp8, product alone, not fast": lambda a=other, b=across: product(a, b, fast=False),
            "W bf16": lambda g=grad, x=x: g.t() @ x,
        }
        micros = {what: round(1e6 * seconds(run, device), 1) for what, run in runs.items()}
        found.append({"linear": f"{name} {outputs} x {inputs}", "error": float(close), **micros})
    return found


def values(rows: Any) -> Any:
    return rows.values.double() * rows.scales.double()


def seconds(run: Any, device: str, times: int = 20) -> float:
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        run()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - began) / times


def trained(server: ForkServer, given: argparse.Namespace, precision: str, **changes: Any) -> dict[str, Any]:
    """One run; `killed`, and words of a job."""
    preset, depth = changes.pop("preset", given.preset), changes.pop("depth", given.depth)
    faults = (parse_fault(KILL),) if changes.pop("killed", False) else ()
    job = Job.from_dict(
        {
            **quick_job(preset, {"depth": depth}, given.rows, shape(preset).context),
            "steps": given.steps,
            "microbatches": 4,
            "precision": precision,
            "device": given.device,
            "compile": given.device == "cuda",
            "optimizer": {"decay": "constant"},
            "base": str(Path(__file__).resolve().parents[2]),
            **changes,
        }
    )
    began = time.monotonic()
    outcome = LocalTask(job, fork_server=server, faults=faults).run()
    rows = list(outcome.by_step().values())
    times = [row.seconds for row in rows[3:]] or [0.0]
    print(f"{precision} {changes}: {time.monotonic() - began:.0f} s {outcome.failure or ''}", file=sys.stderr)
    return {
        "failure": outcome.failure,
        "step_s": round(statistics.median(times), 4),
        "losses": [row.loss for row in rows],
        "incidents": len(outcome.incidents),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt-3b")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learn", type=int, default=60)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    server = ForkServer().start()
    found: dict[str, Any] = {}
    form = shape(given.preset)
    try:
        found["products"] = products(form, given.rows * form.context, given.device)
        for precision in ("bf16", "fp8"):
            found[f"steps {precision}"] = trained(server, given, precision)
        small = {"preset": "gpt-125m" if given.device == "cuda" else given.preset, "steps": given.learn}
        for precision in ("bf16", "fp8"):
            found[f"learning {precision}"] = trained(server, given, precision, **small, depth=4)
        pair = {"replicas": 2, "microbatches": 2, "steps": 5, "compile": False, "depth": 2}
        found["clean"] = trained(server, given, "fp8", **pair)
        found["killed"] = trained(server, given, "fp8", **pair, killed=True)
    finally:
        server.close()
    failures = {name: run["failure"] for name, run in found.items() if isinstance(run, dict)}
    summary = {
        "speedup": round(found["steps bf16"]["step_s"] / max(found["steps fp8"]["step_s"], 1e-9), 3),
        "last losses": [
            statistics.mean(found[f"learning {precision}"]["losses"][-5:]) for precision in ("bf16", "fp8")
        ],
        "bits equal after a kill": found["clean"]["losses"] == found["killed"]["losses"],
        "killed": found["killed"]["incidents"],
        "failures": {name: why for name, why in failures.items() if why},
    }
    if given.json:
        print(json.dumps({**found, "summary": summary}))
    else:
        for row in found["products"]:
            print("\n".join(f"{key:32} {value}" for key, value in row.items()), end="\n\n")
        print("\n".join(f"{key:32} {value}" for key, value in summary.items()))
    return int(bool(summary["failures"]) or not summary["bits equal after a kill"])


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main())
