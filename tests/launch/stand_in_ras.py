"""A process that listens where NCCL's RAS does, and answers as NCCL 2.28 does, or as none should."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Answer = Callable[[socket.socket], None]
KINDS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def communicator(
    counts: dict[int, int],
    pids: dict[int, int],
    *,
    name: str = "0x5bf1",
    missing: dict[int, dict[str, bool]] | None = None,
    host: str = "127.0.0.1",
    size: int | None = None,
) -> dict[str, Any]:
    """With the number of all-reduces by rank; `missing`: the status of those who did not answer."""
    place = {"host": host, "cuda_dev": 0, "nvml_dev": 0}
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False}
    ranks = [
        {
            "rank": rank,
            **place,
            "pid": pids[rank],
            "status": {**status, "abort_flag": False},
            "collective_counts": {kind: count if kind == "AllReduce" else 0 for kind in KINDS},
        }
        for rank, count in counts.items()
    ]
    absent = [
        {
            "rank": rank,
            **place,
            "pid": pids[rank],
            "status": {"unresponsive": False, "considered_dead": False, **s},
        }
        for rank, s in (missing or {}).items()
    ]
    return {
        "hash": name,
        "secondary_hash": "0x1:0x2",
        "size": len(counts) + len(absent) if size is None else size,
        "ranks_count": len(ranks),
        "missing_ranks_count": len(absent),
        "ranks": ranks,
        "missing_ranks": absent,
    }


def status(*communicators: dict[str, Any]) -> bytes:
    about = {"nccl_version": "2.28.9", "communicators_count": len(communicators)}
    end = {"ras": {"collection_time_sec": 0.002, "timeouts_count": 0}}
    text = json.dumps(about | {"communicators": communicators} | end, indent=2)
    return re.sub(r',(\s*"status": {\s*"unresponsive")', r"\1", text).encode()  # as NCCL 2.28.9 writes it


def said(text: bytes) -> bytes:
    return b"SERVER PROTOCOL 2\nOK\nOK\n" + text


def answer(text: Callable[[], bytes] | bytes) -> Answer:
    def speak(line: socket.socket) -> None:
        read = line.makefile("rb")
        while (word := read.readline().strip().upper()) not in (b"STATUS", b""):
            line.sendall(b"SERVER PROTOCOL 2\n" if word.startswith(b"CLIENT PROTOCOL") else b"OK\n")
        line.sendall(text if isinstance(text, bytes) else text())

    return speak


def never(line: socket.socket) -> None:
    """As a process that is stopped."""
    while line.recv(1 << 12):
        pass


def close_early(line: socket.socket) -> None:
    line.recv(10)
    line.sendall(b"SERVER PROT")


def reset(line: socket.socket) -> None:
    """As a process that ends."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def one_gigabyte(line: socket.socket) -> None:
    line.sendall(b"SERVER PROTOCOL 2\nOK\nOK\n{")
    for _ in range(1 << 10):
        line.sendall(bytes(1 << 20))


def drip(line: socket.socket) -> None:
    while True:
        line.sendall(b"{")
        time.sleep(0.01)


@contextlib.contextmanager
def ras(answers: Iterable[Answer]) -> Iterator[str]:
    """One answer per connection, the last one again and again. Its address, as NCCL_RAS_ADDR has it."""
    scripted = list(answers)
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        number = 0
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            speak = scripted[min(number, len(scripted) - 1)]
            number += 1
            threading.Thread(target=_speak, args=(speak, line), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _speak(speak: Answer, line: socket.socket) -> None:
    with contextlib.suppress(OSError), line:
        speak(line)
