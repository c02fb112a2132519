"""A network switch in user space: every machine has one cable, and each direction of each cable can be bad.

Machines are network namespaces with a TAP device each; the switch holds the other end and passes frames on.
So loss, delay, bandwidth and cuts, also of one direction only, need no kernel module (`netem` is often not
there).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_LONGEST = 65_600  # bytes of a frame
_BACKLOG_S = 1.0  # of a slow cable; what waits longer is dropped
BROADCAST = b"\xff" * 6


@dataclass(slots=True)
class Cable:
    """One direction of a machine's cable."""

    is_cut: bool = False
    loss: float = 0.0  # probability
    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: as fast as the switch
    free_at: float = 0.0


class UserSwitch:
    """Frames from every port to every other. `out` and `into` of a port are its two directions."""

    def __init__(self, seed: int = 0) -> None:
        self.out: dict[str, Cable] = {}
        self.into: dict[str, Cable] = {}
        self.frames = 0
        self._fds: dict[str, int] = {}
        self._macs: dict[bytes, str] = {}
        self._random = random.Random(seed)
        self._later: list[tuple[float, int, str, bytes]] = []
        self._is_over = threading.Event()
        self._changed = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        os.write(self._changed[1], b"x")
        self._thread.join(5)
        for fd in self._fds.values():
            os.close(fd)

    def plug_in(self, name: str, mac: bytes, netns: int | None, device: str) -> None:
        """A TAP device in the network namespace of this process id, or in ours."""
        self.out[name], self.into[name] = Cable(), Cable()
        self._macs[mac] = name
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(_tap(netns, device)))
        thread.start()
        thread.join()
        self._fds[name] = found[0]
        os.write(self._changed[1], b"x")

    def unplug(self, name: str) -> None:
        """The machine is off; its device went with its namespace."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.write(self._changed[1], b"x")
            time.sleep(0.05)
            os.close(fd)
        self._macs = {mac: of for mac, of in self._macs.items() if of != name}

    def heal(self, names: Iterable[str]) -> None:
        for name in names:
            self.out[name], self.into[name] = Cable(), Cable()

    def _run(self) -> None:
        while not self._is_over.is_set():
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                _, _, name, frame = heapq.heappop(self._later)
                self._deliver(name, frame)
            wait = max(0.0, self._later[0][0] - now) if self._later else 0.5
            fds = dict(self._fds)
            by_fd = {fd: name for name, fd in fds.items()}
            try:
                ready, _, _ = select.select([*by_fd, self._changed[0]], [], [], wait)
            except (OSError, ValueError):  # unplugged meanwhile
                continue
            for fd in ready:
                if fd == self._changed[0]:
                    os.read(fd, 4096)
                else:
                    self._take(by_fd[fd], fd)

    def _take(self, source: str, fd: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(fd, _LONGEST)
            except OSError:
                return
            self.frames += 1
            target = frame[:6]
            if target in self._macs:
                self._pass_on(source, self._macs[target], frame)
            elif target[0] & 1:
                for name in list(self._fds):
                    if name != source:
                        self._pass_on(source, name, frame)

    def _pass_on(self, source: str, target: str, frame: bytes) -> None:
        now = at = time.monotonic()
        for cable in (self.out[source], self.into[target]):
            if cable.is_cut or (cable.loss and self._random.random() < cable.loss):
                return
            if cable.bytes_per_s:
                if cable.free_at - now > _BACKLOG_S:
                    return
                cable.free_at = max(now, cable.free_at) + len(frame) / cable.bytes_per_s
                at = max(at, cable.free_at)
            at += cable.delay_s
        if at <= now:
            self._deliver(target, frame)
        else:
            heapq.heappush(self._later, (at, self.frames, target, frame))

    def _deliver(self, name: str, frame: bytes) -> None:
        fd = self._fds.get(name)
        if fd is not None:
            try:
                os.write(fd, frame)
            except OSError:
                return


def _tap(pid: int | None, device: str) -> int:
    """Opened in a thread of its own: a network namespace is a thread's."""
    if pid is not None:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd
