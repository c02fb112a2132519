"""`everstep train job.toml`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep import log
from everstep.cli import render
from everstep.cli.render import AsJson
from everstep.errors import EverstepError, UserError, one_sentence
from everstep.job.job import Job, load_job

if TYPE_CHECKING:
    from everstep.launch.local.page import RunPage

KILL = typer.Option(
    metavar="stage=1,replica=0,step=7[,op=F3]",
    rich_help_panel="Faults",
    help="Kill this worker in this step, before this op: F3, I2, W5 (F1.3: microbatch 3 of "
    "replica 1), R or U. Repeatable.",
)
START_OVER = typer.Option(
    "--start-over",
    help="Skip checkpoints that cannot be used: resume from an older one, or from step 1 if none is left. "
    "Nothing is deleted. A usable checkpoint is still resumed from: to begin again at step 1, give another "
    "checkpoint.folder.",
)
WEB = typer.Option(
    "--web",
    min=0,
    max=65535,
    metavar="PORT",
    help="Port of the page, on this machine only; 0 for any free port.",
)
EVERY = typer.Option(
    "--every", min=1, metavar="N", help="Print one line every N steps instead of the live line."
)
GRACE = typer.Option(
    "--grace", min=0, metavar="SECONDS", help="On SIGTERM: time to finish the step and save its state."
)


def train_command(
    job_file: Annotated[
        Path, typer.Argument(metavar="JOB.TOML", help="The job file; docs/job-file.md lists its keys.")
    ],
    kill: Annotated[list[str] | None, KILL] = None,
    start_over: Annotated[bool, START_OVER] = False,
    web: Annotated[int, WEB] = 0,
    no_web: Annotated[bool, typer.Option("--no-web", help="Serve no page.")] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write scalars for TensorBoard into this directory.")
    ] = None,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Print every decision with its reason.")
    ] = False,
    every: Annotated[int | None, EVERY] = None,
    grace: Annotated[float, GRACE] = 25.0,
    log_format: Annotated[render.LogFormat, render.LOG_FORMAT] = render.LogFormat.TEXT,
    as_json: AsJson = False,
) -> int:
    """Train a job on this machine. If a worker fails, the others finish its step.

    The job file is checked before anything starts. If the checkpoint directory contains a checkpoint,
    training resumes from it. The command prints the address of a page that shows the run. Ctrl-C and SIGTERM
    stop it after the step it is in and save its state; a second signal stops it at once.

    [bold]Examples[/bold]

      everstep train examples/job.toml

      everstep train examples/job.toml --kill stage=1,replica=0,step=7,op=F3 --kill stage=0,replica=1,step=9
    """
    as_lines = log_format is render.LogFormat.JSON
    log.start(form="json" if as_lines else "plain")
    job = load_job(job_file)
    if start_over:
        if job.checkpoint is None:
            raise UserError("--start-over needs a job with a [checkpoint] table; remove the option.")
        job = replace(job, checkpoint=replace(job.checkpoint, start_over=True))
    from everstep.engine.prepare.preflight import preflight
    from everstep.engine.prepare.resolve import callbacks_of, data_of, evaluation_of
    from everstep.launch.local import api, report
    from everstep.launch.local.callbacks import checked as checked_callbacks
    from everstep.launch.local.data_needs import prepare
    from everstep.launch.local.loggers import TensorBoardLog
    from everstep.launch.local.pace import workload_of
    from everstep.launch.local.resuming import refuse_another_model, with_compile_settled

    job, notes = with_compile_settled(job)
    faults = api.parse_kills(kill or (), job)
    data, evaluation = data_of(job), evaluation_of(job)
    prepare(job, data, evaluation)
    callbacks = [
        *checked_callbacks(callbacks_of(job)),
        *([TensorBoardLog(tensorboard)] if tensorboard else ()),
    ]
    checked = preflight(job, data=data, evaluation=evaluation)
    refuse_another_model(job, checked.model)
    render.note(f"{describe(job)}, {render.parameters(checked.parameters)}")
    for sentence in (*notes, *checked.notes):
        render.note(sentence)
    with (
        nullcontext() if no_web else own_page(web) as page,
        render.watching(job, as_json=as_json or as_lines, decisions=decisions, every=every) as watch,
    ):
        watch("workload", workload_of(job, checked.model, checked.batch))
        outcome = api.run_with_callbacks(
            job,
            callbacks,
            rate=checked.rate,
            faults=faults,
            watch=watch,
            page=page,
            grace_s=grace,
            name=str(job_file),
        )
    document = report.document(outcome, steps=job.steps)
    if as_json:
        render.emit(document)
    if outcome.failure is not None:
        raise EverstepError(f"training ended: {one_sentence(outcome.failure)}")
    render.note(report.summary_line(document))
    return int(outcome.unsaved)


def own_page(port: int, *, may_hurt: bool = False) -> RunPage:
    """The page of this run; it costs one socket until a browser connects."""
    from everstep.launch.local.page import RunPage

    return RunPage(port=port, may_hurt=may_hurt)


def describe(job: Job) -> str:
    """A job in one short line."""
    what = job.model.preset or job.model.hf or job.model.build
    shape = f"{render.count(job.replicas, 'replica')} × {render.count(job.stages, 'stage')}"
    shards = f" × {job.shards} shards" if job.shards > 1 else ""
    batch, steps = render.count(job.microbatches, "microbatch"), render.count(job.steps, "step")
    return f"{what}: {shape}{shards}, {batch} per replica, {steps}, {job.precision} on {job.device}"
