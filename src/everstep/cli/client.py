"""How commands are told which coordinator to speak to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.launch import tokens
from everstep.launch.client import DEFAULT_ADDRESS, Client

__all__ = ["DEFAULT_ADDRESS", "Address", "Ca", "Client", "Token"]

Address = Annotated[
    str,
    typer.Option(
        envvar="EVERSTEP_ADDRESS",
        help="Where the coordinator listens, or @FILE that holds it.",
        rich_help_panel="Cluster",
    ),
]
Token = Annotated[
    str,
    typer.Option(
        envvar="EVERSTEP_TOKEN",
        help="The coordinator's token, or @FILE that holds it.",
        callback=lambda value: tokens.found(value),
        show_default="this user's own",
        show_envvar=True,
        rich_help_panel="Cluster",
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(help="For https: the certificate that signed the coordinator's.", rich_help_panel="Cluster"),
]
