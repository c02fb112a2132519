"""The folder of one run, shared by all its nodes: how keepers of one job know of each other.

    RUN/token                 what callers of the coordinator must know; readable by its owner only
    RUN/wanted                how many nodes the run is to have
    RUN/lead                  locked by the keeper that leads: it runs the coordinator and watches Slurm
    RUN/coordinator           the address of the coordinator now, for people
    RUN/logs/                 of agents, coordinators and workers
    RUN/state-K/              K counts how often Slurm has requeued the job: nothing of an earlier life is met
    RUN/state-K/coordinator   the address of the coordinator now
    RUN/state-K/journal…      its journal, and the losses of every step
    RUN/state-K/keeper-NODE   locked by the keeper of that node
    RUN/state-K/drained       nodes that were drained because Slurm said so
    RUN/state-K/exit          written when the task is over: the exit code

The lock is the kernel's, on the file system that the nodes share: it ends with the process that holds it, and
with the machine as soon as the file server takes that machine for dead. Rejected: to let slurmctld say who
leads. It takes a dead node for alive for five minutes (SlurmdTimeout), and it may be down itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from pathlib import Path

from everstep.errors import UserError

_NO_LOCKS = (38, 45, 95, 524)  # ENOSYS, EOPNOTSUPP (and as other kernels number it), ENOTSUPP from a server


class Run:
    def __init__(self, folder: Path, *, attempt: int = 0) -> None:
        self.folder, self.attempt = folder, attempt
        self._lead: int | None = None

    def make(self, *, wanted: int, token: str = "") -> None:
        """The folder, the number of nodes, the token (or one made here). What is there already stays."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            self.state.mkdir(exist_ok=True)
            self._write_once("wanted", f"{wanted}\n")
            self._write_once("token", (token or secrets.token_urlsafe(32)) + "\n")
        except OSError as error:
            raise UserError(
                f"the run directory {self.folder} cannot be used ({error.strerror}); give another by --run, "
                "on a file system that all nodes share."
            ) from None

    def _write_once(self, name: str, text: str) -> bool:
        """Whole or not at all: written beside it, then linked. False if it was there."""
        beside = self.folder / f".{name}.{secrets.token_hex(8)}"
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, self.folder / name)
            return True
        except FileExistsError:
            return False
        finally:
            beside.unlink()

    # -------------------------------------------------------------- what is in it

    @property
    def token(self) -> str:
        path = self.folder / "token"
        try:
            mode = path.stat().st_mode
            if mode & 0o077:
                raise UserError(f"{path} can be read by others; chmod 600 {path}, and use a new token.")
            return path.read_text().strip()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}); is {self.folder} a run directory?"
            ) from None

    @property
    def wanted(self) -> int:
        return int((self.folder / "wanted").read_text())

    @property
    def state(self) -> Path:
        return self.folder / f"state-{self.attempt}"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def place(self) -> str:
        """For `--coordinator` and `--address`: the file is read again at every attempt."""
        return f"@{self.state / 'coordinator'}"

    def publish(self, address: str) -> None:
        for folder in (self.state, self.folder):
            _replace(folder / "coordinator", address + "\n")

    @property
    def drained(self) -> frozenset[str]:
        with contextlib.suppress(OSError, ValueError):
            return frozenset(json.loads((self.state / "drained").read_text()))
        return frozenset()

    def remember_drained(self, nodes: frozenset[str]) -> None:
        _replace(self.state / "drained", json.dumps(sorted(nodes)))

    @property
    def exit_code(self) -> int | None:
        """None while it goes on. Opened, not looked for: an open asks the file server."""
        try:
            return int((self.state / "exit").read_text())
        except (OSError, ValueError):
            return None

    @property
    def has_ended_life(self) -> bool:
        """Has Slurm requeued the job since?"""
        return (self.folder / f"state-{self.attempt + 1}").exists()

    def end(self, code: int) -> None:
        _replace(self.state / "exit", f"{code}\n")

    # -------------------------------------------------------------- who leads

    @property
    def leads(self) -> bool:
        return self._lead is not None

    def try_to_lead(self) -> bool:
        """Take the lock, if it is free; it is kept until this process ends."""
        if self._lead is None:
            self._lead = self._lock(self.folder / "lead")
        return self._lead is not None

    def keep(self, node: str) -> bool:
        """Be the one keeper of a node; False if it has one."""
        return self._lock(self.state / f"keeper-{node}") is not None

    def _lock(self, path: Path) -> int | None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in _NO_LOCKS:
                raise UserError(
                    f"the file system of {self.folder} has no locks; give another directory by --run "
                    "(Lustre: mount it with flock)."
                ) from None
            return None
        return file


def _replace(path: Path, text: str) -> None:
    """Old or new, never half of it."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    beside.write_text(text)
    os.replace(beside, path)
