"""What is read from files and options: fabrics, ranges; every mistake one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep_fabric.topology import Topology


def read_tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"fabric file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"fabric file {path} is not TOML: {error}.") from None


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
