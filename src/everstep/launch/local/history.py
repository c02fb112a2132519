"""Steps and evaluations of every start of a run, in one file beside its checkpoints.

A run that starts again after step s continues this file behind step s. Rows of later steps, which an earlier
start had reached without saving them, are done again, and have the same numbers; callbacks are not called
for them again. The file also has the settings that decide what is learnt, so that a start which
resumes with other ones says so.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.engine.datasets.order import RowOrder
from everstep.job.job import Job
from everstep.launch.local.outcome import Outcome, rows_file
from everstep.log import LineFile, say, warn

NAME = "history.jsonl"
MICROBATCHES, PER_MICROBATCH = "microbatches per step", "rows per microbatch"  # settings of a start
FIRST_ROW = "first row"  # where its rows continue (RowOrder.start); follows from the settings before it
Row = dict[str, Any]


@dataclass(slots=True)
class History:
    """Without a folder it remembers this start only."""

    folder: Path | None
    steps: dict[int, Row] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    settings: Row = field(default_factory=dict)  # of this start
    earlier: Row = field(default_factory=dict)  # of the one before
    _file: LineFile | None = None

    @staticmethod
    def of(job: Job) -> History:
        spec = job.checkpoint
        remote = spec is None or "://" in spec.folder
        return History.at(None if remote or spec is None else job.path(spec.folder), settings_of(job))

    @staticmethod
    def at(folder: Path | None, settings: Row | None = None) -> History:
        history = History(folder, settings=settings or {})
        history._read()
        return history

    def begin(self, resumed_from: int) -> None:
        """It is known now which step this start goes on from."""
        if self.folder is None:
            return
        path = self.folder / NAME
        if resumed_from == 0 and self.steps:  # another run, in the same folder
            with contextlib.suppress(OSError):
                path.rename(path.with_suffix(".before.jsonl"))
            self.steps.clear()
            self.evaluations.clear()
        self._file = rows_file(path)
        if resumed_from > 0 and (changed := changes(self.earlier, self.settings)):
            say(f"resumes with other settings than before: {changed}")
            # What an earlier start has done behind this step it has done with others.
            for table in (self.steps, self.evaluations):
                for step in [step for step in table if step > resumed_from]:
                    del table[step]
        if self.earlier != self.settings:
            self._write({"kind": "settings", "settings": self.settings})

    def step(self, row: Row) -> bool:
        """False: an earlier start, or an earlier attempt, has reported this step."""
        is_new = row["step"] not in self.steps
        self.steps[row["step"]] = row
        if is_new:
            self._write({"kind": "step", **row})
        return is_new

    def evaluated(self, step: int, values: dict[str, float]) -> bool:
        is_new = step not in self.evaluations
        self.evaluations[step] = values
        if is_new:
            self._write({"kind": "evaluation", "step": step, "values": values})
        return is_new

    def add_earlier(self, outcome: Outcome) -> None:
        """What earlier starts have done, up to where this one has begun."""
        earlier = {step: row for step, row in self.steps.items() if step <= outcome.resumed_from}
        outcome.earlier_losses = {step: float(row["loss"]) for step, row in earlier.items()}
        outcome.earlier_norms = {step: float(row["grad_norm"]) for step, row in earlier.items()}
        for step, values in self.evaluations.items():
            if step <= outcome.resumed_from:
                outcome.evaluations.setdefault(step, values)

    def close(self) -> None:
        if self._file is not None and (lost := self._file.close()):
            warn(f"{self._file.path}: the last {lost} rows could not be written")
        self._file = None

    def _write(self, line: Row) -> None:
        if self._file is not None:
            self._file.add(json.dumps(line))

    def _read(self) -> None:
        if self.folder is None or not (self.folder / NAME).is_file():
            return
        for text in (self.folder / NAME).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                if line.get("kind") == "settings":
                    self.earlier = dict(line["settings"])
                    continue
                kind, step = line.pop("kind"), int(line["step"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a line that a crash has cut off
            if kind == "step":
                self.steps[step] = line
            elif kind == "evaluation":
                self.evaluations[step] = dict(line["values"])


def settings_of(job: Job, order: RowOrder | None = None) -> Row:
    """What decides what is learnt; the shape, the number of steps and where things are do not. `order`: of
    the rows of the data set, where it has any.
    """
    words = job.to_dict()
    found = {key: words.get(key) for key in ("seed", "precision", "recompute", "compile")}
    found[MICROBATCHES] = job.microbatches_in_step
    for table in ("optimizer", "data"):
        found |= {f"{table}.{key}": value for key, value in (words.get(table) or {}).items()}
    found.pop("data.options", None)  # may name a folder of one start
    if order is not None:
        found |= {"rows of data": order.size, PER_MICROBATCH: order.rows, FIRST_ROW: order.start}
    written: Row = json.loads(json.dumps(found, default=str))  # as it will be read back
    return written


def changes(before: Row, now: Row) -> str:
    """In words; empty if nothing is known of before, or nothing differs."""
    shared = [key for key in now if key != FIRST_ROW and key in before and before[key] != now[key]]
    return ", ".join(f"{key} {before[key]} -> {now[key]}" for key in shared[:8])
