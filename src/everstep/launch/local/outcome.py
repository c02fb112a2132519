"""The outcome of a run: one row per step, incidents, and the count of committed microbatches."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from everstep.drive.step_rows import StepRow, StepRows
from everstep.log import LineFile, warn
from everstep.protocol.actions import RecordStep
from everstep.protocol.incidents import Incident
from everstep.protocol.ops import Microbatch


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    steps: StepRows = field(default_factory=lambda: StepRows(rows=deque()))
    incidents: list[Incident] = field(default_factory=list)
    issued: int = 0
    failure: str | None = None
    stopped: str = ""  # why before its last step: what a callback or a signal said
    ended: str = ""  # why it ended, and whether its last state is saved
    refused_checkpoints: list[str] = field(default_factory=list)
    resumed_from: int = 0
    saved: int = 0  # the newest step whose state is a checkpoint
    unsaved: bool = False  # the last state should be saved, and is not
    resumed_loss: float | None = None  # of that step, if its checkpoint says it
    losses: dict[int, dict[Microbatch, float]] = field(default_factory=dict)
    earlier_losses: dict[int, float] = field(default_factory=dict)  # of earlier starts
    earlier_norms: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # by the step evaluated

    @property
    def rows(self) -> list[StepRow]:
        return list(self.steps.rows)

    @property
    def committed(self) -> int:
        return self.steps.committed

    @property
    def replayed_elsewhere(self) -> int:
        return self.steps.replayed_elsewhere

    def by_step(self) -> dict[int, StepRow]:
        """The valid row of each step: that of the last attempt."""
        return {row.step: row for row in self.steps.rows}

    def all_losses(self) -> dict[int, float]:
        """Of every step, also of those that an earlier start has done."""
        known = {} if self.resumed_loss is None else {self.resumed_from: self.resumed_loss}
        now = {step: row.loss for step, row in self.by_step().items()}
        return dict(sorted({**known, **self.earlier_losses, **now}.items()))

    def all_grad_norms(self) -> dict[int, float]:
        rows = self.by_step().items()
        return dict(sorted({**self.earlier_norms, **{step: row.grad_norm for step, row in rows}}.items()))

    def add(self, record: RecordStep, now: float) -> StepRow:
        """A step is on record."""
        self.losses[record.step] = dict(record.losses)
        return self.steps.add(record, now)


class StepLog:
    """One JSON line per step, in the log directory of the job."""

    def __init__(self, folder: Path) -> None:
        self._file = rows_file(folder / "steps.jsonl")

    def write(self, row: StepRow) -> None:
        at = round(row.at - time.monotonic() + time.time(), 6)  # a run's own clock says nothing to others
        self._file.add(json.dumps(row.document() | {"at": at}))

    def close(self) -> None:
        if lost := self._file.close():
            warn(f"{self._file.path}: the last {lost} rows could not be written")


def rows_file(path: Path) -> LineFile:
    """A file that is there to be read later: what it cannot take does not stop training."""
    return LineFile(
        path,
        tell=lambda why: warn(f"{path} cannot be written ({why}); training continues, its rows are kept"),
    )
