"""The lines between an agent and the worker processes of its node: one Unix socket for all to call.

A process's first message says which one it is; what follows are its reports. Nothing blocks: a worker that is
stopped does not read, and what it has not read waits here, up to a bound.

An agent with a record is one of several that these processes will have: reports and orders are counted, and
kept by who said them until the other side will not lose them (`node.line_to_agent`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everstep.core.agent.agent_messages import ProcessEvent, ProcessGreeted, ProcessMisspoke, ProcessSpoke
from everstep.errors import PeerError
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import (
    EndWorker,
    FromWorker,
    LineWord,
    OrdersHeard,
    RankOrder,
    ReportsHeard,
    Sender,
    WorkerHello,
    WorkerOrder,
)
from everstep.protocol.table import PROTOCOL

ACKNOWLEDGE_EVERY_S = 1.0
MOST_UNSENT = 64 << 20  # bytes that one worker has not read
MOST_UNGREETED = 1024
MOST_HELLO = 1 << 16  # bytes before a caller has said who it is
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Loop(Protocol):
    """What the lines need of the loop they live in: asyncio's in the agent, a selector in a local run."""

    def watch(self, fd: int, ready: Callable[[], object]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


@dataclass(slots=True)
class _Line:
    socket: socket.socket
    unpacker: Unpacker = field(default_factory=lambda: Unpacker(FromWorker | LineWord))
    unsent: bytearray = field(default_factory=bytearray)
    acknowledged: int = 0  # reports that the process was told need not be kept


@dataclass(slots=True)
class Counts:
    """Of one process, over all its lines."""

    heard: int = 0  # its reports
    told: int = 0  # orders to it, of which the last ones are kept
    kept: deque[bytes] = field(default_factory=deque)

    def took(self, number: int) -> None:
        """It has had so many orders."""
        while self.kept and self.told - len(self.kept) < number:
            self.kept.popleft()


def _is_honest(caller: socket.socket, pid: int) -> bool:
    """A process of another user can be one of another owner: the kernel must know it by this number."""
    known, uid = _pid_and_user(caller)
    return uid == os.geteuid() or known == pid


def _pid_and_user(caller: socket.socket) -> tuple[int, int]:
    pid, uid, _ = _CREDENTIALS.unpack(
        caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


class WorkerLines:
    def __init__(
        self,
        loop: Loop,
        path: Path,
        *,
        knows: Callable[[Sender, int], bool],  # is there such a process, and is this its pid?
        happened: Callable[[ProcessEvent], None],
        keeps: bool = False,  # another agent may come after this one
        for_all: bool = False,  # workers run as other users
        on_record: Callable[[], None] = lambda: None,  # what was decided and heard is safe when it returns
    ) -> None:
        self.path = path
        self.counts: dict[Sender, Counts] = {}
        self._keeps, self._on_record, self._for_all = keeps, on_record, for_all
        self._changed: dict[Sender, list[bytes]] = {}  # since the last `news`: new orders
        self._acknowledge_at = 0.0
        self._loop, self._knows, self._happened = loop, knows, happened
        self._lines: dict[Sender, _Line] = {}
        self._callers: dict[int, _Line] = {}  # by file number: they have not said who they are

    def open(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        if self._for_all:
            self.path.chmod(0o666)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        for sender in list(self._lines):
            self.hang_up(sender)
        for fd in list(self._callers):
            self._forget_caller(fd)
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()

    def send(self, sender: Sender, order: WorkerOrder | RankOrder) -> None:
        """To a process that has called; one that dies meanwhile is noticed elsewhere. Goes out with the next
        `flush`, if what led to it must be on record first.
        """
        line, counts = self._lines.get(sender), self.counts.get(sender)
        if counts is None:
            return
        data = pack(order)
        counts.told += 1
        if self._keeps:
            counts.kept.append(data)
            self._changed.setdefault(sender, []).append(data)
        if line is not None:
            line.unsent += data
            if not self._keeps:
                self._write(sender, line)

    def flush(self) -> None:
        """Send what is on record, and what a worker had no room for."""
        if any(line.unsent for line in self._lines.values()):
            self._on_record()
            for sender, line in list(self._lines.items()):
                if line.unsent:
                    self._write(sender, line)

    def acknowledge(self, now: float) -> None:
        """Tell processes which reports they need not keep, every now and then."""
        if not self._keeps or now < self._acknowledge_at:
            return
        self._acknowledge_at = now + ACKNOWLEDGE_EVERY_S
        for sender, line in self._lines.items():
            if (number := self.counts[sender].heard) > line.acknowledged:
                line.acknowledged = number
                line.unsent += pack(ReportsHeard(number=number))

    def news(self) -> dict[Sender, tuple[Counts, list[bytes]]]:
        """For the record: those processes whose counts have changed since it was asked last, and the orders
        that are new.
        """
        changed, self._changed = self._changed, {}
        return {
            sender: (self.counts[sender], new) for sender, new in changed.items() if sender in self.counts
        }

    def forget(self, sender: Sender) -> None:
        """The process is gone."""
        self.hang_up(sender)
        self.counts.pop(sender, None)

    def drain(self, sender: Sender) -> None:
        """Hear a process's last words; it may have died at the door."""
        if sender not in self._lines:
            self._accept()
            for fd in list(self._callers):
                self._greet(fd)
        while self._listen(sender):
            pass

    def hang_up(self, sender: Sender) -> None:
        line = self._lines.pop(sender, None)
        if line is not None:
            self._loop.unwatch(line.socket.fileno())
            line.socket.close()

    # -------------------------------------------------------------- in and out

    def _write(self, sender: Sender, line: _Line) -> None:
        try:
            sent = line.socket.send(line.unsent, socket.MSG_DONTWAIT)
            del line.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            line.unsent.clear()  # it is dying: its pidfd says so
        if len(line.unsent) > MOST_UNSENT:
            line.unsent.clear()
            self._happened(ProcessMisspoke(sender, f"does not read: {MOST_UNSENT >> 20} MiB of orders wait"))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(MOST_UNGREETED):
                sock, _ = self._listener.accept()
                fd = sock.fileno()
                self._callers[fd] = _Line(sock)
                self._loop.watch(fd, lambda fd=fd: self._greet(fd))  # type: ignore[misc]
                if len(self._callers) > MOST_UNGREETED:
                    self._make_room()

    def _make_room(self) -> None:
        """Hang up on the oldest caller of the user with the most: who is honest says at once who it is."""
        users = {fd: _pid_and_user(caller.socket)[1] for fd, caller in self._callers.items()}
        (most, _), *_ = Counter(users.values()).most_common(1)
        self._forget_caller(next(fd for fd, user in users.items() if user == most))

    def _forget_caller(self, fd: int) -> None:
        self._loop.unwatch(fd)
        self._callers.pop(fd).socket.close()

    def _greet(self, fd: int) -> None:
        caller = self._callers.get(fd)
        if caller is None:
            return
        try:
            data = caller.socket.recv(1 << 12, socket.MSG_DONTWAIT)
            said = caller.unpacker.feed(data)
            hello = next(said, None)
        except BlockingIOError:
            return
        except (OSError, PeerError):
            hello, data = None, b""
        if hello is None and data and caller.unpacker.num_waiting <= MOST_HELLO:
            return  # the rest of it comes later
        self._loop.unwatch(fd)
        del self._callers[fd]
        if (
            not isinstance(hello, WorkerHello)
            or hello.protocol != PROTOCOL
            or not _is_honest(caller.socket, hello.pid)
        ):
            caller.socket.close()
            return
        sender = Sender(hello.task, hello.worker, hello.incarnation)
        if (sender in self._lines and not self._keeps) or not self._knows(sender, hello.pid):
            if self._keeps:  # of an agent whose record is lost: else it would call again and again
                with contextlib.suppress(OSError):
                    caller.socket.send(pack(EndWorker(gently=False)), socket.MSG_DONTWAIT)
            caller.socket.close()
            return
        self.hang_up(sender)
        self._lines[sender] = caller
        counts = self.counts.setdefault(sender, Counts())
        if self._keeps:
            self._changed.setdefault(sender, [])
            counts.took(hello.heard)
            caller.acknowledged = counts.heard
            caller.unsent += pack(ReportsHeard(number=counts.heard)) + b"".join(counts.kept)
        self._loop.watch(fd, lambda: self._listen(sender))
        self._happened(ProcessGreeted(sender))
        self._heard(sender, caller, b"")

    def _listen(self, sender: Sender) -> bool:
        """Hear what there is. False: nothing now."""
        line = self._lines.get(sender)
        if line is None:
            return False
        try:
            data = line.socket.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            if self._keeps and (counts := self.counts.get(sender)) is not None:
                self._on_record()
                with contextlib.suppress(OSError):  # it has said all it had to say, and waits for this
                    line.socket.send(pack(ReportsHeard(number=counts.heard)), socket.MSG_DONTWAIT)
            self.hang_up(sender)
            return False
        return self._heard(sender, line, data)

    def _heard(self, sender: Sender, line: _Line, data: bytes) -> bool:
        try:
            for said in line.unpacker.feed(data):
                if isinstance(said, OrdersHeard):
                    self.counts[sender].took(said.number)
                elif not isinstance(said, WorkerHello):
                    self.counts[sender].heard += 1
                    if self._keeps:
                        self._changed.setdefault(sender, [])
                    self._happened(ProcessSpoke(sender, said))
        except PeerError as error:
            self.hang_up(sender)
            self._happened(ProcessMisspoke(sender, f"said what is not a report: {error}"))
            return False
        return True
