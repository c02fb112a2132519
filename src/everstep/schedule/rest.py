"""The rest of a broken step in which some microbatches must be run again for their outputs only.

`planner` orders every other step. Here a place may be done in any combination of kinds (`W` done, `F` and `I` to be
run once more: a ghost, see `core.survey`), which its regular patterns do not know. So: list scheduling. Run the step
in virtual time, and whenever a worker is free give it the best op that is ready: first the input gradients (someone
upstream waits for them), then forwards, then weight gradients (nobody waits for them).
"""

from __future__ import annotations

import heapq

from everstep.core.ops import Kind, Microbatch, Op, Worker
from everstep.schedule.instance import Instance
from everstep.schedule.schedule import Schedule, closing_ops

Place = tuple[Microbatch, int]


def order_with_ghosts(instance: Instance, mode: str) -> Schedule:
    """Order the ops that are not done. `reroute` fuses the backward, the other modes split it."""
    run = _Run(instance, fused=mode in ("1f1b", "reroute"))
    run.to_the_end()
    return Schedule({w: (*ops, *closing_ops(w.stage)) for w, ops in run.order.items()})


def choose_hosts(instance: Instance) -> dict[Place, int]:
    """Home if it lives, else the live peer of the stage with the least work; done ops stay where their stash is."""
    hosts: dict[Place, int] = {}
    for stage in range(instance.stages):
        load = dict.fromkeys(instance.live(stage), 0.0)
        homeless = []
        for microbatch in instance.homes():
            done = instance.done.get((microbatch, stage))
            if done is None and microbatch.home not in load:
                homeless.append(microbatch)
                continue
            host = hosts[microbatch, stage] = done.host if done else microbatch.home
            if host in load:
                load[host] += _work(instance, Worker(host, stage), done.kinds if done else "")
        for microbatch in homeless:
            host = min(load, key=lambda k: (load[k] + _work(instance, Worker(k, stage), ""), k))
            hosts[microbatch, stage] = host
            load[host] += _work(instance, Worker(host, stage), "")
    return hosts


class _Run:
    def __init__(self, instance: Instance, *, fused: bool) -> None:
        self.instance = instance
        self.hosts = choose_hosts(instance)
        self.backward = Kind.B if fused else Kind.I
        self.order: dict[Worker, list[Op]] = {w: [] for w in instance.workers()}
        self.ready: dict[Worker, list[tuple[int, int, Op]]] = {w: [] for w in self.order}
        self.busy: set[Worker] = set()
        self.forward_done: set[Place] = set()
        self.gradient_here: set[Place] = set()
        self.events: list[tuple[float, int, Worker, Op, bool]] = []  # (time, order, worker, op, is it finished)
        self.pushed = 0
        self._begin()

    def to_the_end(self) -> None:
        while self.events:
            now = self.events[0][0]
            touched = []
            while self.events and self.events[0][0] == now:
                _, _, worker, op, finished = heapq.heappop(self.events)
                touched.append(worker)
                if finished:
                    self.busy.discard(worker)
                    self._finish(op, now)
                else:
                    self._make_ready(worker, op)
            for worker in touched:
                self._start(worker, now)

    def _begin(self) -> None:
        last = self.instance.stages - 1
        for microbatch in self.instance.homes():
            for stage in range(self.instance.stages):
                kinds = self._done(microbatch, stage)
                place = (microbatch, stage)
                if "F" in kinds:
                    self.forward_done.add(place)
                elif stage == 0 or "F" in self._done(microbatch, stage - 1):
                    self._arrives(0.0, place, Kind.F)
                if "I" not in kinds and (stage == last or "I" in self._done(microbatch, stage + 1)):
                    self._gradient_arrives(0.0, place)
                if "I" in kinds and "W" not in kinds:
                    self._arrives(0.0, place, Kind.W)

    def _finish(self, op: Op, now: float) -> None:
        assert op.microbatch is not None
        place = (op.microbatch, op.stage)
        if op.kind is Kind.F:
            self.forward_done.add(place)
            if place in self.gradient_here:
                self._arrives(now, place, self._backward(place))
            below = (op.microbatch, op.stage + 1)
            if op.stage + 1 < self.instance.stages and "F" not in self._done(*below):
                self._arrives(now + self.instance.hop, below, Kind.F)
        elif op.kind in (Kind.I, Kind.B):
            above = (op.microbatch, op.stage - 1)
            if op.stage > 0 and "I" not in self._done(*above):
                self._gradient_arrives(now + self.instance.hop, above)
            if op.kind is Kind.I and "W" not in self._done(*place):
                self._arrives(now, place, Kind.W)

    def _gradient_arrives(self, time: float, place: Place) -> None:
        self.gradient_here.add(place)
        if place in self.forward_done:
            self._arrives(time, place, self._backward(place))

    def _arrives(self, time: float, place: Place, kind: Kind) -> None:
        self._push(time, self._host(place), Op(kind, place[0], place[1]), finished=False)

    def _make_ready(self, worker: Worker, op: Op) -> None:
        assert op.microbatch is not None
        urgency = {Kind.F: 1, Kind.W: 2}.get(op.kind, 0)
        rank = op.microbatch.number * self.instance.replicas + op.microbatch.home
        heapq.heappush(self.ready[worker], (urgency, rank, op))

    def _start(self, worker: Worker, now: float) -> None:
        queue = self.ready[worker]
        if worker in self.busy or not queue:
            return
        _, _, op = heapq.heappop(queue)
        self.order[worker].append(op)
        self.busy.add(worker)
        self._push(now + self.instance.time(op.kind, worker), worker, op, finished=True)

    def _push(self, time: float, worker: Worker, op: Op, *, finished: bool) -> None:
        self.pushed += 1
        heapq.heappush(self.events, (time, self.pushed, worker, op, finished))

    def _host(self, place: Place) -> Worker:
        return Worker(self.hosts[place], place[1])

    def _backward(self, place: Place) -> Kind:
        return Kind.I if "W" in self._done(*place) else self.backward

    def _done(self, microbatch: Microbatch, stage: int) -> str:
        done = self.instance.done.get((microbatch, stage))
        return done.kinds if done else ""


def _work(instance: Instance, worker: Worker, done: str) -> float:
    return sum(instance.time(kind, worker) for kind in (Kind.F, Kind.I, Kind.W) if kind not in done)
