"""What `everstep fabric` reads and writes: fabric files, ranges; every mistake one sentence."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import UserError

if TYPE_CHECKING:
    from everstep.fabric import Topology


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


def write_text(path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
