"""Which workers make up each stage from which step on, in which epoch, and which attempt at a step counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.core.words.ops import Worker
from everstep.core.words.shape import Shape
from everstep.core.words.worker_messages import Members


@dataclass(slots=True, kw_only=True)
class Groups:
    shape: Shape
    epoch: int
    attempts: tuple[tuple[int, int], ...]  # (from this step on, attempt), ascending
    members: tuple[Members, ...] = ()

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def regroup(self, low: int, since: Mapping[Worker, int], *, restarting: frozenset[int]) -> None:
        """Form the groups from the step before `low` on, which may not be sealed everywhere yet.

        `since` has the first step of every member. A stage that still owes ops (`restarting`) forms a new
        group even with the same members: the new plan may give an op to a worker that has contributed
        already, and its part must not count without that op.
        """
        table = []
        for first in sorted({low - 1, *(step for step in since.values() if step >= low)}):
            live = tuple(
                tuple(sorted(w.replica for w, s in since.items() if w.stage == stage and s <= first))
                for stage in range(self.shape.stages)
            )
            if not all(live):
                continue
            rounds = tuple(
                self.epoch if stage in restarting else self._round(stage, first, live[stage])
                for stage in range(self.shape.stages)
            )
            table.append(Members(first, live, rounds))
        self.members = tuple(table)

    def _round(self, stage: int, step: int, live: tuple[int, ...]) -> int:
        fitting = [m for m in self.members if m.from_step <= step]
        if fitting and fitting[-1].live[stage] == live:
            return fitting[-1].rounds[stage]
        return self.epoch

    def without(self) -> frozenset[Worker]:
        """The places that take no part once every joiner that is let in has entered."""
        live = self.members[-1].live
        return frozenset(w for w in self.shape.workers() if w.replica not in live[w.stage])

    def attempt_of(self, step: int) -> int:
        """The attempt at a step that counts; exact for steps that are not recorded yet."""
        return [attempt for first, attempt in self.attempts if first <= step][-1]

    def void_from(self, step: int, *, recorded: int) -> None:
        """What was computed of this step and later ones does not count: they get a new attempt."""
        attempt = self.attempts[-1][1] + 1
        earlier = [(first, number) for first, number in self.attempts if first < step]
        settled = [number for first, number in earlier if first <= recorded][-1:]
        unrecorded = [(first, number) for first, number in earlier if first > recorded]
        self.attempts = ((0, settled[0] if settled else 0), *unrecorded, (step, attempt))
