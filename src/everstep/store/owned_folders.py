"""Folders that belong to a living process: temporary files, states in memory, the checkpoints of a local run.

A process that is killed removes nothing. So its folder carries a lock that the system releases with the
process, and its fork server, which outlives it for a moment, or else the process that makes the next folder
of the kind, removes those whose lock is free. A lock, not a pid in the name: processes of different
containers share folders and not their pids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from everstep.errors import UserError

MEMORY = Path("/dev/shm")
LEAST_ROOM = 16 << 20
KINDS = tuple(
    f"everstep-{kind}-" for kind in ("beacons", "memory", "node", "run", "script", "shards", "snapshots")
)


def new_folder(prefix: str, root: Path) -> tuple[Path, int]:
    """An empty folder, and the lock that says it is in use. Folders of dead owners are removed first."""
    assert prefix in KINDS, f"{prefix} would not be found by remove_all_left"
    remove_left(prefix, root)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # another process clears up just now
            return folder, _locked(folder)


def remove_left(prefix: str, root: Path) -> None:
    """The folders of this kind whose owners are dead."""
    for left in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = _locked(left)
            shutil.rmtree(left)
            os.close(lock)


def remove_all_left() -> None:
    """Of every kind."""
    for root in {MEMORY, Path(tempfile.gettempdir())}:
        for prefix in KINDS:
            remove_left(prefix, root)


@contextlib.contextmanager
def temporary_folder(prefix: str, *, in_memory: bool = False) -> Iterator[Path]:
    """In the system's folder for temporary files, or in memory if there is room; removed at the end, or by
    the next process of its kind.
    """
    root = MEMORY if in_memory and _has_room(MEMORY) else Path(tempfile.gettempdir())
    folder, lock = new_folder(prefix, root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def one_run_at_a_time(folder: Path, key: str) -> Iterator[None]:
    """The only local run that writes checkpoints into this folder: two would damage each other's. `key`: of
    the job, for the sentence of the second one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder)
    except BlockingIOError:
        raise UserError(
            f"{key} {str(folder)!r} is in use by another run; give this one another folder, or end that one."
        ) from None
    except OSError:  # a file system without locks; or no folder at all, which saves will say
        yield
        return
    try:
        yield
    finally:
        os.close(lock)


def share(lock: int) -> None:
    """Others may hold this folder's lock too; it is in use as long as one of them does."""
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)


def shared(folder: Path) -> int:
    """The lock of a folder that others hold, or have just left."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        share(number)
    except OSError:
        os.close(number)
        raise
    return number


def _locked(folder: Path) -> int:
    """Hold the folder's lock, or raise."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number


def _has_room(root: Path) -> bool:
    with contextlib.suppress(OSError):
        found = os.statvfs(root)
        return os.access(root, os.W_OK) and found.f_bavail * found.f_frsize >= LEAST_ROOM
    return False
