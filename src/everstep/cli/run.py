"""`everstep run train.py`: a person's own script, launched the way torchrun launches one."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli import render
from everstep.cli.train import JSON, KILL
from everstep.errors import UserError


def run_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A file that calls everstep.train.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its own.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Instead of the script's replicas.")] = None,
    stages: Annotated[int | None, typer.Option(help="Instead of the script's stages.")] = None,
    kill: Annotated[list[str] | None, KILL] = None,
    as_json: Annotated[bool, JSON] = False,
) -> int:
    """Run a script that calls [bold]everstep.train[/bold], with workers that heal.

    The script is run here up to that call, and once more in every worker.

    [bold]Examples[/bold]

      everstep run examples/own_model.py

      everstep run --replicas 3 --kill stage=1,replica=0,step=7 examples/own_model.py --steps 20
    """
    if not script.is_file():
        raise UserError(f"script {str(script)!r} is not a file.")
    from everstep.launch import api, report
    from everstep.node.script import run_as_main

    overrides = {"replicas": replicas, "stages": stages}
    launch = api.Launch(
        script=[str(script.resolve()), *(arguments or ())],
        kills=kill or (),
        overrides={name: value for name, value in overrides.items() if value is not None},
        watch=lambda job: render.watching(job, as_json=as_json),
    )
    code = 0
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        api.launch = launch
        try:
            run_as_main(str(script), arguments or [])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            api.launch = None
    if launch.result is None and code == 0:
        raise UserError(f"script {str(script)!r} has ended without calling everstep.train.")
    if launch.result is not None:
        if as_json:
            render.emit(launch.result.document)
        render.note(report.summary_line(launch.result.document))
    return code
