"""Step times on one GPU: a plain torch loop, and Everstep in several shapes that share the GPU.

    python bench/gpu/steps.py                        gpt-350m: plain loop, 1 x 1, 2 x 1, 2 x 2
    python bench/gpu/steps.py --preset gpt-1b --microbatches 4 --shapes 1x1 --compile \\
        --job '{"compile": true}' '{"compile": true, "accumulate": "fp32"}'
    python bench/gpu/steps.py --json

All train the same number of microbatches per step on the same data. Under MPS (`--mps`) processes that share
the GPU run at the same time; without it they take turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # where nothing can be installed

from everstep.job.job import Job  # noqa: E402
from everstep.job.presets import flops_per_token, shape  # noqa: E402
from everstep.launch.local.run import LocalTask  # noqa: E402
from everstep.node.fork_server import ForkServer  # noqa: E402
from harness.mps import mps  # noqa: E402

LIMIT_S = 120.0  # of one run of Everstep


def plain_loop(spec: dict[str, Any], after: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """One process, fp32 masters, bf16 compute, fused AdamW: what a careful person writes."""
    import torch
    from torch import nn

    from everstep.engine.datasets.data import Synthetic
    from everstep.engine.layers.gpt import gpt
    from everstep.engine.layers.model import built
    from everstep.engine.state.optimizer import adamw

    torch.set_float32_matmul_precision("high")
    form = shape(spec["preset"])
    model = gpt(spec["preset"])
    with torch.device("cuda"):  # a large model's weights take long to draw on the host
        masters = [built(model, name) for name in model.layers]
    layers: list[Any] = [copy.deepcopy(layer).bfloat16() for layer in masters]
    named = [(f"{i}.{n}", p) for i, layer in enumerate(masters) for n, p in layer.named_parameters()]
    working = [p for layer in layers for p in layer.parameters()]
    optimizer = adamw(lr=3e-4)(named)

    def tail(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(layers[-1](x).float().flatten(0, -2), y.flatten())

    if spec["compile"]:
        layers[1:-1] = [torch.compile(layer) for layer in layers[1:-1]]
        tail = torch.compile(tail)  # type: ignore[assignment]
    data = Synthetic(vocab=form.vocab, sequence=form.context, rows=spec["rows"])
    sums = [torch.zeros_like(p) for _, p in named]
    times, losses = [], []
    for step in range(1, spec["steps"] + 1):
        began = time.monotonic()
        total = []
        for number in range(spec["microbatches"]):
            x, y = (t.cuda(non_blocking=True) for t in data.batch(step, number))
            for layer in layers[:-1]:
                x = layer(x)
            loss = tail(x, y)
            loss.backward()
            with torch.no_grad():
                torch._foreach_add_(sums, [p.grad for p in working])
            for p in working:
                p.grad = None
            total.append(loss.detach())
        torch._foreach_div_(sums, spec["microbatches"])
        norm = torch.nn.utils.get_total_norm(sums)
        torch._foreach_mul_(sums, torch.clamp(1.0 / norm, max=1.0))
        for (_, p), g in zip(named, sums, strict=True):
            p.grad = g
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(working, [p.detach() for _, p in named])
            torch._foreach_zero_(sums)
        losses.append(float(torch.stack(total).mean()))
        times.append(time.monotonic() - began)
        after(step)
    return {"times": times, "losses": losses}


def everstep_run(spec: dict[str, Any], server: ForkServer) -> dict[str, Any]:
    replicas, stages = map(int, spec["shape"].split("x"))
    job = Job.from_dict(
        {
            "model": {"preset": spec["preset"]},
            "data": {"kind": "synthetic", "rows": spec["rows"]},
            "steps": spec["steps"],
            "replicas": replicas,
            "stages": stages,
            "microbatches": spec["microbatches"] // replicas,
            "precision": "bf16",
            "device": "cuda",
            "optimizer": {"decay": "constant"},
            **spec["job"],
        }
    )
    rows: list[Any] = []
    began = time.monotonic()
    first_s = 0.0

    def watch(kind: str, what: Any) -> None:
        nonlocal first_s
        if kind == "step":
            first_s = first_s or time.monotonic() - began
            rows.append(what)
            print(f"  step {what.step} {what.seconds:.3f} s", file=sys.stderr, flush=True)
        elif kind == "tick" and time.monotonic() - began > LIMIT_S:
            raise RuntimeError(f"{len(rows)} steps in {LIMIT_S:.0f} s")

    outcome = LocalTask(job, fork_server=server, watch=watch).run()
    for incident in outcome.incidents:  # its steps are no measure of speed
        evidence = "; ".join(f"{one.source}: {one.text}" for one in incident.evidence)
        about = f"{incident.workers} in step {incident.step}, {incident.what}; {incident.label}; {evidence}"
        print(f"  incident: {about}\n{incident.traceback}", file=sys.stderr, flush=True)
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    times, losses = [row.seconds for row in rows], [row.loss for row in rows]
    return {"times": times, "losses": losses, "first_step_after_s": round(first_s, 1)}


def plain_runs(specs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """In a process of their own, so that nothing is left on the GPU."""
    command = [sys.executable, __file__, "--specs", json.dumps(specs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        found = (json.loads(line) for line in running.stdout if line.startswith("{"))
        for _ in specs:
            yield next(found, {"failed": "it ended"})
        running.kill()


def figures(spec: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    if "failed" in found:
        return {"what": spec["what"], "failed": found["failed"]}
    form = shape(spec["preset"])
    step_s = statistics.median(found["times"][spec["warmup"] :])
    flops = flops_per_token(form) * form.context * spec["rows"] * spec["microbatches"]
    return {
        "what": spec["what"],
        "step_s": round(step_s, 4),
        "tflops": round(flops / step_s / 1e12, 1),
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
        "times": [round(one, 3) for one in found["times"]],
        "first_step_after_s": found.get("first_step_after_s"),
    }


def all_runs(
    plain: list[dict[str, Any]], ours: list[dict[str, Any]], server: ForkServer
) -> Iterator[dict[str, Any]]:
    for spec, found in zip(plain, plain_runs(plain) if plain else (), strict=True):
        yield figures(spec, found)
    for spec in ours:
        try:
            yield figures(spec, everstep_run(spec, server))
        except RuntimeError as error:
            yield {"what": spec["what"], "failed": str(error)[-300:]}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-350m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8, help="of the whole step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", default=["1x1", "2x1", "2x2"])
    parser.add_argument("--plain", action="store_true", help="the plain loop too")
    parser.add_argument("--compile", action="store_true", help="the plain loop compiled too")
    parser.add_argument("--job", nargs="*", default=["{}"], help="keys of the job, as JSON; several: in turn")
    parser.add_argument("--mps", action="store_true", help="start MPS, and stop it at the end")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--specs", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.specs:
        for spec in json.loads(args.specs):
            print(json.dumps(plain_loop(spec)), flush=True)
        return
    same = {name: getattr(args, name) for name in ("preset", "rows", "microbatches", "steps", "warmup")}
    plain = [{**same, "what": "plain loop", "compile": False}] if args.plain else []
    plain += [{**same, "what": "plain loop, compiled", "compile": True}] if args.compile else []
    jobs = [(text, json.loads(text)) for text in args.job]
    ours = [
        {**same, "what": f"everstep {s} {text}", "shape": s, "job": job}
        for text, job in jobs
        for s in args.shapes
    ]
    rows = []
    with mps(args.mps), closing(ForkServer().start()) as server:  # one for all: it loads torch once
        for row in all_runs(plain, ours, server):
            rows.append(row)
            print(row, file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({**same, "mps": args.mps, "rows": rows}))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
