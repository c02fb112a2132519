"""How fast a planned order repeats when ops take other times than those it was planned with.

It runs some steps on end, since one without a barrier flows into the next. A step's time is what the last of
them add.
"""

from __future__ import annotations

from heapq import heappop, heappush

from everstep.protocol.ops import Kind, Op, Worker
from everstep.schedule.instance import Instance
from everstep.schedule.modes import MODES
from everstep.schedule.schedule import Planned

# Steps run on end; those that fill the pipeline, or drain it, do not count.
FILLING, COUNTED, BEHIND = 3, 4, 2
Fact = tuple[str, int, object, int]  # letter, step, microbatch (or worker), stage


def repeating_period(planned: Planned, instance: Instance) -> float:
    """Seconds a step of this plan takes when it repeats and ops take the times of `instance`."""
    ends = _Run(planned, instance).ends()
    return (ends[-1] - ends[FILLING - 1]) / COUNTED


class _Run:
    def __init__(self, planned: Planned, instance: Instance) -> None:
        self.lists = dict(planned.schedule.ops)
        self.instance = instance
        self.barrier = not MODES[planned.mode].staggered
        self.peers: dict[int, list[Worker]] = {}
        for worker in instance.workers():
            self.peers.setdefault(worker.stage, []).append(worker)
        self.at = dict.fromkeys(self.lists, 0)
        self.running: set[Worker] = set()
        self.facts: set[Fact] = set()
        self.waits: dict[Fact, list[Worker]] = {}
        self.now = 0.0
        self.left = [len(self.lists)] * (FILLING + COUNTED + BEHIND)  # workers that have not ended the step
        self.due: list[tuple[float, Worker]] = []  # when ops that run end
        self.arrivals: list[tuple[float, Fact]] = []  # what is under way between workers

    def ends(self) -> list[float]:
        """When each counted step's last update ended, and those before."""
        found: list[float] = []
        for worker in self.lists:
            self._try(worker)
        while len(found) < FILLING + COUNTED:
            assert self.due or self.arrivals, "the order deadlocks"
            if self.arrivals and (not self.due or self.arrivals[0][0] < self.due[0][0]):
                self.now, fact = heappop(self.arrivals)
                self._know(fact)
            else:
                self.now, worker = heappop(self.due)
                self._finish(worker, found)
        return found

    def _place(self, worker: Worker) -> tuple[int, Op]:
        step, number = divmod(self.at[worker], len(self.lists[worker]))
        return step, self.lists[worker][number]

    def _try(self, worker: Worker) -> None:
        """Start the worker's next op if what it needs is there; else remember who waits for it."""
        step, op = self._place(worker)
        if worker in self.running or step >= len(self.left):
            return
        if op.kind is Kind.R:
            self._know(("done", step, worker, worker.stage))
        for need in self._needs(step, op):
            if need not in self.facts:
                self.waits.setdefault(need, []).append(worker)
                return
        self.running.add(worker)
        takes = self.instance.time(op.kind, Worker(worker.replica, op.stage))
        heappush(self.due, (self.now + takes, worker))

    def _needs(self, step: int, op: Op) -> list[Fact]:
        match op.kind:
            case Kind.F if op.stage > 0:
                needs: list[Fact] = [("F", step, op.microbatch, op.stage - 1)]
            case Kind.I | Kind.B if op.stage + 1 < self.instance.stages:
                needs = [("I", step, op.microbatch, op.stage + 1)]
            case Kind.R:  # parts from every peer
                needs = [("done", step, w, w.stage) for w in self.peers[op.stage]]
            case Kind.U:
                needs = [("R", step, w, w.stage) for w in self.peers[op.stage]]
            case _:
                needs = []
        if self.barrier and step and op.microbatch is not None:
            needs.append(("step", step - 1, None, 0))
        return needs

    def _finish(self, worker: Worker, found: list[float]) -> None:
        step, op = self._place(worker)
        self.running.discard(worker)
        self.at[worker] += 1
        if op.microbatch is not None:
            letter = "I" if op.kind is Kind.B else str(op.kind)
            heappush(self.arrivals, (self.now + self.instance.hop, (letter, step, op.microbatch, op.stage)))
        elif op.kind is Kind.R:
            self._know(("R", step, worker, worker.stage))
        else:
            self.left[step] -= 1
            if self.left[step] == 0:
                found.append(self.now)
                self._know(("step", step, None, 0))
        self._try(worker)

    def _know(self, fact: Fact) -> None:
        self.facts.add(fact)
        for worker in self.waits.pop(fact, ()):
            self._try(worker)
