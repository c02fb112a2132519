"""List scheduling where a worker runs several parts of the model (`protocol.shape.Fold`).

The rules are those of `dispatch`: gradients first, weight gradients last, a forward only where the stash has
room. What is new is the choice between parts:

    F    the later part first (it is nearer to a gradient), or as many microbatches as there are workers
         through one part, then through the next (interleaved 1F1B)
    I    the later part first, or the earlier microbatch

and that the parts of a worker have one stash. Each has its share of it (`compact`), or uses more, but leaves
room for one microbatch to every later part of the worker. That is why it cannot deadlock: of the microbatches
under way take the most advanced one. Its next op is an F or an I whose input is there. Earlier parts never
fill the room of a later one, so a barred F means that its own part holds another microbatch, which is further
on, or has its W left, which nothing bars.

        0  F0 F0 F0 F0 .  .  F7 I7 W7 F7 I7 ...      four workers, eight parts, V: worker 0 runs parts 0 and
        3           F3 F4 F3 F4 ...                  7, worker 3 runs 3 and 4, and hands over to itself

Kept apart from `dispatch`, whose loop is the planner's cost in jobs of thousands of workers: there a worker
has one heap of forwards, here one per part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from everstep.schedule.compact import Compact


class FoldedHabit(NamedTuple):
    first: Literal["later part", "group"] = "later part"  # of the forwards that may run
    alternate: bool = True  # after an I, an F goes before the next I
    inputs: Literal["later part", "earlier batch"] = "later part"  # of the gradients
    shared: bool = False  # parts use each other's share of the stash, but for one microbatch of each
    patience: float = 0.0  # rather idle than start a W that would delay an F or I under way, up to this share


# In the order in which they did best over the instances of tests/schedule/test_folded.py.
FOLDED_HABITS = (
    FoldedHabit(),
    FoldedHabit(shared=True),
    FoldedHabit(first="group", alternate=False),
    FoldedHabit(inputs="earlier batch"),
    FoldedHabit(first="group"),
    FoldedHabit(inputs="earlier batch", shared=True),
    FoldedHabit(patience=0.5),
    FoldedHabit(inputs="earlier batch", shared=True, patience=0.5),
)
F, I, W = 0, 1, 2


def dispatch_folded(problem: Compact, habit: FoldedHabit) -> list[list[int]]:
    """The op codes of every folded worker, in order."""
    return _Run(problem, habit).order_of_all()


class _Run:
    """One step in virtual time."""

    def __init__(self, problem: Compact, habit: FoldedHabit) -> None:
        self.problem, self.habit = problem, habit
        self.times = problem.forward, problem.backward, problem.weight
        self.last = problem.stages - 1
        num = max(problem.worker) + 1
        self.cells: list[list[int]] = [[] for _ in range(num)]  # later parts first
        for cell in reversed(range(len(problem.worker))):
            self.cells[problem.worker[cell]].append(cell)
        self.forwards: list[list[int]] = [[] for _ in problem.worker]  # per cell: a heap of keys
        self.inputs: list[list[tuple[int, int, int]]] = [[] for _ in range(num)]
        self.weights: list[deque[int]] = [deque() for _ in range(num)]
        self.order: list[list[int]] = [[] for _ in range(num)]
        self.held = [0.0] * len(problem.worker)
        self.after_input = [False] * num
        self.busy = [False] * num
        self.due: list[list[float]] = [[] for _ in range(num)]  # heaps: when inputs under way arrive
        self.done_f, self.done_i = bytearray(problem.have_forward), bytearray(problem.have_input)
        self.gradient_here = bytearray(len(problem.host))
        self.events: list[tuple[float, int, int]] = []  # time, number, ~code of an op that ends; or code
        self.now, self.count = 0.0, 0

    def order_of_all(self) -> list[list[int]]:
        self._begin()
        free: Iterable[int] = range(len(self.order))
        while True:
            for worker in free:
                if not self.busy[worker]:
                    self._give_work(worker)
            if not self.events:
                return self.order
            self.now = self.events[0][0]
            touched: dict[int, None] = {}
            while self.events and self.events[0][0] == self.now:
                code = heappop(self.events)[2]
                unit, kind = divmod(code if code >= 0 else ~code, 3)
                touched[self._worker(unit)] = None
                if code >= 0:
                    self._arrived(unit, kind)
                else:
                    self._ended(unit, kind)
            free = touched

    def _begin(self) -> None:
        problem = self.problem
        for unit, cell in enumerate(problem.host):
            part = unit % problem.stages
            if not self.done_f[unit] and (part == 0 or self.done_f[unit - 1]):
                heappush(self.forwards[cell], problem.key[unit])
            if not self.done_i[unit]:
                self.gradient_here[unit] = part == self.last or self.done_i[unit + 1]
                if self.done_f[unit]:
                    self.held[cell] += problem.takes[cell]
                    if self.gradient_here[unit]:
                        self._input(unit)
            elif not problem.have_weight[unit]:
                self.held[cell] += problem.frees_late[cell]
                self.weights[problem.worker[cell]].append(unit)

    def _worker(self, unit: int) -> int:
        return self.problem.worker[self.problem.host[unit]]

    def _input(self, unit: int) -> None:
        batch, part = divmod(unit, self.problem.stages)
        number = batch % self.problem.microbatches
        urgency = (-part, number) if self.habit.inputs == "later part" else (number, -part)
        heappush(self.inputs[self._worker(unit)], (*urgency, unit))

    def _give_work(self, worker: int) -> None:
        problem = self.problem
        ready = [cell for cell in self.cells[worker] if self.forwards[cell]]
        may = [cell for cell in ready if self._has_room(worker, cell)]
        if self.inputs[worker]:
            if may and self.habit.alternate and self.after_input[worker]:
                kind = F
            elif not may and ready and self.weights[worker] and self.after_input[worker]:
                kind = W
            else:
                kind = I
        elif may:
            kind = F
        elif self.weights[worker]:
            kind = W
            if self.habit.patience and self._waits(worker):
                return
        else:
            return
        if kind == F:
            cell = may[0] if self.habit.first == "later part" else min(may, key=self._urgency)
            unit = heappop(self.forwards[cell]) % len(problem.host)
            self.held[cell] += problem.takes[cell]
            self.after_input[worker] = False
        elif kind == I:
            unit = heappop(self.inputs[worker])[2]
            self.after_input[worker] = True
        else:
            unit = self.weights[worker].popleft()
        self._start(worker, unit, kind)

    def _has_room(self, worker: int, cell: int) -> bool:
        problem, held = self.problem, self.held
        if not (self.habit.shared and problem.shares):
            return held[cell] + problem.takes[cell] <= problem.room[cell]
        cells = self.cells[worker]
        reserved = sum(max(0.0, problem.takes[later] - held[later]) for later in cells if later > cell)
        taken = sum(held[one] for one in cells) + problem.takes[cell]
        return taken <= sum(problem.room[one] for one in cells) - reserved

    def _urgency(self, cell: int) -> tuple[int, ...]:
        """In groups of as many microbatches as there are workers."""
        problem, first = self.problem, self.forwards[cell][0]
        batch, part = divmod(first % len(problem.host), problem.stages)
        return batch % problem.microbatches // len(problem.closing), part, first

    def _waits(self, worker: int) -> bool:
        due, cell = self.due[worker], self.problem.host[self.weights[worker][0]]
        while due and due[0] <= self.now:
            heappop(due)
        return bool(due) and due[0] - self.now <= self.habit.patience * self.problem.weight[cell]

    def _start(self, worker: int, unit: int, kind: int) -> None:
        problem, cell = self.problem, self.problem.host[unit]
        end = self.now + self.times[kind][cell]
        if kind == I and problem.fused and problem.have_weight[unit]:
            end -= problem.weight[cell]
        self.busy[worker] = True
        self.order[worker].append(3 * unit + kind)
        self._later(end, ~(3 * unit + kind))
        if (behind := self._next(unit, kind)) is not None:
            heappush(self.due[self._worker(behind)], end + self._hop(unit, behind))

    def _next(self, unit: int, kind: int) -> int | None:
        """The unit that waits for what this op makes."""
        part = unit % self.problem.stages
        if kind == F and part < self.last and not self.done_f[unit + 1]:
            return unit + 1
        if kind == I and part > 0 and not self.done_i[unit - 1]:
            return unit - 1
        return None

    def _hop(self, unit: int, other: int) -> float:
        return 0.0 if self._worker(unit) == self._worker(other) else self.problem.hop

    def _later(self, time: float, code: int) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, code))

    def _ended(self, unit: int, kind: int) -> None:
        problem, cell, worker = self.problem, self.problem.host[unit], self._worker(unit)
        self.busy[worker] = False
        if kind == W:
            self.held[cell] -= problem.frees_late[cell]
            return
        if kind == F:
            self.done_f[unit] = 1
            if self.gradient_here[unit]:
                self._input(unit)
            elif self.done_i[unit]:
                self.held[cell] -= problem.takes[cell]  # run again for its output alone
        elif problem.fused or problem.have_weight[unit]:
            self.held[cell] -= problem.takes[cell]
        else:
            self.held[cell] -= problem.frees_early[cell]
            self.weights[worker].append(unit)
        if (behind := self._next(unit, kind)) is not None:
            self._later(self.now + self._hop(unit, behind), 3 * behind + kind)

    def _arrived(self, unit: int, kind: int) -> None:
        if kind == F:
            heappush(self.forwards[self.problem.host[unit]], self.problem.key[unit])
        elif self.done_f[unit]:
            self._input(unit)
        else:
            self.gradient_here[unit] = 1
