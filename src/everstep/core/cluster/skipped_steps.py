"""Steps without an update: the gradient was not finite, so the step was skipped.

One skipped step is part of training in low precision. Many in a row are an incident. A run of which every
step was skipped has trained nothing, and one that ends with many in a row nothing more: it fails, with the
reason.
"""

from __future__ import annotations

import math

from everstep.core.cluster.incidents import Incidents
from everstep.core.cluster.orders import Actions
from everstep.core.cluster.task import Task
from everstep.core.faults.severity import ErrorKind, known
from everstep.protocol.actions import RecordStep
from everstep.protocol.incidents import StepsSkipped
from everstep.protocol.moment import Moment
from everstep.protocol.work import mean_loss

MOST_IN_A_ROW = 10
NOT_FINITE = "its steps are skipped"  # what an incident says
KEPT_LOSSES = 64


class SkippedSteps:
    """Changes `task.progress.skips` and `task.progress.losses`."""

    def __init__(self, *, incidents: Incidents) -> None:
        self._incidents = incidents

    def recorded(self, task: Task, record: RecordStep, now: Moment) -> Actions:
        if not record.trains:  # the closing step has no gradient
            return []
        skips, losses = task.progress.skips, task.progress.losses
        for later in [step for step in losses if step >= record.step]:  # done again, from a kept state
            del losses[later]
        if (mean := mean_loss(record.losses)) is not None and math.isfinite(mean):
            losses[record.step] = mean
        while len(losses) > KEPT_LOSSES:
            del losses[min(losses)]
        skips.recorded += 1
        if math.isfinite(record.norm):
            skips.in_a_row = 0
            incident = self._incidents.about(task, StepsSkipped())
            outcome = f"step {record.step} was updated again"
            return [] if incident is None else self._incidents.close(incident, outcome, now)
        skips.in_a_row += 1
        skips.total += 1
        if skips.in_a_row == MOST_IN_A_ROW:
            self._tell(task, record.step, now)
        return []

    def why_failed(self, task: Task, now: Moment) -> str:
        """At the end of a run: empty, if its last steps were updated, but for a few."""
        skips = task.progress.skips
        all_skipped = bool(skips.recorded) and skips.total >= skips.recorded
        if not all_skipped and skips.in_a_row < MOST_IN_A_ROW:
            return ""
        if self._incidents.about(task, StepsSkipped()) is None:
            self._tell(task, task.steps, now)
        why = "were skipped, their gradients were not finite: nothing is trained"
        if all_skipped and skips.recorded == 1:
            return "the only step was skipped, its gradient was not finite: nothing is trained"
        if all_skipped:
            return f"all {skips.recorded} steps {why}"
        return (
            f"the last {skips.in_a_row} of {task.steps} steps {why} after step {task.steps - skips.in_a_row}"
        )

    def _tell(self, task: Task, step: int, now: Moment) -> None:
        incident = self._incidents.new(task=task, what=NOT_FINITE, now=now, step=step)
        incident.stops_training, incident.subject = False, StepsSkipped()
        count = task.progress.skips.in_a_row
        text = f"the gradients of {count} steps up to step {step} were not finite"
        if count == 1:
            text = f"the gradient of step {step} was not finite"
        self._incidents.tell(incident, "progress", (text,), now)
        self._incidents.judge(incident, known(ErrorKind.NOT_FINITE, text), now)
        because = "a skipped step changes no weight; a lower learning rate, other data or precision may help"
        self._incidents.treat(incident, "none: an operator can help", because, now)
