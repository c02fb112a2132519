"""`everstep plan --memory job.toml`: what a worker of each stage will keep in memory."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from everstep.job.compiling import CompileChoice
from everstep.schedule.footprint import ON_THE_HOST, RECORDED

MOST_STAGES = 4  # columns of the table


def show_memory(file: Path, as_json: bool) -> None:
    from everstep.engine.prepare.figures import layer_figures, settings_of
    from everstep.engine.prepare.first_batch import batch_of
    from everstep.engine.prepare.fitting import fit, fits, memory_here
    from everstep.engine.prepare.resolve import data_of, model_of
    from everstep.job.compiling import choice_for, settled
    from everstep.job.job import load_job
    from everstep.schedule import footprint

    job = load_job(file)
    job.refuse_contradictions()
    compiling = choice_for(job)
    job = settled(job, compiling)
    model = model_of(job)
    memory = memory_here(job)
    batch = batch_of(job, data_of(job))
    layers = layer_figures(model, batch, job.precision, job.device, compiled=job.compiles)
    found = fit(job, model, layers, memory)
    document: dict[str, Any] = {
        "per_parameter": footprint.per_parameter(settings_of(job), job.microbatches),
        "worker_bytes": memory.worker,
        "machine_bytes": memory.machine,
        "fits": fits(job, found, memory),
        "compile": {"is": compiling.compile, "because": compiling.because},
        "copies_in_memory": {"interval": job.copy_interval, "by_default": job.memory_interval is None},
        "stages": [
            {
                "stage": one.stage,
                "parameters": one.figures.parameters,
                "stash_cap": one.stash,
                "bytes_per_stash": one.figures.held,
                "bytes_per_stash_gathered": one.figures.keys_values if job.context_parallel else 0.0,
                "items": {item.name: {"device": item.device, "host": item.host} for item in one.items},
                "total": one.total,
                "with_recordings": one.with_recordings,
            }
            for one in found
        ],
    }
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _show(document)


def _show(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    stages = document["stages"]
    table = Table("item", "bytes per parameter")
    for name, each in document["per_parameter"].items():
        table.add_row(name, f"{each:g}")
    console.print(table)
    kept = list(document["per_parameter"])
    others = [name for name in stages[0]["items"] if name not in (*kept, *ON_THE_HOST, RECORDED)]
    shown = _shown(stages)
    table = Table("per worker", *(f"stage {one['stage']}" for one in shown))
    table.add_row("parameters", *(f"{one['parameters'] / 1e6:,.1f} M" for one in shown))
    from_step_to_step = [sum(one["items"][name]["device"] for name in kept) for one in shown]
    table.add_row("from step to step", *map(_size, from_step_to_step))
    for name in others:
        table.add_row(name, *(_both(one["items"][name]) for one in shown))
    table.add_row("at most together", *(_size(one["total"]) for one in shown))
    table.add_row("microbatches held at once", *(str(one["stash_cap"]) for one in shown))
    console.print(table)
    if any(one["bytes_per_stash_gathered"] for one in shown):
        most = max(one["bytes_per_stash_gathered"] for one in stages)
        console.print(
            f"of each stash at most {_size(most)} are keys and values of whole rows, gathered by every shard",
            soft_wrap=True,
        )
    if len(shown) < len(stages):
        console.print(f"the fullest {len(shown)} of {len(stages)} stages; --json prints all", soft_wrap=True)
    for name in [name for name in ON_THE_HOST if name in stages[0]["items"]]:
        most = max(one["items"][name]["host"] for one in stages)
        console.print(f"host memory besides, per worker: {name}, at most {_size(most)}", soft_wrap=True)
    copies = document["copies_in_memory"]
    if copies["by_default"]:
        console.print(
            f"by default a cluster keeps states in the memory of two nodes every {copies['interval']} steps, "
            "where eight states per worker that copies fit into half of a node's free memory; "
            "memory_interval = 0 turns this off",
            soft_wrap=True,
        )
    elif copies["interval"]:
        console.print(
            f"states are kept in the memory of two nodes every {copies['interval']} steps, because the job "
            "says so",
            soft_wrap=True,
        )
    if any(one["items"][RECORDED]["device"] for one in stages):
        most = min(max(one["with_recordings"] for one in stages), document["worker_bytes"] or math.inf)
        console.print(
            f"with CUDA graphs at most {_size(most)} per worker: they are recorded where memory is free "
            '(graphs = "never" records none)',
            soft_wrap=True,
        )
    if document["compile"]["because"]:
        console.print(str(CompileChoice(*document["compile"].values())), soft_wrap=True)
    each = sum(document["per_parameter"].values())
    console.print(f"{each:g} bytes per parameter stay from step to step", soft_wrap=True)
    if document["worker_bytes"] is not None:
        console.print(f"a worker has {_size(document['worker_bytes'])}", soft_wrap=True)
    elif document["machine_bytes"] is not None:
        console.print(f"this machine has {_size(document['machine_bytes'])} for all workers", soft_wrap=True)
    else:
        console.print("how much memory a worker has is not known here; set memory_gib", soft_wrap=True)
    console.print("the job fits" if document["fits"] else "the job does not fit")


def _shown(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    fullest = sorted(stages, key=lambda one: -one["total"])[:MOST_STAGES]
    return sorted(fullest, key=lambda one: int(one["stage"]))


def _both(item: dict[str, float]) -> str:
    return f"{_size(item['host'])} on the host" if item["host"] else _size(item["device"])


def _size(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
