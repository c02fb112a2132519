"""What the task as a whole does: run, gather ledgers, plan the rest of a step, go back to a kept state.

                 ┌─────── a member dies, a joiner has caught up, an update is invalid ───┐
                 │                                                                       │
    Assembling ──┼─► Restoring ──► Running ──► Gathering ──► Planning ──► Running ───────┘
        ▲        │                                │
        └────────┴── a stage has no worker left ──┘   (then: everyone loads the newest kept state)

Every change of membership is a new epoch. In it the live members finish the op in hand and report their
ledgers (Gathering); the scheduler orders what is owed (Planning; its answer may come late: if a worker dies
meanwhile, the epoch is raised and the answer is ignored); then each worker gets the rest of its step and goes
on (Running).
"""

from __future__ import annotations

from everstep.core.task.assembly import Assembly, CheckpointSearch
from everstep.core.task.doubts import unreported
from everstep.core.task.groups import Groups
from everstep.core.task.owed import what_is_owed
from everstep.core.task.places import Places
from everstep.core.task.resume_orders import restore_orders, resume_orders
from everstep.core.task.states import (
    PHASE,
    Assembling,
    Gathering,
    Over,
    Phase,
    Planning,
    Restoring,
    Running,
)
from everstep.core.task.step_book import StepBook
from everstep.protocol.actions import Action, ComputePlan, FailTask, InterruptWorkers, LookForCheckpoint
from everstep.protocol.events import LedgerReported, PlanComputed
from everstep.protocol.incidents import TaskIncidents
from everstep.protocol.lifecycle import become
from everstep.protocol.ops import Worker


class Phases:
    """Owns the phase, the groups and what is known of kept states; asks `Places` and `StepBook`."""

    def __init__(
        self,
        phase: Phase,
        groups: Groups,
        assembly: Assembly,
        *,
        places: Places,
        book: StepBook,
        log: TaskIncidents,
    ) -> None:
        self.phase, self.groups, self.assembly = phase, groups, assembly
        self._places, self._book, self._log = places, book, log

    def to(self, phase: Phase) -> None:
        """The only way the task changes its phase."""
        self.phase = become(PHASE, self.phase, phase, "the task")

    def fail(self, because: str) -> list[Action]:
        self.to(Over(because))
        return [FailTask(because=because)]

    # -------------------------------------------------------------- a new epoch

    def interrupt_if_running(self, because: str) -> list[Action]:
        return self.interrupt(because) if isinstance(self.phase, Running) else []

    def interrupt(self, because: str, *, rewind: int | None = None) -> list[Action]:
        """Ask the members for their ledgers. If one dies meanwhile, ask again, in the next epoch."""
        if rewind is None and isinstance(self.phase, Gathering | Planning):
            rewind = self.phase.rewind
        epoch, asked = self.groups.next_epoch(), self._places.members_and_entering()
        if not asked:
            return self.assemble()
        self.to(Gathering(epoch, because, rewind, set(asked)))
        return [InterruptWorkers(workers=tuple(sorted(asked)), epoch=epoch, because=because)]

    def take_ledger(self, event: LedgerReported) -> list[Action]:
        match self.phase:
            case Gathering() as phase if event.worker in phase.awaited:
                assert event.epoch == phase.epoch
                phase.ledgers[event.worker] = event.ledger
                phase.awaited.discard(event.worker)
                return [] if phase.awaited else self._plan_rest(phase)
        return []

    def await_no_ledger_of(self, worker: Worker) -> list[Action]:
        """This worker is not a member any more."""
        if not isinstance(self.phase, Gathering):
            return []
        self.phase.awaited.discard(worker)
        self.phase.ledgers.pop(worker, None)
        return [] if self.phase.awaited else self._plan_rest(self.phase)

    def _plan_rest(self, phase: Gathering) -> list[Action]:
        """Every ledger is here: have the scheduler order what is owed."""
        if self.assembly.is_doubted:
            return self.assemble()
        ledgers = self._places.settle_entering(phase.ledgers)
        if {worker.stage for worker in ledgers} != set(range(self.groups.shape.stages)):
            return self.assemble()
        book, groups = self._book, self.groups
        known = dict.fromkeys(ledger.shares for ledger in ledgers.values())  # most know the same
        book.hear_shares(share for shares in known for share in shares)
        if groups.lost_chunk(ledgers) is not None:
            return self.assemble()
        owed = what_is_owed(groups.shape, ledgers, steps=book.last_step, entering=self._places.entering())
        book.stop_after(max(owed.high, book.recorded + 1))  # a step whose seal is still to come
        if owed.high < book.last_step:
            self._places.let_in(owed.high + 1)
        rewind = owed.rewind if phase.rewind is None else phase.rewind
        if not groups.shape.chunks:
            doubt = unreported(groups.lost(ledgers, owed.low, owed.high, self._places.since()), ledgers)
            if doubt is not None and doubt >= groups.voided_from:
                rewind = doubt if rewind is None else min(rewind, doubt)
        low = owed.low if rewind is None else min(owed.low, rewind)
        groups.regroup(
            low,
            self._places.since(),
            restarting=owed.owing,
            settled=owed.settled,
            ledgers=ledgers,
        )
        self.to(Planning(phase.epoch, phase.because, rewind, owed, ledgers))
        return [
            ComputePlan(
                epoch=phase.epoch,
                broken=owed.broken_if_undone(rewind),
                dead=groups.without(),
                because=phase.because,
            )
        ]

    def take_plan(self, event: PlanComputed, now: float) -> list[Action]:
        phase = self.phase
        if not isinstance(phase, Planning | Restoring):
            return []
        assert event.epoch == phase.epoch
        kept_outputs = phase.owed.kept_outputs if isinstance(phase, Planning) else 0
        self._log.planned(now, phase.epoch, kept_outputs)
        if isinstance(phase, Restoring):
            self._void_from(phase.restore + 1)
            self._book.go_back_to(phase.restore, is_verified=phase.restore == self.assembly.on_disk)
            self.assembly.loaded()
            self.assembly.ordered_in = phase.epoch
            orders = restore_orders(event, phase, self._places, self.groups, self._book)
        else:
            if phase.rewind is not None:
                self._void_from(phase.rewind + 1)
            orders = resume_orders(event, phase, self._places, self.groups, self._book)
        self.to(Running(phase.epoch))
        return [orders, *self._places.feed_joiners()]

    def _void_from(self, step: int) -> None:
        self._book.void_from(step)
        self.groups.void_from(step, recorded=self._book.recorded)

    # -------------------------------------------------------------- back to a kept state

    def assemble(self) -> list[Action]:
        """A stage has no worker left: everyone goes back to the newest state that is kept."""
        self.assembly.is_doubted = False
        kept = self.assembly.in_memory
        if self._places.policy.looks and (kept is None or kept < self._book.recorded):
            self.assembly.look = CheckpointSearch.WANTED
        self._places.send_all_back()
        self._assemble_nearest(wait_for_all=False)
        return self.fill_stages() + self.restore_if_assembled()

    def go_back(self, because: str, *, verified: int) -> list[Action]:
        """What was computed after this step may be wrong. All workers pause before they load a state."""
        self.assembly.doubt_after(verified)
        return self.interrupt(because)

    def _assemble_nearest(self, *, wait_for_all: bool) -> None:
        step, where = self.assembly.nearest()
        self.to(Assembling(step, wait_for_all))
        self._log.restoring(step, where)

    def fill_stages(self) -> list[Action]:
        """Start every worker that may be started; the task fails where none is left for a stage."""
        actions = self._places.start_all()
        exhausted = self._places.exhausted()
        return actions if exhausted is None else self.fail(exhausted)

    def restore_if_assembled(self) -> list[Action]:
        if not isinstance(self.phase, Assembling):
            return []
        is_first = self.phase.wait_for_all and not self._log.incidents
        found = self.assembly.restore(self.phase, self._places, self.groups, is_first=is_first)
        if found is None:
            return []
        if isinstance(found, LookForCheckpoint):
            return [found]
        phase, question = found
        self.to(phase)
        return [question]

    def committed(self, step: int) -> None:
        """A checkpoint is complete. While all wait to go back, it may be the newest one."""
        self.assembly.committed(step)
        if isinstance(self.phase, Assembling):
            self._assemble_nearest(wait_for_all=self.phase.wait_for_all)

    def take_look(self, step: int | None, *, again: bool) -> list[Action]:
        """What the folder's newest checkpoint is; a state that was found counts, whatever was reported."""
        if self.assembly.look is not CheckpointSearch.ASKED:
            return []
        self.assembly.look = CheckpointSearch.WANTED if again else CheckpointSearch.DONE
        if step is not None and isinstance(self.phase, Assembling):
            self.committed(step)
        return self.restore_if_assembled()

    def take_kept(self, step: int | None) -> list[Action]:
        """The newest state in the memory of nodes is of another step now, or gone."""
        before = self.assembly.in_memory
        self.assembly.kept_in_memory(step)
        match self.phase:
            case Assembling() as phase:
                self._assemble_nearest(wait_for_all=phase.wait_for_all)
            case Restoring() as phase if phase.restore == before and self.assembly.in_memory != before:
                return self.assemble()  # its copies are gone, or make room for a newer state
        return []
