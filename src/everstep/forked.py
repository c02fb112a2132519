"""What holds for every process that we fork, and how a fork server is asked for one."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from everstep.errors import UserError

_IN_ONE_PACKET = 64 << 10  # bytes; the kernel takes 208 KiB at most, by its settings also less
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_NAME = 15  # PR_SET_NAME
_MOST_BYTES = 64 << 20  # of a job, a command or an environment

# For a process that others are forked from: what it loads may ask torch whether there is a GPU. Asked by CUDA
# instead of NVML, those that are forked could not use one.
ASKS_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def leave_to_owner() -> None:
    """This process does not end by SIGTERM: a scheduler (`scancel`, systemd) sends it to all processes of a
    job. The agent or launcher hears it too, lets workers make their state safe and ends them. What this
    process forks, such as workers of a DataLoader, ends by it as always.
    """
    here = os.getpid()

    def heard(number: int, frame: Any) -> None:
        if os.getpid() != here:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, heard)


def send_request(line: socket.socket, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """To a fork server, on a line of packets. What is too long for a packet goes into memory that is handed
    over as one more file.
    """
    body = json.dumps(request).encode()
    if len(body) <= _IN_ONE_PACKET:
        socket.send_fds(line, [body], fds)
        return
    if len(body) > _MOST_BYTES:
        raise UserError(
            f"a process cannot be started with {len(body) >> 20} MiB of job, arguments and environment; the "
            f"most is {_MOST_BYTES >> 20} MiB. Pass the name of a file instead."
        )
    memory = os.memfd_create("request")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(body)
        socket.send_fds(line, [b'{"long": true}'], [*fds, memory])
    finally:
        os.close(memory)


def received_request(line: socket.socket, most_fds: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """None: the other end is closed."""
    data, fds, _, _ = socket.recv_fds(line, 2 * _IN_ONE_PACKET, most_fds + 1)
    if not data:
        return None, fds
    request: dict[str, Any] = json.loads(data)
    if "long" in request:
        memory = fds.pop()
        request = json.loads(os.pread(memory, _MOST_BYTES, 0))
        os.close(memory)
    return request, fds


def name_process(name: str) -> None:
    """What `top`, `ps -o comm` and py-spy show of a forked process, whose command line is its fork server's:
    at most 15 bytes. For the main thread to call.
    """
    ctypes.CDLL(None).prctl(_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """Processes whose parents have ended become children of this one, also daemons that left a session."""
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it is gone, or a thread of it
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def end_orphans(but: Collection[int], within_s: float) -> None:
    """SIGKILL to what this process has adopted, and to what that leaves behind. A daemon may have cleared its
    environment; its parent it cannot choose. Its own children are orphans, and ours, once it has ended.
    """
    deadline = time.monotonic() + within_s
    while (orphans := set(children_of(os.getpid())).difference(but)) and time.monotonic() < deadline:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def reap_orphans(but: Collection[int]) -> None:
    """Those that have ended by themselves."""
    for pid in set(children_of(os.getpid())).difference(but):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
