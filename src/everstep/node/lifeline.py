"""Know of a death before the kernel has cleared up after it.

A pidfd speaks when a process is gone for good, and a training process takes tens of milliseconds to go: its
memory is unmapped first. But the very first thing the kernel does for a dying thread is to release the robust
mutexes it holds, so that others need not wait for the dead. So a worker holds one, in memory it shares with
its agent, and a thread of the agent waits for it: that wait ends about a millisecond after a SIGKILL.

    worker   lock ───────────────── SIGKILL ─► released ─► memory unmapped ─► files closed ─► pidfd readable
    agent         wait for the lock ···········┘ EOWNERDEAD: it is dead                          ┘ it is gone

Where robust mutexes are missing, `hold` and `wait` say so and the pidfd alone has to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

SIZE = 64  # a pthread_mutex_t has 40 to 48 bytes
_PROCESS_SHARED, _ROBUST, _OWNER_DEAD = 1, 1, 130


class Lifeline:
    """One mutex in a file both sides map."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._mutex = (ctypes.c_char * SIZE).from_buffer(self._map)
        self._libc = ctypes.CDLL(None, use_errno=True)
        if create:
            self._make()

    def _make(self) -> None:
        attributes = ctypes.create_string_buffer(SIZE)
        with contextlib.suppress(AttributeError):
            self._libc.pthread_mutexattr_init(attributes)
            self._libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
            self._libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
            self._libc.pthread_mutex_init(self._mutex, attributes)

    def hold(self) -> bool:
        """By the worker's main thread, for as long as it lives. False: not possible here."""
        try:
            return bool(self._libc.pthread_mutex_lock(self._mutex) == 0)
        except AttributeError:
            return False

    def watch(self, died: Callable[[], None]) -> None:
        """By the agent, once the worker holds it: calls `died` from a thread of its own."""

        def wait() -> None:
            with contextlib.suppress(AttributeError):
                if self._libc.pthread_mutex_lock(self._mutex) == _OWNER_DEAD:
                    died()

        threading.Thread(target=wait, name="lifeline", daemon=True).start()


class Bell:
    """Wakes a loop from any thread: what was rung is handed over there."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rung: list[object] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def ring(self, what: object) -> None:
        with self._lock:
            if not self._is_closed:  # else its number may be another file's by now
                self._rung.append(what)
                os.eventfd_write(self.fd, 1)

    def take(self) -> list[object]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        with self._lock:
            rung, self._rung = self._rung, []
        return rung

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.fd)
