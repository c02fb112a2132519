"""Where ranks meet: one TCPStore a life, in a process of ours, on a socket that listens before ranks begin.

Rejected: the store in rank 0 (it dies with rank 0, and everybody else's error hides the one that matters); a
port that is looked up free and bound later (someone else may take it in between); one store for all lives,
as torchrun 2.13 keeps it (a restarted rank can read the address that a dead one has left there, and wait).

The supervisor listens on port 0, hands ranks the number, and passes the socket to this process once a rank
loads torch or connects; who connects earlier waits in the socket's backlog. So the supervisor itself never
loads torch, and the store's own loading runs beside that of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

_BACKLOG = 4096


def listen(address: str, port: int) -> socket.socket:
    """`port` 0: a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class StoreHost:
    """The supervisor's side: a process, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def serve(self, listener: socket.socket) -> None:
        """A fresh, empty store on this socket; the one before is dropped."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [_told(listener)], [listener.fileno()])
        except OSError:  # it died just now; once more with a new one
            self._start()
            socket.send_fds(self._socket, [_told(listener)], [listener.fileno()])

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()  # it holds nothing that anybody needs
            self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if self._socket is not None:
            self._socket.close()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "everstep.launch.rank_store", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket = ours


def _told(listener: socket.socket) -> bytes:
    address, port = listener.getsockname()
    return json.dumps({"address": address, "port": port}).encode()


def _host(fd: int) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    line = socket.socket(fileno=fd)
    store: Any = None
    while True:
        data, fds, _, _ = socket.recv_fds(line, 4096, 1)
        if not data:
            return
        store = None  # close the one before first: it may hold the same port
        told = json.loads(data)
        store = TCPStore(
            told["address"],
            told["port"],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=fds[0],
            timeout=timedelta(seconds=30),
        )
        assert store is not None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from everstep.launch.rank_main import die_with_parent

    die_with_parent()
    with contextlib.suppress(KeyboardInterrupt):
        _host(int(sys.argv[1]))
    os._exit(0)
