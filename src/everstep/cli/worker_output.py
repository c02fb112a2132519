"""What a worker of a cluster prints, read part by part: `everstep logs`, with `--follow`."""

from __future__ import annotations

import time
from typing import Any

from everstep.cli import render
from everstep.cli.client import Client
from everstep.core.cluster.task import OVER
from everstep.errors import UserError

LOOK_EVERY_S = 0.5


class WorkerOutput:
    def __init__(self, client: Client, task: str, worker: str, size: int) -> None:
        self._client, self._task, self._worker, self._size = client, task, worker, size
        self.document: dict[str, Any] = {}
        self._evaluated = 0

    def read(self) -> str:
        """What is new; at first, the last `size` bytes."""
        path = f"/v1/tasks/{self._task}/logs?worker={self._worker}&bytes={self._size}"
        known = self.document
        answer = self._client.get(path + (f"&from={known['next']}" if known else ""))
        if known and answer["node"] != known["node"]:  # it runs elsewhere now: another file, from its start
            answer = self._client.get(f"{path}&from=0")
        text: str = answer["text"]
        self.document = answer | {"text": known.get("text", "") + text}
        return text

    def follow(self, *, quiet: bool) -> None:
        """Until the task is over and all of it is read."""
        while True:
            try:
                text = self.read()
            except UserError:
                if self._is_over():
                    raise
                text = ""  # it has not started yet, or is between two nodes
            if not quiet:
                print(text, end="", flush=True)
            self._tell_evaluations()
            if not text:
                if self._is_over():
                    return
                time.sleep(LOOK_EVERY_S)

    def _is_over(self) -> bool:
        return self._row()["state"] in OVER

    def _row(self) -> Any:
        return self._client.get(f"/v1/tasks/{self._task}?rows=0")

    def _tell_evaluations(self) -> None:
        for found in self._row()["evaluations"]:
            if found["step"] > self._evaluated:
                self._evaluated = found["step"]
                values = ", ".join(f"{name} {value:.6g}" for name, value in found["values"].items())
                render.note(f"evaluation after step {found['step']}: {values}")
