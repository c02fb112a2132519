"""Records of a running job, taken from outside: also from ranks whose main thread is stuck.

PyTorch's worker server answers in a C++ thread. Its Flight Recorder handler needs no interpreter, its
traceback handler does; so a rank that answers the first and not the second has something holding the
interpreter's lock. A rank that answers neither is stopped, dead, or was never asked to serve:

    server = torch._C._distributed_c10d._WorkerServer("127.0.0.1", 7000 + rank)    # one line in a script

Every rank is asked at the same time, so one that does not answer costs its timeout once, not once a rank.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.diagnose import pulled

_FRAME_MARK = 'File "'


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    rank: int
    taken_ns: int
    dump: bytes | None = None
    why: str = ""  # there is no dump
    stack: str = ""
    stuck: bool = False  # the recorder answers, the interpreter does not


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def pull_rank(rank: int, address: str, *, timeout_s: float = 2.0) -> Answer:
    """Ask one rank. `address` is host:port, or the path of a Unix socket."""
    taken = time.time_ns()
    try:
        dump = _ask(address, "fr_trace_json", timeout_s)
    except TimeoutError:
        return Answer(
            rank=rank, taken_ns=taken, why=f"does not answer within {timeout_s:g} s: stopped or overwhelmed"
        )
    except (OSError, http.client.HTTPException) as error:
        return Answer(rank=rank, taken_ns=taken, why=f"cannot be reached ({error}): its process is gone")
    try:
        stack = _ask(address, "dump_traceback", timeout_s).decode(errors="replace")
    except TimeoutError:
        return Answer(rank=rank, taken_ns=taken, dump=dump, stuck=True)
    except (OSError, http.client.HTTPException):
        stack = ""
    return Answer(rank=rank, taken_ns=taken, dump=dump, stack=main_frame(stack))


def pull(addresses: dict[int, str], *, timeout_s: float = 2.0) -> list[Answer]:
    """Ask every rank at once."""
    with ThreadPoolExecutor(max_workers=min(64, len(addresses) or 1)) as pool:
        return list(pool.map(lambda item: pull_rank(*item, timeout_s=timeout_s), sorted(addresses.items())))


def save(answers: list[Answer], folder: Path, *, world_size: int) -> None:
    """The dumps, and who answered, as `everstep diagnose` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    said: dict[int, dict[str, Any]] = {}
    for answer in answers:
        said[answer.rank] = {"taken_ns": answer.taken_ns, "answered": answer.dump is not None}
        if answer.dump is not None:
            (folder / f"fr_rank_{answer.rank}.json").write_bytes(answer.dump)
        else:
            said[answer.rank]["why"] = answer.why
        if answer.stack:
            said[answer.rank]["stack"] = answer.stack
        if answer.stuck:
            said[answer.rank]["stuck"] = True
    (folder / "pull.json").write_text(json.dumps(pulled.document(world_size, said)))


def main_frame(traceback: str) -> str:
    """Where the main thread is: `train.py:31 in sleep`, from faulthandler's text."""
    threads = traceback.split("\n\n")
    frames = [line.strip() for line in threads[-1].splitlines() if _FRAME_MARK in line]
    if not frames:
        return ""
    name, _, rest = frames[0].partition(_FRAME_MARK)[2].partition('"')
    return f"{name.rsplit('/', 1)[-1]}:{rest.replace(', line ', '').strip()}"


def _ask(address: str, handler: str, timeout_s: float) -> bytes:
    connection: http.client.HTTPConnection
    if address.startswith("/"):
        connection = _UnixConnection(address, timeout_s)
    else:
        host, _, port = address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"{handler} answers {answer.status}")
        return body
    finally:
        connection.close()
