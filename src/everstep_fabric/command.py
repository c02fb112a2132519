"""`everstep fabric probe`: which source port takes which path of a leaf-spine network."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from everstep.cli import render
from everstep.cli.render import AsJson
from everstep.errors import UserError
from everstep_fabric.catalogue import Tuple4
from everstep_fabric.document import topology_from
from everstep_fabric.files import addresses_of, port_range, read_tables
from everstep_fabric.probe import Budget, Prober

fabric_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure the paths of a network.",
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
    as_json: AsJson = False,
) -> None:
    """Measure which source port takes which path. Run it on the source node; it needs no root.

    [bold]Example[/bold]

      everstep fabric probe fabric.toml --from h1 --to h2 --ports 24000-24255
    """
    topology = topology_from(read_tables(fabric))
    prober = Prober(
        topology=topology, ports=port_range(ports), budget=Budget(packets=packets, seconds=seconds)
    )
    ends = addresses_of(topology, source, targets or [n.name for n in topology.nodes if n.name != source])
    found = _learn(prober, ends, target_port, protocol)
    found |= {"packets": prober.budget.sent}
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    _print_probed(found)


# ---------------------------------------------------------------------- work


def _learn(
    prober: Prober, ends: tuple[str, dict[str, str]], target_port: int, protocol: str
) -> dict[str, Any]:
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


# ---------------------------------------------------------------------- printing


def _print_probed(found: Mapping[str, Any]) -> None:
    table = Table("to", "path", "ports", "first of them")
    for name, row in found["to"].items():
        for path, ports in sorted(row["paths"].items()):
            table.add_row(name, path, str(len(ports)), ", ".join(map(str, ports[:6])))
            name = ""
    render.show(table)
