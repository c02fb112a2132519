"""How long a step takes where workers share cores.

The planner thinks every worker has a machine of its own. Four workers on two cores have not: an op takes as
long as the others leave it. Here the order stays what was planned, and time passes differently: at any moment
the busy workers of a machine share its cores evenly, each with one core at most.

    busy workers   1    2    3    4        of a machine with 2 cores
    speed of each  1    1    2/3  1/2

Then an op's length is no number of its own, and a death has two effects that the planner's clock cannot show:
the heirs have more to do, and everybody left is faster. Times are those of an op alone on a core.

It runs some steps on end, since one without a barrier flows into the next. A step's time is what the last of
them add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from everstep.protocol.ops import Kind, Op, Worker
from everstep.schedule.instance import Instance
from everstep.schedule.modes import MODES
from everstep.schedule.schedule import Planned

FILLING, COUNTED, BEHIND = (
    3,
    4,
    2,
)  # steps run on end; those that fill the pipeline, or drain it, do not count
Fact = tuple[str, int, object, int]  # letter, step, microbatch (or worker), stage


@dataclass(frozen=True, slots=True)
class Machine:
    """Workers that share cores."""

    workers: frozenset[Worker]
    cores: float


def shared_period(planned: Planned, alone: Instance, machines: Sequence[Machine]) -> float:
    """Seconds a step of this plan takes when it repeats and its workers share cores.

    `alone` has the times of ops without sharing. A worker in no machine has a core of its own.
    """
    ends = _Run(planned, alone, machines).ends()
    return (ends[-1] - ends[FILLING - 1]) / COUNTED


class _Machine:
    """Busy workers progress at one speed, so only one number moves: what each of them has got so far."""

    def __init__(self, cores: float) -> None:
        self.cores = cores
        self.got = 0.0
        self.due: list[tuple[float, Worker]] = []  # what each will have got when its op ends

    def speed(self) -> float:
        return min(1.0, self.cores / len(self.due)) if self.due else 1.0

    def until_next(self) -> float:
        return (self.due[0][0] - self.got) / self.speed() if self.due else float("inf")


class _Run:
    def __init__(self, planned: Planned, alone: Instance, machines: Sequence[Machine]) -> None:
        self.lists = dict(planned.schedule.ops)
        self.alone = alone
        self.barrier = not MODES[planned.mode].staggered
        self.peers: dict[int, list[Worker]] = {}
        for worker in alone.workers():
            self.peers.setdefault(worker.stage, []).append(worker)
        self.machine_of = {w: _Machine(1.0) for w in self.lists}
        for machine in machines:
            shared = _Machine(machine.cores)
            self.machine_of.update((w, shared) for w in machine.workers if w in self.lists)
        self.at = dict.fromkeys(self.lists, 0)
        self.running: set[Worker] = set()
        self.facts: set[Fact] = set()
        self.waits: dict[Fact, list[Worker]] = {}
        self.now = 0.0
        self.left = [len(self.lists)] * (FILLING + COUNTED + BEHIND)  # workers that have not ended the step
        self.arrivals: list[tuple[float, Fact]] = []  # what is under way between workers

    def ends(self) -> list[float]:
        """When each counted step's last update ended, and those before."""
        found: list[float] = []
        for worker in self.lists:
            self._try(worker)
        every = list(dict.fromkeys(self.machine_of.values()))
        while len(found) < FILLING + COUNTED:
            machine = min(every, key=_Machine.until_next)
            wait = machine.until_next()
            if self.arrivals and self.arrivals[0][0] - self.now < wait:
                self._pass(every, self.arrivals[0][0] - self.now)
                self._know(heappop(self.arrivals)[1])
                continue
            assert wait < float("inf"), "the order deadlocks"
            self._pass(every, wait)
            self._finish(heappop(machine.due)[1], found)
        return found

    def _pass(self, machines: list[_Machine], seconds: float) -> None:
        self.now += seconds
        for machine in machines:
            machine.got += seconds * machine.speed()

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
        machine = self.machine_of[worker]
        heappush(
            machine.due, (machine.got + self.alone.time(op.kind, Worker(worker.replica, op.stage)), worker)
        )

    def _needs(self, step: int, op: Op) -> list[Fact]:
        match op.kind:
            case Kind.F if op.stage > 0:
                needs: list[Fact] = [("F", step, op.microbatch, op.stage - 1)]
            case Kind.I | Kind.B if op.stage + 1 < self.alone.stages:
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
            heappush(self.arrivals, (self.now + self.alone.hop, (letter, step, op.microbatch, op.stage)))
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
