"""`everstep schedule`: the step that the live workers run, and its distance from the optimum."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from everstep.cli.render import AsJson
from everstep.diagnose import drawing
from everstep.errors import UserError
from everstep.protocol.ops import Kind, parse_worker
from everstep.schedule import MODES, Instance, Planned, plan, same_cap, uniform
from everstep.schedule.modes import REFERENCES, TRAINING
from everstep_lab.schedule import gantt
from everstep_lab.schedule import grid as worker_grid
from everstep_lab.schedule.compare import compare
from everstep_lab.schedule.document import choice_document, document_of, instance_from
from everstep_lab.schedule.normalize import normalize, relative_throughput
from everstep_lab.schedule.polish import polish as polish_plan

STYLES = {
    Kind.F: "black on bright_cyan",
    Kind.I: "black on yellow",
    Kind.W: "black on green",
    Kind.B: "black on bright_yellow",
    Kind.R: "white on magenta",
    Kind.U: "white on magenta",
    None: "dim",
}


def schedule_command(
    stages: Annotated[int, typer.Option(help="Pipeline stages.")] = 4,
    replicas: Annotated[int, typer.Option(help="Data-parallel replicas.")] = 3,
    microbatches: Annotated[int, typer.Option(help="Microbatches per replica and step.")] = 6,
    dead: Annotated[
        list[str] | None, typer.Option(help="Failed worker, as replica:stage. Repeatable.")
    ] = None,
    times: Annotated[
        str, typer.Option(help="Op times; R (reduce) and U (update) default to 0.")
    ] = "F=1,I=1,W=1",
    hop: Annotated[float, typer.Option(help="Time to send a tensor between stages.")] = 0.0,
    stash: Annotated[
        str, typer.Option(help="Limit of microbatches per worker: none, a number, or from-memory.")
    ] = "none",
    memory: Annotated[float, typer.Option(help="Bytes per worker for activations.")] = 0.0,
    held_forward: Annotated[float, typer.Option(help="Bytes per microbatch from F to I.")] = 0.0,
    held_weight: Annotated[float, typer.Option(help="Bytes per microbatch from I to W.")] = 0.0,
    mode: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {mode.about}" for name, mode in MODES.items()) + ".")
    ] = TRAINING,
    instance_file: Annotated[
        Path | None,
        typer.Option("--instance", help="Read the full instance from JSON instead of the options above."),
    ] = None,
    polish: Annotated[
        bool, typer.Option("--polish", help="Improve the plan with CP-SAT (extra `optimal`).")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Time limit of --polish.")] = 30.0,
    text: Annotated[bool, typer.Option("--text", help="Print the ops, one line per worker.")] = False,
    as_json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(help="Write a Gantt chart as SVG.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a Gantt chart as PNG (extra `plot`).")] = None,
    policies: Annotated[
        bool, typer.Option("--compare", help="Compare with the policies of other systems.")
    ] = False,
    normalized: Annotated[
        bool, typer.Option("--normalize", help="Show which placement of the failures costs least.")
    ] = False,
) -> None:
    """Plan one step for the live workers, with a bound on its distance from the optimum.

    [bold]Examples[/bold]

      everstep schedule --stages 4 --replicas 3 --microbatches 6 --dead 1:2

      everstep schedule --dead 1:2 --dead 0:3 --normalize --compare

      everstep schedule --dead 1:2 --mode reroute --polish --seconds 10 --svg step.svg

      everstep schedule --instance step.json --json > plan.json
    """
    if mode not in MODES:
        raise UserError(f"--mode {mode} is not one of {', '.join(MODES)}.")
    if instance_file is not None:
        instance = _read_instance(instance_file)
    else:
        instance = _instance(replicas, stages, microbatches, dead or [], times, hop)
        if memory:
            instance = replace(
                instance,
                held_forward=(held_forward,) * stages,
                held_weight=(held_weight,) * stages,
                memory=dict.fromkeys(instance.fault_free().workers(), memory),
            )
    instance = _with_stash(instance, stash, given=instance_file is not None)
    messages = Console(stderr=True)
    if mode in REFERENCES and instance.dead:
        messages.print(f"{mode} is a failure-free reference: failed workers are ignored.")
        instance = instance.fault_free()
    began = time.perf_counter()
    planned = _polished(instance, mode, seconds, messages) if polish else plan(instance, mode)
    planning_ms = (time.perf_counter() - began) * 1e3
    _write_charts(instance, planned, svg, png)
    if as_json:
        references = {
            f"fault_free_{name.replace('-', '_')}": plan(instance.fault_free(), name).value
            for name in REFERENCES
        }
        document = document_of(instance, planned, planning_ms=planning_ms, fault_free=references)
        document["relative_throughput"] = relative_throughput(instance, mode)
        if policies:
            document["policies"] = [
                {"policy": row.policy, "step": row.step, "lower_bound": row.lower_bound}
                for row in compare(instance)
            ]
        if normalized:
            document["normalization"] = [choice_document(choice) for choice in normalize(instance, mode)]
        sys.stdout.write(json.dumps(document) + "\n")
    elif text:
        sys.stdout.write(planned.schedule.text() + "\n")
    else:
        _show(instance, planned, planning_ms)
        if policies:
            _show_policies(instance)
        if normalized:
            _show_normalized(instance, mode)


def _instance(
    replicas: int, stages: int, microbatches: int, dead: list[str], times: str, hop: float
) -> Instance:
    if min(replicas, stages, microbatches) < 1:
        raise UserError("--replicas, --stages and --microbatches must be at least 1.")
    if not 0 <= hop < float("inf"):
        raise UserError(f"--hop is {hop:g}; give a finite time of 0 or more.")
    each = _times(times)
    forward, input_grad, weight_grad = (
        uniform(replicas=replicas, stages=stages, value=each[letter]) for letter in "FIW"
    )
    try:
        gone = frozenset(parse_worker(x) for x in dead)
    except UserError as error:
        raise UserError(f"--dead: {error}") from None
    return Instance(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        hop=hop,
        dead=gone,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        reduce=(each.get("R", 0.0),) * stages,
        update=(each.get("U", 0.0),) * stages,
    )


def _times(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([FIWRU])\s*=\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*", part)
        if match is None:
            raise UserError(f"--times {text!r}: {part!r} is not of the form F=1; write F=1,I=1,W=1.")
        found[match[1]] = float(match[2])
    missing = [letter for letter in "FIW" if letter not in found]
    if missing:
        raise UserError(f"--times {text!r} lacks {missing[0]}; write F=1,I=1,W=1.")
    return found


def _with_stash(instance: Instance, stash: str, *, given: bool) -> Instance:
    if stash == "none":
        return instance if given else replace(instance, stash_cap=None, memory=None)
    if stash == "from-memory":
        if instance.memory is None:
            raise UserError(
                "--stash from-memory needs memory: give --memory with --held-forward and "
                "--held-weight, or an --instance that has it."
            )
        return replace(instance, stash_cap=None)
    if not stash.isdigit() or int(stash) < 1:
        raise UserError(f"--stash {stash} is not none, from-memory or a number of at least 1.")
    cap = same_cap(replicas=instance.replicas, stages=instance.stages, cap=int(stash))
    return replace(instance, memory=None, stash_cap=cap)


def _read_instance(path: Path) -> Instance:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--instance {path} cannot be read: {error.strerror}.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"--instance {path} is not JSON: {error.msg} in line {error.lineno}.") from None
    return instance_from(document)


def _polished(instance: Instance, mode: str, seconds: float, messages: Console) -> Planned:
    """CP-SAT under a bar that fills with its time limit."""
    columns = TextColumn("polish"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=messages, transient=True) as bar:
        task = bar.add_task("looking", total=seconds)
        finished = threading.Event()

        def tick() -> None:
            while not finished.wait(0.2):
                bar.advance(task, 0.2)

        def found(best: float, bound: float, _: float) -> None:
            bar.update(task, description=f"best {best:g}, bound {bound:g}")

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            return polish_plan(instance, mode, seconds=seconds, progress=found)
        finally:
            finished.set()
            ticker.join()


def _write_charts(instance: Instance, planned: Planned, svg: Path | None, png: Path | None) -> None:
    if svg is None and png is None:
        return
    chart = gantt.picture(instance, planned)
    for path, is_png in ((svg, False), (png, True)):
        if path is not None:
            content = drawing.png(chart) if is_png else drawing.svg(chart).encode()
            try:
                path.write_bytes(content)
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def _show(instance: Instance, planned: Planned, planning_ms: float) -> None:
    console = Console(highlight=False)
    console.print(planned.because)
    console.print(
        f"planned in {planning_ms:.1f} ms; re-routed {planned.rerouted}; "
        f"peak stash {max(planned.peak_stash.values())}; fault-free 1F1B "
        f"{plan(instance.fault_free(), '1f1b').value:g}, zero bubble "
        f"{plan(instance.fault_free(), 'zero-bubble').value:g}",
        soft_wrap=True,
    )
    drawing = worker_grid.draw(instance, planned, columns=max(60, console.width - 8))
    for worker, cells in drawing.rows:
        line = Text(f"{worker!s:>5} ")
        for cell in cells:
            line.append(cell.text, style=("bold " if cell.rerouted else "") + STYLES[cell.kind])
        console.print(line, soft_wrap=True)
    console.print(f"a column is {drawing.tick:g}; small letters are re-routed, dots are idle", style="dim")


def _show_policies(instance: Instance) -> None:
    rows = compare(instance)
    table = Table("policy", "step", "vs fault-free 1F1B", "vs fault-free zero bubble")
    for row in rows:
        table.add_row(
            row.policy,
            "stopped" if row.step is None else f"{row.step:g}",
            f"{row.relative(rows[0].step or 1.0):.3f}",
            f"{row.relative(rows[1].step or 1.0):.3f}",
        )
    Console().print(table)


def _show_normalized(instance: Instance, mode: str) -> None:
    table = Table("moves", "failures per stage", "lower bound", "who changes stage")
    for choice in normalize(instance, mode):
        table.add_row(
            str(len(choice.moves)),
            " ".join(map(str, choice.failures)),
            f"{choice.bound:g}",
            ", ".join(f"{m.worker} becomes {m.becomes}" for m in choice.moves) or "none",
        )
    Console().print(table)
