"""What the kernel says about a process."""

from __future__ import annotations

import contextlib
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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """0: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
