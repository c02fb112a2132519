"""The options that name a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.launch import coordinator_token
from everstep.launch.client import DEFAULT_ADDRESS, Client

__all__ = ["DEFAULT_ADDRESS", "Address", "Ca", "Client", "Token"]

Address = Annotated[
    str,
    typer.Option(
        envvar="EVERSTEP_ADDRESS",
        help="Address of the coordinator, or @FILE that contains it.",
        rich_help_panel="Cluster",
    ),
]
Token = Annotated[
    str,
    typer.Option(
        envvar="EVERSTEP_TOKEN",
        help="Token of the coordinator, or @FILE that contains it.",
        callback=lambda value: coordinator_token.found(value),
        show_default="~/.config/everstep/token",
        show_envvar=True,
        rich_help_panel="Cluster",
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        "--ca",
        envvar="EVERSTEP_TLS",
        help="For https: directory of everstep ca issue, or a CA certificate.",
        show_default="~/.config/everstep/tls, if it is there",
        callback=lambda value: coordinator_token.tls_place(value),
        rich_help_panel="Cluster",
    ),
]
