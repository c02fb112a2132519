"""An update on trial: the job before it comes back if the new one does not start, slows down or learns worse.

update asked for ──► step boundary ──► workers of the new job start ──► step 1 … step N ──► it stays
                                          │ one raises or ends            │ loss or pace leaves its band
                                          └──────────────► the job before it, from the newest state
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median

from everstep.protocol.messages import UpdateRequested
from everstep.protocol.shape import Shape
from everstep.protocol.table import Json

NUM_JUDGED = 5  # steps: one alone says little


@dataclass(slots=True)
class Trial:
    """Of a task's update. `Training` changes it."""

    job: Json  # the one before
    shape: Shape
    request: UpdateRequested
    num_steps: int = 0  # of the new job
    last_at: float | None = None
    losses: list[float] = field(default_factory=list)
    num_skipped: int = 0  # in a row: their gradients were not finite
    seconds: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.num_steps >= self.request.steps

    def recorded(self, losses: list[float], at: float, *, norm: float = 0.0) -> str:
        """A step of the new job, and the norm of its gradient. Why the job must go; empty: it stays so far.
        The first step is not timed: it holds the start.
        """
        self.num_steps += 1
        if self.last_at is not None:
            self.seconds.append(at - self.last_at)
        self.last_at = at
        self.losses.append(fmean(losses) if losses else math.nan)
        self.num_skipped = 0 if math.isfinite(norm) else self.num_skipped + 1
        return self._nothing_is_learned() or self._loss_is_out() or self._pace_is_out()

    def _nothing_is_learned(self) -> str:
        """A skipped step changes no weight, so its loss can stay in the band. A few are usual in fp16."""
        if self.num_skipped < min(NUM_JUDGED, self.request.steps):
            return ""
        return f"the gradients of {self.num_skipped} steps in a row were not finite"

    def _loss_is_out(self) -> str:
        loss, most = self.losses[-1], self.request.most_loss
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        recent = self.losses[-NUM_JUDGED:]
        if most is None or len(recent) < min(NUM_JUDGED, self.request.steps) or fmean(recent) <= most:
            return ""
        return f"the loss is {fmean(recent):.4g} on average, above {most:.4g}"

    def _pace_is_out(self) -> str:
        most = self.request.most_step_s
        enough = len(self.seconds) >= min(NUM_JUDGED, self.request.steps - 1)
        if most is None or not self.seconds or not enough or median(self.seconds) <= most:
            return ""
        return f"a step takes {median(self.seconds):.3g} s, more than {most:.3g} s"
