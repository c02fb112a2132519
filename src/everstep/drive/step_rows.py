"""The rows of a task's steps: built here and nowhere else, for the step log, the page and the outcome."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from everstep.protocol import messages as msg
from everstep.protocol.actions import RecordStep
from everstep.protocol.table import Document, Json
from everstep.protocol.work import mean_loss

KEPT_ROWS = 2000  # of a task, for those who look
LOSS = "loss"  # what every evaluation finds first
KEPT_EVALUATIONS = 200
KEPT_LOST = 200  # stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One line of the step log."""

    step: int
    loss: float
    grad_norm: float
    seconds: float
    epoch: int
    attempt: int
    at: float

    def document(self) -> Document:
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "seconds": round(self.seconds, 6),
            "epoch": self.epoch,
            "attempt": self.attempt,
            "at": round(self.at, 6),
        }


@dataclass(slots=True, kw_only=True)
class StepRows:
    """Of one task. Counts are of all its rows, also of those that are no longer kept."""

    rows: deque[StepRow] = field(default_factory=lambda: deque(maxlen=KEPT_ROWS))
    last_at: float = 0.0  # when the last step was recorded, or training began
    first: int = 0
    last: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)  # first and last of steps that have no rows
    made: int = 0  # steps, also those that were made before
    committed: int = 0  # microbatches
    replayed_elsewhere: int = 0
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # by the step that was evaluated

    def evaluate(self, record: RecordStep, names: Iterable[str]) -> dict[str, float]:
        """The scores that a step brought along: those of the weights after the step before."""
        found = means(names, (line for _, line in record.scores))
        for later in [step for step in self.evaluations if step >= record.step]:  # of steps done again
            del self.evaluations[later]
        self.evaluations[record.step - 1] = found
        while len(self.evaluations) > KEPT_EVALUATIONS:
            del self.evaluations[min(self.evaluations)]
        return found

    def shift(self, seconds: float) -> None:
        """Bring the times to another clock."""
        self.last_at += seconds
        shifted = [replace(row, at=row.at + seconds) for row in self.rows]
        self.rows.clear()
        self.rows.extend(shifted)

    def begin(self, now: float, *, done: int = 0, microbatches: int = 0) -> None:
        """Workers are ordered to continue: the first step's time starts here. `done`: the last step in the
        state that they have. Where it is later than the last row, from a checkpoint that was written while no
        coordinator was there or that an older journal does not know, the steps between were done once too.
        """
        self.last_at = self.last_at or now
        if 0 < self.last < done:
            self.committed += (done - self.last) * microbatches
            self.made += done - self.last
            self.lost = [*self.lost, (self.last + 1, done)][-KEPT_LOST:]
            self.last = done

    def add(self, record: RecordStep, now: float) -> StepRow:
        loss = mean_loss(record.losses)
        row = StepRow(
            step=record.step,
            loss=math.nan if loss is None else loss,
            grad_norm=record.norm,
            seconds=now - self.last_at if self.last_at else 0.0,
            epoch=record.epoch,
            attempt=record.attempt,
            at=now,
        )
        self.rows.append(row)
        self.made += 1
        self.last_at = now
        self.first = min(self.first or record.step, record.step)
        if record.step <= self.last:  # done again, from a kept state: only the last time counts
            self.committed -= (self.last - record.step + 1) * record.microbatches_committed
            self.lost = [
                (first, min(last, record.step - 1)) for first, last in self.lost if first < record.step
            ]
        self.last = record.step
        self.committed += record.microbatches_committed
        self.replayed_elsewhere += record.replayed_elsewhere
        return row


def metric_names(job: Mapping[str, Json]) -> tuple[str, ...]:
    """What an evaluation finds, by the words of a job."""
    metrics = (job.get("evaluation") or {}).get("metrics") or ()
    return (LOSS, *(str(name).rpartition(":")[2] for name in metrics))


def means(names: Iterable[str], lines: Iterable[tuple[float, ...]]) -> dict[str, float]:
    """The value of every metric, from the lines of all microbatches. A LightningModule may log metrics and no
    loss, which then has no weight and is left out.
    """
    columns = list(zip(*(line for line in lines if line), strict=True))
    found = {}
    for number, name in enumerate(names):
        if not columns:
            return {}
        total, weight = math.fsum(columns[2 * number]), math.fsum(columns[2 * number + 1])
        if weight or name != LOSS:
            found[name] = total / weight if weight else math.nan
    return found


def begins_training(action: msg.ClusterAction) -> bool:
    order = action.order if isinstance(action, msg.Dispatch) else None
    return isinstance(order, msg.ResumeTask)


def rows_from(document: Mapping[str, Json]) -> StepRows:
    """What `rows_document` has written."""
    plain = {name: value for name, value in document.items() if name not in ("rows", "evaluations", "lost")}
    rows = StepRows(**plain)
    rows.lost = [(first, last) for first, last in document.get("lost", ())]
    rows.evaluations = {int(step): dict(values) for step, values in document.get("evaluations", ())}
    rows.rows.extend(StepRow(**row) for row in document["rows"])
    return rows


def rows_document(rows: StepRows) -> Document:
    return {
        "rows": [row.document() for row in rows.rows],
        "last_at": rows.last_at,
        "first": rows.first,
        "last": rows.last,
        "lost": [list(steps) for steps in rows.lost],
        "made": rows.made,
        "committed": rows.committed,
        "replayed_elsewhere": rows.replayed_elsewhere,
        "evaluations": [[step, values] for step, values in sorted(rows.evaluations.items())],
    }
