"""`everstep plan`: which task gets which workers, what the change gains and costs, and the runner-up."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from everstep.cli.render import AsJson
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.plan import SlotPlace
    from everstep_lab.plan.assign import Plan
    from everstep_lab.plan.events import PlanWorld

EPILOG = """[bold]Examples[/bold]\n
everstep plan cluster.toml\n
everstep plan cluster.toml --what-if "lose node-3"\n
everstep plan cluster.toml --what-if "lose node-3 for 2h" --json\n
everstep plan cluster.toml --next\n
everstep plan --memory job.toml\n
"""


def plan_command(
    file: Annotated[Path, typer.Argument(help="Cluster and tasks as TOML, or a job; see docs/planner.md.")],
    what_if: Annotated[
        str | None,
        typer.Option(help='Event to plan for: "lose node-3", "join node-9", "finish gpt", "submit gpt".'),
    ] = None,
    next_events: Annotated[
        bool, typer.Option("--next", help="Show the plan for every possible next event.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="FILE is a job: show what its workers keep in memory.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan which task gets which workers, and whether the move pays off."""
    if memory:
        from everstep_lab.cli.memory import show_memory

        show_memory(file, as_json)
        return
    from everstep_lab.plan.assign import assign
    from everstep_lab.plan.document import document_of, world_from
    from everstep_lab.plan.events import after

    world = world_from(_read(file))
    if next_events:
        _show_next(world, as_json)
        return
    if what_if is not None:
        world = after(what_if, world)
    began = time.perf_counter()
    plan = assign(world.cluster, world.submitted(), world.now, what_if or "")
    planning_ms = (time.perf_counter() - began) * 1e3
    if as_json:
        sys.stdout.write(json.dumps(document_of(plan, what_if or "", planning_ms)) + "\n")
    else:
        _show(world, plan, planning_ms)


plan_command.__doc__ = f"{plan_command.__doc__}\n\n{EPILOG}"


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UserError(f"cluster file '{file}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"cluster file '{file}' is not text; give a TOML file.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"cluster file '{file}' is not TOML: {str(error).rstrip('.')}.") from None


def _show(world: PlanWorld, plan: Plan, planning_ms: float) -> None:
    from everstep.protocol.durations import span

    console = Console(highlight=False)
    console.print(plan.because, soft_wrap=True)
    table = Table("task", "weight", "workers", "shape", "choice", "throughput", "downtime", "moves")
    weights = {task.name: task.weight for task in world.tasks}
    for name, gain in plan.gains.items():
        table.add_row(
            name,
            f"{weights[name]:g}",
            f"{gain.workers_before} → {gain.workers_after}",
            _changed(gain.shape_before, gain.shape_after),
            gain.kind.name.lower() + (" (lost a worker)" if gain.damaged else ""),
            _changed_rate(gain.throughput_before, gain.throughput_after),
            span(gain.transition_s) if gain.cost else "none",
            str(gain.moves),
        )
    console.print(table)
    console.print(
        f"WAF {_short(plan.waf_before)} → {_short(plan.waf_after)}; the plan is expected to hold for "
        f"{span(plan.running_s)}; planned in {planning_ms:.1f} ms",
        soft_wrap=True,
    )
    if plan.payback_s is not None:
        console.print(f"the move pays for itself after {span(plan.payback_s)}")
    if plan.runner_up is not None:
        console.print(
            f"runner-up, {plan.runner_up.behind:.2%} behind: {plan.runner_up.because}", soft_wrap=True
        )
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    console.print("places", style="bold")
    for name, places in plan.assignment.places.items():
        console.print(f"  {name}: {_by_node(places)}", soft_wrap=True)


def _show_next(world: PlanWorld, as_json: bool) -> None:
    from everstep_lab.plan.table import NextEvents

    answers = NextEvents(world)
    began = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning ahead", total=answers.num_decisions())
        while answers.prepare(1):
            bar.advance(task)
    planning_ms = (time.perf_counter() - began) * 1e3
    ready = [answers.look_up(event) for event in answers.events]
    if as_json:
        rows = [{"event": r.event, "allocation": r.allocation, "because": r.because} for r in ready]
        document = {"decisions": answers.num_decisions(), "planning_ms": planning_ms, "events": rows}
        sys.stdout.write(json.dumps(document) + "\n")
        return
    table = Table("event", *(task.name for task in world.submitted()))
    for row in ready:
        cells = [str(row.allocation.get(task.name, "")) for task in world.submitted()]
        table.add_row(row.event, *cells)
    Console().print(table)
    Console().print(f"{answers.num_decisions()} different plans, computed in {planning_ms:.0f} ms")


def _changed(before: object, after: object) -> str:
    if before == after or before is None:
        return str(after or "")
    return f"{before} → {after}" if after else f"{before} → none"


def _changed_rate(before: float, after: float) -> str:
    """Both in the unit of the larger."""
    unit = _short(max(before, after)).partition(" ")[2]
    parts = [
        _short(x).partition(" ")[0] if _short(x).endswith(unit) or not x else _short(x)
        for x in (before, after)
    ]
    return f"{parts[0]} → {parts[1]} {unit}".rstrip()


def _short(value: float) -> str:
    for size, unit in ((1e18, " EFLOP/s"), (1e15, " PFLOP/s"), (1e12, " TFLOP/s")):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _by_node(places: Sequence[SlotPlace | None]) -> str:
    """node-0:0-7 node-1:0-3, and how many are missing."""
    slots: dict[str, list[int]] = {}
    for place in places:
        if place is not None:
            slots.setdefault(place.node, []).append(place.slot)
    missing = sum(place is None for place in places)
    parts = [f"{node}:{_runs(sorted(found))}" for node, found in slots.items()]
    shown = " ".join(parts[:16]) + (f" and {len(parts) - 16} nodes more" if len(parts) > 16 else "")
    return shown + (f"; {missing} missing" if missing else "")


def _runs(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
