"""`everstep access`: who may call a coordinator; `everstep audit`: who did what."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.render import AsJson
from everstep.errors import UserError
from everstep.protocol.durations import duration
from everstep.server.access import CredentialsFile, Role, checked_name, matrix, role_of, write_private

access_app = typer.Typer(
    no_args_is_help=True,
    help="Who may call a coordinator: tokens by role and name, in one file that the coordinator reads again "
    "when it changes. Roles: viewer, submitter, node, admin.",
)
File = Annotated[
    Path, typer.Option("--file", "-f", help="The credentials file; by default of a coordinator started here.")
]
Out = Annotated[
    str | None,  # a Path has no slash at its end
    typer.Option(
        "--out",
        "-o",
        metavar="PATH",
        help="Write the token here, mode 600; a directory, or a path that ends with /, gets NAME.token. No "
        "file is overwritten, except by rotate one with a token of the same name.",
        show_default="stdout",
    ),
]
DEFAULT_FILE = Path("everstep-state/credentials")


@access_app.command("add")
def add_command(
    role: Annotated[str, typer.Argument(help="viewer, submitter, node or admin.")],
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="A person, a program, or a node's name.")
    ],
    file: File = DEFAULT_FILE,
    out: Out = None,
    as_json: AsJson = False,
) -> int:
    """Make a token for a name. The file keeps only its hash.

    A viewer reads. A submitter also submits tasks and changes its own; a submitted job runs code on every
    node. A node can connect as the agent of that one node and do nothing else. An admin may do everything.

    [bold]Examples[/bold]

      everstep access add viewer grafana -o grafana.token

      everstep access add submitter alice bob -o tokens/

      everstep access add node n1 n2 n3 --file /var/lib/everstep/credentials -o tokens/
    """
    held, wanted = CredentialsFile(file), role_of(role)
    made = {checked_name(name): held.add(wanted, name) for name in names}
    return _hand_out(held, made, wanted, out, rotated=False, as_json=as_json)


@access_app.command("rotate")
def rotate_command(
    name: Annotated[str, typer.Argument(help="Whose token.")],
    overlap: Annotated[
        str, typer.Option(help="How long the old token stays valid: 0s, 20min, 2h, 3d.")
    ] = "1h",
    file: File = DEFAULT_FILE,
    out: Out = None,
    as_json: AsJson = False,
) -> int:
    """Make a new token for a name; the old one stays valid for a while.

    [bold]Examples[/bold]

      everstep access rotate n1 -o tokens/

      everstep access rotate alice --overlap 0s
    """
    held = CredentialsFile(file)
    left_s = 0.0 if overlap.strip() in ("0", "0s") else duration(overlap, "--overlap")
    token = held.rotate(name, time.time() + left_s)
    role = next(one.role for one in held.credentials if one.name == name and one.digest)
    return _hand_out(held, {name: token}, role, out, rotated=True, as_json=as_json)


def _hand_out(
    held: CredentialsFile, made: dict[str, str], role: Role, out: str | None, *, rotated: bool, as_json: bool
) -> int:
    files = {} if out is None else _files(out, list(made))
    for name, file in files.items():
        if os.path.lexists(file) and not (rotated and held.is_of(name, file)):
            raise UserError(f"{file} is there and would be overwritten; give another path to --out.")
    for name, file in files.items():
        write_private(file, made[name] + "\n")
    held.write(time.time())
    for name in made:
        render.note(f"{role} {name} is in {held.path}; its token is in {files.get(name, 'stdout')}")
    shown = {name: token for name, token in made.items() if out is None}
    if as_json:
        render.emit({"role": role, "names": list(made), "file": str(held.path), "tokens": shown})
    elif shown:
        print("\n".join(shown.values() if len(shown) == 1 else (" ".join(pair) for pair in shown.items())))
    return 0


def _files(out: str, names: list[str]) -> dict[str, Path]:
    """Where each token goes."""
    is_folder = out.endswith("/") or Path(out).is_dir() or len(names) > 1
    return {name: Path(out) / f"{name}.token" if is_folder else Path(out) for name in names}


@access_app.command("remove")
def remove_command(
    name: Annotated[str, typer.Argument(help="Whose tokens.")],
    file: File = DEFAULT_FILE,
    as_json: AsJson = False,
) -> int:
    """Remove the tokens of a name. Its open connections are closed within a second.

    [bold]Example[/bold]

      everstep access remove bob
    """
    held = CredentialsFile(file)
    count = held.remove(name)
    held.write(time.time())
    render.note(f"{name} is removed from {file} ({count} {'entry' if count == 1 else 'entries'})")
    if as_json:
        render.emit({"name": name, "removed": count, "file": str(file)})
    return 0


@access_app.command("revoke")
def revoke_command(
    role: Annotated[str, typer.Argument(help="viewer, submitter, node or admin.")],
    name: Annotated[str, typer.Argument(help="The name in the certificate.")],
    file: File = DEFAULT_FILE,
    as_json: AsJson = False,
) -> int:
    """Refuse the certificates of a name, and its tokens. [bold]everstep access remove[/bold] undoes it.

    [bold]Example[/bold]

      everstep access revoke node n7
    """
    held = CredentialsFile(file)
    held.revoke(role_of(role), checked_name(name))
    held.write(time.time())
    render.note(f"{role} {name} is revoked in {file}")
    if as_json:
        render.emit({"name": name, "role": role, "revoked": True, "file": str(file)})
    return 0


@access_app.command("list")
def list_command(file: File = DEFAULT_FILE, as_json: AsJson = False) -> int:
    """Show who is in a credentials file. Tokens cannot be shown: the file has their hashes.

    [bold]Example[/bold]

      everstep access list --file /var/lib/everstep/credentials
    """
    if not file.exists():
        raise UserError(f"{file} is not there; everstep access add makes it, or give --file.")
    rows = [
        {"role": one.role, "name": one.name, "revoked": not one.digest, "until": one.until}
        for one in CredentialsFile(file).credentials
    ]
    if as_json:
        render.emit({"credentials": rows})
        return 0
    table = Table("role", "name", "valid", box=None, pad_edge=False)
    for row in rows:
        until = row["until"]
        valid = (
            "yes" if not isinstance(until, float) else f"until {datetime.fromtimestamp(until):%Y-%m-%d %H:%M}"
        )
        table.add_row(str(row["role"]), str(row["name"]), "revoked" if row["revoked"] else valid)
    render.show(table)
    return 0


@access_app.command("roles")
def roles_command(as_json: AsJson = False) -> int:
    """Show what each role may call. own: tasks that it submitted itself.

    [bold]Example[/bold]

      everstep access roles
    """
    rows = matrix()
    if as_json:
        render.emit({"calls": [{"call": call, **cells} for call, cells in rows]})
        return 0
    table = Table("call", *Role, box=None, pad_edge=False)
    for call, cells in rows:
        table.add_row(call, *("-" if cells[role] == "no" else cells[role] for role in Role))
    render.show(table)
    return 0


def audit_command(
    last: Annotated[int, typer.Option(min=1, help="How many of the newest requests.")] = 50,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Show who asked for what: submissions, cancellations, drains and the like, the newest first.

    [bold]Example[/bold]

      everstep audit --last 20
    """
    rows: list[dict[str, Any]] = Client(address=address, token=token, ca=ca).get(f"/v1/audit?last={last}")
    if as_json:
        render.emit({"requests": rows})
        return 0
    table = Table("time", "event", "who", "what", box=None, pad_edge=False)
    for row in rows:
        when = f"{datetime.fromtimestamp(row['at']):%Y-%m-%d %H:%M:%S}"
        table.add_row(when, str(row["event"]), row["by"], row["text"])
    render.show(table)
    return 0
