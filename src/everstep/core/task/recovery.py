"""How a task heals: survivors' ledgers in, the rest of the step out.

One machine per task, off the data path. Workers train without it; it speaks when membership changes.

                 ┌────────────────────────────── a member dies, a joiner has caught up, an update is invalid
                 ▼                                                                        │
    Assembling ──► Planning ──► Running ──► Gathering ──► Planning ──► Running ───────────┘
        ▲                                      │
        └──────── a stage has nobody left ─────┘   (then: the newest checkpoint, and on from there)

Every change of membership is a new epoch. In it the live members finish the op in hand and tell their ledgers
(Gathering); what is owed is given to the scheduler (Planning, whose answer may come late: a death meanwhile
raises the epoch and the answer is ignored); then each worker gets the rest of its step and goes on (Running).

A replacement copies its state from a live peer while training goes on, and is let in at a step nobody has
entered.
"""

from __future__ import annotations

import math
from typing import assert_never

from everstep.core.task.admission import Admission
from everstep.core.task.owed import Owed, what_is_owed
from everstep.core.task.states import (
    Absent,
    Assembling,
    Gathering,
    Joining,
    Member,
    Over,
    Planning,
    Running,
    Starting,
)
from everstep.core.words.actions import (
    Action,
    BrokenStep,
    CloseIncident,
    ComputePlan,
    FinishShape,
    FinishTask,
    RecordStep,
    ResumeStep,
    StopFeeding,
)
from everstep.core.words.events import (
    CheckpointCommitted,
    CopiesLost,
    Event,
    LedgerReported,
    PlacesGranted,
    PlanComputed,
    ProfileChanged,
    RestoreFailed,
    StateCopied,
    StateKept,
    StepSealed,
    StopRequested,
    TrainingStalled,
    UpdateInvalidated,
    WorkerExited,
    WorkerRaised,
    WorkerResumed,
    WorkerStarted,
)
from everstep.core.words.ops import Kind, Op, Worker
from everstep.core.words.worker_messages import Ledger, Resume

_KEPT_SHARES = 4  # steps


class Recovery(Admission):
    """The state machine. `handle` is its only way to change."""

    def begin(self) -> list[Action]:
        """The first actions: a process for every place that has a slot."""
        actions: list[Action] = []
        for worker in sorted(self.granted):
            actions += self._start(worker, "the task begins")
        return actions

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; say what follows from it."""
        if isinstance(self.phase, Over):
            return []
        match event:
            case WorkerStarted():
                return self._started(event)
            case WorkerExited():
                return self._exited(event, now)
            case WorkerRaised():
                return self._raised(event)
            case LedgerReported():
                return self._ledger(event)
            case PlanComputed():
                return self._planned(event, now)
            case StepSealed():
                return self._sealed(event)
            case UpdateInvalidated():
                return self._invalidated(event, now)
            case StateCopied():
                return self._copied(event)
            case WorkerResumed():
                return self._resumed(event)
            case ProfileChanged() | TrainingStalled() | CopiesLost():
                return self._gather(event.because) if isinstance(self.phase, Running) else []
            case PlacesGranted():
                return self._granted(event)
            case CheckpointCommitted():
                if event.step <= self.recorded:  # else it was written before the task went back
                    self.checkpoint = max(self.checkpoint, event.step)
                return []
            case StateKept():
                return self._kept(event.step)
            case RestoreFailed():
                return self._unrestored(event)
            case StopRequested():
                self.stopping = event.because
                return self._gather(event.because) if isinstance(self.phase, Running) else []
            case _:
                assert_never(event)

    def validate(self) -> None:
        """What must hold between events."""
        if isinstance(self.phase, Running | Gathering | Planning) and self.members:
            for worker in self._having(Member):
                assert worker.replica in self.members[-1].live[worker.stage] or not isinstance(
                    self.phase, Running
                ), f"{worker} is a member nobody knows of"
        assert all(count <= self.policy.max_restarts + 1 for count in self.restarts.values())
        if isinstance(self.phase, Gathering):
            assert self.phase.awaited, "gathering, but nobody is awaited"
        for incident in self.incidents:
            assert incident.planned_at is None or incident.planned_at >= incident.evidence_at

    # -------------------------------------------------------------- processes come and go

    def _granted(self, event: PlacesGranted) -> list[Action]:
        """Who has a slot now. A place without one stays empty: its microbatches go elsewhere."""
        self.granted = event.places
        for worker in event.clean:
            self.restarts[worker] = 0
        if isinstance(self.phase, Assembling):
            return self._bring_back_for_assembly()
        return self._bring_back_the_due()

    def _started(self, event: WorkerStarted) -> list[Action]:
        place = self.places[event.worker]
        if not isinstance(place, Starting) or place.incarnation != event.incarnation:
            return []
        self.places[event.worker] = Joining(event.incarnation)
        match self.phase:
            case Assembling():
                return self._plan_if_assembled()
            case Running():
                return self._feed_joiners()
            case _:
                return []

    def _exited(self, event: WorkerExited, now: float) -> list[Action]:
        worker, place = event.worker, self.places[event.worker]
        if isinstance(place, Absent) or place.incarnation != event.incarnation:
            return []
        was_member = isinstance(place, Member) or (isinstance(place, Joining) and place.enter_at is not None)
        self.places[worker] = Absent(self.recorded + self.policy.rejoin_after_steps, event.reason)
        actions: list[Action] = []
        if isinstance(place, Joining) and place.source is not None:
            actions.append(
                StopFeeding(source=place.source, joiner=worker, because=f"{worker} died while joining")
            )
        if isinstance(self.phase, Planning) and self.phase.restore is not None:
            return actions + self._assemble()  # nobody has moved yet
        if was_member:
            if not event.planned:
                incident = self.log.open(worker, event.reason, self.recorded + 1, now, event.done_ops)
                incident.killed_at = incident.killed_at or event.killed_at
            actions += self._gather(f"worker {worker} is gone: {event.reason}")
        elif isinstance(self.phase, Running):
            actions += self._feed_joiners()
        actions += self._bring_back_the_due()
        if isinstance(self.phase, Assembling):
            actions += self._bring_back_for_assembly()
        return actions

    def _raised(self, event: WorkerRaised) -> list[Action]:
        """Twice the same exception at the same op, from two processes: the input is at fault, not a
        machine.
        """
        first = self.raised.setdefault(event.where, (event.worker, event.incarnation))
        if first == (event.worker, event.incarnation):
            return []
        return self._fail(f"two workers raised at {event.where}, so another would too: {event.error}")

    # -------------------------------------------------------------- a new epoch

    def _ledger(self, event: LedgerReported) -> list[Action]:
        phase = self.phase
        if (
            not isinstance(phase, Gathering)
            or event.epoch != phase.epoch
            or event.worker not in phase.awaited
        ):
            return []
        phase.ledgers[event.worker] = event.ledger
        phase.awaited.discard(event.worker)
        return [] if phase.awaited else self._survey(phase)

    def _unrestored(self, event: RestoreFailed) -> list[Action]:
        """The state that a worker was to load is gone. A peer of its stage may have it already; if none has,
        all go back to an older one. Either way the others may be at work: they pause first.
        """
        place = self.places[event.worker]
        if not isinstance(place, Member) or place.incarnation != event.incarnation:
            return []
        if event.step == self.kept:
            self.kept = None
        match self.phase:
            case Running():
                self.places[event.worker] = Joining(place.incarnation)
                return self._gather(f"worker {event.worker} could not load the state of step {event.step}")
            case Gathering() as phase:
                self.places[event.worker] = Joining(place.incarnation)
                phase.awaited.discard(event.worker)
                return [] if phase.awaited else self._survey(phase)
            case Planning(restore=int()):
                return self._assemble()  # nobody has moved yet
            case _:
                return []

    def _survey(self, phase: Gathering) -> list[Action]:
        ledgers = self._settle_joiners(phase.ledgers)
        if any(not any(w.stage == s for w in ledgers) for s in range(self.shape.stages)):
            return self._assemble()
        found = what_is_owed(self.shape, ledgers, steps=self.last_step, entering=self._entering())
        last = max(found.high, self.recorded + 1)  # a step whose seal is still to come
        if self.stopping and self.until is None and last < self.steps:
            self.until = last
        for place in self.places.values():
            if (
                isinstance(place, Joining)
                and place.copied
                and place.enter_at is None
                and self._is_fed(place)  # else it is given a new source, and copies anew
                and found.high < self.last_step
            ):
                place.enter_at = found.high + 1
        if self.rewind is None:
            self.rewind = found.rewind
        self._regroup(
            found.low if self.rewind is None else min(found.low, self.rewind), restarting=found.owing
        )
        broken = {
            step: rest if self.rewind is None or step <= self.rewind else BrokenStep(rest.dead, {})
            for step, rest in found.broken.items()
        }
        self.phase = Planning(phase.epoch, phase.because, None, found, ledgers)
        return [
            ComputePlan(
                epoch=phase.epoch,
                broken=broken,
                dead=self._not_among(self.members[-1]),
                because=phase.because,
            )
        ]

    def _planned(self, event: PlanComputed, now: float) -> list[Action]:
        phase = self.phase
        if not isinstance(phase, Planning) or event.epoch != phase.epoch:
            return []
        self.log.planned(now, phase.epoch)
        self.phase = Running(phase.epoch)
        if phase.restore is not None:
            actions = self._resume_from_checkpoint(event, phase.restore, phase.because)
        else:
            actions = self._resume_members(event, phase)
        self.rewind = None
        return actions + self._feed_joiners()

    def _resume_members(self, event: PlanComputed, phase: Planning) -> list[Action]:
        assert phase.survey is not None
        if self.rewind is not None:
            self._void_from(self.rewind + 1)
        actions: list[Action] = []
        admitted = self._entering()
        for worker in sorted({*phase.ledgers, *admitted}):
            ledger = phase.ledgers.get(worker)
            at = ledger.step if ledger is not None else admitted[worker]
            if self.rewind is not None and ledger is not None:
                at = min(at, self.rewind)
            void = self.steps if self.rewind is None else self.rewind  # nothing done after this step counts
            lists = {
                step: ops[worker]
                if ledger is None or step > void
                else _without_reduce(ops[worker], ledger, step)
                for step, ops in event.lists.items()
                if step >= at and worker in ops
            }
            if self.rewind is not None and self.rewind < phase.survey.low:
                lists[self.rewind] = (Op(Kind.U, None, worker.stage),)
            order = Resume(
                epoch=phase.epoch,
                attempts=self.attempts,
                step=at,
                lists=lists,
                steady=event.steady[worker],
                hosts=event.hosts,
                steady_hosts=event.steady_hosts,
                members=self.members,
                ghosts=phase.survey.ghosts.get(worker, frozenset()),
                give={
                    step: peers
                    for step, peers in phase.survey.give.get(worker, {}).items()
                    if self.rewind is None or step <= self.rewind
                },
                rewind=self.rewind,
                until=self.until,
                awaits=self._awaited(worker, phase.survey),
                shares=tuple((s, stage, x) for s, of in self.shares.items() for stage, x in of.items()),
                feeds={
                    joiner.replica: None if place.enter_at is None else place.enter_at - 1
                    for joiner, place in self._joiners()
                    if place.source == worker
                },
            )
            actions.append(ResumeStep(worker=worker, order=order, because=phase.because))
        return actions

    def _awaited(self, worker: Worker, found: Owed) -> frozenset[int]:
        return frozenset(
            step
            for giver, steps in found.give.items()
            for step, peers in steps.items()
            if giver.stage == worker.stage
            and worker.replica in peers
            and (self.rewind is None or step <= self.rewind)
        )

    # -------------------------------------------------------------- steps

    def _sealed(self, event: StepSealed) -> list[Action]:
        if event.attempt != self.attempt_of(event.step):
            return []  # the step was taken back since
        if event.step > self.recorded - _KEPT_SHARES:
            self.shares.setdefault(event.step, {})[event.stage] = event.sum_of_squares
            self.shares = {s: of for s, of in self.shares.items() if s > self.recorded - _KEPT_SHARES}
        if event.step <= self.recorded:
            return []
        self.sealed.setdefault(event.step, {})[event.stage] = event
        self._imply_earlier_seals(event)
        actions: list[Action] = []
        while len(self.sealed.get(self.recorded + 1, {})) == self.shape.stages:
            actions.append(self._record(self.sealed.pop(self.recorded + 1)))
        if actions:
            actions += self._bring_back_the_due() + self._admit_the_late()
        if self.recorded >= self.last_step:
            self.phase = Over("the last step is sealed")
            actions.append(self._finished())
        elif actions and self.stopping and self.until is None and isinstance(self.phase, Running):
            actions += self._gather(self.stopping)  # it was asked to stop while it was mending something
        return actions

    def _finished(self) -> Action:
        if self.recorded >= self.steps:
            return FinishTask(because=f"step {self.steps} is sealed at every stage")
        because = f"{self.stopping}; step {self.recorded}, the last of this shape, is sealed at every stage"
        return FinishShape(step=self.recorded, because=because)

    def _imply_earlier_seals(self, event: StepSealed) -> None:
        """A stage seals its steps in order: if the only one who knew of an earlier seal died before telling,
        this one tells it too. What is lost then are that step's losses, if it was the last stage's.
        """
        total = self.shape.replicas * self.shape.microbatches
        for step in range(self.recorded + 1, event.step):
            implied = StepSealed(
                step=step,
                stage=event.stage,
                attempt=self.attempt_of(step),
                microbatches=total,
                executed=3 * total,
            )
            self.sealed.setdefault(step, {}).setdefault(event.stage, implied)

    def _record(self, stages: dict[int, StepSealed]) -> RecordStep:
        self.recorded += 1
        for worker, place in self._joiners():
            if (
                place.enter_at is not None
                and place.enter_at <= self.recorded
                and isinstance(self.phase, Running)
            ):
                self.places[worker] = Member(place.incarnation, place.enter_at)  # its part is in this sum
        total = self.shape.replicas * self.shape.microbatches
        once = all(sealed.microbatches == total for sealed in stages.values())
        elsewhere = sum(sealed.executed - 3 * total for sealed in stages.values())
        self.log.recorded(self.recorded, elsewhere)
        squares = [sealed.sum_of_squares for sealed in stages.values()]
        norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        return RecordStep(
            step=self.recorded,
            epoch=self.epoch,
            attempt=self.attempts[-1][1],
            losses=stages[self.shape.stages - 1].losses,
            norm=norm,
            microbatches_committed=total if once else 0,
            replayed_elsewhere=elsewhere,
            because="every stage has sealed it",
        )

    def _invalidated(self, event: UpdateInvalidated, now: float) -> list[Action]:
        if event.attempt != self.attempt_of(event.step + 1) or isinstance(self.phase, Assembling):
            return []
        if self.rewind is not None and isinstance(self.phase, Gathering):
            return []
        self.rewind = event.step
        because = f"step {event.step} was updated eagerly, and its norm {event.norm:.4g} forbids that"
        self.log.open(event.worker, because, event.step, now, 0)
        return self._gather(because)

    # -------------------------------------------------------------- incidents

    def _resumed(self, event: WorkerResumed) -> list[Action]:
        if event.epoch != self.epoch:
            return []
        return [
            CloseIncident(incident=incident, because=f"{event.worker} runs ops again")
            for incident in self.log.resumed(event.at)
        ]


def _without_reduce(ops: tuple[Op, ...], ledger: Ledger, step: int) -> tuple[Op, ...]:
    """A worker that holds a step's sum has no reduce left in it."""
    if ledger.step > step or (ledger.step == step and any(op.kind is Kind.R for op in ledger.done)):
        return tuple(op for op in ops if op.kind is not Kind.R)
    return ops
