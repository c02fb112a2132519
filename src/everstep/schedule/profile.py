"""How long each op takes on each worker, as the workers themselves report it.

A worker tells two times of an op: how long it took (`F`), and how long it kept a core busy (`F.cpu`). Where
every worker has a core they are the same. Where workers share cores, the first holds the wait for one, and
that wait changes when somebody dies; the second does not. `instance` has the first, for planning; `alone` has
the second, for telling in advance how long a step takes (see sharing.py). Besides its ops a worker burns time
on messages and bookkeeping: `step.cpu` is all of it in a step, and `alone` spreads the rest over the ops.
"""

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
        self._busy: dict[Worker, Mapping[Kind, float]] = {}
        self._step_busy: dict[Worker, float] = {}
        self._planned: dict[Worker, float] | None = (
            None  # a microbatch's time, as the schedule in force takes it
        )

    def learn(self, worker: Worker, told: Mapping[str, float]) -> None:
        self._times[worker] = {kind: told[kind] for kind in Kind if kind in told}
        busy = {kind: told[f"{kind}.cpu"] for kind in Kind if f"{kind}.cpu" in told}
        if all(kind in busy for kind in WORK):
            self._busy[worker] = busy
            self._step_busy[worker] = told.get("step.cpu", 0.0)

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
        return self._instance(self._times)

    def alone(self, hosted: Mapping[Worker, int]) -> Instance | None:
        """The same task with times as if every worker had a core; None where nobody has told them.

        `hosted` is how many microbatches a worker runs in a step, the one that `step.cpu` was told of.
        """
        if not self._busy:
            return None
        return self._instance({w: self._with_the_rest(w, hosted.get(w, 0)) for w in self._busy})

    def _with_the_rest(self, worker: Worker, hosted: int) -> dict[Kind, float]:
        busy = self._busy[worker]
        known = hosted * sum(busy[k] for k in WORK) + sum(busy.get(k, 0.0) for k in (Kind.R, Kind.U))
        factor = max(1.0, self._step_busy[worker] / known) if hosted else 1.0
        return {kind: seconds * factor for kind, seconds in busy.items()}

    def _instance(self, times: Mapping[Worker, Mapping[Kind, float]]) -> Instance:
        stages = range(self.shape.stages)
        grids = {
            kind: tuple(
                tuple(_time(times, Worker(k, s), kind) for s in stages) for k in range(self.shape.replicas)
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
            reduce=tuple(_stage_time(times, s, Kind.R) for s in stages),
            update=tuple(_stage_time(times, s, Kind.U) for s in stages),
        )

    def _relative(self) -> dict[Worker, float]:
        work = {w: sum(_time(self._times, w, kind) for kind in WORK) for w in self.shape.workers()}
        mean = fmean(work.values())
        return {w: time / mean for w, time in work.items()}


def _time(times: Mapping[Worker, Mapping[Kind, float]], worker: Worker, kind: Kind) -> float:
    """A worker about as fast as its stage is taken to be like it: noise must not move microbatches."""
    own, stage = times.get(worker, {}), _stage_time(times, worker.stage, kind, otherwise=1.0)
    total = sum(_stage_time(times, worker.stage, k) for k in WORK)
    if any(k not in own for k in WORK) or abs(sum(own[k] for k in WORK) / total - 1) < LIKE_THE_STAGE:
        return stage
    return own[kind]


def _stage_time(
    times: Mapping[Worker, Mapping[Kind, float]], stage: int, kind: Kind, otherwise: float = 0.0
) -> float:
    known = [of[kind] for w, of in times.items() if w.stage == stage and kind in of]
    return fmean(known) if known else otherwise
