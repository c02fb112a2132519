"""Submit a run to Slurm: the run's folder, then the very script that people may submit themselves."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.launch.client import Client
from everstep.launch.slurm import shell as slurm_shell
from everstep.launch.slurm.run import Run

LOOK_EVERY_S = 2.0
_OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmLaunch:
    file: Path  # the job file, or the script
    run: Path
    nodes: int
    least: int = 0  # nodes to begin with; 0: all
    script: Mapping[str, Any] | None = None  # as the API takes it
    sbatch: Sequence[str] = ()  # more options for it
    slots: int = 0
    port: int = 7077
    coordinator: str = ""
    ca: Path | None = None
    interface: str = ""
    watch_s: float = 5.0

    def options(self) -> list[str]:
        nodes = f"{self.least}-{self.nodes}" if 0 < self.least < self.nodes else str(self.nodes)
        return [f"--nodes={nodes}", f"--output={self.run / 'keepers.out'}", *self.sbatch]

    @property
    def task_file(self) -> Path:
        """What keepers read; its name is the task's."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.file.stem)
        return self.file if self.script is None else self.run / f"{name}.json"

    def arguments(self) -> list[str]:
        """Of `everstep launch node`, behind the script's own."""
        found = [str(self.task_file), "--port", str(self.port), "--watch", f"{self.watch_s:g}"]
        found += ["--slots", str(self.slots)] if self.slots else []
        found += ["--coordinator", self.coordinator] if self.coordinator else []
        found += ["--interface", self.interface] if self.interface else []
        return found + (["--ca", str(self.ca)] if self.ca else [])


def submit(launch: SlurmLaunch, *, token: str = "") -> str:
    """Its number in Slurm. The token goes through a file that its owner alone can read."""
    Run(launch.run).make(wanted=launch.nodes, token=token)
    if launch.script is not None:
        launch.task_file.write_text(json.dumps(launch.script))
    environment = {key: value for key, value in os.environ.items() if key != "EVERSTEP_TOKEN"}
    environment |= {"EVERSTEP_RUN": str(launch.run), "EVERSTEP": f"{sys.executable} -m everstep.cli.main"}
    return slurm_shell.submit(launch.options(), launch.arguments(), environment)


def wait(number: str, run: Path, say: Callable[[str], None]) -> int:
    """Until the job is over, through requeues; the task's exit code."""
    printed = ""
    while True:
        try:
            job = slurm_shell.job(number)
            state = "COMPLETED" if job is None else job.state
            line = _line(state, run)
        except slurm_shell.SlurmFailed as error:  # slurmctld restarts; the job does not mind
            state, line = "", str(error)
        if state in _OVER:
            code = newest(run).exit_code
            return 1 if code is None else code
        if line != printed:
            say(line)
            printed = line
        time.sleep(LOOK_EVERY_S)


def newest(run: Path) -> Run:
    """The run in its last life."""
    lives = [int(path.name.removeprefix("state-")) for path in run.glob("state-*")]
    return Run(run, attempt=max(lives, default=0))


def _line(state: str, run: Path) -> str:
    last = newest(run)
    try:
        status: Any = Client(address=last.place, token=last.token).get("/v1/status")
    except EverstepError:
        return f"job is {state.lower()}"
    up = sum(node["state"] == "up" and node["connected"] for node in status["nodes"])
    tasks = ", ".join(
        f"{t['task']} is {t['state']}, step {t['step']}" + ("" if t["script"] else f" of {t['steps']}")
        for t in status["tasks"]
    )
    return f"job is {state.lower()}, {up} nodes up; {tasks}"
