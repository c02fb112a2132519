"""`everstep agent`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.client import DEFAULT_ADDRESS
from everstep.cli.coordinator import until_signalled
from everstep.errors import UserError


def agent_command(
    coordinator: Annotated[
        str,
        typer.Option(
            envvar="EVERSTEP_ADDRESS",
            help="Where it listens, or @FILE that holds it; several, comma-separated, if there are any.",
        ),
    ] = DEFAULT_ADDRESS,
    node: Annotated[str, typer.Option(help="This node's name.", show_default="the host's")] = "",
    slots: Annotated[
        int, typer.Option(min=0, help="Workers this node can hold.", show_default="GPUs, or CPUs")
    ] = 0,
    host: Annotated[str, typer.Option(help="Where other nodes' workers reach this one's.")] = "127.0.0.1",
    token: Annotated[
        str,
        typer.Option(
            envvar="EVERSTEP_TOKEN", help="The coordinator's token.", show_default="this user's own"
        ),
    ] = "",
    token_file: Annotated[Path | None, typer.Option(help="The file that holds the token, mode 600.")] = None,
    ca: Annotated[
        Path | None, typer.Option(help="For https: what signed the coordinator's certificate.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="For what workers print.")] = None,
    beat: Annotated[
        float,
        typer.Option(min=0.05, help="Seconds between heartbeats; slower for thousands of nodes."),
    ] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="Print what it is as JSON, then run.")] = False,
) -> int:
    """Run the agent of this node: it starts workers for the coordinator, and watches them.

    If the line to the coordinator breaks, or the coordinator refuses its token, its workers train on and it
    tries again; a token file is read again each time.

    [bold]Examples[/bold]

      everstep agent --slots 2

      everstep agent --coordinator https://head:7077 --host 10.0.0.7 --ca ca.pem
    """
    from everstep.cli import render
    from everstep.launch import tokens
    from everstep.node.agent import Agent, AgentSettings

    settings = AgentSettings(
        node=node or socket.gethostname(),
        slots=slots or _slots(),
        coordinators=tuple(filter(None, coordinator.split(","))),
        host=host,
        token=lambda: tokens.found(token, token_file),
        ca=ca,
        words=log_dir,
        beat_s=beat,
    )
    settings.token()  # a file that cannot be read is told now
    if not settings.coordinators:
        raise UserError(f"--coordinator is empty; give an address such as {DEFAULT_ADDRESS}.")
    if as_json:
        render.emit({"node": settings.node, "slots": settings.slots, "pid": os.getpid()})

    tokens.clean_environment()

    async def run() -> None:
        agent = Agent(settings, say=render.note)
        agent.warm_up()
        await agent.run()

    return until_signalled(run())


def _slots() -> int:
    from everstep.node import slot_devices

    return len(slot_devices.found()) or os.cpu_count() or 1
