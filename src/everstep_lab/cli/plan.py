"""`everstep plan --memory job.toml`: what a worker of each stage needs at least."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from everstep.cli.render import AsJson
from everstep.errors import UserError
from everstep.job.compiling import CompileChoice

MOST_STAGES = 4  # columns of the table


def plan_command(
    file: Annotated[Path, typer.Argument(help="A job (TOML).")],
    memory: Annotated[bool, typer.Option("--memory", help="Show what its workers keep in memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what the workers of a job need.

    Example:

        everstep plan --memory job.toml
    """
    if not memory:
        raise UserError("everstep plan needs --memory. Which task gets which workers: everstep explain.")
    show_memory(file, as_json)


def show_memory(file: Path, as_json: bool) -> None:
    from everstep.engine.prepare.first_batch import batch_of
    from everstep.engine.prepare.fitting import fit, fits, memory_here, settings_of
    from everstep.engine.prepare.resolve import data_of, model_of
    from everstep.job.compiling import choice_for, settled
    from everstep.job.job import load_job
    from everstep.schedule.footprint import per_parameter

    job = load_job(file)
    job.refuse_contradictions()
    compiling = choice_for(job)
    job = settled(job, compiling)
    memory = memory_here(job)
    found = fit(job, model_of(job), batch_of(job, data_of(job)))
    document: dict[str, Any] = {
        "per_parameter": per_parameter(settings_of(job)),
        "worker_bytes": memory.worker,
        "machine_bytes": memory.machine,
        "fits": fits(job, found, memory),
        "compile": {"is": compiling.compile, "because": compiling.because},
        "copies_in_memory": {"interval": job.copy_interval, "by_default": job.memory_interval is None},
        "stages": [
            {"stage": one.stage, "parameters": one.parameters, "items": one.items, "total": one.total}
            for one in found
        ],
    }
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _show(document)


def _show(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    shown = _shown(document["stages"])
    table = Table("per worker", "bytes per parameter", *(f"stage {one['stage']}" for one in shown))
    each = document["per_parameter"]
    table.add_row("parameters", "", *(f"{one['parameters'] / 1e6:,.1f} M" for one in shown))
    for name in shown[0]["items"]:
        row = [one["items"][name] for one in shown]
        if any(row):
            table.add_row(name, f"{each[name]:g}" if name in each else "", *map(_size, row))
    table.add_row("together", f"{sum(each.values()):g}", *(_size(one["total"]) for one in shown))
    console.print(table)
    if len(shown) < len(document["stages"]):
        console.print(
            f"the fullest {len(shown)} of {len(document['stages'])} stages; --json prints all", soft_wrap=True
        )
    console.print(
        "what microbatches hold besides is measured in the first step; a worker holds as many as fit",
        soft_wrap=True,
    )
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
    if document["compile"]["because"]:
        console.print(str(CompileChoice(*document["compile"].values())), soft_wrap=True)
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


def _size(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
