"""How long each op takes on each worker, as the workers themselves report it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from everstep.core.ops import Kind, Worker
from everstep.core.survey import Shape
from everstep.schedule import Instance


class Profile:
    """Until a worker has reported, it is taken to be like its stage; until a stage has, all ops take one unit."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._times: dict[Worker, Mapping[Kind, float]] = {}

    def learn(self, worker: Worker, times: Mapping[Kind, float]) -> None:
        self._times[worker] = times

    def instance(self) -> Instance:
        """The task with nobody dead and nothing done."""
        stages = range(self.shape.stages)
        grids = {kind: tuple(tuple(self._time(Worker(k, s), kind) for s in stages) for k in range(self.shape.replicas))
                 for kind in (Kind.F, Kind.I, Kind.W)}
        return Instance(replicas=self.shape.replicas, stages=self.shape.stages, microbatches=self.shape.microbatches,
                        forward=grids[Kind.F], input_grad=grids[Kind.I], weight_grad=grids[Kind.W],
                        reduce=tuple(self._stage_time(s, Kind.R) for s in stages),
                        update=tuple(self._stage_time(s, Kind.U) for s in stages))

    def _time(self, worker: Worker, kind: Kind) -> float:
        own = self._times.get(worker, {})
        return own[kind] if kind in own else self._stage_time(worker.stage, kind, otherwise=1.0)

    def _stage_time(self, stage: int, kind: Kind, otherwise: float = 0.0) -> float:
        known = [times[kind] for w, times in self._times.items() if w.stage == stage and kind in times]
        return fmean(known) if known else otherwise
