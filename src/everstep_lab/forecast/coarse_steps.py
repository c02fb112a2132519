"""How fast tasks train in a forecast: seconds per step from what a storm has measured before its first fault.

A task trains while every stage has a member and no member is stopped. A step takes as long as measured alone,
and longer beside other tasks that train, or programs that start (`cores`). A task with fewer workers
is as fast as with all: there are fewer cores than workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep_lab.agenda import Agenda
from everstep_lab.forecast.cores import Cores


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastKind:
    """A kind of task, and how long things take with it."""

    name: str
    weight: float
    shape: Shape
    steps: int
    alone_s: float
    beside_s: float
    begin_s: float
    cold_s: float
    again_s: float = 0.0  # until a killed worker takes part again, beside other tasks; 0: not measured
    save_every: int = 5
    copy_every: int = 0

    def start_s(self, each: float, *, beside_s: float) -> float:
        """Seconds of one core that a worker takes to start. It was measured while all kinds trained, and a
        process had so much of one core; `beside_s`: of that time it did not start.
        """
        if self.again_s:
            return max(0.05, self.again_s - beside_s) * each
        return max(0.05, self.begin_s - self.alone_s)

    @property
    def share(self) -> float:
        """Of the cores, beside one task of each other kind."""
        return min(1.0, self.alone_s / max(self.alone_s, self.beside_s))


@dataclass(slots=True)
class Actor:
    """A worker's process."""

    node: str
    incarnation: int
    step: int = 1
    joining: bool = True
    goes: bool = False  # it was ordered to run, and not to stop
    stopped: bool = False
    starts: bool = True  # its process is not up yet


@dataclass(slots=True)
class Going:
    """A task as its workers see it."""

    kind: ForecastKind
    step: int = 1
    left: float = 1.0  # of the step
    since_s: float = 0.0
    trains: bool = False
    rate: float = 0.0  # steps per second
    number: int = 0  # of the last appointment
    waits: bool = False  # for members on a node that is gone, until there is another epoch
    until: int | None = None
    recorded: int = 0  # the highest step on record
    disk: int = 0


def overdue(task: str, worker: Worker, actor: Actor, step: int, after_s: float) -> msg.OpOverdue:
    """What its agent says of a worker that is stopped, or else waits for others."""
    return msg.OpOverdue(
        task=task,
        worker=worker,
        incarnation=actor.incarnation,
        step=step,
        doing="1F0.0" if actor.stopped else "",
        busy=actor.stopped,
        stopped=actor.stopped,
        elapsed_s=after_s,
        expected_s=0.1,
    )


class CoarseSteps:
    """Steps of all tasks. `sealed` is called at the end of each one of them."""

    def __init__(
        self,
        agenda: Agenda,
        actors: Mapping[tuple[str, Worker], Actor],
        *,
        kinds: Sequence[ForecastKind],
        cores: int,
        sealed: Callable[[str], None],
    ) -> None:
        self.going: dict[str, Going] = {}
        self._agenda, self._actors, self._ends = agenda, actors, sealed
        self.workers = sum(len(kind.shape.workers()) for kind in kinds)
        self._all_shares = sum(kind.share for kind in kinds)
        self.cores = Cores(agenda, cores, training=self._busy, changed=self.settle_all)

    def members(self, task: str) -> dict[Worker, Actor]:
        return {w: a for (t, w), a in sorted(self._actors.items()) if t == task and not a.joining}

    def settle(self, task: str) -> None:
        """Its workers have changed: how fast does it go now?"""
        going, now = self.going[task], self._agenda.now_us / 1e6
        going.left -= (now - going.since_s) * going.rate
        going.since_s = now
        was, going.trains = going.trains, self._trains(task)
        going.rate = self._rate(task) if going.trains else 0.0
        going.number += 1
        if going.rate:
            left_us = max(1, int(max(0.0, going.left / going.rate) * 1e6))
            self._agenda.after(left_us, self._seal, task, going.number)
        if was != going.trains:
            self.settle_all(but=task)

    def settle_all(self, but: str = "") -> None:
        """Who is busy beside them has changed."""
        for name in [name for name, going in self.going.items() if name != but and going.trains]:
            self.settle(name)
        self.cores.settle()

    def next_step(self, task: str) -> None:
        going = self.going[task]
        last = min(going.kind.steps, going.until or going.kind.steps)
        for actor in self.members(task).values():
            actor.step = going.step + 1
            actor.goes = actor.goes and going.step < last
        going.step, going.left, going.since_s = going.step + 1, 1.0, self._agenda.now_us / 1e6
        self.settle(task)

    def _seal(self, task: str, number: int) -> None:
        if self.going[task].number == number:
            self._ends(task)

    def _trains(self, task: str) -> bool:
        members, going = self.members(task), self.going[task]
        if going.waits or len({worker.stage for worker in members}) < going.kind.shape.stages:
            return False
        return all(actor.goes and not actor.stopped for actor in members.values())

    def _rate(self, task: str) -> float:
        kind = self.going[task].kind
        others = sum(each.kind.share for name, each in self.going.items() if name != task and each.trains)
        share = min(1.0, self.cores.share_left() * self._all_shares * kind.share / (others + kind.share))
        return share / max(1e-3, kind.alone_s)

    def _busy(self) -> float:
        """Processes of tasks that train."""
        active = sum(each.kind.share for each in self.going.values() if each.trains)
        return self.workers * active / self._all_shares
