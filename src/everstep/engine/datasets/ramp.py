"""A batch that grows with the step: in early steps only a share of the microbatches count.

    share 0.5 of 8    microbatch 0 1 2 3 4 5 6 7
                      counts       x   x   x   x       spread evenly, so over the replicas too

The others are in the schedule as always and do nothing: they have no data, no loss and the weight 0. So every
step has its microbatches whatever its share is, and a death, a change of shape or a resumed run meets nothing
new. Those that count take the data one after the other: nothing of it is skipped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchRamp:
    phases: tuple[tuple[int, int], ...]  # from which step on, how many microbatches count; the first from 1
    microbatches: int  # in a step

    @staticmethod
    def of(shares: Mapping[str, float], microbatches: int) -> BatchRamp | None:
        """`shares`: of a batch, by the step from which each holds; empty: there is no ramp."""
        found = sorted((int(step), max(1, round(share * microbatches))) for step, share in shares.items())
        return BatchRamp(tuple(found), microbatches) if found else None

    def counting(self, step: int) -> int:
        return self.phases[self._phase(step)][1]

    def counts(self, step: int, microbatch: int) -> bool:
        count = self.counting(step)
        return (microbatch + 1) * count // self.microbatches > microbatch * count // self.microbatches

    def place(self, step: int, microbatch: int) -> tuple[int, int]:
        """(step, microbatch) of a run without a ramp that has the data of this one."""
        phase = self._phase(step)
        earlier = sum((b[0] - a[0]) * a[1] for a, b in pairwise(self.phases[: phase + 1]))
        first, count = self.phases[phase]
        number = earlier + (step - first) * count + microbatch * count // self.microbatches
        return number // self.microbatches + 1, number % self.microbatches

    def _phase(self, step: int) -> int:
        return bisect_right([first for first, _ in self.phases], step) - 1


@dataclass(frozen=True, slots=True)
class RampedData:
    data: Any
    ramp: BatchRamp

    @property
    def in_a_thread(self) -> bool:
        return bool(getattr(self.data, "in_a_thread", False))

    def batch(self, step: int, microbatch: int) -> Any:
        return self.data.batch(*self.ramp.place(step, microbatch))


def ramped(data: Any, job: Any) -> Any:
    """What a job trains on, as its steps ask for it. Not a stream's, which is read in order."""
    ramp = BatchRamp.of(job.ramp, job.microbatches_in_step)
    return data if ramp is None or hasattr(data, "preview") else RampedData(data, ramp)
