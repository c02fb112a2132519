"""The files with what workers print: where each is, also once its task is over, and parts of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everstep.errors import UserError
from everstep.log import trim
from everstep.protocol.ops import Worker

MOST_PATHS = 10_000
TRIM_EVERY_S = 10.0


class WorkerLogs:
    def __init__(self, folder: Path) -> None:
        """`folder`: for jobs that name none."""
        self.folder = folder
        self._paths: dict[tuple[str, Worker], Path] = {}

    def path(self, task: str, worker: Worker, folder: str | None) -> Path:
        """Where a worker is to print. `folder`: of its job, if that names one."""
        found = self.folder / f"{task}-{_name(worker)}" if folder is None else Path(folder, _name(worker))
        with contextlib.suppress(OSError):  # it trains without
            found.parent.mkdir(parents=True, exist_ok=True)
        self._paths[task, worker] = found
        while len(self._paths) > MOST_PATHS:
            del self._paths[next(iter(self._paths))]
        return found

    def trim(self, workers: Iterable[tuple[str, Worker]]) -> None:
        """Of workers that run: their logs keep to a size."""
        for known in workers:
            if (path := self._paths.get(known)) is not None:
                trim(path)

    def read(self, task: str, worker: Worker, *, most: int, start: int | None = None) -> dict[str, Any]:
        """The end of what a worker has printed here, or what follows `start`: text, where it ends, and when
        it was written.
        """
        path = self._paths.get((task, worker), self.folder / f"{task}-{_name(worker)}")
        if not path.is_file():
            raise UserError(f"worker {worker} of {task} has printed nothing here.")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - most) if start is None or start > size else start
            file.seek(begin)
            data = file.read(most)
            at = os.fstat(file.fileno()).st_mtime
        return {"text": data.decode(errors="replace"), "next": begin + len(data), "at": at}


def _name(worker: Worker) -> str:
    return f"worker-{worker.replica}-{worker.stage}.log"
