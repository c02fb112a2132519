"""Who takes part in a task, in which epoch, and which attempt at a step counts: what recovery knows.

The ground floor of `core.task.recovery`; it asks for nothing and decides nothing about steps.
"""

from __future__ import annotations

from everstep.core.task.states import (
    Absent,
    Assembling,
    Joining,
    Lived,
    Member,
    Over,
    Phase,
    PlaceState,
    RecoveryPolicy,
    Starting,
)
from everstep.core.words.actions import Action, FailTask, StartWorker
from everstep.core.words.events import StepSealed
from everstep.core.words.incidents import Incident, IncidentLog, TaskIncidents
from everstep.core.words.ops import Worker
from everstep.core.words.shape import Shape
from everstep.core.words.worker_messages import Members


class Membership:
    def __init__(
        self,
        shape: Shape,
        *,
        steps: int,
        policy: RecoveryPolicy,
        first_step: int = 1,
        checkpoint: int | None = None,
        lived: Lived | None = None,
        granted: frozenset[Worker] | None = None,
        log: TaskIncidents | None = None,
    ) -> None:
        """`granted`: the places that have a slot (None: all of them); only these are ever started.
        `checkpoint`: what is on disk, where the first step goes on from a newer state in memory.
        """
        self.shape = shape
        self.steps = steps
        self.policy = policy
        lived = lived or Lived()
        self.epoch = lived.epoch
        self.attempts: tuple[tuple[int, int], ...] = ((0, lived.attempt),)
        self.recorded = first_step - 1
        self.checkpoint = first_step - 1 if checkpoint is None else checkpoint
        self.kept = None if checkpoint is None else first_step - 1  # in the memory of nodes
        self.places: dict[Worker, PlaceState] = {w: Absent(0, "not started yet") for w in shape.workers()}
        self.granted = frozenset(shape.workers()) if granted is None else granted
        self.incarnations = dict.fromkeys(shape.workers(), lived.incarnation)
        self.restarts = dict.fromkeys(shape.workers(), 0)  # on the machine it has now
        self.phase: Phase = Assembling(restore=first_step - 1, wait_for_all=True)
        self.members: tuple[Members, ...] = ()
        self.rewind: int | None = None
        self.stopping = ""  # why this shape ends, if it does
        self.until: int | None = None  # its last step
        self.sealed: dict[int, dict[int, StepSealed]] = {}
        self.shares: dict[int, dict[int, float]] = {}  # of the norm, by step and stage, of the last few steps
        self.log = IncidentLog().of_task("") if log is None else log
        self.raised: dict[str, tuple[Worker, int]] = {}  # where -> who raised there first

    @property
    def incidents(self) -> list[Incident]:
        return self.log.incidents

    def lived(self) -> Lived:
        return Lived(self.epoch, self.attempts[-1][1], max(self.incarnations.values()))

    @property
    def last_step(self) -> int:
        return self.steps if self.until is None else self.until

    # -------------------------------------------------------------- processes

    def _start(self, worker: Worker, because: str) -> list[Action]:
        self.restarts[worker] += 1
        self.incarnations[worker] += 1
        self.places[worker] = Starting(self.incarnations[worker])
        return [StartWorker(worker=worker, incarnation=self.incarnations[worker], because=because)]

    def _bring_back_the_due(self) -> list[Action]:
        actions: list[Action] = []
        for worker, place in self.places.items():
            if isinstance(place, Absent) and place.due_step <= self.recorded and self._may_start(worker):
                actions += self._start(
                    worker,
                    f"worker {worker} was lost ({place.because}); start number {self.restarts[worker] + 1}",
                )
        return actions

    def _fail(self, because: str) -> list[Action]:
        self.phase = Over(because)
        return [FailTask(because=because)]

    # -------------------------------------------------------------- groups and attempts

    def _regroup(self, low: int, *, restarting: frozenset[int]) -> None:
        """Who makes up each stage, and in which epoch each group was formed: from the step before `low` on,
        which may not be sealed everywhere yet.

        A stage that still owes ops forms its group anew even with the same members: the new plan may give an
        op to a worker that has contributed already, and its part must not count without that op.
        """
        since = {w: p.since for w, p in self.places.items() if isinstance(p, Member)} | self._entering()
        table = []
        for first in sorted({low - 1, *(step for step in since.values() if step >= low)}):
            live = tuple(
                tuple(sorted(w.replica for w, s in since.items() if w.stage == stage and s <= first))
                for stage in range(self.shape.stages)
            )
            if not all(live):
                continue
            rounds = tuple(
                self.epoch if stage in restarting else self._round(stage, first, live[stage])
                for stage in range(self.shape.stages)
            )
            table.append(Members(first, live, rounds))
        self.members = tuple(table)

    def _round(self, stage: int, step: int, live: tuple[int, ...]) -> int:
        fitting = [m for m in self.members if m.from_step <= step]
        if fitting and fitting[-1].live[stage] == live:
            return fitting[-1].rounds[stage]
        return self.epoch

    def attempt_of(self, step: int) -> int:
        """The attempt at a step that counts; exact for steps that are not on record yet."""
        return [attempt for first, attempt in self.attempts if first <= step][-1]

    def _void_from(self, step: int) -> None:
        """What was computed of this step and later ones does not count: they are attempted anew."""
        attempt = self.attempts[-1][1] + 1
        self.shares = {s: of for s, of in self.shares.items() if s < step}
        earlier = [(first, number) for first, number in self.attempts if first < step]
        settled = [number for first, number in earlier if first <= self.recorded][-1:]
        open_still = [(first, number) for first, number in earlier if first > self.recorded]
        self.attempts = ((0, settled[0] if settled else 0), *open_still, (step, attempt))

    def _is_fed(self, place: Joining) -> bool:
        return place.source is not None and isinstance(self.places[place.source], Member)

    def _may_start(self, worker: Worker) -> bool:
        return worker in self.granted and self.restarts[worker] <= self.policy.max_restarts

    def _having(self, standing: type[PlaceState]) -> list[Worker]:
        return [worker for worker, place in self.places.items() if isinstance(place, standing)]

    def _joiners(self) -> list[tuple[Worker, Joining]]:
        return [(worker, place) for worker, place in self.places.items() if isinstance(place, Joining)]

    def _entering(self) -> dict[Worker, int]:
        return {w: place.enter_at for w, place in self._joiners() if place.enter_at is not None}

    def _not_among(self, members: Members) -> frozenset[Worker]:
        return frozenset(w for w in self.shape.workers() if w.replica not in members.live[w.stage])
