"""The rows of each task's steps as files: tasks/NAME.jsonl, one JSON line per step.

The files are derived from the journal. A crash between journal and file leaves lines out, and perhaps half a
line; a full disk does too. What is missing is written when the coordinator starts, or when the disk takes it
again: a row that is in the journal is in its file in the end.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MOST_HELD = 2000  # rows of a task that wait for the disk
_NAME = ("at", "step", "epoch", "attempt")  # of a row
_TAIL_BYTES = 1 << 16  # the last line is shorter than this


class StepFiles:
    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder / "tasks", say
        self._held: dict[str, deque[dict[str, Any]]] = {}  # rows that could not be written

    def append(self, task: str, row: dict[str, Any]) -> None:
        held = self._held.setdefault(task, deque(maxlen=MOST_HELD))
        held.append(row)
        try:
            self._write(task, held)
        except OSError as error:
            if len(held) == 1:
                self._say(
                    f"the step log of task {task} cannot be written ({error.strerror}); it is tried again"
                )
        else:
            del self._held[task]

    def complete(self, task: str, rows: Sequence[dict[str, Any]]) -> None:
        """After a restart: add the rows that the file lacks, `rows` being the newest of the task."""
        try:
            last = self._mend(self._path(task))
        except OSError as error:
            self._say(f"the step log of task {task} cannot be read ({error.strerror})")
            return
        for row in _after(rows, last):
            self.append(task, row)

    def _write(self, task: str, rows: Sequence[dict[str, Any]]) -> None:
        path = self._path(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with path.open("ab") as file:
            size = file.tell()
            try:
                file.write(lines)
                file.flush()
            except OSError:
                os.ftruncate(file.fileno(), size)  # no half of a line stays
                raise

    def _mend(self, path: Path) -> dict[str, Any] | None:
        """Cut off half a line, if a crash left one; the last whole row."""
        if not path.exists():
            return None
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            tail = file.read()
            whole = tail[: tail.rfind(b"\n") + 1]
            if len(whole) < len(tail):
                file.truncate(start + len(whole))
        lines = whole.splitlines()
        return dict(json.loads(lines[-1])) if lines else None

    def _path(self, task: str) -> Path:
        return self._folder / f"{task}.jsonl"


def _after(rows: Sequence[dict[str, Any]], last: dict[str, Any] | None) -> Sequence[dict[str, Any]]:
    """The rows that follow this one. Not by time alone: rows that were journaled at once have one time."""
    if last is None:
        return rows
    same = [number for number, row in enumerate(rows) if all(row[key] == last.get(key) for key in _NAME)]
    if same:
        return rows[same[-1] + 1 :]
    return [row for row in rows if row["at"] > last["at"]]
