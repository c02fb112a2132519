"""`everstep track`: the steps of a task on a cluster, in the tools people watch runs with.

A process of its own that reads from the coordinator, with the credentials of a viewer: a slow tracker cannot
delay the coordinator. Every step is given on once and in order; steps that a task does again after a restore
were given on before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli import render
from everstep.cli.client import DEFAULT_ADDRESS, Address, Ca, Client, Token
from everstep.cli.render import AsJson
from everstep.errors import EverstepError, UserError
from everstep.launch.client import in_path
from everstep.launch.local.loggers import CsvLog, JsonlLog, MlflowLog, TensorBoardLog, WandbLog

POLL_S = 1.0
AWAY_S = 300.0  # a coordinator that restarts
_OVER = ("finished", "failed", "cancelled")


def track_command(
    task: Annotated[str, typer.Argument(help="Name of the task.")],
    wandb: Annotated[
        str, typer.Option(metavar="PROJECT", help="Weights & Biases: a run of the task's name.")
    ] = "",
    mlflow: Annotated[str, typer.Option(metavar="EXPERIMENT", help="MLflow: a run of the task's name.")] = "",
    mlflow_uri: Annotated[str, typer.Option(metavar="URI", help="MLflow's tracking server.")] = "",
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Event files for TensorBoard.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="One line per step.")] = None,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One JSON object per step, evaluation and incident.")
    ] = None,
    after: Annotated[
        int, typer.Option(metavar="STEP", help="Begin after this step.", min=0, show_default="what is known")
    ] = 0,
    address: Address = DEFAULT_ADDRESS,
    token: Token = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> int:
    """Follow a task of a cluster and log its steps to W&B, MLflow, TensorBoard, CSV or JSON lines.

    Runs anywhere that reaches the coordinator; a viewer's token is enough. Files are continued after their
    last step. Steps from before the last few thousand are not known to the coordinator any more.

    [bold]Examples[/bold]

      everstep track llama-8b --wandb llama

      everstep track llama-8b --mlflow pretraining --mlflow-uri http://mlflow:5000

      everstep track llama-8b --csv losses.csv --jsonl events.jsonl
    """
    trackers: list[Any] = []
    if wandb:
        trackers.append(WandbLog(project=wandb, name=task, id=task, resume="allow"))
    if mlflow:
        trackers.append(MlflowLog(tracking_uri=mlflow_uri or None, experiment=mlflow, run_name=task))
    if tensorboard is not None:
        trackers.append(TensorBoardLog(tensorboard))
    if csv is not None:
        trackers.append(CsvLog(csv))
    if jsonl is not None:
        trackers.append(JsonlLog(jsonl))
    if not trackers:
        raise UserError("say where the steps go: --wandb, --mlflow, --tensorboard, --csv or --jsonl.")
    if mlflow_uri and not mlflow:
        raise UserError("--mlflow-uri needs --mlflow EXPERIMENT.")
    client = Client(address=address, token=token, ca=ca)
    last = max([after, *(last_step(path) for path in (csv, jsonl) if path is not None)])
    document = client.get(f"/v1/tasks/{in_path(task)}?rows=0")
    follower = TaskNews(trackers, after=last)
    follower.start(document)
    render.note(f"task {task} is {document['state']}; its steps after {last} are logged")
    try:
        document = follow(client, task, follower)
    finally:
        follower.end(document["state"])
    render.note(f"task {task} is {document['state']}: logged up to step {follower.last}")
    if as_json:
        render.emit({"task": task, "state": document["state"], "last": follower.last})
    return 1 if document["state"] in ("failed", "cancelled") else 0


class TaskNews:
    """Gives on what is new, once."""

    def __init__(self, trackers: Sequence[Any], *, after: int) -> None:
        self._trackers, self.last = trackers, after
        self._evaluated, self.incident = after, 0

    def start(self, document: Mapping[str, Any]) -> None:
        self._tell("on_start", {"task": document["task"], "steps": document["steps"], "evaluations": {}})

    def take(self, document: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]] = ()) -> None:
        """What the coordinator says of the task now."""
        for row in document["rows"]:
            if row["step"] > self.last:
                self.last = row["step"]
                self._tell("on_step", {name: value for name, value in row.items() if value is not None})
        for row in document["evaluations"]:
            if row["step"] > self._evaluated:
                self._evaluated = row["step"]
                self._tell("on_eval", row["step"], row["values"])
        for one in sorted(incidents, key=lambda one: one["number"]):
            if one["task"] == document["task"] and one["number"] > self.incident:
                self.incident = one["number"]
                self._tell("on_incident", one)

    def end(self, state: str) -> None:
        self._tell("on_end", state if state == "finished" else None)

    def _tell(self, what: str, *words: Any) -> None:
        for tracker in self._trackers:
            if (hears := getattr(tracker, what, None)) is not None:
                hears(*words)


def follow(
    client: Client, task: str, follower: TaskNews, *, sleep: Callable[[float], None] = time.sleep
) -> Any:
    """Until the task ends; returns the last that was heard of it."""
    since: float | None = None
    while True:
        try:
            where = in_path(task)
            document = client.get(f"/v1/tasks/{where}?after={follower.last}")
            incidents = client.get(f"/v1/incidents?after={follower.incident}&task={where}")
            since = None
        except EverstepError:
            since = since or time.monotonic()
            if time.monotonic() - since > AWAY_S:
                raise
        else:
            follower.take(document, incidents)
            if document["state"] in _OVER:
                return document
        sleep(POLL_S)


def last_step(path: Path) -> int:
    """The last step that a file of ours has; 0: there is none."""
    if not path.is_file():
        return 0
    last = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("{"):
                try:
                    row = json.loads(line)
                except ValueError:  # the end of a line was not written
                    continue
                last = max(last, row.get("step", 0)) if row.get("kind") == "step" else last
            elif (first := line.partition(",")[0]).isdecimal():
                last = max(last, int(first))
    return last
