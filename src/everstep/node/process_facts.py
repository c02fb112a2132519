"""What the kernel says about a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def active_s(pid: int) -> float:
    """For how long its threads have run or waited for a CPU, since they were made."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):
            ran, waited, _ = path.read_text().split()
            total += int(ran) + int(waited)
    return total / 1e9


def is_stopped(pid: int) -> bool:
    """Is it stopped, as by SIGSTOP?"""
    return _stat(pid)[:1] == [b"T"]


def parent_of(pid: int) -> int:
    """0: there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[bytes]:
    """From its state on; empty: there is no such process. Asked many times per second, so without a file
    object."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return []
    try:
        return os.read(file, 4096).rpartition(b")")[2].split()
    except ProcessLookupError:
        return []
    finally:
        os.close(file)
