"""By which address and port a node of a Slurm job is reached by the others."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from everstep.errors import UserError
from everstep.launch.slurm import shell as slurm
from everstep.net.sockets import listening


def address_of(node: str, interface: str = "") -> str:
    """By which the other nodes reach this one: of an interface; else its name, else what Slurm has.

    A name that means loopback here (Debian writes the host's own so into /etc/hosts) means it nowhere else.
    """
    if interface:
        return _address_of_interface(interface)
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(node, None)}
    except OSError:
        found = set()
    if found and not any(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        return node
    known = slurm.nodes([node]).get(node)
    with contextlib.suppress(ValueError):
        if known is not None:
            return str(ipaddress.ip_address(known.address))
    raise UserError(
        f"node {node} has no address that other nodes can reach (its name is looked up as "
        f"{', '.join(sorted(found)) or 'nothing'}); give --interface."
    )


def _address_of_interface(name: str) -> str:
    import psutil

    addresses = psutil.net_if_addrs().get(name, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in addresses:
            if entry.family == family:
                return str(entry.address)
    raise UserError(f"--interface {name} is not on this node; it has {', '.join(psutil.net_if_addrs())}.")


def free_port(host: str, port: int) -> int:
    """The port, or any other if something else listens there."""
    for wanted in (port, 0):
        with contextlib.suppress(OSError), listening(host, wanted) as server:
            return int(server.getsockname()[1])
    return port
