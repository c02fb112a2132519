"""`everstep fabric probe`: which source port takes which path of a leaf-spine network.

The laboratory adds `plan`, `simulate` and `show` (`everstep_lab.cli.fabric`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli import render
from everstep.cli.fabric_files import (
    addresses_of,
    nodes_only,
    port_range,
    read_tables,
    topology_in,
    write_text,
)
from everstep.cli.render import AsJson
from everstep.errors import UserError

fabric_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure the paths of a network, plan the flows of training on them, simulate the effect.",
)

FabricFile = Annotated[Path, typer.Argument(help="Fabric file (TOML); see docs/fabric.md.")]


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


# ---------------------------------------------------------------------- printing


def _print_probed(found: Mapping[str, Any]) -> None:
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
    render.show(table)
