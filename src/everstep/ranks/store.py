"""Rendezvous: one TCPStore per attempt, in a process of ours, on a socket that listens before ranks begin.

Rejected: the store in rank 0 (it dies with rank 0, and everybody else's error hides the one that matters); a
port that is looked up free and bound later (someone else may take it in between); one store for all lives,
as torchrun 2.13 keeps it (a restarted rank can read the address that a dead one has left there, and wait).

The keeper listens on port 0, hands ranks the number, and passes the socket to this process once a rank
loads torch or connects; who connects earlier waits in the socket's backlog. So the keeper itself never
loads torch, and the store's own loading runs beside that of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from everstep.net.sockets import listening

_BACKLOG = 4096


def listen(address: str, port: int) -> socket.socket:
    """`port` 0: a free one."""
    return listening(address, port, _BACKLOG)


class StoreHost:
    """The keeper's side: a process, started when it is first needed.

    `fork`: starts it from a process that has torch already, and gives its pidfd.
    """

    def __init__(self, fork: Callable[[int], int] | None = None) -> None:
        self._fork = fork
        self._pidfd: int | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def serve(self, listener: socket.socket) -> None:
        """A fresh, empty store on this socket; the one before is dropped."""
        try:
            self._send(listener)
        except OSError:  # it has died; once more with a new one
            self.close()
            self._send(listener)

    def close(self) -> None:
        """Nothing in it is needed any more. Gone when this returns: its port is free."""
        if self._socket is not None:
            self._socket.close()
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            select.select([self._pidfd], [], [], 5)
            os.close(self._pidfd)
        if self._popen is not None:
            self._popen.wait()
        self._socket = self._pidfd = self._popen = None

    def _send(self, listener: socket.socket) -> None:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        socket.send_fds(self._socket, [_settings(listener)], [listener.fileno()])

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if self._fork is not None:
                self._pidfd = self._fork(theirs.fileno())
                return
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "everstep.ranks.store", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._popen.pid)


def _settings(listener: socket.socket) -> bytes:
    address, port, *_ = listener.getsockname()  # of IPv6 it has more
    return json.dumps({"address": address, "port": port}).encode()


def host(fd: int) -> None:
    """The process's whole life: a store for every socket that comes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    line = socket.socket(fileno=fd)
    store: Any = None
    while True:
        data, fds, _, _ = socket.recv_fds(line, 4096, 1)
        if not data:
            return
        store = None  # close the one before first: it may hold the same port
        settings = json.loads(data)
        store = TCPStore(
            settings["address"],
            settings["port"],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=fds[0],
            timeout=timedelta(seconds=30),
        )
        assert store is not None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from everstep.ranks.rank_main import die_with_parent

    die_with_parent(int(sys.argv[2]))
    with contextlib.suppress(KeyboardInterrupt):
        host(int(sys.argv[1]))
    os._exit(0)
