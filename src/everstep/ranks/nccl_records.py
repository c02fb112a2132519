"""What NCCL itself knows of this node's ranks: by its RAS threads, and by the files of its Inspector.

RAS is in every process with NCCL 2.24 or newer, and answers in JSON since 2.28. It counts what each rank has
launched, also outside torch, and knows who does not answer. All processes of a host listen at one port, those
of other jobs too; the kernel chooses who gets a connection, and who got it answers for its own job:

    us ──connect──► a rank that is stopped       says nothing: another try
       ──connect──► a rank of another task       names no process of ours: another try
       ──connect──► one of our ranks             all ranks of the job, on all nodes

Where NCCL is not used no process listens, and that is known at once. The Inspector is read only where the
script's environment switches it on; it writes down the operations that have completed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.ras_json import read_json

RAS_ADDRESS = "localhost:28028"
FIRST_WORD_S = 0.3  # from a process that is not stopped
MOST_TRIES = 8
MOST_BYTES = 1 << 24  # of an answer: some 3,000 ranks with 8 communicators
MOST_COUNTS = 64  # of a rank: communicators times kinds of operations
TAIL_BYTES = 1 << 18  # of a file of the Inspector
_QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nSTATUS\n"
_BETWEEN_TWO = ("Send", "Recv", "SendRecv")  # their numbers differ from rank to rank

# By communicator and kind, then by number: when it was written down, and how long it took.
Operations = dict[str, dict[int, tuple[float, float]]]


@dataclass(slots=True, kw_only=True)
class SeenByRas:
    """One rank."""

    launched: dict[str, int] = field(default_factory=dict)  # operations, by communicator and kind
    trouble: str = ""  # in words; empty: none


class NcclQuestion:
    """Asked in a thread: a folder may be on a server that is gone. What is not known in time is not used."""

    def __init__(
        self,
        environment: Mapping[str, str],
        ranks: Mapping[int, int],
        *,
        folder: str = "",
        world: int = 0,
        seconds: float,
    ) -> None:
        """`ranks`: of this node, by the ids of their processes. Without `world`, RAS is not asked."""
        self.seen: dict[int, SeenByRas] = {}
        self.completed: dict[int, Operations] = {}
        self._environment, self._ranks, self._folder, self._world = environment, ranks, folder, world
        self._until = time.monotonic() + seconds
        self._thread = threading.Thread(target=self._ask, name="everstep-nccl", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _ask(self) -> None:
        address = ras_address(self._environment) if self._world else None
        if address is not None:
            self.seen = self._ask_ras(address)
        if folder := inspector_folder(self._environment, self._folder):
            found = ((r, completed_operations(inspector_tail(folder, pid))) for pid, r in self._ranks.items())
            self.completed = {rank: operations for rank, operations in found if operations}

    def _ask_ras(self, address: tuple[str, int]) -> dict[int, SeenByRas]:
        for _ in range(MOST_TRIES):
            said = b""
            try:
                said = converse(address, self._until)
            except (TimeoutError, ConnectionResetError, BrokenPipeError):  # it is stopped, or ends
                pass
            except (OSError, UnicodeError):  # no process listens; the host name is none
                return {}
            if (found := seen_by_ras(said, self._ranks, self._world)) or time.monotonic() >= self._until:
                return found
        return {}


def ras_address(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Where it listens; None: nowhere."""
    if environment.get("NCCL_RAS_ENABLE", "1").strip() == "0":
        return None
    host, _, port = environment.get("NCCL_RAS_ADDR", RAS_ADDRESS).strip().rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() and int(port) < 1 << 16 else None


def converse(address: tuple[str, int], until: float) -> bytes:
    """All that one process says, until it closes the connection; nothing, if that is too much."""
    said = bytearray()
    with socket.create_connection(address, max(0.01, min(FIRST_WORD_S, until - time.monotonic()))) as line:
        line.sendall(_QUESTION)
        while chunk := line.recv(1 << 16):
            said += chunk
            if len(said) > MOST_BYTES:
                return b""
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            line.settimeout(left_s)
    return bytes(said)


def seen_by_ras(said: bytes, ranks: Mapping[int, int], world: int) -> dict[int, SeenByRas]:
    """Of these ranks, by the ids of their processes. A process of another host may have the same id: then
    that one is ours which has our rank's number in a communicator of all ranks.
    """
    entries = list(_entries(said))
    ours = [entry for entry in entries if entry.process[1] in ranks]
    hosts: dict[int, set[str]] = {}
    for entry in ours:
        hosts.setdefault(entry.process[1], set()).add(entry.process[0])
    sure = {e.process for e in ours if e.size == world and e.rank == ranks[e.process[1]]}
    found: dict[int, SeenByRas] = {}
    for entry in ours:
        if len(hosts[entry.process[1]]) == 1 or entry.process in sure:
            seen = found.setdefault(ranks[entry.process[1]], SeenByRas())
            room = MOST_COUNTS - len(seen.launched)
            seen.launched |= dict(list(entry.launched.items())[:room])
            seen.trouble = seen.trouble or entry.trouble
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A rank of a communicator."""

    process: tuple[str, int]  # host and pid
    rank: int
    size: int
    launched: Mapping[str, int]
    trouble: str


def _entries(said: bytes) -> Iterator[_Entry]:
    start = said.find(b"{")
    if not said.startswith(b"SERVER PROTOCOL ") or start < 0:
        return
    try:
        status = read_json(said[start:].decode())
    except (ValueError, RecursionError):  # of an NCCL that answers in text, or of no NCCL
        return
    for comm in _objects(status, "communicators"):
        name = f"NCCL communicator {_word(comm.get('hash'))}"
        used = {
            kind for rank in _objects(comm, "ranks") for kind, count in _counts(rank).items() if count > 0
        }
        for rank in _objects(comm, "ranks") + _objects(comm, "missing_ranks"):
            yield _Entry(
                process=(str(rank.get("host")), _int(rank.get("pid"))),
                rank=_int(rank.get("rank")),
                size=_int(comm.get("size")),
                launched={f"{name} ({k})": n for k, n in _counts(rank).items() if k in used},
                trouble=_trouble(rank),
            )


def _counts(rank: Mapping[str, Any]) -> dict[str, int]:
    counts = _part(rank, "collective_counts")
    return {_word(kind): _int(count) for kind, count in counts.items() if kind not in _BETWEEN_TWO}


def _trouble(rank: Mapping[str, Any]) -> str:
    """Errors that NCCL notes for a rank are no such thing: those are of the peers of a dead one."""
    status = _part(rank, "status")
    if status.get("considered_dead") is True:
        return "is considered dead"
    return "does not answer" if status.get("unresponsive") is True else ""


def _part(row: Any, name: str) -> dict[str, Any]:
    part = row.get(name) if isinstance(row, dict) else None
    return part if isinstance(part, dict) else {}


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    listed = value.get(name) if isinstance(value, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _word(value: Any) -> str:
    """For people to read, whoever wrote it."""
    return "".join(filter(str.isalnum, str(value)[:40]))


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else -1


# ------------------------------------------------------------------ the Inspector


def inspector_folder(environment: Mapping[str, str], folder: str) -> Path | None:
    """Where it writes; None: it is off, or nobody said where."""
    given = environment.get("NCCL_INSPECTOR_DUMP_DIR", "")
    is_on = environment.get("NCCL_INSPECTOR_ENABLE", "0").strip() not in ("", "0")
    return Path(folder, given) if is_on and given and environment.get("NCCL_PROFILER_PLUGIN") else None


def inspector_tail(folder: Path, pid: int) -> bytes:
    """The newest lines that a process has written."""
    with contextlib.suppress(OSError), (folder / f"{socket.gethostname()}-pid{pid}.log").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read(TAIL_BYTES)
    return b""


def completed_operations(text: bytes) -> Operations:
    """Those that the device has timed, of lines that can be read."""
    found: Operations = {}
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # the first one is cut, and the last one may be
            continue
        header, done, about = (_part(row, name) for name in ("header", "coll_perf", "metadata"))
        number, took_us = _int(done.get("coll_sn")), _int(done.get("coll_exec_time_us"))
        if number >= 0 and took_us >= 0 and done.get("coll_timing_source") == "kernel_gpu":
            name = f"NCCL communicator {_word(header.get('id'))} ({_word(done.get('coll'))})"
            found.setdefault(name, {})[number] = (_int(about.get("dump_timestamp_us")) / 1e6, took_us / 1e6)
    return dict(list(found.items())[:MOST_COUNTS])
