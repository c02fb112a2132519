"""Schedules under the stash caps that the memory model gives: a 7B model on eight GPUs of 80 GB.

    python bench/schedule_memory.py
    python bench/schedule_memory.py --preset gpt-7b --gpus 8 --gb 80 --recompute --json

For every shape of the eight: what a worker keeps from step to step, how many microbatches its stages can hold
beside that, and how far the planned step is from the bound, whole and with a worker dead (`plan`'s own gap).
Ops take time by the parameters of their stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from everstep.engine.prepare.figures import layer_figures, settings_of
from everstep.engine.prepare.fitting import GIB, Memory, fit, fits
from everstep.engine.prepare.resolve import data_of, model_of
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.schedule import Instance, Worker, per_stage, plan
from everstep.schedule.footprint import USABLE, per_parameter


def jobs(args: argparse.Namespace) -> list[Job]:
    found = []
    for stages in range(1, args.gpus + 1):
        if args.gpus % stages == 0:
            replicas = args.gpus // stages
            found.append(
                Job(
                    model=ModelSpec(preset=args.preset),
                    data=DataSpec(kind="synthetic", rows=1),
                    optimizer=OptimizerSpec(shard=replicas > 1),
                    precision="bf16",
                    accumulate="strict32",
                    recompute=args.recompute,
                    device="cuda",
                    transport="nccl",
                    replicas=replicas,
                    stages=stages,
                    microbatches=args.microbatches // replicas,
                )
            )
    return found


def rows_of(job: Job, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, data = model_of(job), data_of(job)
    layers = layer_figures(model, data.batch(1, 0), job.precision, job.device)
    memory = Memory(worker=USABLE * args.gb * 1e9)
    stages = fit(job, model, layers, memory)
    row: dict[str, Any] = {
        "replicas": job.replicas,
        "stages": job.stages,
        "microbatches": job.microbatches,
        "per_parameter": sum(per_parameter(settings_of(job)).values()),
        "kept_gib": max(sum(i.device for i in s.items if i.when == "always") for s in stages) / GIB,
        "stash_gib": max(s.figures.held for s in stages) / GIB,
        "caps": [s.stash for s in stages],
        "fits": fits(job, stages, memory),
    }
    if not row["fits"] or job.stages == 1:
        return [row]
    found = []
    deaths = [(), (Worker(0, job.stages // 2),)] if job.replicas > 1 else [()]
    for dead in deaths:
        planned = plan(_instance(job, [s.figures.parameters for s in stages], row["caps"], dead), "decoupled")
        free = plan(_instance(job, [s.figures.parameters for s in stages], None, dead), "decoupled")
        found.append(
            {**row, "dead": len(dead), "gap": planned.gap, "against_no_cap": planned.value / free.value - 1}
        )
    return found


def _instance(job: Job, parameters: list[int], caps: list[int] | None, dead: tuple[Worker, ...]) -> Instance:
    times = tuple(round(p * 10.0 / max(parameters), 2) for p in parameters)
    whole = Instance(
        replicas=job.replicas,
        stages=job.stages,
        microbatches=job.microbatches,
        forward=per_stage(replicas=job.replicas, values=times),
        input_grad=per_stage(replicas=job.replicas, values=times),
        weight_grad=per_stage(replicas=job.replicas, values=times),
        hop=0.1,
        dead=frozenset(dead),
    )
    if caps is None:
        return whole
    limits = {Worker(k, s): caps[s] for k in range(job.replicas) for s in range(job.stages)}
    return replace(whole, stash_cap=limits)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--preset", default="gpt-7b")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--gb", type=float, default=80.0)
    parser.add_argument("--microbatches", type=int, default=32, help="of the whole step, 2048 tokens each")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [row for job in jobs(args) for row in rows_of(job, args)]
    if args.json:
        print(json.dumps(rows))
        return 0
    print("| shape | bytes per parameter | kept | a stash | stash caps | dead | gap | step against no cap |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        shape = f"{row['replicas']} x {row['stages']} x {row['microbatches']}"
        base = (
            f"| {shape} | {row['per_parameter']:g} | {row['kept_gib']:.1f} GiB | {row['stash_gib']:.2f} GiB |"
        )
        if "gap" not in row:
            why = "one stage: no pipeline" if row["fits"] else "does not fit"
            print(f"{base} {' '.join(map(str, row['caps']))} | {why} | | |")
            continue
        caps = " ".join(map(str, row["caps"]))
        print(f"{base} {caps} | {row['dead']} | {row['gap']:.2%} | {row['against_no_cap']:+.2%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
