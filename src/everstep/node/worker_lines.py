"""The lines between an agent and the worker processes of its node: one Unix socket for all to call.

A process's first message says which one it is; what follows are its reports. Nothing blocks: a worker that is
stopped does not read, and what it has not read waits here, up to a bound.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from everstep.core.agent.agent_messages import ProcessEvent, ProcessGreeted, ProcessMisspoke, ProcessSpoke
from everstep.errors import PeerError
from everstep.protocol.codec import Unpacker, pack
from everstep.protocol.messages import FromWorker, RankOrder, Sender, WorkerHello, WorkerOrder
from everstep.protocol.table import PROTOCOL

MOST_UNSENT = 64 << 20  # bytes that one worker has not read
MOST_UNGREETED = 1024


class Loop(Protocol):
    """What the lines need of the loop they live in: asyncio's in the agent, a selector in a local run."""

    def watch(self, fd: int, ready: Callable[[], object]) -> None: ...

    def unwatch(self, fd: int) -> None: ...


@dataclass(slots=True)
class _Line:
    socket: socket.socket
    unpacker: Unpacker = field(default_factory=lambda: Unpacker(FromWorker))
    unsent: bytearray = field(default_factory=bytearray)


class WorkerLines:
    def __init__(
        self,
        loop: Loop,
        path: Path,
        *,
        knows: Callable[[Sender, int], bool],  # is there such a process, and is this its pid?
        happened: Callable[[ProcessEvent], None],
    ) -> None:
        self.path = path
        self._loop, self._knows, self._happened = loop, knows, happened
        self._lines: dict[Sender, _Line] = {}
        self._callers: dict[int, _Line] = {}  # by file number: they have not said who they are

    def open(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        for sender in list(self._lines):
            self.hang_up(sender)
        for fd, caller in list(self._callers.items()):
            self._loop.unwatch(fd)
            caller.socket.close()
        self._callers.clear()
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()

    def send(self, sender: Sender, order: WorkerOrder | RankOrder) -> None:
        """To a process that has called; one that dies meanwhile is noticed elsewhere."""
        line = self._lines.get(sender)
        if line is not None:
            line.unsent += pack(order)
            self._write(sender, line)

    def flush(self) -> None:
        """Try again what a worker had no room for."""
        for sender, line in list(self._lines.items()):
            if line.unsent:
                self._write(sender, line)

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
            while len(self._callers) < MOST_UNGREETED:
                sock, _ = self._listener.accept()
                fd = sock.fileno()
                self._callers[fd] = _Line(sock)
                self._loop.watch(fd, lambda fd=fd: self._greet(fd))  # type: ignore[misc]

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
        if hello is None and data:
            return  # the rest of it comes later
        self._loop.unwatch(fd)
        del self._callers[fd]
        if not isinstance(hello, WorkerHello) or hello.protocol != PROTOCOL:
            caller.socket.close()
            return
        sender = Sender(hello.task, hello.worker, hello.incarnation)
        if sender in self._lines or not self._knows(sender, hello.pid):
            caller.socket.close()
            return
        self._lines[sender] = caller
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
            self.hang_up(sender)
            return False
        return self._heard(sender, line, data)

    def _heard(self, sender: Sender, line: _Line, data: bytes) -> bool:
        try:
            for said in line.unpacker.feed(data):
                if not isinstance(said, WorkerHello):
                    self._happened(ProcessSpoke(sender, said))
        except PeerError as error:
            self.hang_up(sender)
            self._happened(ProcessMisspoke(sender, f"said what is not a report: {error}"))
            return False
        return True
