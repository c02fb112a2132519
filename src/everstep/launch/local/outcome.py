"""The outcome of a run: one row per step, incidents, and the count of committed microbatches."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from everstep.core.words.actions import RecordStep
from everstep.core.words.incidents import Incident
from everstep.core.words.ops import Microbatch


@dataclass(slots=True, kw_only=True)
class StepRow:
    """One line of the step log."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    epoch: int
    attempt: int
    at: float

    def told(self) -> dict[str, Any]:
        """As the step log and the page have it."""
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "seconds": round(self.seconds, 6),
            "epoch": self.epoch,
            "attempt": self.attempt,
        }


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    rows: list[StepRow] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    issued: int = 0
    committed: int = 0
    replayed_elsewhere: int = 0
    failure: str | None = None
    refused_checkpoints: list[str] = field(default_factory=list)
    resumed_from: int = 0
    losses: dict[int, dict[Microbatch, float]] = field(default_factory=dict)

    def by_step(self) -> dict[int, StepRow]:
        """The valid row of each step: that of the last attempt."""
        return {row.step: row for row in self.rows}

    def add(self, record: RecordStep, *, now: float, since: float) -> StepRow:
        """A step is on record."""
        losses = dict(record.losses)
        row = StepRow(
            step=record.step,
            loss=sum(losses[m] for m in sorted(losses)) / len(losses) if losses else math.nan,
            grad_norm=record.norm,
            seconds=now - since,
            epoch=record.epoch,
            attempt=record.attempt,
            at=now,
        )
        if self.rows and row.step <= self.rows[-1].step:  # done again: the last time counts
            again = self.rows[-1].step - row.step + 1
            self.committed -= again * record.microbatches_committed
        self.rows.append(row)
        self.losses[row.step] = losses
        self.committed += record.microbatches_committed
        self.replayed_elsewhere += record.replayed_elsewhere
        return row


class StepLog:
    """One JSON line per step, in the log directory of the job."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / "steps.jsonl").open("a", encoding="utf-8")

    def write(self, row: StepRow) -> None:
        self._file.write(json.dumps(row.told()) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
