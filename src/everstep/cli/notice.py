"""`everstep notice`."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.cluster import AsJson, report
from everstep.protocol.durations import duration


def notice_command(
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    leaves_in: Annotated[str, typer.Argument(help="Time until it is taken away: 90s, 2min.")],
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Announce that a node will be taken away, as the provider of a spot instance does.

    If its workers find slots elsewhere, they move at once and training continues meanwhile. Otherwise they
    keep training and leave shortly before the node does, with their state safe in memory or on disk. An agent
    with --notice-file reads such a notice by itself. everstep drain NODE --readmit withdraws it.

    [bold]Example[/bold]

      everstep notice node-3 2min
    """
    seconds = duration(leaves_in, "LEAVES_IN")
    client = Client(address=address, token=token, ca=ca)
    return report(client.post(f"/v1/nodes/{node}/notice", {"leaves_in_s": seconds}), "node", as_json)
