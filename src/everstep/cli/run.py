"""`everstep run train.py`: run your training script, as torchrun does.

Without `--nproc` the script calls `everstep.train`, and its workers recover in mid-step. With `--nproc` it is
any script that torchrun can start; then a failure restarts all ranks.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from everstep import log
from everstep.cli import render, scripts
from everstep.cli.render import AsJson
from everstep.cli.train import EVERY, KILL, WEB, own_page
from everstep.errors import EverstepError, UserError

if TYPE_CHECKING:
    from everstep.job.job import Job
    from everstep.launch.local.page import RunPage
    from everstep.launch.local.run import Watcher

_OWN, _ANY = "Scripts that call everstep.train", "Any script (with --nproc)"


def run_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Your script; with --module, a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Override the replicas of the script; its batch stays.", rich_help_panel=_OWN),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Override the stages of the script.", rich_help_panel=_OWN)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Override the batch: microbatches per step of all replicas together.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    kill: Annotated[list[str] | None, KILL] = None,
    every: Annotated[int | None, EVERY] = None,
    web: Annotated[int, WEB] = 0,
    no_web: Annotated[bool, typer.Option("--no-web", rich_help_panel=_OWN, help="Serve no page.")] = False,
    nproc: Annotated[
        str | None,
        typer.Option(
            "--nproc",
            "--nproc-per-node",
            "--nproc_per_node",
            metavar="N",
            rich_help_panel=_ANY,
            help="Number of ranks to start: a number, gpu or cpu.",
        ),
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            "--nnodes",
            metavar="MIN:MAX",
            rich_help_panel=_ANY,
            help="Number of nodes. Start the same command on each of them.",
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint",
            "--rdzv_endpoint",
            metavar="HOST:PORT",
            rich_help_panel=_ANY,
            help="With --nnodes: where the nodes meet. The coordinator runs there.",
        ),
    ] = "",
    rdzv_id: Annotated[
        str,
        typer.Option("--rdzv-id", "--rdzv_id", rich_help_panel=_ANY, help="With --nnodes: name of the run."),
    ] = "",
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            "--node_rank",
            min=0,
            rich_help_panel=_ANY,
            help="With --nnodes: number of this node; node 0 runs the coordinator.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", rich_help_panel=_ANY, help="SCRIPT is the name of a module.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", "--max_restarts", rich_help_panel=_ANY, help="Maximum restarts of all ranks."
        ),
    ] = 3,
    rdzv_port: Annotated[
        int,
        typer.Option(
            "--rdzv-port",
            "--master-port",
            "--master_port",
            rich_help_panel=_ANY,
            help="MASTER_PORT; 0 for a free port at each start.",
        ),
    ] = 0,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir", "--log_dir", rich_help_panel=_ANY, help="Directory for logs; runs/ if not given."
        ),
    ] = None,
    hang_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=_ANY,
            help="Restart when no rank has used CPU time or printed anything for this long.",
        ),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            show_default="5; 25 to save",
            help="Time between SIGTERM and SIGKILL of a rank. For scripts that call everstep.train: on "
            "SIGTERM, to finish the step and save its state.",
        ),
    ] = None,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            rich_help_panel=_ANY,
            show_default="auto",
            help="Import this module once and fork every rank from there, for faster restarts. "
            "auto: what the script imports. none: nothing. Repeatable.",
        ),
    ] = None,
    snapshot_dir: Annotated[
        Path | None,
        typer.Option(
            "--snapshot-dir",
            rich_help_panel=_ANY,
            help="Directory seen by all nodes: states of everstep.snapshot are also written there.",
        ),
    ] = None,
    hold: Annotated[
        bool | None,
        typer.Option(
            "--hold/--no-hold",
            rich_help_panel=_ANY,
            show_default="if the script calls everstep.snapshot",
            help="When a rank dies, hold the others in their collectives until its replacement is there.",
        ),
    ] = None,
    unit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=_ANY,
            show_default="as the parameters say",
            help="Ranks next to each other that hold one replica of the model; they are replaced together.",
        ),
    ] = None,
    copy_every: Annotated[
        int | None,
        typer.Option(
            "--copy-every",
            metavar="N",
            rich_help_panel=_ANY,
            show_default="10",
            help="Calls of everstep.snapshot from one copy in memory to the next.",
        ),
    ] = None,
    standby: Annotated[
        scripts.Standby | None,
        typer.Option(
            rich_help_panel=_ANY,
            show_default="none",
            help="parked: each node has a process with the GPU open (0.5 GB) for the next replacement.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            rich_help_panel=_ANY,
            help="Sum gradients exactly, so that their bits do not depend on the ring or the order of ranks.",
        ),
    ] = False,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    as_json: AsJson = False,
) -> int:
    """Run your training script, with workers that recover or as torchrun runs it.

    A script that calls [bold]everstep.train[/bold] runs here up to that call, and then in every worker.

    With [bold]--nproc[/bold] it can be any script that torchrun can start. Every rank gets the same
    environment variables as under torchrun, and a log file. If a rank dies, raises, stops or hangs, Everstep
    reports which rank and why, and restarts all ranks.

    [bold]Examples[/bold]

      everstep run examples/own_model.py

      everstep run --replicas 4 --kill stage=1,replica=0,step=7 examples/own_model.py --steps 20

      everstep run --nproc 2 --hang-after 60 examples/torchrun_style.py --steps 50

      everstep run --nproc gpu --max-restarts 10 --preload none train.py

      everstep run --nproc 8 --nnodes 2:4 --rdzv-endpoint head:29400 train.py
    """
    log.start()
    for name in misplaced(script, arguments or [], any_script=nproc is not None):
        log.warn(
            f"{name} stands after {script}, which gets it; options of everstep run stand before the script"
        )
    if nproc is None:
        given = {
            "--module": module,
            "--nnodes": nnodes,
            "--hang-after": hang_after,
            "--preload": preload,
            "--log-dir": log_dir,
            "--snapshot-dir": snapshot_dir,
            "--hold": hold,
            "--unit": unit,
            "--copy-every": copy_every,
            "--standby": standby,
            "--exact": exact,
        }
        for name, value in given.items():
            if value:
                raise UserError(f"{name} is for scripts that torchrun can start; give --nproc too.")
        overrides = {"replicas": replicas, "stages": stages, "batch": batch}
        options = HealedRun(
            overrides={name: value for name, value in overrides.items() if value is not None},
            kill=kill or [],
            every=every,
            web=None if no_web else web,
            grace_s=grace,
            as_json=as_json,
        )
        return _heal(script, arguments or [], options)
    for name, value in {"--replicas": replicas, "--stages": stages, "--batch": batch, "--kill": kill}.items():
        if value:
            raise UserError(f"{name} is for scripts that call everstep.train; remove it or --nproc.")
    if not module and not script.is_file():
        raise UserError(f"script {str(script)!r} is not a file.")
    if not 0 <= rdzv_port < 2**16:
        raise UserError(f"--rdzv-port is {rdzv_port}; give a port from 1 to 65535, or 0 for a free one.")
    command = ["-m", str(script), *(arguments or [])] if module else [str(script), *(arguments or [])]
    least, most = scripts.nodes_range(nnodes or "1", "--nnodes")
    run = scripts.ScriptCommand(
        command=command,
        ranks=scripts.count(nproc, "--nproc"),
        least=least,
        most=most,
        max_restarts=max_restarts,
        hang_after_s=hang_after,
        grace_s=5.0 if grace is None else grace,
        preload=preload,
        log_dir=log_dir or Path("runs"),
        snapshot_dir=snapshot_dir,
        hold=scripts.hold_choice(hold),
        unit=unit,
        copy_every=copy_every,
        standby=standby,
        exact=exact,
    )
    if most == 1:
        return scripts.run_here(run, port=rdzv_port, as_json=as_json)
    if not rdzv_endpoint:
        raise UserError("--nnodes needs --rdzv-endpoint; give HOST:PORT of one of the nodes.")
    at = scripts.Rendezvous(
        endpoint=scripts.endpoint(rdzv_endpoint, 29400),
        run_id=rdzv_id or "run",
        node_rank=node_rank,
    )
    return scripts.run_on_nodes(run, at, as_json=as_json)


def misplaced(script: Path, arguments: list[str], *, any_script: bool) -> list[str]:
    """Options of ours among the script's arguments that its text does not mention."""
    panels = (_ANY,) if any_script else (_OWN, _ANY, KILL.rich_help_panel)
    hints = get_type_hints(run_command, include_extras=True)
    ours = {
        option
        for name, hint in hints.items()
        for info in getattr(hint, "__metadata__", ())
        if getattr(info, "rich_help_panel", None) in panels
        for option in (info.default, *(info.param_decls or ()), f"--{name.replace('_', '-')}")
        if str(option).startswith("--")  # typer keeps the first name as `default`
    }
    given = [argument.partition("=")[0] for argument in arguments]
    try:
        text = script.read_text(errors="replace")
    except OSError:  # said later
        return []
    words = set(re.findall(r"\w+", text.replace("--", " ").replace("-", "_")))
    return [one for one in given if one in ours and one.strip("-").replace("-", "_") not in words]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealedRun:
    """What the command line says about a script that calls everstep.train."""

    overrides: dict[str, int]
    kill: list[str]
    every: int | None
    web: int | None  # port of the page; None: no page
    grace_s: float | None
    as_json: bool

    @contextlib.contextmanager
    def watch(self, job: Job) -> Iterator[Watcher]:
        with render.watching(job, as_json=self.as_json, every=self.every) as watch:
            yield watch

    def page(self, wanted: bool) -> contextlib.AbstractContextManager[RunPage | None]:
        return own_page(self.web) if wanted and self.web is not None else contextlib.nullcontext()


def _from_script(error: Exception, script: str) -> TracebackType | None:
    """The part of a traceback that begins in the script; all of it where no frame of the script is in it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return frame or error.__traceback__


def _heal(script: Path, arguments: list[str], options: HealedRun) -> int:
    """A script that calls everstep.train."""
    as_json = options.as_json
    if not script.is_file():
        raise UserError(f"script {str(script)!r} is not a file.")
    from everstep.launch.local import api, report
    from everstep.node.script import run_as_main

    launch = api.LocalLaunch(
        script=[str(script.resolve()), *arguments],
        kills=options.kill,
        overrides=options.overrides,
        watch=options.watch,
        page=options.page,
        grace_s=options.grace_s,
    )
    code = 0
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        api.launch = launch
        try:
            run_as_main(str(script), arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except EverstepError:
            raise
        except Exception as error:  # the user's code: shown as Python shows it, without the frames above it
            traceback.print_exception(error.with_traceback(_from_script(error, str(script))))
            return 1
        finally:
            api.launch = None
    if launch.result is None and code == 0:
        raise UserError(
            f"script {str(script)!r} has ended without calling everstep.train; a script for "
            "torchrun is started by everstep run --nproc N."
        )
    if launch.result is not None:
        if as_json:
            render.emit(launch.result.document)
        render.note(report.summary_line(launch.result.document))
        code = code or int(not launch.result.document["saved"])
    return code
