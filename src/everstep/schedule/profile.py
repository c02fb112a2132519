"""How long each op takes on each worker, as the workers themselves report it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from everstep.core.ops import Kind, Worker
from everstep.core.survey import Shape
from everstep.schedule import Instance

WORK = (Kind.F, Kind.I, Kind.W)
DRIFT = 0.3  # a worker's time has changed if it is off by this share
LIKE_THE_STAGE = 0.3  # a worker is no slower or faster than its peers within this share


class Profile:
    """Until a worker has reported, it is taken to be like its stage; until a stage has, all ops take one
    unit.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._times: dict[Worker, Mapping[Kind, float]] = {}
        self._planned: dict[Worker, float] | None = (
            None  # a microbatch's time, as the schedule in force takes it
        )

    def learn(self, worker: Worker, times: Mapping[Kind, float]) -> None:
        self._times[worker] = times

    def drift(self) -> str | None:
        """Does the schedule in force rest on times that are no longer true? One sentence if so.

        What counts is a worker's time against the others': all slower alike leaves the best order as it is.
        """
        if len({w.stage for w in self._times}) < self.shape.stages:
            return None
        if self._planned is None:
            return "the first steps have shown how long ops take"
        now = self._relative()
        ratios = {w: now[w] / self._planned[w] for w in now if w in self._planned}
        worst = max(ratios, key=lambda w: abs(ratios[w] - 1), default=None)
        if worst is None or abs(ratios[worst] - 1) < DRIFT:
            return None
        return f"worker {worst} takes {ratios[worst]:.2f} of the time it was planned with, against the others"

    def instance(self) -> Instance:
        """The task with nobody dead and nothing done; what is planned now is planned with these times."""
        if self._times:
            self._planned = self._relative()
        stages = range(self.shape.stages)
        grids = {
            kind: tuple(
                tuple(self._time(Worker(k, s), kind) for s in stages) for k in range(self.shape.replicas)
            )
            for kind in WORK
        }
        return Instance(
            replicas=self.shape.replicas,
            stages=self.shape.stages,
            microbatches=self.shape.microbatches,
            forward=grids[Kind.F],
            input_grad=grids[Kind.I],
            weight_grad=grids[Kind.W],
            reduce=tuple(self._stage_time(s, Kind.R) for s in stages),
            update=tuple(self._stage_time(s, Kind.U) for s in stages),
        )

    def _relative(self) -> dict[Worker, float]:
        work = {w: sum(self._time(w, kind) for kind in WORK) for w in self.shape.workers()}
        mean = fmean(work.values())
        return {w: time / mean for w, time in work.items()}

    def _time(self, worker: Worker, kind: Kind) -> float:
        """A worker about as fast as its stage is taken to be like it: noise must not move microbatches."""
        own, stage = self._times.get(worker, {}), self._stage_time(worker.stage, kind, otherwise=1.0)
        total = sum(self._stage_time(worker.stage, k) for k in WORK)
        if any(k not in own for k in WORK) or abs(sum(own[k] for k in WORK) / total - 1) < LIKE_THE_STAGE:
            return stage
        return own[kind]

    def _stage_time(self, stage: int, kind: Kind, otherwise: float = 0.0) -> float:
        known = [times[kind] for w, times in self._times.items() if w.stage == stage and kind in times]
        return fmean(known) if known else otherwise
