"""What an agent leaves to the agent that comes after it: a folder, so that workers outlive their agent.

    state/
      lock        held by the agent that lives; its number is in it
      record      what was decided and heard, one line for each change; only the whole lines count
      agent       the socket that workers call, and call again
      fork-*      the sockets of fork servers, which hold the exit statuses of their workers
      beacon-*    what workers show, and by which mutex their death is noticed

Nothing leaves the agent (an order to a worker, a report to the coordinator, a word that a report need not be
kept) before what led to it is in the record. So the next agent continues as the same one (`boot`): for the
coordinator its line was cut for a moment, for the workers theirs was. Nothing is flushed to a disk: what is
written outlives the process, and if the machine goes, its workers go too and the record does not count (the
kernel's boot id is in it).

Rejected: a keeper process that holds everything and is never replaced. It would be the one program that
cannot be upgraded, and an order or report under way between it and the agent needs the same record.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.core.agent.reports import KeptReport
from everstep.errors import UserError
from everstep.node.worker_lines import Counts
from everstep.protocol import messages as msg
from everstep.protocol.codec import decode, encode
from everstep.protocol.messages import Sender
from everstep.protocol.table import PROTOCOL, Document

REWRITE_BYTES = 4 << 20  # a record is written again when it has grown by so much
MOST_PATH = 90  # of the folder: names of sockets have at most 107 bytes
REPLACE_S = 30.0  # for an agent that was told to make room for this one
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class Left:
    """All that the record says."""

    boot: str = ""
    memory: str = ""  # the folder of copies of states
    memory_port: int = 0
    image: Document = field(default_factory=dict)  # of the agent's decisions
    opened: dict[str, msg.OpenTask | msg.OpenMemory] = field(
        default_factory=dict
    )  # by task: the last of each
    reports: dict[int, KeptReport] = field(default_factory=dict)
    number: int = 0  # of the last report
    counts: dict[Sender, Counts] = field(default_factory=dict)

    def apply(self, line: Document) -> None:
        self.boot = line.get("boot", self.boot)
        self.memory = line.get("memory", self.memory)
        self.memory_port = line.get("memory_port", self.memory_port)
        self.image = line.get("image", self.image)
        for each in line.get("opened", ()):
            order = decode(msg.Order, each)
            self.opened[f"{type(order).__name__} {order.task}"] = order
        for number, report, sender in line.get("reports", ()):
            self.number = number
            self.reports[number] = KeptReport(
                number, decode(msg.NodeReport, report), decode(Sender | None, sender)
            )
        if "kept" in line:
            for number in [n for n in self.reports if n <= line["kept"]]:
                del self.reports[number]
        self.number = max(self.number, line.get("number", 0))
        for sender, heard, told, took, new in line.get("lines", ()):
            counts = self.counts.setdefault(decode(Sender, sender), Counts())
            counts.heard, counts.told = heard, told
            counts.kept.extend(bytes.fromhex(data) for data in new)
            counts.took(took)


class AgentRecord:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "record"
        self._file = -1
        self._size = self._rewrite_at = 0

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def read(self) -> Left | None:
        """What another agent has left on this machine since it started; None: nothing that counts."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        left = Left()
        lines = [json.loads(line) for line in data.split(b"\n")[:-1]]
        if not lines or lines[0].get("kernel") != _boot_id():
            return None
        for line in lines:
            left.apply(line)
        return left if left.image else None

    def rewrite(self, line: Document) -> bool:
        """This line says everything."""
        text = self._text({"kernel": _boot_id(), "protocol": PROTOCOL, **line})
        new = self._path.with_name("record.new")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        _write(file, text)
        os.replace(new, self._path)
        self.close()
        self._file, self._size = file, len(text)
        self._rewrite_at = len(text) * 2 + REWRITE_BYTES
        return True

    def append(self, line: Document) -> bool:
        """False: it has grown so much that it should be written again."""
        text = self._text(line)
        _write(self._file, text)
        self._size += len(text)
        return self._size < self._rewrite_at

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @staticmethod
    def _text(line: Document) -> bytes:
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def report_row(kept: KeptReport) -> list[Any]:
    return [kept.number, encode(kept.report), encode(kept.sender)]


def line_row(sender: Sender, counts: Counts, new: list[bytes]) -> list[Any]:
    took = counts.told - len(counts.kept)
    return [encode(sender), counts.heard, counts.told, took, [data.hex() for data in new]]


def _write(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


@contextlib.contextmanager
def held(folder: Path, *, replace: bool, shared: bool = False) -> Iterator[None]:
    """This agent is the only one in the folder. `replace`: one that lives is told to leave it first.
    `shared`: workers of other users may enter it, and see nothing.
    """
    if len(os.fsencode(folder.absolute())) > MOST_PATH:
        raise UserError(
            f"--state {folder} is longer than {MOST_PATH} bytes, and sockets in it could not be named; "
            "give a shorter path."
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise UserError(f"--state {folder} belongs to another user; give a folder of your own.")
        if found.st_mode & (
            0o066 if shared else 0o077
        ):  # secrets of tasks are in it; and it may be anything, such as /tmp
            raise UserError(
                f"--state {folder} is open to other users; give a folder of this agent alone, which is made "
                "if it is not there, or close it to others (chmod 700)."
            )
        if not (folder / "lock").exists() and any(folder.iterdir()):  # the next agent would clean it up
            raise UserError(f"--state {folder} holds other files; give an empty folder, or one to be made.")
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"--state {folder} cannot be used: {error.strerror}.") from None
    try:
        _refuse_other_protocol(folder)  # before another agent is told to leave
        _take(file, folder, replace=replace)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(file)


def _refuse_other_protocol(folder: Path) -> None:
    """Workers that speak another one cannot be taken over."""
    try:
        first = json.loads((folder / "record").read_bytes().split(b"\n", 1)[0])
    except (OSError, ValueError):
        return
    if first.get("kernel") == _boot_id() and first.get("protocol") != PROTOCOL:
        raise UserError(
            f"--state {folder} has workers of an agent that spoke protocol {first.get('protocol')}, and this "
            f"one speaks {PROTOCOL}: end their tasks with that version of Everstep, or give another folder."
        )


def _take(file: int, folder: Path, *, replace: bool) -> None:
    until, told = time.monotonic() + REPLACE_S, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        pid = int(os.pread(file, 32, 0) or b"0")
        if not replace:
            raise UserError(
                f"--state {folder} is in use by the agent with pid {pid}; give --replace to take over its "
                "workers, or another folder."
            )
        if not told and pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
            told = True
        if time.monotonic() > until:
            raise UserError(f"the agent with pid {pid} did not leave --state {folder} in {REPLACE_S:g} s.")
        time.sleep(0.05)
