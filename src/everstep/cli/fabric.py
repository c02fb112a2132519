"""`everstep fabric`: a leaf-spine network's paths, and which flow of training takes which."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.fabric import Flow, Routing, Task, Topology

fabric_app = typer.Typer(
    no_args_is_help=True,
    help="Put each long-lived flow of training on a path of its own, and see what it is worth.",
)

FabricFile = Annotated[
    Path, typer.Argument(help="Fabric file (TOML): [clos], or nodes, leaves, spines, cables; and [[task]].")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
PRESETS = ("c4p", "c4p-2to1", "c4p-one-job", "gpu4096")


@fabric_app.command("plan")
def plan_command(
    fabric: FabricFile,
    previous: Annotated[
        Path | None, typer.Option(help="A plan written before (--out): keep its paths, move few flows.")
    ] = None,
    max_moves: Annotated[
        int | None, typer.Option(help="With --previous: most flows moved to even the load.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan (JSON).")] = None,
    roce: Annotated[
        Path | None, typer.Option(help="Write queue pairs and NCCL's environment; untested.")
    ] = None,
    catalogue: Annotated[
        Path | None, typer.Option(help="With --roce: what `probe --protocol udp` wrote.")
    ] = None,
    bound: Annotated[
        bool, typer.Option(help="Also solve the linear program (scipy); slow on large ones.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Give every flow of the tasks a path, so that the worst link is as little loaded as can be.

    everstep fabric plan fabric.toml --out plan.json
    """
    from everstep.fabric.allocate import allocate, reallocate
    from everstep.fabric.bound import bound_s, lower_bound_s
    from everstep.fabric.document import plan_document

    topology, _, flows = _read(fabric)
    began = time.perf_counter()
    if previous is None:
        routing = allocate(topology, flows)
    else:
        routing = reallocate(topology, _previous(previous, topology, flows), flows, max_moves=max_moves)
    spent_ms = (time.perf_counter() - began) * 1e3
    least = bound_s(topology, flows) if bound else lower_bound_s(topology, flows)
    document = plan_document(routing, bound_s=least, allocation_ms=spent_ms) | {"moved": list(routing.moved)}
    if out is not None:
        _write(out, json.dumps(document, indent=1))
    if roce is not None:
        _write_roce(roce, routing, catalogue)
    if as_json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    _print_plan(routing, least, spent_ms)


@fabric_app.command("probe")
def probe_command(
    fabric: FabricFile,
    source: Annotated[str, typer.Option("--from", help="This machine's node in the file.")],
    targets: Annotated[
        list[str] | None, typer.Option("--to", help="A node to probe; repeatable; all others.")
    ] = None,
    ports: Annotated[str, typer.Option(help="Source ports, first-last.")] = "24000-24063",
    target_port: Annotated[int, typer.Option(help="The port that data will go to.")] = 29500,
    protocol: Annotated[str, typer.Option(help="tcp or udp: that of the data.")] = "tcp",
    packets: Annotated[int, typer.Option(help="Most packets sent in all.")] = 4096,
    seconds: Annotated[float, typer.Option(help="Most seconds spent in all.")] = 10.0,
    trace: Annotated[
        bool, typer.Option(help="All hops, to discover a fabric whose switches are not known.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the catalogue (JSON); with --trace the fabric, to be read as a file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find out which source port takes which path. Needs no root; run it on the node it probes from.

    everstep fabric probe fabric.toml --from h1 --to h2 --ports 24000-24255
    """
    from everstep.node.probe import Budget, Prober

    document = _toml(fabric)
    topology = _only_addresses(document) if trace else _topology(document)
    prober = Prober(topology=topology, ports=_range(ports), budget=Budget(packets=packets, seconds=seconds))
    ends = _addresses(topology, source, targets or [n.name for n in topology.nodes if n.name != source])
    if trace:
        found = _discover(prober, ends, target_port)
        if out is not None:
            _write(out, json.dumps(found["fabric"], indent=1))
    else:
        found = _learn(prober, ends, target_port, protocol)
        if out is not None:
            _write(out, json.dumps(prober.catalogue.document(), indent=1))
    found |= {"packets": prober.budget.sent}
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    _print_probed(found)


@fabric_app.command("simulate")
def simulate_command(
    fabric: Annotated[Path | None, typer.Argument(help="Fabric file with [[task]]; or a --preset.")] = None,
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of every task.")] = 5,
    seeds: Annotated[int, typer.Option(help="Seeds of hashing and chance.")] = 20,
    fail: Annotated[
        list[str] | None, typer.Option(help="LINK[=FRACTION]@SECONDS, repeatable; 0 is dead.")
    ] = None,
    notice: Annotated[float, typer.Option(help="Seconds from a failure to the plan's answer.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Steps in time on a simulated fabric: planned, hashed (ECMP), by chance and in turn.

    everstep fabric simulate --preset c4p --fail 'l0p0>s0@0.05'
    """
    from everstep.fabric.policies import POLICIES

    topology, tasks, flows = _preset(preset) if fabric is None else _read(fabric)
    changes = [_change(text, topology) for text in fail or []]
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
    seed: Annotated[int, typer.Option(help="Of the hashing it is compared with.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write the two pictures as SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the fabric with the load of every link: hashed before, planned after.

    everstep fabric show fabric.toml --svg fabric.svg
    """
    import numpy as np

    from everstep.fabric import picture
    from everstep.fabric.allocate import allocate
    from everstep.fabric.policies import ecmp

    topology, _, flows = _read(fabric)
    pictures = [
        ("hashed (ECMP)", ecmp(topology, flows, np.random.default_rng(seed))),
        ("planned", allocate(topology, flows)),
    ]
    if svg is not None:
        _write(svg, picture.svg(pictures))
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


# ---------------------------------------------------------------------- reading


def _toml(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":  # what --trace has written
        return dict(_json(path))
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"fabric file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"fabric file {path} is not TOML: {error}.") from None


def _topology(document: Mapping[str, Any]) -> Topology:
    from everstep.fabric.document import topology_from

    return topology_from(document)


def _read(path: Path) -> tuple[Topology, list[Task], list[Flow]]:
    from everstep.fabric.document import tasks_from
    from everstep.fabric.flows import flows_of

    document = _toml(path)
    topology = _topology(document)
    tasks = tasks_from(document, topology)
    flows = [flow for task in tasks for flow in flows_of(task)]
    if not flows:
        raise UserError(f"{path}: no task sends anything between nodes; there is nothing to plan.")
    return topology, tasks, flows


def _preset(name: str | None) -> tuple[Topology, list[Task], list[Flow]]:
    from everstep.fabric import scenarios

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


def _previous(path: Path, topology: Topology, flows: list[Flow]) -> Routing:
    import numpy as np

    from everstep.fabric.routing import Routing

    document = _json(path)
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


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error.msg} in line {error.lineno}.") from None


def _range(text: str) -> range:
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last) <= 65535):
        raise UserError(f"--ports {text!r} is not a range such as 24000-24063.")
    return range(int(first), int(last) + 1)


def _addresses(topology: Topology, source: str, targets: list[str]) -> tuple[str, dict[str, str]]:
    addresses = {
        node.name: next((port.address for port in node.ports if port.address), None)
        for node in topology.nodes
    }
    for name in (source, *targets):
        if name not in addresses:
            raise UserError(f"node {name!r} is not in the fabric file; its nodes are {', '.join(addresses)}.")
        if addresses[name] is None:
            raise UserError(f"node {name} has no address in the fabric file; give its port one.")
    return str(addresses[source]), {name: str(addresses[name]) for name in targets}


def _only_addresses(document: Mapping[str, Any]) -> Topology:
    """For discovery: nodes are known, switches are not."""
    from everstep.fabric.topology import Node, Port, Switch, Topology

    nodes = []
    for row in document.get("node", []):
        address = row.get("address") or next((p.get("address") for p in row.get("ports", [])), None)
        if address is None or "name" not in row:
            raise UserError("--trace: each [[node]] needs a name and an address.")
        nodes.append(
            Node(name=str(row["name"]), ports=(Port(nic=0, plane=0, leaf="?", gbps=1.0, address=address),))
        )
    if not nodes:
        raise UserError("--trace: the file has no [[node]]; list names and addresses.")
    leaves = (Switch(name="?"),)
    return Topology(name="unknown", nodes=tuple(nodes), leaves=leaves, spines=(), fabric_links=())


def _change(text: str, topology: Topology) -> Any:
    from everstep.fabric.simulate import Change

    what, at, when = text.rpartition("@")
    link, _, fraction = what.partition("=")
    try:
        change = Change(at_s=float(when), condition={link: float(fraction or 0.0)})
    except ValueError:
        raise UserError(f"--fail {text!r} is not LINK@SECONDS or LINK=FRACTION@SECONDS.") from None
    if not at or link not in topology.index:
        raise UserError(f"--fail {text!r}: {link!r} is not a link of {topology.name}, such as l0>s0.")
    return change


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
                f"none of the probes from {source} to {name} ({address}) was answered: it cannot be reached, "
                "or the switches send no ICMP time-exceeded."
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
        raise UserError(f"no probe from {source} was answered all the way; nothing is discovered.")
    topology = topology_of(traces, link_gbps=1.0, port_gbps=1.0)
    return {"from": source, "traces": len(traces), "fabric": topology_document(topology)}


def _write_roce(path: Path, routing: Routing, catalogue: Path | None) -> None:
    from everstep.fabric.catalogue import Catalogue
    from everstep.fabric.roce import plan_file

    known = None if catalogue is None else Catalogue.from_document(_json(catalogue))
    _write(path, json.dumps(plan_file(routing, known, time.monotonic()), indent=1))


def _simulated(
    topology: Topology,
    tasks: list[Task],
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


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
