"""`everstep launch slurm`, and what it runs on the nodes."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep import log
from everstep.cli import render
from everstep.cli.client import Ca
from everstep.cli.render import AsJson
from everstep.errors import UserError

launch_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Start coordinator and agents on the machines of a cluster.",
)
TaskFile = Annotated[
    Path,
    typer.Argument(metavar="JOB.TOML", help="The job file, or what `launch slurm` has written for a script."),
]
Slots = Annotated[
    int,
    typer.Option(min=0, help="Number of workers per node.", show_default="its GPUs, or CPUs, in this job"),
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the coordinator.")]
Coordinator = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="An existing coordinator, or several; set EVERSTEP_TOKEN to its token.",
        show_default="one inside the job; it moves when its node is lost",
    ),
]
Interface = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Network interface between the nodes, such as ib0.",
        show_default="the address of the node's name, or Slurm's",
    ),
]
Watch = Annotated[float, typer.Option(min=0.5, help="Seconds between queries of Slurm.")]


Given = Annotated[
    list[str], typer.Argument(metavar="JOB.TOML | SCRIPT [ARGS]...", help="A job file, or a script.")
]
Nodes = Annotated[str, typer.Option("--nodes", "--nnodes", metavar="MIN:MAX", help="Number of nodes.")]
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", min=0, help="Of a script, after failures of ranks.")
]
HangAfter = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Of a script: restart after so long without progress."),
]
Grace = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="Of a script: time from SIGTERM to SIGKILL.")
]
Preload = Annotated[
    list[str] | None, typer.Option(metavar="MODULE", help="Of a script: import it once per node; or none.")
]
LogDir = Annotated[Path | None, typer.Option("--log-dir", help="Of a script: a file per rank.")]


@launch_app.command("slurm")
def slurm_command(
    given: Given,
    nodes: Nodes,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Directory shared by all nodes, for token, journal and logs.",
            show_default="runs/NAME-TIME beside the file",
        ),
    ] = None,
    slots: Slots = 0,
    nproc: Annotated[
        str, typer.Option("--nproc-per-node", metavar="N", help="Of a script: ranks per node.")
    ] = "1",
    max_restarts: MaxRestarts = 3,
    hang_after: HangAfter = None,
    grace: Grace = 5.0,
    preload: Preload = None,
    log_dir: LogDir = None,
    sbatch: Annotated[str, typer.Option(metavar="OPTIONS", help="More options for sbatch.")] = "",
    coordinator: Coordinator = "",
    port: Port = 7077,
    interface: Interface = "",
    watch: Watch = 5.0,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job ends.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the batch script and submit nothing.")] = False,
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Train a job, or run any torchrun-style script, on nodes that Slurm allocates, and survive lost nodes.

    Each node runs a keeper, which runs its agent; one keeper also runs the coordinator. If a node is lost,
    Slurm is asked for a replacement. If Slurm drains a node, its workers move away first. If Slurm requeues
    the job, training resumes from the newest checkpoint. A script runs on MIN to MAX nodes.

    [bold]Examples[/bold]

      everstep launch slurm job.toml --nodes 4

      everstep launch slurm job.toml --nodes 16 --sbatch "--partition=gpu --gpus-per-node=8 --time=7-0" --wait

      everstep launch slurm --nodes 2:4 --nproc-per-node 8 train.py -- --lr 1e-4

      everstep launch slurm job.toml --nodes 4 --print > everstep.sbatch
    """
    from everstep.cli import scripts
    from everstep.launch.slurm import sbatch as slurm
    from everstep.launch.slurm import shell as slurm_shell

    if show:
        print(slurm_shell.SCRIPT.read_text(), end="")
        return 0
    file = Path(given[0])
    least, most = scripts.nodes_range(nodes, "--nodes")
    if not nproc.isdecimal():
        raise UserError(f"--nproc-per-node is {nproc!r}; give a number: nodes may differ from this machine.")
    if script := _script(
        given,
        ranks=scripts.count(nproc, "--nproc-per-node"),
        least=least,
        most=most,
        max_restarts=max_restarts,
        hang_after_s=hang_after,
        grace_s=grace,
        preload=preload,
        log_dir=log_dir,
    ):
        slots = script["ranks"]
    else:
        from everstep.job.job import load_job

        if least != most:
            raise UserError(f"--nodes is {nodes!r}, and a job file needs one number of nodes; give {most}.")
        if load_job(file).checkpoint is None:
            render.note(
                f"{file} keeps no checkpoints: if Slurm requeues the job, training starts again at step 1."
            )
    token = os.environ.get("EVERSTEP_TOKEN", "")
    if coordinator and not token:
        raise UserError("--coordinator needs a token; set EVERSTEP_TOKEN to the token of that coordinator.")
    launch = slurm.SlurmLaunch(
        file=file.resolve(),
        script=script,
        run=(run or _default_run(file)).resolve(),
        least=least,
        nodes=most,
        sbatch=_split(sbatch),
        slots=slots,
        port=port,
        coordinator=coordinator,
        ca=ca and ca.resolve(),
        interface=interface,
        watch_s=watch,
    )
    number = slurm.submit(launch, token=token)
    render.note(f"job {number}; its directory is {launch.run}")
    render.note("EVERSTEP_TOKEN=$(cat TOKEN) everstep status --address @ADDRESS shows its state, with")
    render.note(f"  TOKEN {launch.run}/token, ADDRESS {launch.run}/coordinator")
    code = slurm.wait(number, launch.run, render.note) if wait else 0
    if as_json:
        render.emit({"job": number, "run": str(launch.run), "exit": code if wait else None})
    return code


@launch_app.command("node")
def node_command(
    job_file: TaskFile,
    run: Annotated[Path, typer.Option(help="Directory of the run, shared by all nodes.")],
    slots: Slots = 0,
    interface: Interface = "",
    coordinator: Coordinator = "",
    port: Port = 7077,
    watch: Watch = 5.0,
    spare_of: Annotated[
        str, typer.Option(metavar="JOB", help="This node replaces a lost node of that job.")
    ] = "",
    attempt: Annotated[int, typer.Option(hidden=True)] = -1,
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
    ca: Ca = None,
) -> int:
    """Run the keeper of one node of a Slurm job; `launch slurm` starts it by srun.

    [bold]Example[/bold]

      srun --no-kill --ntasks-per-node=1 everstep launch node --run /shared/runs/llama job.toml
    """
    from everstep.launch.slurm.address import address_of
    from everstep.launch.slurm.node_rules import slots_of
    from everstep.launch.slurm.slurm_keeper import SlurmKeeper, SlurmKeeperSettings

    env = os.environ
    node = env.get("SLURMD_NODENAME", "")
    if not node or "SLURM_JOB_ID" not in env:
        raise UserError(
            "this process is not a step of a Slurm job; start it by srun or by everstep launch slurm."
        )
    settings = SlurmKeeperSettings(
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
    log.start()
    return SlurmKeeper(settings, say=log.say).run()


def _script(given: list[str], **options: Any) -> dict[str, Any] | None:
    """The script that is given, as the API takes it; None: a job file is given."""
    from everstep.cli import scripts

    file, arguments = Path(given[0]), given[1:]
    if not file.is_file():
        raise UserError(f"{given[0]!r} is not a file; give a job file or a script.")
    if file.suffix != ".toml":
        return scripts.ScriptCommand(command=[str(file), *arguments], **options).table()
    if arguments:
        raise UserError(f"{arguments[0]!r} follows a job file, which takes no arguments; remove it.")
    return None


def _split(options: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options))
    except ValueError as error:
        raise UserError(f"--sbatch {options!r} cannot be split into options: {error}.") from None


def _default_run(file: Path) -> Path:
    import time

    return file.resolve().parent / "runs" / f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
