"""What people ask of a running coordinator: submit, status, drain, readmit, cancel, pause, resize, logs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.train import KILL
from everstep.errors import EverstepError, UserError

JSON = typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")
AsJson = Annotated[bool, JSON]
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
_OVER = ("finished", "failed", "cancelled")


def submit_command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="Its keys: docs/job-file.md.")],
    name: Annotated[str, typer.Option(help="The task's name.", show_default="the file's")] = "",
    weight: Annotated[float, typer.Option(help="How much it matters against other tasks.")] = 1.0,
    kill: Annotated[list[str] | None, KILL] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the task is over.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Give a job to the cluster. Its paths must mean the same on every node.

    [bold]Examples[/bold]

      everstep submit examples/job.toml

      everstep submit job.toml --name llama-8b --weight 2 --wait
    """
    from everstep.engine.job import load_job

    job, client = load_job(job_file), Client(address=address, token=token, ca=ca)
    body: dict[str, Any] = {"name": name or job_file.stem, "job": job.to_dict(), "weight": weight}
    if kill:
        body["faults"] = kill
    told = client.post("/v1/tasks", body)
    render.note(f"task {told['task']} is {told['state']}: {told['because']}")
    if wait:
        told = _wait(client, told["task"])
        render.note(f"task {told['task']} is {told['state']}: {told['because']}")
    if as_json:
        render.emit(told)
    return 1 if told["state"] in ("failed", "cancelled") else 0


def _wait(client: Client, task: str) -> Any:
    """Also through a coordinator's restart."""
    away = 0.0
    while True:
        try:
            told, away = client.get(f"/v1/tasks/{task}"), 0.0
            if told["state"] in _OVER:
                return told
        except EverstepError:
            away = away or time.monotonic()
            if time.monotonic() - away > 60:
                raise
        time.sleep(0.5)


def status_command(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it on the screen.")] = False,
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
    console = Console(highlight=False)
    if not watch:
        console.print(_picture(document))
        return 0
    with Live(_picture(document), console=console, refresh_per_second=4) as live:
        while True:
            time.sleep(0.5)
            try:
                live.update(_picture(client.get("/v1/status")))
            except EverstepError as error:
                live.update(Text(f"{error} Trying again ...", style="yellow"))


def drain_command(
    node: Annotated[str, typer.Argument(help="The node's name.")],
    readmit: Annotated[bool, typer.Option("--readmit", help="Let it have workers again.")] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Take all workers off a node, and give it no new ones. --readmit undoes it, also for a lemon.

    [bold]Examples[/bold]

      everstep drain node-3

      everstep drain node-3 --readmit
    """
    client = Client(address=address, token=token, ca=ca)
    return _told(client.post(f"/v1/nodes/{node}/{'readmit' if readmit else 'drain'}"), "node", as_json)


def cancel_command(
    task: Annotated[str, typer.Argument(help="The task's name.")],
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """End a task for good. Its checkpoints stay.

    [bold]Example[/bold]

      everstep cancel llama-8b
    """
    return _told(
        Client(address=address, token=token, ca=ca).post(f"/v1/tasks/{task}/cancel"), "task", as_json
    )


def pause_command(
    task: Annotated[str, typer.Argument(help="The task's name.")],
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Start it again, from its newest checkpoint.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Give a task's slots back for a while; it needs checkpoints.

    [bold]Examples[/bold]

      everstep pause llama-8b

      everstep pause llama-8b --go-on
    """
    client = Client(address=address, token=token, ca=ca)
    return _told(client.post(f"/v1/tasks/{task}/{'unpause' if go_on else 'pause'}"), "task", as_json)


def resize_command(
    task: Annotated[str, typer.Argument(help="The task's name.")],
    workers: Annotated[int | None, typer.Argument(help="At most this many.")] = None,
    shape: Annotated[str, typer.Option(help="replicas x stages, like 3x2.")] = "",
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Let a task have at most so many workers, or take another shape. Its batch and its losses stay.

    With --shape its workers hand their states over in memory, at the next step boundary, to those of the new
    shape.

    [bold]Examples[/bold]

      everstep resize llama-8b 48

      everstep resize llama-8b --shape 3x2
    """
    client = Client(address=address, token=token, ca=ca)
    if shape:
        words = shape.lower().split("x")
        if workers is not None or len(words) != 2 or not all(word.strip().isdecimal() for word in words):
            raise UserError(
                f"--shape is {shape!r}; give replicas x stages, like 3x2, and no number of workers."
            )
        counts = {"replicas": int(words[0]), "stages": int(words[1])}
        return _told(client.post(f"/v1/tasks/{task}/reshape", counts), "task", as_json)
    if workers is None:
        raise UserError("give a number of workers, or --shape, like 3x2.")
    return _told(client.post(f"/v1/tasks/{task}/resize", {"workers": workers}), "task", as_json)


def logs_command(
    task: Annotated[str, typer.Argument(help="The task's name.")],
    worker: Annotated[str, typer.Option(help="replica:stage")] = "0:0",
    size: Annotated[int, typer.Option("--bytes", min=1, help="How much of its end.")] = 16384,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Show the end of what a worker has printed.

    [bold]Example[/bold]

      everstep logs llama-8b --worker 1:0
    """
    client = Client(address=address, token=token, ca=ca)
    told = client.get(f"/v1/tasks/{task}/logs?worker={worker}&bytes={size}")
    if as_json:
        render.emit(told)
    else:
        print(told["text"], end="")
    return 0


def _told(told: Any, what: str, as_json: bool) -> int:
    if as_json:
        render.emit(told)
    render.note(f"{what} {told[what]} is {told['state']}: {told['because']}")
    return 0


# ------------------------------------------------------------------ the picture


def _picture(document: Any) -> Group:
    open_ones = document["incidents"]["open"]
    told = f"{document['incidents']['total']} incidents, {len(open_ones)} open"
    if open_ones:
        told += f": {', '.join(map(str, open_ones[:10]))} (everstep explain {open_ones[0]})"
    return Group(_nodes(document["nodes"]), Text(), _tasks(document["tasks"]), Text(), Text(told))


def _nodes(nodes: Any) -> Table:
    table = Table("node", "state", "heard", "slots", "workers", "because", box=None, pad_edge=False)
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
    table = Table(
        "task", "state", "workers", "step", "", "loss", "s/step", "because", box=None, pad_edge=False
    )
    for task in tasks:
        table.add_row(
            task["task"],
            _state(task["state"]),
            f"{task['workers']}/{task['places']}",
            f"{task['step']}/{task['steps']}",
            ProgressBar(total=task["steps"], completed=task["step"], width=16),
            "-" if task["loss"] is None else f"{task['loss']:.5f}",
            "-" if not task["step_seconds"] else f"{task['step_seconds']:.3f}",
            task["because"],
        )
    return table


def _state(state: str) -> Text:
    return Text(state, style=_COLOURS.get(state, "red"))
