"""The commands of a running cluster: submit, status, queue, drain, notice, cancel, pause, resume,
update, resize, logs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from everstep.cli import render, scripts
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.render import AsJson, Console
from everstep.cli.train import KILL
from everstep.cli.worker_output import WorkerOutput
from everstep.errors import EverstepError, UserError
from everstep.launch.client import in_path
from everstep.protocol.durations import duration
from everstep.protocol.messages import AN_OPERATOR

if TYPE_CHECKING:
    from everstep.job.job import Job

_COLOURS = {
    "up": "green",
    "running": "green",
    "finished": "blue",
    "silent": "yellow",
    "waiting": "yellow",
    "searching": "yellow",
    "draining": "yellow",
    "ending": "yellow",
    "paused": "yellow",
}
_SCRIPTS = "Scripts of others (with --script)"
_OVER = ("finished", "failed", "cancelled")


def submit_command(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB.TOML | -- ARGS]",
            help="The job file (docs/job-file.md lists its keys), or the arguments of --script.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the task.", show_default="the name of the file")] = "",
    script: Annotated[
        str,
        typer.Option(
            metavar="SCRIPT", rich_help_panel=_SCRIPTS, help="Any script that torchrun can start, not a job."
        ),
    ] = "",
    module: Annotated[
        bool, typer.Option("--module", "-m", rich_help_panel=_SCRIPTS, help="--script names a module.")
    ] = False,
    nproc: Annotated[
        str,
        typer.Option(
            "--nproc-per-node",
            "--nproc_per_node",
            metavar="N",
            rich_help_panel=_SCRIPTS,
            help="Ranks per node; each takes a slot.",
        ),
    ] = "1",
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", "--nnodes", metavar="MIN:MAX", rich_help_panel=_SCRIPTS, help="Number of nodes."
        ),
    ] = "1",
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            rich_help_panel=_SCRIPTS,
            help="Maximum restarts after failures of ranks. Lost nodes do not count.",
        ),
    ] = 3,
    hang_after: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=_SCRIPTS,
            help="Restart when no rank has made progress for this long.",
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", rich_help_panel=_SCRIPTS, help="Time from SIGTERM to SIGKILL.")
    ] = 5.0,
    preload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            rich_help_panel=_SCRIPTS,
            show_default="auto",
            help="Import this module once per node and fork ranks from there. auto: what the script imports. "
            "none: nothing. Repeatable.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", rich_help_panel=_SCRIPTS, help="Directory for a file per rank."),
    ] = None,
    snapshot_dir: Annotated[
        Path | None,
        typer.Option(
            "--snapshot-dir",
            rich_help_panel=_SCRIPTS,
            help="Directory seen by all nodes: states of everstep.snapshot are also written there.",
        ),
    ] = None,
    hold: Annotated[
        bool | None,
        typer.Option(
            "--hold/--no-hold",
            rich_help_panel=_SCRIPTS,
            show_default="if the script calls everstep.snapshot",
            help="When a rank dies, hold the others in their collectives until its replacement is there.",
        ),
    ] = None,
    unit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=_SCRIPTS,
            show_default="as the parameters say",
            help="Ranks next to each other that hold one replica of the model; they are replaced together.",
        ),
    ] = None,
    copy_every: Annotated[
        int | None,
        typer.Option(
            "--copy-every",
            metavar="N",
            rich_help_panel=_SCRIPTS,
            show_default="10",
            help="Calls of everstep.snapshot from one copy in memory to the next.",
        ),
    ] = None,
    standby: Annotated[
        scripts.Standby | None,
        typer.Option(
            rich_help_panel=_SCRIPTS,
            show_default="none",
            help="parked: each node has a process with the GPU open (0.5 GB) for the next replacement.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            rich_help_panel=_SCRIPTS,
            help="Sum gradients exactly, so that their bits do not depend on the ring or the order of ranks.",
        ),
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", rich_help_panel=_SCRIPTS, help="Variable for all ranks. Repeatable."
        ),
    ] = None,
    weight: Annotated[float, typer.Option(help="Priority relative to other tasks.")] = 1.0,
    min_workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Start with at least N workers. If failures leave fewer, tasks that need slots get them.",
        ),
    ] = 0,
    kill: Annotated[list[str] | None, KILL] = None,
    pack: Annotated[
        bool,
        typer.Option(
            "--pack/--no-pack",
            help="Copy the job's own code to .everstep/code beside the job file: workers that are started "
            "later run the same code, also if you edit it.",
        ),
    ] = True,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the task ends.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Submit a job, or any torchrun-style script, to the cluster. Its paths must be valid on every node.

    [bold]Examples[/bold]

      everstep submit examples/job.toml

      everstep submit job.toml --name llama-8b --weight 2 --wait

      everstep submit job.toml --min-workers 6

      everstep submit --script train.py --nproc-per-node 8 --nodes 2:4 -- --lr 1e-4
    """
    client = Client(address=address, token=token, ca=ca)
    body: dict[str, Any] = {"weight": weight} | ({"min_workers": min_workers} if min_workers else {})
    if script:
        if kill:
            raise UserError("--kill is for jobs of Everstep's own engine; remove it or --script.")
        least, most = scripts.nodes_range(nodes, "--nodes")
        if not module and not Path(script).is_file():
            raise UserError(f"script {script!r} is not a file.")
        body["name"] = name or re.sub(r"[^A-Za-z0-9._-]", "-", script if module else Path(script).stem)
        body["ranks"] = scripts.ScriptCommand(
            command=[*(["-m", script] if module else [script]), *(given or [])],
            ranks=scripts.count(nproc, "--nproc-per-node"),
            least=least,
            most=most,
            max_restarts=max_restarts,
            hang_after_s=hang_after,
            grace_s=grace,
            preload=preload,
            log_dir=log_dir,
            snapshot_dir=snapshot_dir,
            hold=scripts.hold_choice(hold),
            unit=unit,
            copy_every=copy_every,
            standby=standby,
            exact=exact,
            environment=scripts.environment(env or []),
        ).table()
    else:
        from everstep.job.compiling import CompileChoice
        from everstep.job.job import load_job

        if not given or len(given) > 1:
            raise UserError("give one job file, or --script and its arguments after --.")
        job_file = Path(given[0])
        job = load_job(job_file)
        if because := _done_already(job):
            render.note(because)
            if as_json:
                render.emit({"task": None, "state": "finished", "because": because})
            return 0
        body |= {"name": name or job_file.stem, "job": (packed(job) if pack else job).to_dict()}
    if kill:
        body["faults"] = kill
    answer = client.post("/v1/tasks", body)
    render.note(f"task {answer['task']} is {answer['state']}: {answer['because']}")
    if not script:
        render.note(copies_told(job, _num_up(client)))
        told = answer.get("compile", {"is": False, "because": ""})  # a coordinator of an earlier version
        chosen = CompileChoice(told["is"], told["because"])
        if chosen.because and job.device == "cuda":
            checkpoint = " (a checkpoint that it resumes from decides)" if job.checkpoint is not None else ""
            render.note(f"{chosen}{checkpoint}")
    if wait:
        answer = _wait(client, answer["task"])
        render.note(f"task {answer['task']} is {answer['state']}: {answer['because']}")
    if as_json:
        render.emit(answer)
    return 1 if answer["state"] in ("failed", "cancelled") else 0


def _done_already(job: Job) -> str:
    """A job that is over takes no slots from others. Empty: it is not, or its folder is not seen here."""
    from everstep.store.folder import root_of
    from everstep.store.search import done_already

    if job.checkpoint is None:
        return ""
    step = done_already(root_of(Path(job.base), job.checkpoint.folder), job.steps)
    if not step:
        return ""
    return (
        f"not submitted, nothing is left to do: the checkpoint of step {step} in {job.checkpoint.folder} is "
        "the job's last; to train on, give more steps or another folder"
    )


def copies_told(job: Job, num_nodes: int) -> str:
    """Whether states are kept in memory, and of which nodes, as far as it is known before the start."""
    every = f"every {job.copy_interval} steps the state of each stage is copied to the memory of"
    if not job.copy_interval:
        return "copies in memory are off: memory_interval is 0"
    if job.memory_interval is not None:
        return f"copies in memory are on: {every} its own node{' and of another one' * (num_nodes > 1)}"
    if num_nodes > 1:
        return (
            f"copies in memory are on: {every} its own node and of another one, if the task runs on two and "
            "the copies fit into half of their free memory (everstep logs says whether they do)"
        )
    there = "there is only one" if num_nodes else "none is connected yet"
    return (
        f"copies in memory are off: they need a second node, and {there}; memory_interval = "
        f"{job.copy_interval} keeps them on its own node"
    )


def _num_up(client: Client) -> int:
    """Nodes that can run workers; 0 also where this user may not see them."""
    try:
        return sum(node["state"] == "up" for node in client.get("/v1/status")["nodes"])
    except EverstepError:
        return 0


def packed(job: Job) -> Job:
    """With its own code packed, where it has some."""
    from everstep.job import code

    if not code.names_code(job):
        return job
    try:
        found = replace(job, code=code.pack(job))
    except code.UnpackableError as error:
        render.note(f"the code is not packed, so an edit reaches workers that are started later: {error}")
        return job
    render.note(f"the code is packed in {found.path(found.code or '')}")
    return found


def _wait(client: Client, task: str) -> Any:
    """Poll until the task ends; a coordinator that restarts is retried for a minute."""
    away = 0.0
    while True:
        try:
            answer, away = client.get(f"/v1/tasks/{in_path(task)}"), 0.0
            if answer["state"] in _OVER:
                return answer
        except EverstepError:
            away = away or time.monotonic()
            if time.monotonic() - away > 60:
                raise
        time.sleep(0.5)


def status_command(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until you press Ctrl-C.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Show nodes, tasks and open incidents.

    [bold]Examples[/bold]

      everstep status

      everstep status --watch
    """
    client = Client(address=address, token=token, ca=ca)
    document = client.get("/v1/status")
    if as_json:
        render.emit(document)
        return 0
    if not watch:
        render.show(_picture(document))
        return 0
    with Live(_picture(document), console=Console(highlight=False), refresh_per_second=4) as live:
        while True:
            time.sleep(0.5)
            try:
                live.update(_picture(client.get("/v1/status")))
            except EverstepError as error:
                live.update(Text(f"{error} Retrying ...", style="yellow"))


def queue_command(
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Show the tasks that wait for slots: what they need, why they wait, when they are expected to start.
    A task that has lost all workers of a stage and finds no slot for another one waits, too.

    The expected start is an estimate: running tasks keep their slots until their last step at their present
    pace, and heavier tasks (--weight of submit) start first.

    [bold]Examples[/bold]

      everstep queue

      everstep queue --json
    """
    document = Client(address=address, token=token, ca=ca).get("/v1/queue")
    if as_json:
        render.emit(document)
        return 0
    rows = document["queue"]
    if not rows:
        render.show(Text(f"no task waits; {document['free']} of {document['slots']} slots are free"))
        return 0
    table = Table("place", "task", "owner", "weight", "slots", "expected start", "why it waits", box=None)
    for row in rows:
        seconds = row["starts_in_s"]
        when = "not known" if seconds is None else "now" if not seconds else f"in {_in_words(seconds)}"
        place, weight, slots = str(row["place"]), f"{row['weight']:g}", str(row["needs_slots"])
        why = f"{row['because']}; {row['starts']}"
        table.add_row(place, row["task"], row["owner"], weight, slots, when, why)
    render.show(table)
    return 0


def _in_words(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def drain_command(
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    readmit: Annotated[
        bool, typer.Option("--readmit", help="Undo a drain: workers may run there again.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Drain at once, also if a task loses steps.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Move all workers off a node and start no new ones there.

    A task that would lose steps, because a stage has its only workers on that node, first makes its state
    safe at the end of its step: as a checkpoint, or in the memory of another node. If it has neither, the
    drain is refused. --force ends the workers at once in both cases.

    --readmit undoes it, also for a lemon: a node that failed more often than its peers.

    [bold]Examples[/bold]

      everstep drain node-3

      everstep drain node-3 --readmit
    """
    client = Client(address=address, token=token, ca=ca)
    row = client.post(f"/v1/nodes/{in_path(node)}/{'readmit' if readmit else 'drain'}", {"force": force})
    return node_report(row, as_json)


def notice_command(
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    leaves_in: Annotated[str, typer.Argument(help="Time until it is taken away: 90s, 2min.")],
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Announce that a node will be taken away, as the provider of a spot instance does.

    If its workers find slots elsewhere, they move at once and training continues meanwhile. Otherwise they
    keep training and leave shortly before the node does, with their state safe in memory or on disk. An agent
    with --notice-file reads such a notice by itself. everstep drain NODE --readmit withdraws it.

    [bold]Example[/bold]

      everstep notice node-3 2min
    """
    seconds = duration(leaves_in, "LEAVES_IN")
    client = Client(address=address, token=token, ca=ca)
    return node_report(client.post(f"/v1/nodes/{in_path(node)}/notice", {"leaves_in_s": seconds}), as_json)


def cancel_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Stop a task permanently. Its checkpoints are kept.

    [bold]Example[/bold]

      everstep cancel llama-8b
    """
    row = Client(address=address, token=token, ca=ca).post(f"/v1/tasks/{in_path(task)}/cancel")
    saved = row["saved"]["protected"]
    kept = f"its checkpoint of step {saved} is kept" if saved else "no step of it is saved"
    then = "is cancelled" if row["state"] in _OVER else "ends now"
    return answer(row, f"task {task} {then}; {kept}", as_json)


def pause_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    force: Annotated[
        bool, typer.Option("--force", help="Stop at once, also if its last steps are lost by that.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Stop a task and free its slots until `everstep resume`. The task needs checkpoints.

    Its workers stop after the step they are in, and keep their slots until its state is saved, so no step is
    done twice. If it cannot be saved, the task keeps running and an incident says why. --force, or a second
    request, stops it at once.

    [bold]Examples[/bold]

      everstep pause llama-8b

      everstep pause llama-8b --force
    """
    client = Client(address=address, token=token, ca=ca)
    row = client.post(f"/v1/tasks/{in_path(task)}/pause", {"force": True} if force else {})
    if row["state"] == "paused":
        return answer(row, f"task {task} is paused at step {row['step']}; everstep resume {task}", as_json)
    will = f"task {task} completes the step after {row['step']}, saves it and frees its slots"
    return answer(row, f"{will}; everstep resume {task} continues it", as_json)


def update_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    job_file: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job file, edited or not.")],
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="As for submit.")] = True,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Give a running task new code or settings at the next step boundary.

    The job's code is packed again. Its workers leave after the step they are in, others start with the new
    job from the same state. Steps, batch and checkpoint folder stay as they are. To go back, update again
    with the job before; steps that were done with the new code are not undone.

    [bold]Example[/bold]

      everstep update llama-8b job.toml
    """
    from everstep.job.job import load_job

    job = load_job(job_file)
    told = (packed(job) if pack else job).to_dict()
    row = Client(address=address, token=token, ca=ca).post(f"/v1/tasks/{in_path(task)}/update", {"job": told})
    return answer(row, f"task {task} takes the new job after the step it is in", as_json)


def resume_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Resume a paused task from its newest checkpoint.

    [bold]Example[/bold]

      everstep resume llama-8b
    """
    row = Client(address=address, token=token, ca=ca).post(f"/v1/tasks/{in_path(task)}/unpause")
    if row["state"] == "running":
        return answer(row, f"task {task} is running, at step {row['step']} of {row['steps']}", as_json)
    where = f"after step {row['saved']['protected']}" if row["saved"]["protected"] else "at step 1"
    return answer(row, f"task {task} continues {where} when slots are free ({row['state']})", as_json)


def resize_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    workers: Annotated[int | None, typer.Argument(help="Maximum number of workers.")] = None,
    shape: Annotated[str, typer.Option(help="replicas x stages, such as 3x2, or x shards: 1x2x2.")] = "",
    release: Annotated[bool, typer.Option("--release", help="Let the planner choose again.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Limit a task's workers, or change its shape. Its batches and its losses stay the same.

    With --shape the workers hand their state over in memory at the next step boundary. The planner keeps to
    the size or the shape you give until you --release it.

    [bold]Examples[/bold]

      everstep resize llama-8b 48

      everstep resize llama-8b --shape 3x2

      everstep resize llama-8b --shape 1x2x4

      everstep resize llama-8b --release
    """
    client = Client(address=address, token=token, ca=ca)
    if release:
        if shape or workers is not None:
            raise UserError("--release takes neither a number of workers nor --shape; leave them out.")
        row = client.post(f"/v1/tasks/{in_path(task)}/release")
        return answer(row, f"the planner chooses the size and shape of task {task} again", as_json)
    if shape:
        words = shape.lower().split("x")
        is_odd = len(words) not in (2, 3) or not all(word.strip().isdecimal() for word in words)
        if workers is not None or is_odd:
            raise UserError(
                f"--shape is {shape!r}; give replicas x stages, such as 3x2, or replicas x stages x shards, "
                "and no number of workers."
            )
        counts = dict(zip(("replicas", "stages", "shards"), map(int, words), strict=False))
        before = client.get(f"/v1/tasks/{in_path(task)}?rows=0")
        row = client.post(f"/v1/tasks/{in_path(task)}/reshape", counts)
        return answer(row, _will_take(counts, before, row), as_json)
    if workers is None:
        raise UserError("give a number of workers, or --shape, such as 3x2.")
    row = client.post(f"/v1/tasks/{in_path(task)}/resize", {"workers": workers})
    now = f"it has {row['workers']} of {row['asked']}"
    return answer(
        row, f"task {task} uses at most {render.count(workers, 'worker')} from now on; {now}", as_json
    )


def _will_take(counts: Mapping[str, int], before: Any, row: Any) -> str:
    """What a change of shape does, and when."""
    task, shape = row["task"], " x ".join(str(each) for each in counts.values())
    if {**before["shape"], **counts} == before["shape"]:
        return f"task {task} has the shape {shape} already"
    if row["state"] != "running":
        return f"task {task} takes the shape {shape} when it starts ({row['state']}: {row['because']})"
    first = row["step"] + 1
    return f"task {task} takes the shape {shape} at the end of the step it is in, {first} or {first + 1}"


def logs_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    worker: Annotated[str, typer.Option(help="The worker, as replica:stage.")] = "0:0",
    size: Annotated[int, typer.Option("--bytes", min=1, help="Number of bytes to show.")] = 16384,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what comes, until the task has ended.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Show where a worker runs, what it printed, and the last steps and evaluations of its task.

    Works also once the task has ended. With [bold]--follow[/bold] lines are printed as they come, until the
    task has ended.

    [bold]Examples[/bold]

      everstep logs llama-8b --worker 1:0

      everstep logs llama-8b --follow
    """
    client = Client(address=address, token=token, ca=ca)
    shown = WorkerOutput(client, task, worker, size, quiet=as_json)
    if follow:
        shown.follow()
    else:
        shown.show()
    if as_json:
        render.emit(shown.document)
    return 0


def answer(row: Any, sentence: str, as_json: bool) -> int:
    """What a command has set in motion."""
    if as_json:
        render.emit(row)
    render.note(sentence)
    return 0


def node_report(row: Any, as_json: bool) -> int:
    return answer(row, f"node {row['node']} is {row['state']}: {row['because']}", as_json)


# ------------------------------------------------------------------ the picture


NO_NODES = "no nodes yet; on every machine: everstep agent --slots N"
NO_TASKS = "no tasks yet: everstep submit job.toml"


def _picture(document: Any) -> Group:
    open_ones = document["incidents"]["open"]
    total = document["incidents"]["total"]
    line = f"{render.count(total, 'incident')}, {len(open_ones)} open"
    if open_ones:
        line += f": {', '.join(map(str, open_ones[:10]))} (everstep explain {open_ones[0]})"
    elif total:
        line += " (everstep explain lists them)"
    nodes = _nodes(document["nodes"]) if document["nodes"] else Text(NO_NODES)
    tasks = _tasks(document["tasks"]) if document["tasks"] else Text(NO_TASKS)
    return Group(nodes, Text(), tasks, Text(), Text(line))


def _nodes(nodes: Any) -> Table:
    table = Table("node", "state", "last heard", "slots", "workers", "because", box=None, pad_edge=False)
    for node in nodes[:60]:
        heard = "-" if node["heard_s_ago"] is None else f"{node['heard_s_ago']:.1f} s"
        workers = " ".join(f"{w['task']}/{w['worker']}" for w in node["workers"][:6])
        more = len(node["workers"]) - 6
        used = f"{len(node['workers'])}/{node['slots']}"
        workers += f" +{more}" if more > 0 else ""
        table.add_row(node["node"], _state(node["state"]), heard, used, workers, node["because"])
    if len(nodes) > 60:
        table.add_row(f"and {len(nodes) - 60} more")
    return table


def _tasks(tasks: Any) -> Table:
    named = any(task.get("owner", "") not in ("", AN_OPERATOR) for task in tasks)
    rest = ("state", "workers", "step", "", "protected", "loss", "s/step", "goodput", "evaluation")
    whole = ("task", "owner", *rest) if named else ("task", *rest)
    columns = [Column(name, no_wrap=True) for name in whole]
    table = Table(*columns, Column("because", overflow="fold"), box=None, pad_edge=False)
    for task in tasks:
        table.add_row(
            task["task"],
            *([task.get("owner", "")] if named else []),
            _state(task["state"]),
            f"{task['workers']}/{task['asked']}",
            f"{task['step']}/{task['steps']}" if task["steps"] else str(task["step"] or "-"),
            ProgressBar(total=task["steps"], completed=task["step"], width=16) if task["steps"] else "",
            _protected(task["saved"]),
            "-" if task["loss"] is None else f"{task['loss']:.5f}",
            "-" if not task["step_seconds"] else f"{task['step_seconds']:.3f}",
            "-" if task.get("goodput") is None else f"{task['goodput']:.1%}",
            evaluated(task.get("evaluation")),
            task["because"],
        )
    return table


def evaluated(found: Any) -> str:
    """The newest scores of a task, in a few words."""
    if found is None:
        return "-"
    values = ", ".join(f"{name} {_score(value)}" for name, value in list(found["values"].items())[:3])
    return f"{values} (step {found['step']})"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _protected(saved: Any) -> Text:
    """The newest saved step; red while saves fail."""
    text = f"step {saved['protected']}" if saved["protected"] else "-"
    return Text(f"{text} (save failed)", style="red") if saved["failing"] else Text(text)


def _state(state: str) -> Text:
    return Text(state, style=_COLOURS.get(state, "red"))
