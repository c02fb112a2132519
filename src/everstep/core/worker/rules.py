"""What a task fixes for all its workers, and what follows from a gradient's norm."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRules:
    replicas: int
    stages: int
    microbatches: int
    steps: int
    clip: float | None = None
    stagger: str = "auto"  # "auto", "always", "never"
    eager_below: float = 0.5  # auto: step eagerly while the last norm is below this share of the clip
    tied: tuple[int, int] | None = None  # the two stages that hold one tied tensor, lower first
    closes: bool = False  # the last step only evaluates: its state is that of the step before
    checkpoint_every: int = 0
    chunks: int = 0  # sharded: of each stage's optimizer state
    copy_every: int = 0  # steps between two copies of the state in memory that outlives the worker
    vote_every: int = 0  # steps between two votes on what is computed; 0: there are none
    vote_all: bool = False  # in such a step all microbatches are computed again; else one of each replica
    replays: bool = False  # a step with a NaN is computed again before it counts
    spike: float = 0.0  # and one whose loss is so many spreads above those before it; 0: none is

    @property
    def total_microbatches(self) -> int:
        return self.replicas * self.microbatches

    def scale(self, norm: float) -> float | None:
        """What the gradient is multiplied with; None skips the step."""
        if not math.isfinite(norm):
            return None
        return 1.0 if self.clip is None or norm <= self.clip else self.clip / norm

    def can_be_eager(self, step: int) -> bool:
        """Whatever the norms are."""
        return not (self.chunks or self.stagger == "never" or step == self.steps or self.stages == 1)

    def allows_eager(self, step: int, last_norm: float | None) -> bool:
        """May a stage step before the norm of all stages is known?

        Where recent norms are near the clip it would often be undone, so it waits. The last step waits too:
        no step follows that could begin earlier.
        """
        if not self.can_be_eager(step):
            return False
        if self.stagger == "always":
            return True
        if last_norm is None or not math.isfinite(last_norm):
            return False
        return self.clip is None or last_norm < self.eager_below * self.clip

    def is_voted(self, step: int, number: int | None = None) -> bool:
        """Are microbatches of a step computed again by peers, and this one of each replica among them? Every
        few steps, and where the state is saved: what is saved shall be verified.
        """
        if not self.vote_every or (self.closes and step >= self.steps):
            return False
        if step % self.vote_every and not self._is_saved(step):
            return False
        return number is None or self.vote_all or number == self.turn(step) % self.microbatches

    def is_compared(self, step: int) -> bool:
        """Are states compared, though no microbatch is computed again? What was saved is what is compared."""
        return bool(self.vote_every) and step > 1 and self._is_saved(step - 1)

    def _is_saved(self, step: int) -> bool:
        return bool(self.checkpoint_every) and step % self.checkpoint_every == 0

    def turn(self, step: int) -> int:
        """Counts the votes: who checks whom, and which microbatch, goes round."""
        return step // max(1, self.vote_every)

    def is_tied(self, stage: int) -> bool:
        return self.tied is not None and stage in self.tied

    def other_tied(self, stage: int) -> int:
        """The stage that holds the other half of the tied tensor."""
        assert self.tied is not None
        lower, higher = self.tied
        return higher if stage == lower else lower
