"""`everstep fabric plan`, `simulate`, `show`: what planned paths bring, on any fabric file."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.fabric_files import read_json, read_tables, topology_in, write_text
from everstep.cli.render import AsJson
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.fabric import Flow, Routing, Topology
    from everstep_lab.fabric.traffic_task import TrafficTask

PRESETS = ("c4p", "c4p-2to1", "c4p-one-job", "gpu4096")
FabricFile = Annotated[Path, typer.Argument(help="Fabric file (TOML); see docs/fabric.md.")]


def plan_command(
    fabric: FabricFile,
    previous: Annotated[
        Path | None, typer.Option(help="Previous plan (written by --out): keep its paths, move few flows.")
    ] = None,
    max_moves: Annotated[
        int | None, typer.Option(help="With --previous: maximum number of flows moved to balance the load.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
    roce: Annotated[
        Path | None, typer.Option(help="Write queue pairs and NCCL environment; untested.")
    ] = None,
    catalogue: Annotated[
        Path | None, typer.Option(help="With --roce: the catalogue from `probe --protocol udp`.")
    ] = None,
    bound: Annotated[
        bool, typer.Option("--bound", help="Also solve the linear program (scipy); slow for large fabrics.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Assign a path to every flow so that the load of the busiest link is minimal.

    [bold]Example[/bold]

      everstep fabric plan fabric.toml --out plan.json
    """
    from everstep.fabric.allocate import allocate, reallocate
    from everstep.fabric.bound import lower_bound_s
    from everstep_lab.fabric.bound import bound_s

    topology, _, flows = read_fabric(fabric)
    began = time.perf_counter()
    if previous is None:
        routing = allocate(topology, flows)
    else:
        routing = reallocate(topology, previous_plan(previous, topology, flows), flows, max_moves=max_moves)
    spent_ms = (time.perf_counter() - began) * 1e3
    least = bound_s(topology, flows) if bound else lower_bound_s(topology, flows)
    document = _plan_document(routing, bound_s=least, allocation_ms=spent_ms) | {"moved": list(routing.moved)}
    if out is not None:
        write_text(out, json.dumps(document, indent=1))
    if roce is not None:
        _write_roce(roce, routing, catalogue)
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    _print_plan(routing, least, spent_ms)


def simulate_command(
    fabric: Annotated[Path | None, typer.Argument(help="Fabric file with tasks, or give --preset.")] = None,
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = None,
    steps: Annotated[int, typer.Option(help="Steps per task.")] = 5,
    seeds: Annotated[int, typer.Option(help="Number of seeds for hashing and random choice.")] = 20,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            help="Failed link, as LINK@SECONDS, or LINK=FRACTION@SECONDS of its capacity. Repeatable."
        ),
    ] = None,
    notice: Annotated[float, typer.Option(help="Seconds from a failure to the new plan.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Simulate steps on a fabric: planned, hashed (ECMP), random and round-robin paths.

    [bold]Example[/bold]

      everstep fabric simulate --preset c4p --fail 'l0p0>s0@0.05'
    """
    from everstep_lab.fabric.policies import POLICIES

    topology, tasks, flows = preset_fabric(preset) if fabric is None else read_fabric(fabric)
    changes = [change_of(text, topology) for text in fail or []]
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; use at least 1.")
    rows = {
        policy: _simulated(topology, tasks, flows, policy, steps, seeds, changes, notice)
        for policy in ("planned", *POLICIES)
    }
    if as_json:
        sys.stdout.write(json.dumps({"fabric": topology.name, "flows": len(flows), "policies": rows}) + "\n")
        return
    _print_simulated(topology, flows, rows)


def show_command(
    fabric: FabricFile,
    seed: Annotated[int, typer.Option(help="Seed of the hashing for comparison.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write both pictures as SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the load of every link: hashed before, planned after.

    [bold]Example[/bold]

      everstep fabric show fabric.toml --svg fabric.svg
    """
    import numpy as np

    from everstep.fabric.allocate import allocate
    from everstep_lab.fabric import picture
    from everstep_lab.fabric.policies import ecmp

    topology, _, flows = read_fabric(fabric)
    pictures = [
        ("hashed (ECMP)", ecmp(topology, flows, np.random.default_rng(seed))),
        ("planned", allocate(topology, flows)),
    ]
    if svg is not None:
        write_text(svg, picture.svg(pictures))
    if as_json:
        loads = {
            title: {
                link.name: float(x) for link, x in zip(topology.links, routing.load, strict=True) if x > 0
            }
            for title, routing in pictures
        }
        sys.stdout.write(json.dumps({"fabric": topology.name, "load_s": loads}) + "\n")
        return
    sys.stdout.write(picture.text(pictures))


# ---------------------------------------------------------------------- files


def read_fabric(path: Path) -> tuple[Topology, list[TrafficTask], list[Flow]]:
    from everstep_lab.fabric.traffic_task import flows_of, tasks_from

    document = read_tables(path)
    topology = topology_in(document)
    tasks = tasks_from(document, topology)
    flows = [flow for task in tasks for flow in flows_of(task)]
    if not flows:
        raise UserError(f"{path}: no task sends anything between nodes; there is nothing to plan.")
    return topology, tasks, flows


def preset_fabric(name: str | None) -> tuple[Topology, list[TrafficTask], list[Flow]]:
    from everstep_lab.fabric import scenarios

    match name:
        case "c4p":
            topology, tasks = scenarios.c4p_testbed(), scenarios.eight_jobs()
        case "c4p-2to1":
            topology, tasks = scenarios.c4p_testbed(oversubscription=2), scenarios.eight_jobs()
        case "c4p-one-job":
            topology, tasks = scenarios.c4p_testbed(), scenarios.one_job()
        case "gpu4096":
            topology, tasks = scenarios.gpu_fabric(), [scenarios.large_task(gpus=4096)]
        case _:
            raise UserError(f"give a fabric file or --preset, one of {', '.join(PRESETS)}.")
    return topology, tasks, scenarios.flows_of_all(tasks)


def previous_plan(path: Path, topology: Topology, flows: list[Flow]) -> Routing:
    import numpy as np

    from everstep.fabric.routing import Routing

    document = read_json(path)
    known = {}
    try:
        for row in document["flows"]:
            switches = row["path"].split(" > ")
            links = [f"{a}>{b}" for a, b in pairwise(switches)]
            if all(link in topology.index for link in links):
                known[row["name"]] = [topology.index[link] for link in links]
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"--previous {path} is not a plan; give a file that --out has written.") from None
    kept = [flow for flow in flows if flow.name in known]
    paths = np.array([(known[flow.name] + [-1] * 4)[:4] for flow in kept], dtype=np.int64).reshape(-1, 4)
    return Routing(topology=topology, flows=tuple(kept), paths=paths)


def change_of(text: str, topology: Topology) -> Any:
    from everstep_lab.fabric.simulate import FabricChange

    what, at, when = text.rpartition("@")
    link, _, fraction = what.partition("=")
    try:
        seconds, left = float(when), float(fraction or 0.0)
    except ValueError:
        raise UserError(f"--fail {text!r} is not LINK@SECONDS or LINK=FRACTION@SECONDS.") from None
    if not at or link not in topology.index:
        raise UserError(f"--fail {text!r}: {link!r} is not a link of {topology.name}, such as l0>s0.")
    if not 0 <= left <= 1:
        raise UserError(f"--fail {text!r}: {left:g} of its capacity is left; give a fraction from 0 to 1.")
    if not (math.isfinite(seconds) and seconds >= 0):
        raise UserError(f"--fail {text!r}: the link fails at {seconds:g} s; give a time of 0 or more.")
    return FabricChange(at_s=seconds, condition={link: left})


# ---------------------------------------------------------------------- work


def _write_roce(path: Path, routing: Routing, catalogue: Path | None) -> None:
    from everstep.fabric.catalogue import Catalogue
    from everstep_lab.fabric.roce import plan_file

    known = None if catalogue is None else Catalogue.from_document(read_json(catalogue))
    write_text(path, json.dumps(plan_file(routing, known, time.monotonic()), indent=1))


def _simulated(
    topology: Topology,
    tasks: list[TrafficTask],
    flows: list[Flow],
    policy: str,
    steps: int,
    seeds: int,
    changes: list[Any],
    notice_s: float,
) -> dict[str, Any]:
    import numpy as np

    from everstep.fabric.allocate import allocate, reallocate
    from everstep_lab.fabric.policies import route
    from everstep_lab.fabric.scenarios import rehash_broken
    from everstep_lab.fabric.simulate import simulate

    def replanned(now: Topology, before: Routing) -> Routing:
        return reallocate(now, before, flows)

    worst, mean, stalled = [], [], 0
    start = allocate(topology, flows) if policy == "planned" else None
    for seed in range(seeds if start is None or changes else 1):
        chance = np.random.default_rng(seed)

        def hashed_elsewhere(now: Topology, before: Routing, chance: np.random.Generator = chance) -> Routing:
            return rehash_broken(now, before, chance)

        outcome = simulate(
            start or route(topology, flows, policy, chance),
            tasks,
            num_steps=steps,
            changes=changes,
            switches=hashed_elsewhere,
            reroute=None if start is None else replanned,
            notice_s=notice_s,
        )
        stalled += bool(outcome.stalled)
        seconds = [step.seconds for step in outcome.steps]
        worst.append(max(seconds, default=float("inf")))
        mean.append(float(np.mean(seconds)) if seconds else float("inf"))
    return {
        "mean_step_s": float(np.mean(mean)),
        "worst_step_s": max(worst),
        "median_worst_step_s": float(np.median(worst)),
        "seeds": len(worst),
        "stalled": stalled,
    }


# ---------------------------------------------------------------------- printing


def _print_plan(routing: Routing, least: float, spent_ms: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{routing.because} Bound {least:.4g} s. Allocated in {spent_ms:.1f} ms.", soft_wrap=True)
    table = Table("flow", "path", "Gbit/s")
    for number, flow in list(enumerate(routing.flows))[:40]:
        table.add_row(flow.name, routing.topology.spell(routing.path(number)), f"{routing.rates[number]:.4g}")
    console.print(table)
    if len(routing.flows) > 40:
        console.print(f"and {len(routing.flows) - 40} more; --json has all of them.", style="dim")


def _print_simulated(topology: Topology, flows: list[Flow], rows: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("policy", "mean step s", "worst step s, median of seeds", "worst of all", "times planned")
    for policy, row in rows.items():
        table.add_row(
            policy,
            f"{row['mean_step_s']:.4g}",
            f"{row['median_worst_step_s']:.4g}",
            f"{row['worst_step_s']:.4g}",
            f"{row['mean_step_s'] / rows['planned']['mean_step_s']:.2f}",
        )
    console = Console(highlight=False)
    console.print(f"{topology.name}: {len(flows)} flows over {len(topology.links)} links")
    console.print(table)


def _plan_document(routing: Routing, *, bound_s: float, allocation_ms: float) -> dict[str, Any]:
    import numpy as np

    from everstep.fabric.document import hops_of

    topology = routing.topology
    return {
        "fabric": topology.name,
        "because": routing.because,
        "worst_link_s": routing.worst_load,
        "bound_s": bound_s,
        "allocation_ms": allocation_ms,
        "slowest_gbps": float(np.min(routing.rates, initial=np.inf)) if routing.flows else 0.0,
        "flows": [
            {
                "name": flow.name,
                "task": flow.task,
                "phase": flow.phase,
                "source": f"{flow.source[0]}:{flow.source[1]}",
                "target": f"{flow.target[0]}:{flow.target[1]}",
                "bytes": flow.bytes,
                "gbps": float(rate),
                "path": topology.spell(routing.path(number)),
                "hops": list(hops_of(topology, routing.path(number))),
            }
            for number, (flow, rate) in enumerate(zip(routing.flows, routing.rates, strict=True))
        ],
        "links": {
            link.name: {"gbps": link.gbps, "load_s": float(load)}
            for link, load in zip(topology.links, routing.load, strict=True)
            if load > 0
        },
    }
