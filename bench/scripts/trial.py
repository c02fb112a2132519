"""What a trial needs of the scripts in this folder: a line for every step, and faults from within.

The line is written when the step is over; `at` is CLOCK_MONOTONIC, which all machines of a trial share. A
file `fault` in the trial's folder asks a rank to raise, or to spin, at its next step. Nothing here knows of
Everstep.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

STEPS = 100_000
SAVE_EVERY = 10
PACE_S = float(os.environ.get("TRIAL_PACE_S", "0.05"))  # of a step, besides what it computes
TIMEOUT_S = float(
    os.environ.get("TRIAL_TIMEOUT_S", "0")
)  # of collectives, once training runs; 0: torch's own
HOST = os.environ.get("TRIAL_HOST") or os.uname().nodename  # of machines that are only sets of processes


class Trial:
    def __init__(self) -> None:
        self.folder = Path(os.environ["TRIAL_FOLDER"])
        self.rank = int(os.environ["RANK"])
        self._is_timed = False
        self._file = os.open(self.folder / "diary", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._write(kind="begins")

    def is_over(self) -> bool:
        return (self.folder / "stop").exists()

    def step(self, step: int) -> None:
        if TIMEOUT_S and not self._is_timed:
            self._is_timed = True
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
        self._write(kind="step", step=step)
        time.sleep(PACE_S)
        fault = self.folder / "fault"
        if not fault.exists():
            return
        kind, _, rank = fault.read_text().partition(" ")
        if int(rank) != self.rank:
            return
        fault.rename(self.folder / "fault.done")
        self._write(kind="fault")
        if kind == "exception":
            raise OSError("a fault of the trial")
        spin()

    def _write(self, **line: Any) -> None:
        life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        where = {"rank": self.rank, "world": int(os.environ["WORLD_SIZE"]), "host": HOST}
        line |= where | {"pid": os.getpid(), "life": life, "at": time.monotonic()}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def spin() -> None:
    """An endless loop, as of a lock that is never free."""
    turns = 0
    while True:
        turns += 1
