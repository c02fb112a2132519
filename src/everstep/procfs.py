"""What the kernel says about a process. Asked many times per second, so without paths and file objects."""

from __future__ import annotations

import contextlib
import os
import signal


def active_s(pid: int) -> float:
    """For how long its threads have run or waited for a CPU, since they were made."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0.0
    counted = [_read(f"/proc/{pid}/task/{thread}/schedstat").split() for thread in threads]
    return sum(int(ran) + int(waited) for ran, waited, _ in filter(None, counted)) / 1e9


def is_stopped(pid: int) -> bool:
    """Is it stopped, as by SIGSTOP?"""
    return _stat(pid)[:1] == [b"T"]


def is_traced(pid: int) -> bool:
    """Is it stopped by a debugger?"""
    return _stat(pid)[:1] == [b"t"]


def catches(pid: int, number: int) -> bool | None:
    """Has it a handler for this signal? None: there is no such process."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return None


def wait_status(pid: int) -> int | None:
    """Of a process that has ended and is not reaped yet, its own or another's child; None: there is none."""
    fields = _stat(pid)
    return int(fields[49]) if fields else None


def parent_of(pid: int) -> int:
    """0: there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def born(pid: int) -> int:
    """When it started, in clock ticks since the machine has; 0: there is no such process. A number is used
    again, with another time.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def end_leftovers(pid: int, started: int) -> None:
    """What a process that is gone, and was the leader of a session, has left in it. Its number cannot be
    another's while one of them lives, so where there is such a process again, there is none of them.
    """
    if born(pid) not in (0, started):
        return
    for each in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(int(each))
            try:
                if (fields := _stat(int(each))) and int(fields[3]) == pid and int(fields[19]) >= started:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _stat(pid: int) -> list[bytes]:
    """From its state on; empty: there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    """A small file; empty: it is not there, or not any more."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    except OSError:
        return b""
    finally:
        os.close(file)
