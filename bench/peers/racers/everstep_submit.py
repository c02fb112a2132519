"""Submits the race's job to an Everstep cluster and keeps its diary: the step log of the coordinator.

A node's agent and coordinator are processes of their own; this one only reads, so it can be slow or die.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from everstep.cli.client import Client

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
from harness.race_models import MODEL  # noqa: E402

WORKERS = int(os.environ["RACE_WORKERS"])
LOOK_EVERY_S = 1.0  # it runs on the cores of the workers


def job(folder: str) -> dict[str, Any]:
    return {
        "model": {"build": "loop:layers"},
        "data": {"build": "loop:Data"},
        "optimizer": {"build": "loop:optimizer", "decay": "constant", "clip": None},
        "checkpoint": {"folder": folder, "interval": MODEL.checkpoint_every, "keep": 2},
        "replicas": WORKERS,
        "stages": 1,
        "microbatches": MODEL.microbatches // WORKERS,
        "steps": 1_000_000,
        "threads": 1,
        "base": str(HERE),
    }


class Workers:
    """Writes down which processes work on which node: the harness does its faults to them."""

    def __init__(self, client: Client, diary: int) -> None:
        self.client, self.diary = client, diary
        self.known: set[int] = set()

    def look(self) -> None:
        try:
            rows = self.client.get("/v1/tasks/race/readings")["workers"]
        except Exception:  # for a moment there is none
            return
        for row in rows:
            if row["pid"] not in self.known:
                self.known.add(row["pid"])
                line = {"kind": "born", "node": int(row["node"].removeprefix("n")), "pid": row["pid"]}
                line |= {"order": int(str(row["worker"]).partition(":")[0]), "at": time.monotonic()}
                os.write(self.diary, (json.dumps(line) + "\n").encode())


def follow(path: Path, diary: int, workers: Workers) -> None:
    """The log's wall clock becomes the monotonic clock of everyone's diary."""
    rest = ""
    with path.open() as log:
        while True:
            rest += log.read()
            *lines, rest = rest.split("\n")
            ahead = time.time() - time.monotonic()
            for row in map(json.loads, lines):
                line = {"kind": "step", "rank": 0, "world": WORKERS, "pid": os.getpid()}
                line |= {"step": row["step"], "loss": row["loss"], "at": row["at"] - ahead}
                os.write(diary, (json.dumps(line) + "\n").encode())
            workers.look()
            time.sleep(LOOK_EVERY_S)


def main() -> None:
    address, state = sys.argv[1:3]
    client = Client(address=address, token="race")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if sum(node["connected"] for node in client.get("/v1/status")["nodes"]) == 2:
                break
        except Exception:  # the coordinator is about to start
            pass
        time.sleep(0.1)
    client.post("/v1/tasks", {"name": "race", "job": job(os.environ["RACE_FOLDER"])})
    path = Path(state, "tasks", "race.jsonl")
    while not path.exists():
        time.sleep(0.05)
    diary = os.open(os.environ["RACE_DIARY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    follow(path, diary, Workers(client, diary))


if __name__ == "__main__":
    main()
