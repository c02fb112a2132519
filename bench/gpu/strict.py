"""Strict sums on a GPU: time of a step, bytes per parameter, and whether the bits are equal, by kind of sum.

    python bench/gpu/strict.py                               gpt-1b, bf16, 4 microbatches of 4 x 2048 tokens
    python bench/gpu/strict.py --preset gpt-350m --rows 8 --json
    python bench/gpu/strict.py --options '{"depth": 3}' --rows 8 --turns 30    steps of all kinds in turn
    python bench/gpu/strict.py --device cpu --preset gpt-tiny --sequence 64

One worker alone (`harness.one_worker`); times are medians, on a CPU of process time. "kernel" is the own
kernel of the sums (`engine.sums.kernels`), "torch" is what is used without it. Bits: microbatches in any
order, over other workers, one of them with a gradient a million times too large, which must be promoted.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also when run by path

import torch

from everstep.engine import device as devices
from everstep.engine.layers.model import Slot, partition
from everstep.engine.prepare.figures import layer_figures, settings_of, stage_figures
from everstep.engine.prepare.program import Program
from everstep.engine.sums import kernels
from everstep.engine.sums.sum_parts import SumPart
from everstep.engine.sums.sums import GradientSums
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.schedule import footprint
from harness.one_worker import OneWorker
from harness.quick_weights import quick_weights

GIB = 2.0**30


def job_of(args: argparse.Namespace, accumulate: str) -> Job:
    return Job(
        model=ModelSpec(preset=args.preset, options=json.loads(args.options)),
        data=DataSpec(kind="synthetic", rows=args.rows, sequence=args.sequence),
        optimizer=OptimizerSpec(stagger="never"),
        precision="bf16" if args.device != "cpu" else "fp32",
        accumulate=accumulate,  # type: ignore[arg-type]
        microbatches=args.microbatches,
        device=args.device,
    )


def kinds(args: argparse.Namespace) -> dict[str, tuple[str, bool]]:
    """Name to (accumulate, with the kernel)."""
    found = {"fp32": ("fp32", False), "fp64": ("fp64", False)}
    for kind in ("strict", "strict32"):
        found[f"{kind}, torch"] = (kind, False)
        if args.device != "cpu":
            found[f"{kind}, kernel"] = (kind, True)
    return {name: kind for name, kind in found.items() if not args.only or name in args.only}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    usable = kernels.usable
    for name, (accumulate, with_kernel) in kinds(args).items():
        kernels.usable = usable if with_kernel else _never  # type: ignore[assignment]
        if args.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        job = job_of(args, accumulate)
        worker = OneWorker(job, 0)
        if with_kernel and not worker.stage.sums.has_kernels:
            rows.append({"sums": name, "kernel": "not usable here"})
            continue
        times, weights = [], []
        for step in range(1, args.warmup + args.steps + 1):
            seconds = _timed(args, partial(worker.step, step))
            if step > args.warmup:
                times.append(seconds)
                weights.append(_weight_seconds(args, worker, step))
        rows.append({"sums": name, **_row(args, job, worker, times, weights)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)  # also if it is cut off later
        del worker
        gc.collect()
        if args.device != "cpu":
            torch.cuda.empty_cache()
    kernels.usable = usable
    for row in rows:
        if "step_s" in row:
            row["against_fp32"] = row["step_s"] / rows[0]["step_s"] - 1
    return rows


def turns(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Workers of all kinds in one process, a step of each in turn: what disturbs one disturbs all."""
    names = ["fp32", "strict", "strict32"]
    workers = {name: OneWorker(job_of(args, name), 0) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for step in range(1, args.warmup + args.turns + 1):
        for name in names[step % 3 :] + names[: step % 3]:
            seconds = _timed(args, partial(workers[name].step, step))
            if step > args.warmup:
                times[name].append(seconds)
    rows = []
    for name in names:
        ratios = [own / plain - 1 for own, plain in zip(times[name], times["fp32"], strict=True)]
        middle = statistics.median(times[name])
        rows.append(
            {
                "sums": name,
                "step_s": middle,
                "least_s": min(times[name]),
                "most_s": max(times[name]),
                "against_fp32": middle / statistics.median(times["fp32"]) - 1,
                "least_against_fp32": min(times[name]) / min(times["fp32"]) - 1,
                "median_of_ratios": statistics.median(ratios),
            }
        )
    return rows


def _never(device: torch.device, dtype: torch.dtype) -> bool:
    return False


def _row(
    args: argparse.Namespace, job: Job, worker: OneWorker, times: list[float], weights: list[float]
) -> dict[str, Any]:
    program = Program.of(job)
    layers = layer_figures(program.model, program.data.batch(1, 0), job.precision, job.device)
    figures = stage_figures(layers, partition(program.model, 1)[0], recompute=job.recompute)
    settings = settings_of(job)
    items = footprint.items(figures, settings, stash=worker.peak_stash, hosted=job.microbatches)
    row = {
        "parameters": worker.stage.size,
        "step_s": statistics.median(times),
        "weight_grad_s": statistics.median(weights),
        "model_per_parameter": sum(footprint.per_parameter(settings).values()),
        "model_peak_gib": footprint.total(items) / GIB,
        "peak_stash": worker.peak_stash,
    }
    if args.device != "cpu":
        torch.cuda.synchronize()
        row["measured_per_parameter"] = torch.cuda.memory_allocated() / worker.stage.size
        row["measured_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return row


def _timed(args: argparse.Namespace, run: Callable[[], object]) -> float:
    if args.device == "cpu":
        began = time.process_time()
        run()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _weight_seconds(args: argparse.Namespace, worker: OneWorker, step: int) -> float:
    """One W alone, of a step that is thrown away."""
    stage = worker.stage
    stage.forward(step + 1, 0, None)
    stage.input_grad(step + 1, 0, None)
    seconds = _timed(args, lambda: stage.weight_grad(step + 1, 0))
    stage.discard(step + 1)
    return seconds


def bits(args: argparse.Namespace) -> dict[str, Any]:
    """Are sums the same in any order and grouping on this device?"""
    device = torch.device(args.device)
    slots = {"a": Slot(0, (1000, 1000)), "b": Slot(1_000_000, (4096,))}
    size = 1_004_160
    rng = random.Random(1)
    generator = torch.Generator(device).manual_seed(1)
    shapes = [slot.shape for slot in slots.values()]
    contributions = [
        [torch.randn(s, device=device, generator=generator) * 1e-3 for s in shapes] for _ in range(12)
    ]
    contributions[3][0] *= 1e6
    found: dict[str, Any] = {}
    for kind in ("strict", "strict32"):
        results = []
        for _ in range(args.orders):
            order = rng.sample(contributions, len(contributions))
            groups = [order[: (cut := rng.randint(1, 11))], order[cut:]]
            parts: list[SumPart] = []
            promoted = 0
            for group in groups:
                made = GradientSums(slots, size, kind=kind, contributions=12, device=device)  # type: ignore[arg-type]
                made.begin(1, [-5, -5])
                for one in group:
                    for index, tensor in enumerate(one):
                        made.add(index, lambda tensor=tensor: tensor)
                    made.added()
                parts.append(made.part(slice(0, size)))
                promoted += made.num_promoted
            out = torch.empty(size, device=device, dtype=torch.float64)
            made.means(slice(0, size), [slice(0, size)], parts, 1.0, out)
            results.append(out)
        found[kind] = {
            "orders": args.orders,
            "equal": all(torch.equal(results[0], other) for other in results),
            "promoted": promoted > 0,
            "kernel": made.has_kernels,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="gpt-1b")
    parser.add_argument("--options", default="{}", help="of the model, as JSON")
    parser.add_argument("--only", nargs="*", default=[], help="fp32 first, then others by their names")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turns", type=int, default=0, help="steps of each kind, in turn")
    parser.add_argument("--orders", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device != "cpu":
        devices.exact(torch.device(args.device))
    if args.turns:
        quick_weights()
        for row in turns(args):
            print(json.dumps(row), flush=True)
        return 0
    found = {"bits": bits(args), "rows": measure(args)}
    if args.json:
        print(json.dumps(found))
        return 0
    size = f"{args.microbatches} microbatches of {args.rows} x {args.sequence} tokens"
    print(f"{args.preset}, {size}, {args.device}")
    for kind, told in found["bits"].items():
        print(f"{kind}: {told}")
    print(
        f"{'sums':18} {'step ms':>9} {'+fp32':>7} {'W ms':>8} | {'bytes/param':>11} {'measured':>9} | "
        f"{'peak GiB':>9} {'measured':>9}"
    )
    for row in found["rows"]:
        if "step_s" not in row:
            print(f"{row['sums']:18} {row['kernel']}")
            continue
        print(
            f"{row['sums']:18} {row['step_s'] * 1e3:9.1f} {row['against_fp32']:+7.2%} "
            f"{row['weight_grad_s'] * 1e3:8.2f} | {row['model_per_parameter']:11.1f} "
            f"{row.get('measured_per_parameter', float('nan')):9.2f} | {row['model_peak_gib']:9.2f} "
            f"{row.get('measured_peak_gib', float('nan')):9.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
