"""What is over, for as long as its file lasts: closed incidents and ended tasks, one JSON line each.

The coordinator forgets old incidents and tasks, so that it stays small; here they can still be found. The
file is in the coordinator's folder and begins again at `MOST_BYTES`; before that is archive.jsonl.1. It
is derived from the journal: what a crash left out is added when the coordinator leads again, as far as the
journal still has it. A full disk costs lines, not the coordinator; and what is in the file is read beside
the event loop, as it may be 128 MB: decisions do not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from everstep.core.cluster.task import OVER, Task
from everstep.log import warn
from everstep.protocol.incidents import Incident
from everstep.server import views
from everstep.server.record import ClusterRecord

MOST_BYTES = 64 << 20


Archived = tuple[set[int | None], set[tuple[str | None, int]]]


def _values(of: Any) -> Iterator[str]:
    """All texts and numbers in a row, not the names that it has for them."""
    if isinstance(of, Mapping):
        of = of.values()
    elif not isinstance(of, list):
        yield str(of).casefold()
        return
    for one in of:
        yield from _values(one)


class Archive:
    def __init__(self, record: ClusterRecord, folder: Path) -> None:
        self._record, self._path = record, folder / "archive.jsonl"
        self._is_complete = False
        self._reading: asyncio.Future[Archived] | None = None
        self._failed = False

    def hear(self, news: Mapping[str, Any]) -> None:
        """A listener of the record."""
        if not self._record.leads:
            self._is_complete, self._reading = False, None
            return
        if not self._is_complete:
            if self._reading is None:
                self._begin()  # and adds what is heard until it has been read
            return
        match news["kind"]:
            case "IncidentClosed":
                self._keep([self._incident(i) for i in self._closed() if i.number == news["incident"]])
            case "TaskEnded" if (task := self._record.machine.tasks.get(news["task"])) is not None:
                if task.state in OVER:
                    self._keep([self._task(task)])

    def close(self) -> None: ...

    def search(self, *, text: str, since: float, last: int) -> list[dict[str, Any]]:
        """The newest first. `text`: in any of its values, whatever the case."""
        part = text.casefold()
        found = [
            row for row in self._rows(text) if row["at"] >= since and any(part in v for v in _values(row))
        ]
        return list(reversed(found[-last:]))

    def incident(self, number: int) -> dict[str, Any] | None:
        found = (row for row in self._rows(str(number)) if row.get("number") == number)
        return next(found, None)

    # -------------------------------------------------------------- rows

    def _closed(self) -> list[Incident]:
        return [one for one in self._record.machine.log.incidents if one.resumed_at is not None]

    def _incident(self, one: Incident) -> dict[str, Any]:
        row = views.incident(self._record, one)
        return {"kind": "incident", "at": row["closed_at"], **row}

    def _task(self, task: Task) -> dict[str, Any]:
        row = views.task_row(self._record, task)
        account = self._record.accounts.tasks.get(task.name)
        kept = ("task", "owner", "state", "because", "shape", "step", "steps", "loss", "goodput")
        return {
            "kind": "task",
            "at": task.ended_at + self._record.ahead_s,
            "submitted_at": task.submitted_at + self._record.ahead_s,
            **{key: row[key] for key in kept},
            "lost_s": {} if account is None else {k: round(v, 3) for k, v in account.lost().items() if v},
        }

    def _begin(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._complete(self._archived())
        self._reading = loop.run_in_executor(None, self._archived)
        self._reading.add_done_callback(self._has_read)

    def _has_read(self, reading: asyncio.Future[Archived]) -> None:
        if reading is self._reading and not reading.cancelled():
            self._complete(reading.result())

    def _archived(self) -> Archived:
        """By number and by name and time: both count up."""
        numbers, tasks = set(), set()
        for row in self._rows(""):
            numbers.add(row.get("number"))
            tasks.add((row.get("task"), round(row["at"])))
        return numbers, tasks

    def _complete(self, archived: Archived) -> None:
        """Add what the file lacks."""
        numbers, tasks = archived
        self._is_complete, self._reading = True, None
        over = [task for task in self._record.machine.tasks.values() if task.state in OVER]
        rows = [self._incident(one) for one in self._closed() if one.number not in numbers]
        rows += [row for row in map(self._task, over) if (row["task"], round(row["at"])) not in tasks]
        self._keep(sorted(rows, key=lambda row: row["at"]))

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                size = file.tell()
                try:
                    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                    file.write("".join(lines).encode(errors="replace"))
                    file.flush()
                except OSError:
                    os.ftruncate(file.fileno(), size)
                    raise
                size = file.tell()
            if size > MOST_BYTES:
                os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                warn(f"coordinator: {self._path} cannot be written: {error.strerror}")

    def _rows(self, text: str) -> Iterator[dict[str, Any]]:
        """In the order they were written; of those without this text in their line, none is read."""
        part = json.dumps(text, ensure_ascii=False)[1:-1].casefold()
        for path in (self._path.with_name(f"{self._path.name}.1"), self._path):
            try:
                with path.open("rb") as file:
                    for line in file:
                        if part in line.decode(errors="replace").casefold():
                            try:
                                row = json.loads(line)
                            except ValueError:  # half a line, by a crash
                                continue
                            yield row
            except OSError:
                continue
