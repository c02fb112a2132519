"""What a worker of a cluster prints, and what its task records: `everstep logs`, with `--follow`."""

from __future__ import annotations

import math
import time
from typing import Any

from everstep.cli.client import Client
from everstep.core.cluster.task import OVER
from everstep.errors import UserError
from everstep.launch.client import in_path

LOOK_EVERY_S = 0.5
STEPS_SHOWN = 10  # when nothing is followed


class WorkerOutput:
    def __init__(self, client: Client, task: str, worker: str, size: int, *, quiet: bool = False) -> None:
        self._client, self._task, self._worker, self._size, self._quiet = client, task, worker, size, quiet
        self.document: dict[str, Any] = {}
        self._where = ""
        self._step = self._evaluated = 0  # what is printed already

    def show(self) -> None:
        """What there is."""
        row = self._row(STEPS_SHOWN)
        self._tell_place(row)
        self._print(self._read(), end="")
        self._tell_steps(row)

    def follow(self) -> None:
        """Until the task is over and all of it is read."""
        row = self._row(STEPS_SHOWN)
        while True:
            self._tell_place(row)
            try:
                text = self._read()
            except UserError:
                if row["state"] in OVER:
                    raise
                text = ""  # it has not started yet, or is between two nodes
            self._print(text, end="")
            self._tell_steps(row)
            if row["state"] in OVER and not text:
                return
            if not text:
                time.sleep(LOOK_EVERY_S)
            row = self._row(1000)

    def _read(self) -> str:
        """What is new; at first, the last `size` bytes."""
        path = f"/v1/tasks/{in_path(self._task)}/logs?worker={self._worker}&bytes={self._size}"
        known = self.document
        answer = self._client.get(path + (f"&from={known['next']}" if known else ""))
        if known and answer["node"] != known["node"]:  # it runs elsewhere now: another file, from its start
            answer = self._client.get(f"{path}&from=0")
        text: str = answer["text"]
        self.document = answer | {"text": known.get("text", "") + text}
        return text

    def _row(self, steps: int) -> Any:
        return self._client.get(f"/v1/tasks/{in_path(self._task)}?rows={steps}")

    def _tell_place(self, row: Any) -> None:
        found = place(row, self._worker)
        if found != self._where:
            self._where = found
            self._print(found)

    def _tell_steps(self, row: Any) -> None:
        for line in lines(row, after=self._step, evaluated=self._evaluated):
            self._print(line)
        self._step = max([self._step, *(each["step"] for each in row["rows"])])
        self._evaluated = max([self._evaluated, *(each["step"] for each in row["evaluations"])])

    def _print(self, text: str, end: str = "\n") -> None:
        if not self._quiet:
            print(text, end=end, flush=True)


def place(row: Any, worker: str) -> str:
    """Where a worker runs, and what it does in its task."""
    shape, (replica, _, stage) = row["shape"], worker.partition(":")
    part = f"replica {replica} of {shape['replicas']}, stage {stage} of {shape['stages']}, counted from 0"
    about = f"everstep: worker {worker} of {row['task']} ({part})"
    seat = next((seat for seat in row["seats"] if seat["worker"] == worker), None)
    if seat is None:
        return f"{about} runs nowhere now; the task is {row['state']}: {row['because']}"
    return f"{about} is on node {seat['node']}, slot {seat['slot']}"


def lines(row: Any, *, after: int, evaluated: int) -> list[str]:
    """Steps and evaluations that are new, in the order of steps."""
    told = [(each["step"], 0, _step_line(each, row["steps"])) for each in row["rows"] if each["step"] > after]
    for found in row["evaluations"]:
        if found["step"] > evaluated and (after or found["step"] >= min((t[0] for t in told), default=0)):
            values = ", ".join(f"{name} {_figure(value)}" for name, value in found["values"].items())
            told.append((found["step"], 1, f"evaluation after step {found['step']}: {values}"))
    return [line for _, _, line in sorted(told)]


def _step_line(row: Any, steps: int) -> str:
    took = f"{row['seconds'] * 1e3:.0f} ms" if row["seconds"] else "-"
    loss, norm = row["loss"], row["grad_norm"]
    figures = (
        f"loss {math.nan if loss is None else loss:.6f}  grad norm {math.nan if norm is None else norm:#.4g}"
    )
    return f"step {row['step']:{len(str(steps))}d}/{steps}  {figures}  {took:>9}"


def _figure(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
