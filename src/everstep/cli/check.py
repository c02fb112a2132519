"""`everstep check`."""

from __future__ import annotations

import json
import platform
import re
import tempfile
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli import render
from everstep.cli.render import AsJson
from everstep.errors import UserError
from everstep.job.presets import closest

if TYPE_CHECKING:
    pass


def check_command(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECK", help="Only this check; repeatable. --list shows all."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda (every GPU), cuda:N, or auto: the CPU and every GPU.")
    ] = "auto",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory of the disk to check.", show_default="temporary files"),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Option(
            "--command", metavar="COMMAND", help="A check of your own; exit code 0 passes. Repeatable."
        ),
    ] = None,
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            "--baseline", metavar="FILE", help="What --json printed on another node or day. Repeatable."
        ),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the checks and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine is fit to train: known answers, memory, disk, limits, hardware errors.

    Takes at most about 20 s. Exit code 1 if a check fails; a warning does not fail.

    Examples:

        everstep check

        everstep check --only compute --only memory --device cuda

        everstep check --json > node-a.json

        everstep check --baseline node-a.json --baseline node-b.json --command "dcgmi diag -r 1"
    """
    from everstep.node.checks import CHECKS, QUICK, Probe, run_checks
    from everstep.node.checks import command as own_check

    if list_only:
        print(json.dumps(list(CHECKS)) if as_json else "\n".join(CHECKS))
        return
    for name in only or ():
        if name not in CHECKS:
            raise UserError(f"--only {name}: there is no such check; {closest(name, list(CHECKS))}")
    where = directory or Path(tempfile.gettempdir())
    if not where.is_dir():
        raise UserError(f"--dir {str(where)!r} is not a directory.")
    known = [_findings(path) for path in baseline or ()]
    others = [partial(own_check, text) for text in command or ()]
    is_quick = device == "auto" and only and set(only) <= set(QUICK)
    probe = Probe(where) if is_quick else Probe(where, _devices(device))  # to count GPUs, torch is loaded
    found = run_checks(probe, only=only or (), others=others, baseline=known)
    ok = all(one.state != "failed" for one in found)
    if as_json:
        rows = [asdict(one) for one in found]
        print(json.dumps({"node": platform.node(), "ok": ok, "checks": rows}, indent=1))
    else:
        for one in found:
            render.echo(f"{one.state:8} {one.check:20} {one.says}")
    raise typer.Exit(0 if ok else 1)


def _devices(device: str) -> list[str]:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UserError(f"--device {device!r} is not known; use auto, cpu, cuda or cuda:N.")
    if device == "cpu":
        return ["cpu"]
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if device.startswith("cuda") and not gpus:
        raise UserError(f"--device {device} asks for a GPU and this machine shows none; use --device cpu.")
    if ":" in device and device not in gpus:
        raise UserError(f"--device {device}: the GPUs of this machine are {', '.join(gpus)}.")
    return ["cpu", *gpus] if device == "auto" else gpus if device == "cuda" else [device]


def _findings(path: Path) -> list[Any]:
    from everstep.node.checks import CheckFinding

    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        names = [each.name for each in fields(CheckFinding)]
        return [CheckFinding(**{name: row[name] for name in names if name in row}) for row in table["checks"]]
    except OSError as error:
        raise UserError(f"--baseline {str(path)!r} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--baseline {str(path)!r} is not what `everstep check --json` prints.") from None
