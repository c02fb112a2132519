"""Where the threads of a worker are right now, for people who look.

`py-spy` is asked where it is installed, because it also sees C++ frames. Otherwise the worker itself writes
its stacks when it gets a signal (faulthandler; it works while the interpreter's lock is held). A process that
has not got that far yet is left alone: the signal would end it.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, TextIO

from everstep import procfs

SIGNAL = signal.SIGUSR2
WITHIN_S, LOOK_S = 2.0, 0.02
PY_SPY_S = 10.0
MOST_BYTES = 1 << 18
_files: list[TextIO] = []  # faulthandler keeps a number only, so the file must not be closed


def answer_to_signal(beacon: Path) -> None:
    """In a worker, at its beginning."""
    try:
        file = place_of(beacon).open("w")
    except OSError:  # it trains without
        return
    _files.append(file)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def place_of(beacon: Path) -> Path:
    return beacon.with_name(f"{beacon.name}.stacks")


def stacks_of(pid: int, beacon: Path) -> dict[str, Any]:
    """How they were read, and the text; or why there is none."""
    if (tool := shutil.which("py-spy")) is not None:
        try:
            is_held = procfs.is_stopped(pid) or procfs.is_traced(pid)
            how = "--nonblocking" if is_held else "--native"  # it cannot suspend what is stopped
            command = [tool, "dump", how, "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S)
        except (OSError, subprocess.TimeoutExpired):
            pass  # then the worker is asked itself
        else:
            if done.returncode == 0:
                return {"how": "py-spy", "text": done.stdout[:MOST_BYTES]}
    return _asked(pid, place_of(beacon))


def _asked(pid: int, path: Path) -> dict[str, Any]:
    try:
        answers = procfs.catches(pid, SIGNAL)
        if answers is None:
            return {"error": "its process is gone"}
        if not answers:
            return {"error": "it has not begun to train: its code is still being loaded"}
        before = path.stat().st_size
        os.kill(pid, SIGNAL)
        size, deadline = before, time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            last, size = size, path.stat().st_size
            if before < size == last:
                break
        with path.open("rb") as file:
            file.seek(before)
            text = file.read(MOST_BYTES).decode(errors="replace")
    except OSError as error:
        return {"error": f"its process is gone ({error.strerror})"}
    if not text:
        return {"error": f"it does not answer within {WITHIN_S:g} s: it is stopped, or in the kernel"}
    return {"how": "faulthandler", "text": text}
