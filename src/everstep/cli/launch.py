"""`everstep launch slurm` and what runs on the nodes then."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli import render
from everstep.cli.client import Ca
from everstep.errors import UserError

launch_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Get coordinator and agents onto a cluster's machines.",
)
JobFile = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="Its keys: docs/job-file.md.")]
Slots = Annotated[
    int, typer.Option(min=0, help="Workers a node can hold.", show_default="its GPUs, or CPUs, in this job")
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Of the coordinator.")]
Coordinator = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Where it runs, if not in the job, or several where they stand by; its token by EVERSTEP_TOKEN.",
        show_default="in the job: on its first node, and elsewhere when that is lost",
    ),
]
Interface = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="By which network nodes reach each other, such as ib0.",
        show_default="what a node's name is looked up as, or Slurm's address of it",
    ),
]
Watch = Annotated[float, typer.Option(min=0.5, help="Seconds between two looks at what Slurm says.")]


@launch_app.command("slurm")
def slurm_command(
    job_file: JobFile,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")],
    run: Annotated[
        Path | None,
        typer.Option(
            help="A folder that all nodes share: token, journal, logs.",
            show_default="runs/NAME-TIME beside the job file",
        ),
    ] = None,
    slots: Slots = 0,
    sbatch: Annotated[
        str, typer.Option(metavar="OPTIONS", help="More options for sbatch, as on a command line.")
    ] = "",
    coordinator: Coordinator = "",
    port: Port = 7077,
    interface: Interface = "",
    watch: Watch = 5.0,
    wait: Annotated[bool, typer.Option("--wait", help="Until the job is over.")] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Print the script it would submit, and submit nothing.")
    ] = False,
    ca: Ca = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> int:
    """Train a job on machines that Slurm gives, through the loss of any of them, the first one too.

    Each node gets a keeper, which runs its agent; one keeper leads and runs the coordinator. A node that is
    lost is replaced by another as soon as Slurm has one; a node that Slurm drains is left in good order. If
    the whole job is requeued it goes on from the newest checkpoint.

    [bold]Examples[/bold]

      everstep launch slurm job.toml --nodes 4

      everstep launch slurm job.toml --nodes 16 --sbatch "--partition=gpu --gpus-per-node=8 --time=7-0" --wait

      everstep launch slurm job.toml --nodes 4 --print > everstep.sbatch
    """
    from everstep.launch.slurm import sbatch as slurm
    from everstep.launch.slurm import shell as slurm_shell

    if show:
        print(slurm_shell.SCRIPT.read_text(), end="")
        return 0
    from everstep.engine.job import load_job

    job = load_job(job_file)
    if job.checkpoint is None:
        render.note(
            f"{job_file} keeps no checkpoints: if Slurm requeues the job, it starts from its beginning."
        )
    token = os.environ.get("EVERSTEP_TOKEN", "")
    if coordinator and not token:
        raise UserError("--coordinator is given, and no token; give that coordinator's by EVERSTEP_TOKEN.")
    launch = slurm.SlurmLaunch(
        job_file=job_file.resolve(),
        run=(run or _default_run(job_file)).resolve(),
        nodes=nodes,
        sbatch=_split(sbatch),
        slots=slots,
        port=port,
        coordinator=coordinator,
        ca=ca and ca.resolve(),
        interface=interface,
        watch_s=watch,
    )
    number = slurm.submit(launch, token=token)
    render.note(f"job {number}; its folder is {launch.run}")
    render.note("EVERSTEP_TOKEN=$(cat TOKEN) everstep status --address @ADDRESS shows it, with")
    render.note(f"  TOKEN {launch.run}/token, ADDRESS {launch.run}/coordinator")
    code = slurm.wait(number, launch.run, render.note) if wait else 0
    if as_json:
        render.emit({"job": number, "run": str(launch.run), "exit": code if wait else None})
    return code


@launch_app.command("node")
def node_command(
    job_file: JobFile,
    run: Annotated[Path, typer.Option(help="The run's folder, which all nodes share.")],
    slots: Slots = 0,
    interface: Interface = "",
    coordinator: Coordinator = "",
    port: Port = 7077,
    watch: Watch = 5.0,
    spare_of: Annotated[str, typer.Option(metavar="JOB", help="This node replaces one of that job.")] = "",
    attempt: Annotated[int, typer.Option(hidden=True)] = -1,
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
    ca: Ca = None,
) -> int:
    """Keep one node of a Slurm job: what the script of `launch slurm` starts on each, by srun.

    [bold]Example[/bold]

      srun --no-kill --ntasks-per-node=1 everstep launch node --run /shared/runs/llama job.toml
    """
    from everstep.launch.slurm.address import address_of
    from everstep.launch.slurm.keeper import Keeper, KeeperSettings
    from everstep.launch.slurm.rules import slots_of

    env = os.environ
    node = env.get("SLURMD_NODENAME", "")
    if not node or "SLURM_JOB_ID" not in env:
        raise UserError("this is no step of a Slurm job; start it by srun, or by everstep launch slurm.")
    settings = KeeperSettings(
        run=run.resolve(),
        job_file=job_file.resolve(),
        job=spare_of or env["SLURM_JOB_ID"],
        node=node,
        host=address_of(node, interface),
        rank=rank if rank >= 0 else int(env.get("SLURM_PROCID", "0")),
        attempt=attempt if attempt >= 0 else int(env.get("SLURM_RESTART_COUNT", "0")),
        slots=slots or slots_of(env),
        slots_given=bool(slots),
        wanted=int(env.get("SLURM_JOB_NUM_NODES", "1")),  # in the run's first moment; kept in its folder
        spare=bool(spare_of),
        port=port,
        coordinator=coordinator,
        ca=ca,
        interface=interface,
        watch_s=watch,
    )
    return Keeper(settings, say=render.note).run()


def _split(options: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options))
    except ValueError as error:
        raise UserError(f"--sbatch {options!r} cannot be split into options: {error}.") from None


def _default_run(job_file: Path) -> Path:
    import time

    return job_file.resolve().parent / "runs" / f"{job_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
