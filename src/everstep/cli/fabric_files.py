"""What `everstep fabric` reads and writes: fabric files, plans, ranges; every mistake one sentence."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.fabric import Flow, Routing, Topology, TrafficTask

PRESETS = ("c4p", "c4p-2to1", "c4p-one-job", "gpu4096")


def read_tables(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":  # what --trace has written
        return dict(read_json(path))
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"fabric file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"fabric file {path} is not TOML: {error}.") from None


def topology_in(document: Mapping[str, Any]) -> Topology:
    from everstep.fabric.document import topology_from

    return topology_from(document)


def read_fabric(path: Path) -> tuple[Topology, list[TrafficTask], list[Flow]]:
    from everstep.fabric.document import tasks_from
    from everstep.fabric.flows import flows_of

    document = read_tables(path)
    topology = topology_in(document)
    tasks = tasks_from(document, topology)
    flows = [flow for task in tasks for flow in flows_of(task)]
    if not flows:
        raise UserError(f"{path}: no task sends anything between nodes; there is nothing to plan.")
    return topology, tasks, flows


def preset_fabric(name: str | None) -> tuple[Topology, list[TrafficTask], list[Flow]]:
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


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error.msg} in line {error.lineno}.") from None


def port_range(text: str, option: str = "--ports") -> range:
    first, dash, last = text.partition("-")
    if not (dash and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last) <= 65535):
        raise UserError(f"{option} {text!r} is not a range such as 24000-24063.")
    return range(int(first), int(last) + 1)


def addresses_of(topology: Topology, source: str, targets: list[str]) -> tuple[str, dict[str, str]]:
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


def nodes_only(document: Mapping[str, Any]) -> Topology:
    """For discovery: nodes are known, switches are not."""
    from everstep.fabric.topology import FabricNode, Port, Switch, Topology

    nodes = []
    for row in document.get("node", []):
        address = row.get("address") or next((p.get("address") for p in row.get("ports", [])), None)
        if address is None or "name" not in row:
            raise UserError("--trace: each [[node]] needs a name and an address.")
        nodes.append(
            FabricNode(
                name=str(row["name"]), ports=(Port(nic=0, plane=0, leaf="?", gbps=1.0, address=address),)
            )
        )
    if not nodes:
        raise UserError("--trace: the file has no [[node]]; list names and addresses.")
    leaves = (Switch(name="?"),)
    return Topology(name="unknown", nodes=tuple(nodes), leaves=leaves, spines=(), fabric_links=())


def change_of(text: str, topology: Topology) -> Any:
    from everstep.fabric.simulate import FabricChange

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


def write_text(path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
