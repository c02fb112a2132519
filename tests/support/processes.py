"""Waiting for what is to become true, and whether a process lives."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(holds: Callable[[], Any], what: str = "", within_s: float = 300.0, every_s: float = 0.01) -> Any:
    """What `holds` gives as soon as it is true. The limit only ends a test that would wait for ever."""
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(every_s)
    return found


def lives(pid: int) -> bool:
    """A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fill(disk: Path) -> None:
    """To the last byte."""
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(b"x" * 4096):
            pass
