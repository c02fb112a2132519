"""How long each op takes on each worker, as the workers themselves report it.

A worker tells two times of an op: how long it took (`F`), and how long it took without its wait for a core,
which is its *own*. Where every worker has a core they are about the same. Where workers share cores, the
first holds the wait for one, and that wait changes when a worker dies or a neighbour has work; the other does
not. `instance` has the first, for planning; `drift` has the second, for telling whether a schedule is out of
date.

Within a stage all workers are planned with one time: what differs between them is mostly noise, and noise
must not move microbatches. Who is slower than that is not guessed here: it is given as `slow`, with a factor,
when there is evidence for it (see drive/slowness_watch.py).

A boundary tensor takes a *hop* to the next stage: its bytes at the rate that the sockets to workers of that
stage show, latency included. To a worker of the same machine it takes none. A schedule knows one hop, so it
is the mean over all ways between stages: the sum over a microbatch's whole way is right then.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median_low
from typing import NamedTuple

from everstep.protocol.ops import Kind, Worker
from everstep.protocol.shape import Shape
from everstep.schedule import Instance
from everstep.schedule.stash_limits import StashRoom

WORK = (Kind.F, Kind.I, Kind.W)
DRIFT = 0.3  # a stage's share of the work has changed if it is off by this much
_OLD, _NEW = 0.7, 0.3  # how own times are smoothed
HELD_FORWARD, HELD_WEIGHT, ROOM = "held.F", "held.W", "room"  # bytes, reported with the times
BOUNDARY = "boundary"  # likewise: of a boundary tensor
EAGER = "eager"  # likewise: the share of recent updates that did not wait for the norm of all stages
ALLOCATED, PEAK = (
    "memory",
    "memory.peak",
)  # likewise: on its GPU now, and the most since the last report


class StageTimes(NamedTuple):
    """Seconds of each stage's ops on a worker that is not slow, of its reduce and update together, and of a
    hop.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    closing: tuple[float, ...]
    hop: float


class Profile:
    """Until a worker has reported, it is taken to be like its stage; until a stage has, all ops take one
    unit.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._times: dict[Worker, Mapping[Kind, float]] = {}
        self._own: dict[Worker, dict[Kind, float]] = {}
        self._slow: Mapping[Worker, float] = {}
        self.rooms: dict[Worker, StashRoom] = {}  # what workers have measured of their memory
        self._hops: dict[Worker, dict[int, float]] = {}  # by worker and stage of the receiver: seconds
        self._eager: dict[Worker, float] = {}
        self._planned: list[float] | None = (
            None  # stages' shares of the work, as the schedule in force has it
        )
        self._planned_hop = 0.0

    def learn(
        self,
        worker: Worker,
        times: Mapping[str, float],
        ops: Mapping[str, tuple[int, float]] | None = None,
        sent: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        """`ops`: how many of each kind were run lately, and their own seconds together. `sent`: by peer on
        another machine, bytes and for how many seconds some were on their way.
        """
        self._learn_hops(worker, times.get(BOUNDARY, 0.0), sent or {})
        if EAGER in times:
            before = self._eager.get(worker, times[EAGER])
            self._eager[worker] = _OLD * before + _NEW * times[EAGER]
        self._times[worker] = {kind: times[kind] for kind in Kind if kind in times}
        own = self._own.setdefault(worker, dict(self._times[worker]) if ops is None else {})
        for name, (count, seconds) in (ops or {}).items():
            if count:
                kind, each = Kind(name), seconds / count
                own[kind] = each if kind not in own else _OLD * own[kind] + _NEW * each
        if (held := max(times.get(HELD_FORWARD, 0.0), times.get(HELD_WEIGHT, 0.0))) > 0:
            self.rooms[worker] = StashRoom(held, times.get(ROOM))

    def _learn_hops(self, worker: Worker, boundary: float, sent: Mapping[str, tuple[int, float]]) -> None:
        hops = self._hops.setdefault(worker, {})
        for stage in (worker.stage - 1, worker.stage + 1):
            rows = [row for peer, row in sent.items() if peer.endswith(f":{stage}")]
            size, seconds = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0.0)
            if size >= boundary > 0:  # less than one tensor says little
                hop = boundary * seconds / size
                hops[stage] = hop if stage not in hops else _OLD * hops[stage] + _NEW * hop

    def hop(self) -> float:
        """From one stage to the next, in either direction, as the mean of all workers that have reported."""
        ways = [
            hops.get(stage, 0.0)
            for worker, hops in self._hops.items()
            for stage in (worker.stage - 1, worker.stage + 1)
            if 0 <= stage < self.shape.stages
        ]
        return fmean(ways) if ways else 0.0

    def eager(self) -> float | None:
        """The share of recent updates that did not wait for the norm of all stages; None: not reported."""
        return fmean(self._eager.values()) if self._eager else None

    def drift(self) -> str | None:
        """Does the schedule in force rest on times that are no longer true? One sentence if so.

        What counts is a stage's time against the others': all slower alike leaves the best order as it is,
        and one slow worker is another matter.
        """
        now = self._shares()
        if now is None:
            return None
        if self._planned is None:
            return "the first steps have shown how long ops take"
        # A share of nothing is possible: times come from outside, and a clock may not have moved in an op.
        ratios = [
            share / planned if planned > 0 else 1.0 + share
            for share, planned in zip(now, self._planned, strict=True)
        ]
        worst = max(range(len(ratios)), key=lambda s: abs(ratios[s] - 1))
        if abs(ratios[worst] - 1) < DRIFT:
            return self._drift_of_hops()
        return f"stage {worst} has {ratios[worst]:.2f} of the share of the work that was planned for it"

    def _drift_of_hops(self) -> str | None:
        """A hop is compared with the ops that it delays."""
        op_s = fmean(sum(own.get(kind, 0.0) for kind in WORK) / len(WORK) for own in self._own.values())
        hop, planned = self.hop(), self._planned_hop
        if abs(hop - planned) < DRIFT * max(op_s, planned):
            return None
        return f"a tensor takes {hop * 1e3:.2g} ms to the next stage, and {planned * 1e3:.2g} ms were planned"

    def instance(self, slow: Mapping[Worker, float] | None = None) -> Instance:
        """The task with no worker dead and nothing done; what is planned now is planned with these times.

        `slow`: these workers take so many times as long as the others of their stage.
        """
        self._slow = dict(slow or {})
        self._planned, self._planned_hop = self._shares(), self.hop()
        return self._instance(self._even(self._slow), self._slow)

    def stages(self, slow: Mapping[Worker, float]) -> StageTimes | None:
        """Of workers that are not slow; None: a stage has not reported its times."""
        if self._shares() is None:
            return None
        even, stages = self._even(slow), range(self.shape.stages)
        f, i, w = (tuple(_stage_time(even, s, kind, otherwise=1.0) for s in stages) for kind in WORK)
        closing = tuple(_stage_time(even, s, Kind.R) + _stage_time(even, s, Kind.U) for s in stages)
        return StageTimes(f, i, w, closing, self.hop())

    def _even(self, slow: Mapping[Worker, float]) -> dict[Worker, Mapping[Kind, float]]:
        """Times of the others, and of a stage that is slow as a whole as if it were not."""
        even = {w: times for w, times in self._times.items() if w not in slow}
        for worker in slow.keys() & self._times.keys():  # where a whole stage is slow
            if all(w.stage != worker.stage for w in even):
                even[worker] = {kind: seconds / slow[worker] for kind, seconds in self._times[worker].items()}
        return even

    def _instance(
        self, times: Mapping[Worker, Mapping[Kind, float]], slow: Mapping[Worker, float] | None = None
    ) -> Instance:
        stages, factors = range(self.shape.stages), slow or {}
        usual = {kind: [_stage_time(times, s, kind, otherwise=1.0) for s in stages] for kind in WORK}
        grids = {
            kind: tuple(
                tuple(usual[kind][s] * factors.get(Worker(k, s), 1.0) for s in stages)
                for k in range(self.shape.replicas)
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
            hop=self.hop(),
            reduce=tuple(_stage_time(times, s, Kind.R) for s in stages),
            update=tuple(_stage_time(times, s, Kind.U) for s in stages),
        )

    def _shares(self) -> list[float] | None:
        """What a microbatch takes at each stage, over the mean of all stages; None if one is unknown."""
        work = []
        for stage in range(self.shape.stages):
            reported = [
                sum(own[kind] for kind in WORK) / self._slow.get(worker, 1.0)
                for worker, own in self._own.items()
                if worker.stage == stage and all(kind in own for kind in WORK)
            ]
            if not reported:
                return None
            work.append(median_low(reported))  # one that has just become slow does not make its stage slow
        mean = fmean(work)
        return [seconds / mean for seconds in work] if mean > 0 else None


def _stage_time(
    times: Mapping[Worker, Mapping[Kind, float]], stage: int, kind: Kind, otherwise: float = 0.0
) -> float:
    known = [of[kind] for w, of in times.items() if w.stage == stage and kind in of]
    return fmean(known) if known else otherwise
