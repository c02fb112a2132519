"""Ranks of a framework as processes, forked from one that has imported it: a job is a line of JSON on stdin.

    {"ranks": 2, "logs": […], "environment": {…}, "job": {…}}   →   {"codes": [0, 0]}

`serve(run)` is the loop of such a process; `run(job, rank)` is called in every forked rank. `Ranks` is the
other side: it starts the process, hands it jobs, and has the last line that a failed rank said.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240.0


class RankFailed(Exception):
    """A framework's own process failed; the sentence is its last error line."""


def serve(run: Callable[[dict[str, Any], int], None]) -> None:
    """Until stdin ends."""
    answer = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        task = json.loads(line)
        pids = [_forked(run, task, rank) for rank in range(task["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answer.write(json.dumps({"codes": codes}) + "\n")
        answer.flush()


def _forked(run: Callable[[dict[str, Any], int], None], task: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(task["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1)
        os.environ |= {**task["environment"], "RANK": str(rank), "LOCAL_RANK": str(rank)}
        run(task["job"], rank)
        code = 0
    except BaseException:  # a rank that fails says why in its log, and is not the parent
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Ranks:
    """A framework's processes, by the Python that has it."""

    def __init__(self, python: str, module: str, logs: Path) -> None:
        self._logs, self._count = logs, 0
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [python, "-m", module],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(self, job: dict[str, Any], ranks: int = 1) -> None:
        self._count += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        logs = [self._logs / f"{self._count}-{rank}.log" for rank in range(ranks)]
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(ranks),
        }
        task = {"ranks": ranks, "logs": list(map(str, logs)), "environment": environment, "job": job}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            os.killpg(self._process.pid, signal.SIGKILL)  # the session is its own: the process and its ranks
            raise RankFailed(f"the ranks of {job.get('do')} did not end within {TIMEOUT_S:g} s")
        if any(json.loads(line)["codes"]):
            raise RankFailed(_last_error(logs))
        for log in logs:
            log.unlink()

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _last_error(logs: list[Path]) -> str:
    found = []
    for log in logs:
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        found += [line for line in lines if "Error" in line or "Exception" in line][-1:] or lines[-1:]
    return found[0] if found else "no word in the logs"
