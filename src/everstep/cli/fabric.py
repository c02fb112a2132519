"""`everstep fabric`: which flow of training takes which path of a leaf-spine network."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.fabric_files import (
    PRESETS,
    addresses_of,
    change_of,
    nodes_only,
    port_range,
    preset_fabric,
    previous_plan,
    read_fabric,
    read_json,
    read_tables,
    topology_in,
    write_text,
)
from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.fabric import Flow, Routing, Topology, TrafficTask

fabric_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Plan network paths for the flows of training, and simulate the effect.",
)

FabricFile = Annotated[Path, typer.Argument(help="Fabric file (TOML); see docs/fabric.md.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


@fabric_app.command("plan")
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
    from everstep.fabric.bound import bound_s, lower_bound_s
    from everstep.fabric.document import plan_document

    topology, _, flows = read_fabric(fabric)
    began = time.perf_counter()
    if previous is None:
        routing = allocate(topology, flows)
    else:
        routing = reallocate(topology, previous_plan(previous, topology, flows), flows, max_moves=max_moves)
    spent_ms = (time.perf_counter() - began) * 1e3
    least = bound_s(topology, flows) if bound else lower_bound_s(topology, flows)
    document = plan_document(routing, bound_s=least, allocation_ms=spent_ms) | {"moved": list(routing.moved)}
    if out is not None:
        write_text(out, json.dumps(document, indent=1))
    if roce is not None:
        _write_roce(roce, routing, catalogue)
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    _print_plan(routing, least, spent_ms)


@fabric_app.command("probe")
def probe_command(
    fabric: FabricFile,
    source: Annotated[str, typer.Option("--from", help="Node of the file that this machine is.")],
    targets: Annotated[
        list[str] | None, typer.Option("--to", help="Node to probe; all others if not given. Repeatable.")
    ] = None,
    ports: Annotated[str, typer.Option(help="Source ports, first-last.")] = "24000-24063",
    target_port: Annotated[int, typer.Option(help="Destination port of the data.")] = 29500,
    protocol: Annotated[str, typer.Option(help="Protocol of the data: tcp or udp.")] = "tcp",
    packets: Annotated[int, typer.Option(help="Maximum number of packets.")] = 4096,
    seconds: Annotated[float, typer.Option(help="Maximum time in seconds.")] = 10.0,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace all hops, to discover unknown switches.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the catalogue as JSON; with --trace, the fabric file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure which source port takes which path. Run it on the source node; it needs no root.

    [bold]Example[/bold]

      everstep fabric probe fabric.toml --from h1 --to h2 --ports 24000-24255
    """
    from everstep.node.probe import Budget, Prober

    document = read_tables(fabric)
    topology = nodes_only(document) if trace else topology_in(document)
    prober = Prober(
        topology=topology, ports=port_range(ports), budget=Budget(packets=packets, seconds=seconds)
    )
    ends = addresses_of(topology, source, targets or [n.name for n in topology.nodes if n.name != source])
    if trace:
        found = _discover(prober, ends, target_port)
        if out is not None:
            write_text(out, json.dumps(found["fabric"], indent=1))
    else:
        found = _learn(prober, ends, target_port, protocol)
        if out is not None:
            write_text(out, json.dumps(prober.catalogue.document(), indent=1))
    found |= {"packets": prober.budget.sent}
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    _print_probed(found)


@fabric_app.command("simulate")
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
    from everstep.fabric.policies import POLICIES

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


@fabric_app.command("show")
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

    from everstep.fabric import picture
    from everstep.fabric.allocate import allocate
    from everstep.fabric.policies import ecmp

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


# ---------------------------------------------------------------------- work


def _learn(prober: Any, ends: tuple[str, dict[str, str]], target_port: int, protocol: str) -> dict[str, Any]:
    from everstep.fabric.catalogue import Tuple4

    source, targets = ends
    found: dict[str, Any] = {}
    for name, address in targets.items():
        key = Tuple4(protocol=protocol, source=source, target=address, target_port=target_port)
        answers = prober.learn(key, list(prober.ports))
        if not answers:
            raise UserError(
                f"none of the probes from {source} to {name} ({address}) was answered: the node is "
                "unreachable, or the switches send no ICMP time-exceeded."
            )
        by_path: dict[str, list[int]] = {}
        for port, hops in answers.items():
            by_path.setdefault(" > ".join(hops), []).append(port)
        found[name] = {"paths": by_path, "silent": len(prober.ports) - len(answers)}
    return {"from": source, "to": found}


def _discover(prober: Any, ends: tuple[str, dict[str, str]], target_port: int) -> dict[str, Any]:
    from everstep.fabric.discovery import topology_of
    from everstep.fabric.document import topology_document

    source, targets = ends
    traces = [
        trace
        for address in targets.values()
        for port in prober.ports
        if (trace := prober.trace(source, address, port, target_port=target_port)) is not None
    ]
    if not traces:
        raise UserError(f"no probe from {source} reached its destination; nothing is discovered.")
    topology = topology_of(traces, link_gbps=1.0, port_gbps=1.0)
    return {"from": source, "traces": len(traces), "fabric": topology_document(topology)}


def _write_roce(path: Path, routing: Routing, catalogue: Path | None) -> None:
    from everstep.fabric.catalogue import Catalogue
    from everstep.fabric.roce import plan_file

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
    from everstep.fabric.policies import route
    from everstep.fabric.scenarios import rehash_broken
    from everstep.fabric.simulate import simulate

    def planned_anew(now: Topology, before: Routing) -> Routing:
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
            reroute=None if start is None else planned_anew,
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


def _print_probed(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    if "to" not in found:
        fabric = found["fabric"]
        print(f"{found['traces']} traces: {len(fabric['leaf'])} leaves, {len(fabric['spine'])} spines.")
        return
    table = Table("to", "path", "ports", "first of them")
    for name, row in found["to"].items():
        for path, ports in sorted(row["paths"].items()):
            table.add_row(name, path, str(len(ports)), ", ".join(map(str, ports[:6])))
            name = ""
    Console(highlight=False).print(table)


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
