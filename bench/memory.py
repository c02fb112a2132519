"""The memory model against what a process really uses.

    python bench/memory.py                        CPU: every kind of sum; peak stash by microbatches
    python bench/memory.py --device cuda --preset gpt-1b --rows 1
    python bench/memory.py --device cuda --preset gpt-1b --options '{"depth": 8}' --sharing 2 4 8
    python bench/memory.py --json

Each row is one worker alone in a fresh process (`harness.one_worker`), with the ops of its real schedule. On
a GPU the bytes are torch's own count (`memory_allocated`, `max_memory_allocated`) and what CUDA graphs keep
for themselves; on a CPU they are the process's resident memory, less what it had before the worker was built.

`--sharing`: real runs of one stage instead, with and without sharded states, whose workers share one GPU.
Each tells what it has there (torch's own count, and its slabs of shared memory).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

KINDS = ("strict", "strict32", "fp64", "fp32")
GIB = 2.0**30


def job_of(given: dict[str, Any]) -> Any:
    from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
    from harness.quick_weights import quick_job

    model = ModelSpec(preset=given["preset"], options=given.get("options", {}))
    data = DataSpec(kind="synthetic", rows=given["rows"], sequence=given["sequence"])
    if "shard" in given:  # real workers, each with the first weights of its own
        tables = quick_job(given["preset"], given.get("options", {}), given["rows"], given["sequence"])
        model, data = (
            made(build=tables[name].pop("build"), options=tables[name])
            for made, name in ((ModelSpec, "model"), (DataSpec, "data"))
        )
    return Job(
        model=model,
        data=data,
        optimizer=OptimizerSpec(stagger="auto" if given["eager"] else "never", clip=1e-6),
        precision=given["precision"],
        accumulate=given["accumulate"],
        replicas=given["replicas"],
        stages=given["stages"],
        microbatches=given["microbatches"],
        device=given["device"],
        **({"graphs": given["graphs"]} if "graphs" in given else {}),
    )


def child(given: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: build, train four steps, compare."""
    import torch

    from everstep.engine.layers.model import partition
    from everstep.engine.prepare.figures import (
        layer_figures,
        makes_in_input_grad,
        recompute_of,
        settings_of,
        stage_figures,
    )
    from everstep.engine.prepare.fitting import allocated
    from everstep.engine.prepare.program import Program
    from everstep.schedule import footprint
    from harness.one_worker import OneWorker
    from harness.quick_weights import quick_weights

    torch.set_num_threads(1)
    quick_weights()
    job = job_of(given)
    cuda = job.device != "cpu"
    warm = replace(job, model=replace(job.model, preset="gpt-tiny", options={}), stages=1, microbatches=1)
    OneWorker(replace(warm, data=replace(warm.data, rows=1, sequence=8)), 0).step(1)  # libraries, pools
    before = _resident()
    worker = OneWorker(job, given["stage"], cap=given["cap"])
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    for step in range(1, 5):
        if cuda and step == 4:  # all that will be recorded is recorded
            torch.cuda.reset_peak_memory_stats()
        worker.step(step, eager=given["eager"])
    if cuda:
        torch.cuda.synchronize()
        stays, peak = allocated(worker.stage)
    else:
        stays, peak = _resident() - before, _most_resident() - before
    program = Program.of(job)
    layers = layer_figures(program.model, program.data.batch(1, 0), job.precision, job.device)
    part = partition(program.model, job.stages)[given["stage"]]
    figures = stage_figures(layers, part, recompute=recompute_of(job), makes=makes_in_input_grad(job))
    settings = replace(settings_of(job), eager=given["eager"])
    items = footprint.items(figures, settings, stash=worker.peak_stash, hosted=job.microbatches)
    kept = sum(footprint.per_parameter(settings).values())
    boundaries = figures.sent * job.microbatches  # the last step's are dropped when the next begins
    return {
        **given,
        "parameters": worker.stage.size,
        "model_per_parameter": kept,
        "measured_per_parameter": (stays - boundaries) / worker.stage.size,
        "model_peak": footprint.with_recordings(items),
        "measured_peak": peak,
        "reserved_peak": torch.cuda.max_memory_reserved() if cuda else 0,
        "peak_stash": worker.peak_stash,
        "bytes_per_stash": figures.held,
        "measured_stash": max(worker.stage.held_bytes),
    }


def shared_gpu(given: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: a real run, whose workers tell what they hold."""
    from everstep.engine.layers.model import partition
    from everstep.engine.prepare.figures import (
        layer_figures,
        makes_in_input_grad,
        recompute_of,
        settings_of,
        stage_figures,
    )
    from everstep.engine.prepare.program import Program
    from everstep.launch.local.run import LocalTask
    from everstep.node.fork_server import ForkServer
    from everstep.schedule import footprint
    from everstep.schedule.profile import ALLOCATED, PEAK

    job = job_of(given)
    optimizer = replace(job.optimizer, shard=given["shard"], clip=1.0)
    job = replace(job, optimizer=optimizer, steps=given["steps"])
    told: list[Any] = []
    server = ForkServer().start()
    try:
        outcome = LocalTask(
            job, fork_server=server, watch=lambda kind, what: told.append(what) if kind == "times" else None
        ).run()
    finally:
        server.close()
    if outcome.failure is not None:
        raise SystemExit(outcome.failure)
    program = Program.of(job)
    layers = layer_figures(program.model, program.data.batch(1, 0), job.precision, job.device)
    figures = stage_figures(
        layers, partition(program.model, 1)[0], recompute=recompute_of(job), makes=makes_in_input_grad(job)
    )
    settings = settings_of(job)
    items = footprint.items(figures, settings, stash=footprint.stash_cap(1), hosted=job.microbatches)
    late = [report for report in told if report.step > 2]
    steps = [row.seconds for row in list(outcome.steps.rows)[2:]]
    return {
        **given,
        "parameters": figures.parameters,
        "model_per_parameter": sum(footprint.per_parameter(settings).values()),
        "measured_per_parameter": max(r.times.get(ALLOCATED, 0.0) for r in late) / figures.parameters,
        "model_peak": footprint.with_recordings(items),
        "measured_peak": max(r.times.get(PEAK, 0.0) for r in late),
        "step_s": sorted(steps)[len(steps) // 2],
        "peaks": {f"{r.worker} {r.step}": r.times.get(PEAK, 0.0) for r in told},
        "now": {f"{r.worker} {r.step}": r.times.get(ALLOCATED, 0.0) for r in told},
    }


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    base = {
        "preset": args.preset,
        "options": json.loads(args.options),
        "rows": args.rows,
        "sequence": args.sequence,
        "precision": args.precision or ("fp32" if args.device == "cpu" else "bf16"),
        "replicas": 1,
        "stages": 1,
        "stage": 0,
        "microbatches": 2,
        "device": args.device,
        "cap": None,
        "eager": False,
    }
    if args.sharing:
        real = {**base, "steps": 4, "accumulate": "strict32", "shard": True}
        return _children(
            [
                {**real, "replicas": args.sharing[0], "shard": False},
                *({**real, "replicas": replicas} for replicas in args.sharing),
                {**real, "replicas": args.sharing[-1], "accumulate": "strict"},
            ]
        )
    asked = [{**base, "accumulate": kind, "eager": eager} for kind in KINDS for eager in (False, True)]
    asked += [{**base, "accumulate": "strict", "replicas": 2}]
    piped = {**base, "accumulate": "strict32", "stages": 4}
    for microbatches in args.microbatches:
        asked += [{**piped, "microbatches": microbatches, "cap": cap} for cap in (None, 0)]
    return _children(asked)


def _children(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for given in asked:
        environment = {**os.environ, "MIMALLOC_PURGE_DELAY": "0", "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
        done = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(given)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=600,
        )
        if done.returncode:
            raise SystemExit(f"{given}: {done.stderr[-2000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)  # also if it is cut off later
    return found


def show_shared(found: list[dict[str, Any]]) -> None:
    print(
        f"{'sums':9} {'R':>2} {'sharded':7} | {'bytes/parameter':>15} {'measured':>9} | {'peak GiB':>9} "
        f"{'measured':>9} {'off':>6} | {'step s':>7}"
    )
    for row in found:
        off = row["model_peak"] / max(row["measured_peak"], 1) - 1
        print(
            f"{row['accumulate']:9} {row['replicas']:2} {'yes' if row['shard'] else 'no':7} | "
            f"{row['model_per_parameter']:15.2f} {row['measured_per_parameter']:9.2f} | "
            f"{row['model_peak'] / GIB:9.3f} {row['measured_peak'] / GIB:9.3f} {off:+6.1%} | "
            f"{row['step_s']:7.3f}"
        )


def show(found: list[dict[str, Any]]) -> None:
    print(
        f"{'sums':9} {'eager':5} {'R':>2} {'S':>2} {'M':>3} {'cap':>5} | {'bytes/parameter':>15} "
        f"{'measured':>9} | {'stash':>5} {'MiB each':>9} {'measured':>9} | "
        f"{'peak GiB':>9} {'measured':>9} {'off':>6}"
    )
    for row in found:
        off = row["model_peak"] / row["measured_peak"] - 1
        print(
            f"{row['accumulate']:9} {'yes' if row['eager'] else 'no':5} {row['replicas']:2} "
            f"{row['stages']:2} {row['microbatches']:3} {'none' if row['cap'] == 0 else 'usual':>5} | "
            f"{row['model_per_parameter']:15.2f} {row['measured_per_parameter']:9.2f} | "
            f"{row['peak_stash']:5} {row['bytes_per_stash'] / 2**20:9.2f} "
            f"{row['measured_stash'] / 2**20:9.2f} | "
            f"{row['model_peak'] / GIB:9.3f} {row['measured_peak'] / GIB:9.3f} {off:+6.1%}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt-125m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--options", default="{}", help="of the model, as JSON")
    parser.add_argument("--sharing", type=int, nargs="*", default=[], help="replicas that share the GPU")
    parser.add_argument("--microbatches", type=int, nargs="*", default=[8, 16, 32])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        given = json.loads(args.child)
        print(json.dumps(shared_gpu(given) if "shard" in given else child(given)))
        return 0
    found = rows(args)
    if args.json:
        print(json.dumps({"rows": found}))
    elif args.sharing:
        show_shared(found)
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
