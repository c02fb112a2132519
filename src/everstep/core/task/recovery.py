"""How a task heals: survivors' ledgers in, the rest of the step out.

One machine per task, off the data path. Workers train without it; it acts when membership changes.

A worker's death, a joiner that has caught up and an update that turned out invalid begin a new epoch, which
`core.task.phases` carries through. A replacement copies its state from a live peer while training continues,
and is let in at a step that no worker has entered.

`Recovery` routes events over parts that each own their state and return actions:

    Places      the process that fills each place, its slot, its restarts
    Phases      the task's phase, its groups, epochs and attempts, and the states it can go back to
    StepBook    which stages have sealed which step, and what is recorded
    Raises      the exceptions of workers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from everstep.core.task import ownership
from everstep.core.task.assembly import Assembly
from everstep.core.task.groups import Groups
from everstep.core.task.phases import Phases
from everstep.core.task.places import Places
from everstep.core.task.raises import Raises
from everstep.core.task.states import (
    Absent,
    Assembling,
    Copied,
    Copying,
    Entering,
    Fed,
    Gathering,
    Lived,
    Member,
    Over,
    Phase,
    PlaceState,
    RecoveryPolicy,
    Restoring,
    Running,
    Started,
    Starting,
)
from everstep.core.task.step_book import StepBook
from everstep.protocol import actions as act
from everstep.protocol import events as ev
from everstep.protocol.actions import Action
from everstep.protocol.codec import decode, encode
from everstep.protocol.incidents import Incident, IncidentLog, TaskIncidents
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.table import TABLE, AnyMessage, Document, Fence, Handlers
from everstep.protocol.work import Members, is_quiet

OTHER_KERNELS = (
    "worker {peer} does not use the same fast kernels on {device}: a microbatch has other bits on each of "
    "them. A new process tries again."
)
OTHER_SUMS = (
    "worker {peer} runs a version of Everstep that sums gradients of this job differently. Save and stop the "
    "task, finish the upgrade, and resume the task with one version."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The steps of a run of a task."""

    steps: int  # of the whole task
    first_step: int = 1
    checkpoint: int | None = (
        None  # the step on disk, where the first step continues from a newer state in memory
    )
    closes: bool = False  # the last step only evaluates


class Recovery:
    """The state machine. `handle` is the only way it changes."""

    on: ClassVar = Handlers[list[Action]](ev.Event)

    def __init__(
        self,
        shape: Shape,
        course: Course,
        *,
        policy: RecoveryPolicy,
        lived: Lived | None = None,
        granted: frozenset[Worker] | None = None,
        log: TaskIncidents | None = None,
    ) -> None:
        """`granted`: the places that have a slot (None: all)."""
        lived = lived or Lived()
        restore = course.first_step - 1
        self.shape, self.steps, self.policy = shape, course.steps, policy
        self.log = IncidentLog().of_task("") if log is None else log
        self._raises = Raises()
        self._places = Places.all_absent(
            shape.workers(),
            policy=policy,
            granted=frozenset(shape.workers()) if granted is None else granted,
            incarnation=lived.incarnation,
        )
        self._book = StepBook(
            shape=shape,
            steps=course.steps,
            recorded=restore,
            closes=course.closes,
            verified=restore,
            is_voting=policy.votes_on_all,
            every=policy.votes_on_all,
        )
        self._phases = Phases(
            Assembling(restore=restore, wait_for_all=True),
            Groups(shape=shape, epoch=lived.epoch, attempts=((0, lived.attempt),)),
            Assembly(
                on_disk=restore if course.checkpoint is None else course.checkpoint,
                in_memory=None if course.checkpoint is None else restore,
                last=course.steps - course.closes if policy.looks else None,
            ),
            places=self._places,
            book=self._book,
            log=self.log,
        )

    def begin(self) -> list[Action]:
        """The first actions: a process for every place that has a slot."""
        return [self._places.start(worker, "the task begins") for worker in sorted(self.granted)]

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Take one event; return what follows from it."""
        if isinstance(self.phase, Over) or self.is_late(event):
            return []
        return self.on.handler(self, event)(event, now)

    def is_late(self, said: AnyMessage) -> bool:
        """Is it of a process, an epoch or an attempt at a step that is over? The one place where these are
        compared, by the fences of its row.
        """
        for fence in TABLE[type(said)].fences:
            match fence:
                case Fence.INCARNATION if not self._places.is_running(said.worker, said.incarnation):
                    return True
                case Fence.EPOCH if said.epoch != self.epoch:
                    return True
                case Fence.ATTEMPT if said.attempt != self.attempt_of(said.step):
                    return True
                case Fence.NEXT_ATTEMPT if said.attempt != self.attempt_of(said.step + 1):
                    return True
        return False

    def validate(self) -> None:
        """What must hold between events."""
        self._places.validate()
        if isinstance(self.phase, Running) and self.members:
            for worker in self._places.members():
                live = self.members[-1].live[worker.stage]
                assert worker.replica in live, f"{worker} is a member of no group"
        assert all(count <= self.policy.max_restarts + 1 for count in self.restarts.values())
        if isinstance(self.phase, Gathering):
            assert self.phase.awaited, "gathering, but no ledger is awaited"
        for incident in self.incidents:
            assert incident.planned_at is None or incident.planned_at >= incident.evidence_at

    # -------------------------------------------------------------- what others read

    @property
    def phase(self) -> Phase:
        return self._phases.phase

    @property
    def is_over(self) -> bool:
        return isinstance(self.phase, Over)

    @property
    def places(self) -> dict[Worker, PlaceState]:
        return self._places.states

    @property
    def num_members(self) -> int:
        return self._places.num_members()

    @property
    def granted(self) -> frozenset[Worker]:
        return self._places.granted

    @property
    def restarts(self) -> dict[Worker, int]:
        return self._places.restarts

    @property
    def epoch(self) -> int:
        return self._phases.groups.epoch

    @property
    def members(self) -> tuple[Members, ...]:
        return self._phases.groups.members

    @property
    def recorded(self) -> int:
        """The last step that every stage has sealed."""
        return self._book.recorded

    @property
    def verified(self) -> int:
        """The last recorded step in which peers computed a share again, with the same bits."""
        return self._book.verified

    def is_state_verified(self, step: int) -> bool:
        """Where it can be: not if votes have stopped, or every stage has one worker."""
        can_vote = self._book.votes and any(len(live) > 1 for live in self.members[-1].live)
        return not can_vote or self._book.is_state_verified(step)

    @property
    def checkpoint(self) -> int:
        """The step of the newest checkpoint on disk."""
        return self._phases.assembly.on_disk

    def loads_from_disk(self, event: ev.RestoreFailed) -> bool:
        """Was it the checkpoint on disk that this worker was ordered to load, and not again since?"""
        assembly = self._phases.assembly
        is_on_disk = event.step == assembly.on_disk != assembly.in_memory
        return is_on_disk and event.epoch >= assembly.ordered_in

    @property
    def kept(self) -> int | None:
        """The newest step whose whole state is in the memory of nodes."""
        return self._phases.assembly.in_memory

    @property
    def incidents(self) -> list[Incident]:
        return self.log.incidents

    def attempt_of(self, step: int) -> int:
        return self._phases.groups.attempt_of(step)

    def lived(self) -> Lived:
        """The highest numbers used so far, for the next run of this task."""
        incarnation = max(self._places.incarnations.values())
        return Lived(self.epoch, self._phases.groups.attempts[-1][1], incarnation)

    def snapshot(self) -> Document:
        """All of the state, as JSON, except for the incidents, which are the cluster's."""
        return {
            "phase": encode(self.phase),
            "places": encode(self._places),
            "groups": encode(self._phases.groups),
            "book": encode(self._book),
            "assembly": encode(self._phases.assembly),
            "raises": encode(self._raises),
        }

    @classmethod
    def from_snapshot(cls, data: Document, log: TaskIncidents) -> Recovery:
        places: Places = decode(Places, data["places"])
        book: StepBook = decode(StepBook, data["book"])
        recovery = cls(book.shape, Course(steps=book.steps), policy=places.policy, log=log)
        recovery._raises = decode(Raises, data["raises"])
        recovery._places, recovery._book = places, book
        recovery._phases = Phases(
            decode(Phase, data["phase"]),
            decode(Groups, data["groups"]),
            decode(Assembly, data["assembly"]),
            places=places,
            book=book,
            log=log,
        )
        return recovery

    # -------------------------------------------------------------- processes come and go

    @on
    def _granted(self, event: ev.PlacesGranted, now: float) -> list[Action]:
        """The cluster says which places have a slot. The microbatches of the others run elsewhere."""
        self._places.granted = event.places
        for worker in event.clean:
            self._places.clear_restarts(worker)
        if isinstance(self.phase, Assembling):
            return self._phases.fill_stages()
        return self._places.start_due(self.recorded)

    @on
    def _started(self, event: ev.WorkerStarted, now: float) -> list[Action]:
        if not isinstance(self.places[event.worker], Starting):
            return []
        self._places.started(event.worker, event.incarnation, sums=event.sums, kernels=event.kernels)
        if isinstance(self.phase, Running):
            return self._places.feed_joiners()
        return self._phases.restore_if_assembled()

    def other_sums(self, event: ev.WorkerStarted) -> str | None:
        """Why this worker must not take part beside those of its stage that do."""
        if (peer := self._places.sums_differ(event.worker, event.sums)) is not None:
            return OTHER_SUMS.format(peer=peer)
        peer = self._places.kernels_differ(event.worker, event.kernels)
        return None if peer is None else OTHER_KERNELS.format(peer=peer, device=event.kernels.device)

    @on
    def _exited(self, event: ev.WorkerExited, now: float) -> list[Action]:
        return self._gone([event], now)

    @on
    def _exited_at_once(self, event: ev.WorkersExited, now: float) -> list[Action]:
        exits = [one for one in event.exits if not self.is_late(one)]
        return self._gone(exits, now) if exits else []

    def _gone(self, exits: Sequence[ev.WorkerExited], now: float) -> list[Action]:
        """One epoch for all of them."""
        actions: list[Action] = []
        members: list[ev.WorkerExited] = []
        for event in exits:
            worker, place = event.worker, self.places[event.worker]
            self._places.to(worker, Absent(self.recorded + self.policy.rejoin_after_steps, event.reason))
            if isinstance(place, Fed):
                because = f"worker {worker} died while joining"
                actions.append(act.StopFeeding(source=place.source, joiner=worker, because=because))
            if isinstance(place, Member | Entering):
                members.append(event)
        if isinstance(self.phase, Restoring):
            return actions + self._phases.assemble()  # no worker has begun yet
        for event in members:
            if not event.planned:
                step = event.step or self.recorded + 1
                incident = self.log.open(event.worker, event.reason, step, now, event.done_ops)
                incident.first_step = min(step, self.recorded + 1)
                incident.killed_at = incident.killed_at or event.killed_at
        if members:
            first, more = members[0], len(members) - 1
            who = f"worker {first.worker} is gone" + (f", and {more} more" if more else "")
            actions += self._phases.interrupt(f"{who}: {first.reason}")
            if isinstance(self.phase, Over):
                return actions
        elif isinstance(self.phase, Running):
            actions += self._places.feed_joiners()
        actions += self._places.start_due(self.recorded)
        if isinstance(self.phase, Assembling):  # this may have been the last that was waited for
            actions += self._phases.fill_stages() + self._phases.restore_if_assembled()
        return actions

    @on
    def _raised(self, event: ev.WorkerRaised, now: float) -> list[Action]:
        because = self._raises.repeated(event)
        return [] if because is None else self._phases.fail(because)

    @on
    def _copied(self, event: ev.StateCopied, now: float) -> list[Action]:
        place = self.places[event.worker]
        if not isinstance(place, Copying) or place.transfer != event.transfer:
            return []
        self._places.to(event.worker, Copied(place.incarnation, place.source))
        if self._book.is_full:
            return []  # there is no step that it could enter
        return self._phases.interrupt_if_running(f"worker {event.worker} has caught up and joins")

    @on
    def _filled(self, event: ev.ChunksFilled, now: float) -> list[Action]:
        """A new holder has its states: now another one may be let go, or may share its chunks with those who
        have joined meanwhile.
        """
        if not isinstance(self.places[event.worker], Member | Entering):
            return []
        members, stage = self.members[-1], event.worker.stage
        if ownership.is_settled(members.holders[stage], members.live[stage]):
            return []
        return self._phases.interrupt_if_running(
            f"worker {event.worker} has its share of the optimizer states"
        )

    @on
    def _restore_failed(self, event: ev.RestoreFailed, now: float) -> list[Action]:
        """The state that a worker was to load could not be read. A peer of its stage may have loaded it
        already; if none has, all go back to the newest state that the cluster still counts on: the same one
        again, an older one, or the disk's. Either way the others may be at work: they are interrupted first.
        """
        worker, place = event.worker, self.places[event.worker]
        if not isinstance(place, Member):
            return []
        if 0 < event.epoch < self._phases.assembly.ordered_in:
            return []  # it has been ordered to load a state again since
        match self.phase:
            case Running():
                self._places.to(worker, Started(place.incarnation))
                return self._phases.interrupt(
                    f"worker {worker} could not load the state of step {event.step}"
                )
            case Gathering():
                self._places.to(worker, Started(place.incarnation))
                return self._phases.await_no_ledger_of(worker)
            case Restoring() if not event.epoch:
                return self._phases.assemble()  # no worker has begun yet
            case _:
                return []

    @on
    def _update_invalidated(self, event: ev.UpdateInvalidated, now: float) -> list[Action]:
        """An interruption, no incident: nothing has failed, and the planner counts incidents as failures."""
        if isinstance(self.phase, Assembling | Restoring):
            return []
        if isinstance(self.phase, Gathering) and self.phase.rewind is not None:
            return []
        norm = f"{event.norm:.4g} is above the clip" if isfinite(event.norm) else "is not finite"
        because = f"undo the eager update of step {event.step}: its gradient norm {norm}"
        return self._phases.interrupt(because, rewind=event.step)

    @on
    def _resumed(self, event: ev.WorkerResumed, now: float) -> list[Action]:
        return [
            act.CloseIncident(number=incident.number, because=f"worker {event.worker} runs ops again")
            for incident in self.log.resumed(event.at)
        ]

    # -------------------------------------------------------------- epochs

    @on
    def _ledger_reported(self, event: ev.LedgerReported, now: float) -> list[Action]:
        return self._phases.take_ledger(event)

    @on
    def _plan_computed(self, event: ev.PlanComputed, now: float) -> list[Action]:
        return self._finished_if_full(self._phases.take_plan(event, now))

    @on
    def _disturbed(
        self, event: ev.ProfileChanged | ev.TrainingStalled | ev.CopiesLost, now: float
    ) -> list[Action]:
        return self._phases.interrupt_if_running(event.because)

    @on
    def _votes_settled(self, event: ev.VotesSettled, now: float) -> list[Action]:
        """A worker waits for the verdict: the new epoch breaks the step, and with it the vote."""
        self._book.votes = self._book.votes and event.go_on
        return self._phases.interrupt_if_running(event.because)

    @on
    def _vote_differed(self, event: ev.VoteDiffered, now: float) -> list[Action]:
        """Judged by who knows the machines; what follows comes as another event."""
        return []

    @on
    def _state_doubted(self, event: ev.StateDoubted, now: float) -> list[Action]:
        if isinstance(self.phase, Assembling | Restoring):
            return []
        self._book.suspect = None
        return self._phases.go_back(event.because, verified=self.verified)

    @on
    def _step_suspected(self, event: ev.StepSuspected, now: float) -> list[Action]:
        """Its worker holds the sum back, so no weight has changed since: the step is computed again. Not if
        a step shortly before came from data or model; then it only continues.
        """
        if not isinstance(self.phase, Running):
            return []
        self._book.suspect = event.found
        step = event.found.step
        return self._phases.interrupt(
            event.because, rewind=None if is_quiet(step, self._book.odd) else step - 1
        )

    @on
    def _replay_judged(self, event: ev.ReplayJudged, now: float) -> list[Action]:
        self._book.odd = event.step
        return []

    @on
    def _stop_requested(self, event: ev.StopRequested, now: float) -> list[Action]:
        self._book.stop(event.because, final=event.final, saves=event.saves)
        return self._phases.interrupt_if_running(event.because)

    # -------------------------------------------------------------- states that are kept

    @on
    def _checkpoint_committed(self, event: ev.CheckpointCommitted, now: float) -> list[Action]:
        if event.step <= self.recorded:  # else it was written before the task went back
            self._phases.committed(event.step)
        return []

    @on
    def _checkpoints_looked(self, event: ev.CheckpointsLooked, now: float) -> list[Action]:
        return self._phases.take_look(event.step, again=event.again)

    @on
    def _state_kept(self, event: ev.StateKept, now: float) -> list[Action]:
        return self._phases.take_kept(event.step)

    # -------------------------------------------------------------- steps

    @on
    def _sealed(self, event: ev.StepSealed, now: float) -> list[Action]:
        book = self._book
        groups = self._phases.groups
        records = book.seal(
            event,
            epoch=self.epoch,
            attempt=groups.attempts[-1][1],
            alone=groups.alone_at,
            has_witness=self._has_witness,
        )
        for record in records:
            self.log.recorded(record.step, record.replayed_elsewhere)
        actions: list[Action] = list(records)
        if records:
            if isinstance(self.phase, Running):
                self._places.promote_entered(self.recorded)
            self._places.forgive(self.recorded)
            actions += self._places.start_due(self.recorded) + self._let_in_late_joiners()
        if book.is_full and self._ends_here and not self.policy.looks:
            self._phases.to(Over("the last step is sealed"))
            actions.append(self._finished())
        elif book.is_full:
            actions += [self._finished()] if records and isinstance(self.phase, Running) else []
        elif records and book.must_stop:
            # the request came while the task was healing
            actions += self._phases.interrupt_if_running(book.stopping)
        return actions

    def _has_witness(self, stage: int, step: int) -> bool:
        return any(
            isinstance(place, Member) and place.since <= step
            for worker, place in self.places.items()
            if worker.stage == stage
        )

    def _let_in_late_joiners(self) -> list[Action]:
        """Joiners that caught up while the task was healing: no plan has let them in yet."""
        ready = self._places.ready()
        if not ready or self._book.is_full:
            return []
        return self._phases.interrupt_if_running(f"worker {ready[0]} has caught up and joins")

    def _finished_if_full(self, orders: list[Action]) -> list[Action]:
        """The state that all go back to may be that of the last step of this shape: nothing is left to do. If
        a worker died, or joined, while the others held that state, they get their orders: it may not be safe
        yet.
        """
        if not self._book.is_full or not isinstance(self.phase, Running):
            return orders
        if not any(isinstance(o, act.ResumeWorkers) and o.facts.restore is not None for o in orders):
            return [*orders, self._finished()]
        self._phases.to(Over("the last step is in the state that is kept"))
        return [self._finished()]

    @property
    def is_stopping(self) -> bool:
        """Its shape is to end before its last step."""
        return bool(self._book.stopping)

    @property
    def saves_last(self) -> bool:
        """The state after its last step is to be a checkpoint."""
        return self._book.saves

    @property
    def _ends_here(self) -> bool:
        """The task itself is over, not only its shape: no worker will be asked to go on, once its last state
        is a checkpoint where it has those.
        """
        return self.recorded >= self.steps or self._book.final

    @on
    def _stop_abandoned(self, event: ev.StopAbandoned, now: float) -> list[Action]:
        self._book.go_on()
        return self._phases.interrupt_if_running(event.because)

    def _finished(self) -> Action:
        if self.recorded >= self.steps:
            return act.FinishTask(because=f"completed all {self.steps - self._book.closes} steps")
        what = "the last one" if self._book.final else "the last of this shape"
        because = f"{self._book.stopping}; step {self.recorded}, {what}, is complete"
        return act.FinishShape(step=self.recorded, because=because)
