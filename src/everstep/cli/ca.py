"""`everstep ca`: certificates of one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli import render
from everstep.cli.render import AsJson
from everstep.errors import UserError
from everstep.server.access import Role, checked_name

ca_app = typer.Typer(
    no_args_is_help=True,
    help="A small certificate authority: TLS between commands, coordinator and agents, each known by its "
    "certificate.",
)
Dir = Annotated[Path, typer.Option("--dir", help="The directory of the CA: ca.pem and ca.key.")]
DEFAULT_DIR = Path("everstep-ca")
SERVER = "coordinator"
CA_DAYS, DAYS = 3650, 365


def _authority() -> Any:
    try:
        from everstep.server import authority
    except ImportError:
        raise UserError("certificates need cryptography: pip install 'everstep[encrypt]'.") from None
    return authority


@ca_app.command("init")
def init_command(
    folder: Dir = DEFAULT_DIR,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="How long the CA is valid.")] = CA_DAYS,
    as_json: AsJson = False,
) -> int:
    """Make a CA. Keep DIR/ca.key where only the operator of the cluster can read it.

    [bold]Example[/bold]

      everstep ca init --dir everstep-ca
    """
    _authority().make_authority(folder, days=days)
    render.note(f"the CA is in {folder}; next: everstep ca issue coordinator --host HOST --dir {folder}")
    if as_json:
        render.emit({"ca": str(folder / "ca.pem"), "key": str(folder / "ca.key"), "days": days})
    return 0


@ca_app.command("issue")
def issue_command(
    role: Annotated[str, typer.Argument(help="coordinator, or a role: viewer, submitter, node, admin.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="A person, a program, or a node's name.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Of the coordinator: a name or address that others call it by; repeat it."),
    ] = None,
    folder: Dir = DEFAULT_DIR,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write OUT/NAME.", show_default="DIR/issued")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=36_500, help="How long it is valid.")] = DAYS,
    as_json: AsJson = False,
) -> int:
    """Issue certificates: OUT/NAME with ca.pem, cert.pem and key.pem, for --tls OUT/NAME.

    The role and the name are in the certificate: an agent of node n1 cannot speak for node n2. To withdraw
    one: everstep access revoke.

    [bold]Examples[/bold]

      everstep ca issue coordinator --host head --host 10.0.0.1

      everstep ca issue node n1 n2 n3

      everstep ca issue submitter alice -o certificates
    """
    is_server = role == SERVER
    if not is_server and role not in {*Role}:
        raise UserError(f"role is {role!r}; give {SERVER}, {', '.join(Role)}.")
    if is_server and not host:
        raise UserError("give --host HOST: the name or address that others call the coordinator by.")
    if not is_server and (host or not names):
        raise UserError(
            f"give the names of the {role}s, such as: everstep ca issue {role} n1; and no --host."
        )
    base, made = out or folder / "issued", []
    for name in names or [SERVER]:
        known_as = Role(role) if not is_server else None
        place = base / checked_name(name)
        _authority().issue(folder, place, role=known_as, name=name, hosts=host or (), days=days)
        render.note(f"{role} {name}: {place}")
        made.append({"role": role, "name": name, "folder": str(place), "days": days})
    if as_json:
        render.emit({"issued": made})
    return 0
