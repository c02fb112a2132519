"""Hosts by pulling: a free worker takes the next microbatch of its stage.

Quotas divide the work before anything runs; where speeds differ, what matters is also when each microbatch
comes to which worker. Here the step is run once in virtual time with one queue of forwards per stage. A free
worker takes its own microbatch if one is waiting, else the most urgent one, as long as its stash has room and
its quota allows; the fastest free worker chooses first. Its backward stays where its forward was. A slow
worker so takes what it can finish, and the fast ones the rest.

It balances better than quotas where many workers are slow, and moves several times as many microbatches away
from home. So it is one more start for `refine`, not the rule.
"""

from __future__ import annotations

from heapq import heappop, heappush

from everstep.protocol.ops import Worker
from everstep.schedule.compact import stash_limit
from everstep.schedule.hosts import Place, stage_quotas, work_time
from everstep.schedule.instance import Instance

F, I, W = 0, 1, 2
Batch = tuple[int, int]  # number, home


def pulled_hosts(instance: Instance) -> dict[Place, int] | None:
    """The replica that hosts each place which is not hosted at home; None if the quotas do not fit."""
    return _Run(instance).hosts()


class _Run:
    """One step in virtual time."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        stages = range(instance.stages)
        self.live = [
            [Worker(k, s) for k in sorted(instance.live(s), key=lambda k: work_time(instance, Worker(k, s)))]
            for s in stages
        ]
        busiest = max(stage_quotas(instance, s)[0] for s in stages)
        workers = [worker for stage in self.live for worker in stage]
        work = {worker: work_time(instance, worker) for worker in workers}
        self.quota = {w: int(busiest / work[w] + 1e-9) if work[w] else 1 << 30 for w in workers}
        self.room = {worker: min(stash_limit(instance, worker)) for worker in workers}
        self.waiting: list[list[Batch]] = [[] for _ in stages]
        self.inputs: dict[Worker, list[Batch]] = {worker: [] for worker in workers}
        self.weights: dict[Worker, list[Batch]] = {worker: [] for worker in workers}
        self.held = dict.fromkeys(workers, 0)
        self.after_input = dict.fromkeys(workers, False)
        self.busy: set[Worker] = set()
        self.host: dict[tuple[Batch, int], int] = {}
        self.events: list[tuple[float, int, Worker, int, Batch, bool]] = []  # time, number, ..., has it ended
        self.now, self.count = 0.0, 0

    def hosts(self) -> dict[Place, int] | None:
        for microbatch in self.instance.homes():
            heappush(self.waiting[0], (microbatch.number, microbatch.home))
        changed = set(range(self.instance.stages))
        while True:
            for stage in changed:
                self._give_work(stage)
            if not self.events:
                break
            self.now = self.events[0][0]
            changed = set()
            while self.events and self.events[0][0] == self.now:
                changed |= self._handle(*heappop(self.events)[2:])
        if any(self.waiting):
            return None
        return {(home, n, s): k for ((n, home), s), k in self.host.items() if k != home}

    def _handle(self, worker: Worker, kind: int, batch: Batch, ended: bool) -> set[int]:
        """An op has ended on its worker, or its tensor has come to the worker; which stages may continue."""
        stage = worker.stage
        if not ended:
            heappush(self.inputs[worker] if kind == I else self.waiting[stage], batch)
            return {stage}
        self.busy.discard(worker)
        if kind == F and stage + 1 < self.instance.stages:
            self._later(self.instance.hop, Worker(-1, stage + 1), F, batch, ended=False)
        elif kind == F:
            heappush(self.inputs[worker], batch)
        elif kind == I:
            self.weights[worker].append(batch)
            if stage > 0:
                above = Worker(self.host[batch, stage - 1], stage - 1)
                self._later(self.instance.hop, above, I, batch, ended=False)
        else:
            self.held[worker] -= 1
        return {stage}

    def _later(self, delay: float, worker: Worker, kind: int, batch: Batch, *, ended: bool) -> None:
        self.count += 1
        heappush(self.events, (self.now + delay, self.count, worker, kind, batch, ended))

    def _give_work(self, stage: int) -> None:
        instance = self.instance
        for worker in self.live[stage]:
            if worker in self.busy:
                continue
            waiting = self.waiting[stage]
            may_forward = waiting and self.held[worker] < self.room[worker] and self.quota[worker] > 0
            if self.inputs[worker] and not (may_forward and self.after_input[worker]):
                batch, kind, time = heappop(self.inputs[worker]), I, instance.input_grad
                self.after_input[worker] = True
            elif may_forward:
                batch, kind, time = self._next_for(worker), F, instance.forward
                self.after_input[worker] = False
                self.held[worker] += 1
                self.quota[worker] -= 1
                self.host[batch, stage] = worker.replica
            elif self.weights[worker]:
                batch, kind, time = self.weights[worker].pop(0), W, instance.weight_grad
            else:
                continue
            self.busy.add(worker)
            self._later(time[worker.replica][stage], worker, kind, batch, ended=True)

    def _next_for(self, worker: Worker) -> Batch:
        waiting = self.waiting[worker.stage]
        own = min((batch for batch in waiting if batch[1] == worker.replica), default=None)
        if own is None:
            return heappop(waiting)
        waiting.remove(own)
        waiting.sort()
        return own
