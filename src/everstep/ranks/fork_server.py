"""How a rank's process comes to be: started as any Python is, or forked from one that has loaded torch.

Loading torch takes seconds, and after a fault everybody waits for it. With `--preload torch` one process, the
fork server, loads it once and is forked for every rank of every life. That changes what a script can count on
(torch reads some environment variables while it is loaded), so it is the person's choice.

Either way a rank leads a process group of its own: its children are in it, and end with it. A dead rank
is not reaped before its group has been killed, so that no stranger can get its number in between.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from everstep.errors import EverstepError
from everstep.ranks.rank_main import PARENT

_COMMAND = (sys.executable, "-m", "everstep.ranks.fork_server")
_LATER = {"torch": ("torch._dynamo",)}  # its optimizers load this at their first use; as slow as torch itself


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a rank starts with. The file descriptors stay the caller's."""

    command: Sequence[str]  # of rank_main: the script and its arguments, or -m and a module
    environment: dict[str, str]
    stdout: int
    stderr: int
    line: int
    folder: str = ""  # where it is started; empty: here


class RankProcess(Protocol):
    pid: int
    pidfd: int  # readable when it has ended

    def exit_code(self) -> int:
        """Of an ended one; negative for a signal. Does not reap it."""

    def reap(self) -> None: ...


class RankStarter(Protocol):
    def start(self, start: RankStart) -> RankProcess: ...

    @property
    def fork_store(self) -> Callable[[int], int] | None:
        """Starts `rank_store.host` on a file descriptor where torch is loaded, if anywhere; its pidfd."""

    def close(self) -> None: ...


# ------------------------------------------------------------------ started


class StartedProcess:
    def __init__(self, start: RankStart) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-u", "-m", "everstep.ranks.rank_main", *start.command],
            env={**start.environment, PARENT: str(os.getpid())},
            cwd=start.folder or None,
            stdin=subprocess.DEVNULL,
            stdout=start.stdout,
            stderr=start.stderr,
            pass_fds=[start.line],
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)

    def exit_code(self) -> int:
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def reap(self) -> None:
        self._popen.wait()
        os.close(self.pidfd)


class PlainStarter:
    fork_store = None

    def start(self, start: RankStart) -> RankProcess:
        return StartedProcess(start)

    def close(self) -> None:
        pass


# ------------------------------------------------------------------ forked


class ForkedRank:
    def __init__(self, pid: int, pidfd: int, server: socket.socket) -> None:
        self.pid, self.pidfd, self._server = pid, pidfd, server

    def exit_code(self) -> int:
        """Field 52 of /proc/PID/stat: it is not our child, so that there is nothing to wait for."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # the fork server has gone, and everything with it
            return -signal.SIGKILL
        return os.waitstatus_to_exitcode(int(fields[49]))

    def reap(self) -> None:
        with contextlib.suppress(OSError):
            self._server.send(json.dumps({"reap": self.pid}).encode())
        os.close(self.pidfd)


class ForkingStarter:
    """`preload`: modules to load before the first fork."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def open(self) -> ForkingStarter:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), str(os.getpid()), *self._preload],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours
        return self

    def warm_up(self) -> None:
        """Wait until the modules are loaded; fails if one of them cannot be."""
        assert self._socket is not None, "the fork server is not open"
        answer = b""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"ping": True}).encode())
            answer = self._socket.recv(64)
        if not answer:
            raise self._failed()

    def _failed(self) -> EverstepError:
        return EverstepError(f"--preload {', '.join(self._preload)} has failed; what it said is above.")

    def start(self, start: RankStart) -> RankProcess:
        assert self._socket is not None, "the fork server is not open"
        cwd = start.folder or os.getcwd()
        request = {"command": list(start.command), "environment": start.environment, "cwd": cwd}
        pid, pidfd = self._ask(request, [start.stdout, start.stderr, start.line])
        return ForkedRank(pid, pidfd, self._socket)

    @property
    def fork_store(self) -> Callable[[int], int] | None:
        if "torch" not in self._preload:
            return None
        return lambda fd: self._ask({"store": True}, [fd])[1]

    def _ask(self, request: dict[str, Any], fds: list[int]) -> tuple[int, int]:
        """A fork; its pid and pidfd."""
        assert self._socket is not None
        received: list[int] = []
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            data, received, _, _ = socket.recv_fds(self._socket, 4096, 1)
        if not received:
            raise self._failed()
        return json.loads(data)["pid"], received[0]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()  # ranks die with it
            self._process.wait()


def _serve(fd: int, preload: Sequence[str]) -> None:
    for name in preload:
        importlib.import_module(name)
        for more in _LATER.get(name, ()):
            with contextlib.suppress(ImportError):
                importlib.import_module(more)
    line = socket.socket(fileno=fd)
    server = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not data:
            return
        request = json.loads(data)
        if "ping" in request:
            line.send(b"{}")
            continue
        if "reap" in request:
            os.waitpid(request["reap"], 0)
            continue
        pid = os.fork()
        if pid == 0:
            line.close()
            _host_store(fds[0], server) if "store" in request else _live(request, fds, server)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(line, [json.dumps({"pid": pid}).encode()], [pidfd])
        for each in (*fds, pidfd):
            os.close(each)


def _host_store(fd: int, server: int) -> None:
    from everstep.ranks import rank_main
    from everstep.ranks import store as rank_store

    rank_main.die_with_parent(server)
    rank_store.host(fd)
    os._exit(0)


def _live(request: dict[str, Any], fds: list[int], server: int) -> None:
    """A rank's whole life, in the fork. Ends as a Python process does: threads, atexit, then the code."""
    from everstep.ranks import rank_main

    stdout, stderr, line = fds
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[rank_main.LINE], os.environ[rank_main.PARENT] = str(line), str(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:  # its global generator was copied by the fork; `random` sees to itself
        sys.modules["numpy"].random.seed()
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    rank_main.main(request["command"])
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from everstep.ranks.rank_main import die_with_parent

    die_with_parent(int(sys.argv[2]))
    _serve(int(sys.argv[1]), sys.argv[3:])
