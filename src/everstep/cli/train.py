"""`everstep train job.toml`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli import render
from everstep.engine.job import Job, load_job
from everstep.errors import EverstepError, UserError

if TYPE_CHECKING:
    from everstep.launch.local.page import RunPage
    from everstep.launch.local.run import Watcher

KILL = typer.Option(
    metavar="stage=1,replica=0,step=7[,op=F3]",
    rich_help_panel="Faults",
    help="SIGKILL this worker in this step, before this op: F3, I2, W5 (F1.3: of replica "
    "1), R or U. May be given several times.",
)
START_OVER = typer.Option(
    "--start-over",
    help="Go on without checkpoints that cannot be used: from an older one, or from step 1. They are kept.",
)
WEB = typer.Option(
    "--web", min=0, max=65535, metavar="PORT", help="Of its page, on this machine only; 0: any free one."
)
JSON = typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")


def train_command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="Its keys: docs/job-file.md.")],
    kill: Annotated[list[str] | None, KILL] = None,
    start_over: Annotated[bool, START_OVER] = False,
    web: Annotated[int, WEB] = 0,
    no_web: Annotated[bool, typer.Option("--no-web", help="No page.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write scalars there, for TensorBoard.")
    ] = None,
    decisions: Annotated[bool, typer.Option("--decisions", help="Tell every decision, and why.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> int:
    """Train the job of a file, on workers of this machine, through any worker's death.

    The job is checked first; nothing is started on a mistake. If its checkpoint folder holds a checkpoint,
    training goes on from there. The address of a page to watch it is printed.

    [bold]Examples[/bold]

      everstep train examples/job.toml

      everstep train examples/job.toml --kill stage=1,replica=0,step=7,op=F3 --kill stage=0,replica=1,step=9
    """
    job = load_job(job_file)
    if start_over:
        if job.checkpoint is None:
            raise UserError("--start-over needs a job with a [checkpoint] table; remove the option.")
        job = replace(job, checkpoint=replace(job.checkpoint, start_over=True))
    from everstep.engine.preflight import preflight
    from everstep.launch.local import api, report

    faults = api.parse_kills(kill or (), job)
    checked = preflight(job)
    render.note(f"{describe(job)}, {checked.parameters / 1e6:.2f} M parameters")
    with (
        nullcontext() if no_web else own_page(web) as page,
        render.watching(job, as_json=as_json, decisions=decisions) as watch,
        scalars(tensorboard, watch) as watch_all,
    ):
        outcome = api.run_job(job, faults=faults, watch=watch_all, page=page)
    told = report.document(outcome, steps=job.steps)
    if as_json:
        render.emit(told)
    if outcome.failure is not None:
        raise EverstepError(f"training ended: {outcome.failure}.")
    render.note(report.summary_line(told))
    return 0


def own_page(port: int, *, may_hurt: bool = False) -> RunPage:
    """The page of this run; costs a socket until a browser calls."""
    from everstep.launch.local.page import RunPage

    page = RunPage(port=port, may_hurt=may_hurt)
    render.note(f"page: {page.address}")
    return page


@contextmanager
def scalars(folder: Path | None, watch: Watcher) -> Iterator[Watcher]:
    """The same watcher, with everything also written for TensorBoard."""
    if folder is None:
        yield watch
        return
    from everstep.launch.local.scalars import ScalarWatcher

    with closing(ScalarWatcher(folder, watch)) as told:
        yield told


def describe(job: Job) -> str:
    """A job in half a line."""
    what = job.model.preset or job.model.hf or job.model.build
    return (
        f"{what}: {job.replicas} replicas × {job.stages} stages, {job.microbatches} microbatches a "
        f"replica, {job.steps} steps, {job.precision} on {job.device}"
    )
