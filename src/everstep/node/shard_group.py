"""The processes of one worker that has shards: forked from the first, which leads, and gone when it is.

    agent ──► worker = shard 0 ──fork──► shard 1, shard 2, …       a socket between shard 0 and each other one
                 │                          │
                 │ any shard ends ◄─────────┤  its socket closes: shard 0 says which one it was, and ends
                 └ shard 0 ends ───────────►┘  the kernel ends the others (PR_SET_PDEATHSIG)

So the group is what the agent sees as one process: it has one slot more per shard, and fails as one. Forked
before anything is loaded or opened: no thread, no socket, no CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.forked import leave_to_owner
from everstep.net.sockets import listening
from everstep.protocol import shard_messages as sh
from everstep.protocol.codec import Unpacker, pack
from everstep.store.owned_folders import new_folder

SHARDS = "everstep-shards-"  # folders where the shards of one worker meet
_PR_SET_PDEATHSIG = 1
_TRIES = 64  # to find neighbouring ports that are free


@dataclass(slots=True)
class ShardGroup:
    """As one shard sees it."""

    index: int
    count: int
    store: Path  # where the shards find each other for their collectives
    listener: socket.socket  # this shard's, for its peers in other workers
    lines: list[socket.socket]  # of the leader: to each follower; of a follower: to the leader
    pids: list[int] = field(default_factory=list)  # of the followers
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, message: sh.ToShard | sh.FromShard) -> None:
        data = pack(message)
        with self._lock:
            for line in self.lines:
                line.sendall(data)

    # -------------------------------------------------------------- the leader

    def watch(self, heard: Callable[[int, sh.FromShard], None], ended: Callable[[int, str], None]) -> None:
        """Hear the followers. `ended` is called in a thread of its own, and must not return."""
        for number, line in enumerate(self.lines, start=1):
            thread = threading.Thread(
                target=self._hear, args=(number, line, heard, ended), name=f"shard-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def wait(self) -> None:
        """Until every follower has left, with all it had to say."""
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self.store.parent, ignore_errors=True)

    def _hear(
        self,
        number: int,
        line: socket.socket,
        heard: Callable[[int, sh.FromShard], None],
        ended: Callable[[int, str], None],
    ) -> None:
        unpacker = Unpacker(sh.FromShard)
        with contextlib.suppress(OSError):
            while data := line.recv(1 << 16):
                for message in unpacker.feed(data):
                    heard(number, message)
        ended(number, self._end_of(number))

    def first_dead(self, within: float, *, but: int = 0) -> int | None:
        """A follower that has ended, or does so soon. When one ends, the collectives of the others fail:
        that is no fault of theirs.
        """
        deadline = time.monotonic() + within
        while True:
            for number, pid in enumerate(self.pids, start=1):
                with contextlib.suppress(ChildProcessError):
                    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                    if number != but and os.waitid(os.P_PID, pid, flags) is not None:
                        return number
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)

    def _end_of(self, number: int) -> str:
        try:
            _, status = os.waitpid(self.pids[number - 1], 0)
        except ChildProcessError:
            return "ended"
        if os.WIFSIGNALED(status):
            return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"exited with code {os.WEXITSTATUS(status)}"

    # -------------------------------------------------------------- a follower

    def follow(self, heard: Callable[[sh.ToShard], None]) -> None:
        """Hear the leader, in a thread; when it is gone, so is this process."""
        threading.Thread(target=self._follow, args=(heard,), name="leader", daemon=True).start()

    def _follow(self, heard: Callable[[sh.ToShard], None]) -> None:
        unpacker = Unpacker(sh.ToShard)
        with contextlib.suppress(OSError):
            while data := self.lines[0].recv(1 << 16):
                for message in unpacker.feed(data):
                    heard(message)
        os._exit(1)


def fork(count: int, host: str, folder: Path | None) -> ShardGroup:
    """Fork this process, which becomes shard 0. Returns in every one of them."""
    listeners = neighbouring_ports(host, count)
    # The lock stays open in all of them: a group that is killed leaves its folder to the next one here.
    root, _ = new_folder(SHARDS, folder or Path(tempfile.gettempdir()))
    parent = os.getpid()
    lines: list[socket.socket] = []
    pids: list[int] = []
    for index in range(1, count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _die_with(parent)
            leave_to_owner()
            ours.close()
            for line in lines:
                line.close()
            for number, listener in enumerate(listeners):
                if number != index:
                    listener.close()
            return ShardGroup(index, count, root / "store", listeners[index], [theirs])
        theirs.close()
        lines.append(ours)
        pids.append(pid)
    for listener in listeners[1:]:
        listener.close()
    return ShardGroup(0, count, root / "store", listeners[0], lines, pids)


def neighbouring_ports(host: str, count: int) -> list[socket.socket]:
    """Listening sockets on ports p, p + 1, …: a peer that knows the first knows them all."""
    for _ in range(_TRIES):
        found = [listening(host)]
        first = found[0].getsockname()[1]
        try:
            for port in range(first + 1, first + count):
                found.append(listening(host, port))
            return found
        except (OSError, OverflowError):
            for one in found:
                one.close()
    raise UserError(f"no {count} neighbouring ports are free on {host}; a worker with shards needs them.")


def _die_with(parent: int) -> None:
    """The kernel ends this process when its parent ends, however it ends."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)
