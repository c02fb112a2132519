"""Ranks seen from outside, without their help: state and CPU time from /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from everstep.forked import children_of
from everstep.ranks.words import Look

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def look(
    pid: int, *, output_bytes: int, family_cpu_s: float, entered: Mapping[str, int] | None = None
) -> Look | None:
    own = _stat(pid)
    if own is None:
        return None
    return Look(state=own[0], cpu_s=own[1] + family_cpu_s, output_bytes=output_bytes, entered=entered)


def io_bytes(pid: int) -> int:
    """Read and written by system calls on files and pipes, from its cache or from a disk."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def family_cpu_s(pid: int) -> float:
    """Of its descendants that live; a rank may leave all work to them."""
    return sum(stat[1] for child in family(pid) if (stat := _stat(child)) is not None)


def _stat(pid: int) -> tuple[str, float] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], sum(map(int, fields[11:15])) * _TICK_S  # own, and of children that are reaped


def family(pid: int) -> list[int]:
    """All descendants."""
    return [each for child in children_of(pid) for each in (child, *family(child))]


def started_with(variables: Collection[bytes]) -> list[int]:
    """Processes whose environment has one of these, as NAME=VALUE, from their first moment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it is gone, or another user's
                if not set(variables).isdisjoint((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def build_locks(pid: int) -> set[Path]:
    """Lock files of torch's extension builder (DeepSpeed's ops) that a process holds. They do not name their
    holder: one that was left by a killed process makes all others wait in `FileBaton.wait` without end.
    """
    found = set()
    with contextlib.suppress(OSError):  # it is gone
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                path = Path(fd.readlink())
                if path.name == "lock" and "torch_extensions" in str(path) and path.stat().st_size == 0:
                    found.add(path)
    return found


def handles(pid: int, signum: int) -> bool:
    """Has the process a handler for this signal? Sent without one, most signals end a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signum - 1) & 1)


def oom_kills() -> int:
    """OOM kills since the machine started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
