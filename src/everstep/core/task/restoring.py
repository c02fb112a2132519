"""A new epoch for a task: ask those who are left, or, where a stage has nobody left, go back to a state that
is kept.
"""

from __future__ import annotations

from everstep.core.task.membership import Membership
from everstep.core.task.states import Absent, Assembling, Gathering, Joining, Member, Planning, Starting
from everstep.core.words.actions import Action, ComputePlan, InterruptWorkers, ResumeStep
from everstep.core.words.events import PlanComputed
from everstep.core.words.worker_messages import Resume


class Restoring(Membership):
    def _gather(self, because: str) -> list[Action]:
        """Ask the live members for their ledgers. A second death meanwhile asks again, in the next epoch."""
        self.epoch += 1
        asked = {
            w
            for w, place in self.places.items()
            if isinstance(place, Member) or (isinstance(place, Joining) and place.enter_at is not None)
        }
        if isinstance(self.phase, Assembling) and not asked:
            return []
        if not asked:
            return self._assemble()
        self.phase = Gathering(self.epoch, set(asked), because)
        return [InterruptWorkers(workers=tuple(sorted(asked)), epoch=self.epoch, because=because)]

    def _assemble(self) -> list[Action]:
        """Some stage has nobody left: everyone goes back to the newest state that is kept."""
        for worker, place in list(self.places.items()):
            if isinstance(place, Member | Joining):
                self.places[worker] = Joining(place.incarnation)
        step, where = self._nearest()
        self.phase = Assembling(restore=step, wait_for_all=False)
        self.rewind = None
        self.log.restoring(step, where)
        return self._bring_back_for_assembly() + self._plan_if_assembled()

    def _nearest(self) -> tuple[int, str]:
        """The newest state that is kept, and where. No live replica has it: else nobody would ask."""
        if self.kept is not None and self.kept >= self.checkpoint:
            return self.kept, "the memory of nodes"
        return self.checkpoint, "the checkpoint on disk" if self.checkpoint else "the seed"

    def _kept(self, step: int | None) -> list[Action]:
        """The state in memory is of another step now, or gone."""
        was, self.kept = self.kept, step
        match self.phase:
            case Assembling() as phase:
                phase.restore, where = self._nearest()
                self.log.restoring(phase.restore, where)
            case Planning(restore=int(restoring)) if restoring == was and step is None:
                return self._assemble()
        return []

    def _bring_back_for_assembly(self) -> list[Action]:
        assert isinstance(self.phase, Assembling)
        actions: list[Action] = []
        for worker, place in self.places.items():
            if isinstance(place, Absent) and self._may_start(worker):
                actions += self._start(worker, f"stage {worker.stage} needs a worker ({place.because})")
        for stage in range(self.shape.stages):
            granted = any(worker.stage == stage for worker in self.granted)  # else it waits for a slot
            places = (place for w, place in self.places.items() if w.stage == stage)
            if granted and all(isinstance(place, Absent) for place in places):
                last = next(
                    p.because for w, p in self.places.items() if w.stage == stage and isinstance(p, Absent)
                )
                return self._fail(
                    f"stage {stage} has no worker left and its restarts are used up "
                    f"({self.policy.max_restarts} a place); the last one: {last}"
                )
        return actions

    def _plan_if_assembled(self) -> list[Action]:
        phase = self.phase
        assert isinstance(phase, Assembling)
        ready = self._having(Joining)
        if phase.wait_for_all and any(isinstance(place, Starting) for place in self.places.values()):
            return []
        if any(not any(w.stage == s for w in ready) for s in range(self.shape.stages)):
            return []
        self.epoch += 1
        for worker in ready:
            place = self.places[worker]
            assert isinstance(place, Joining)
            self.places[worker] = Member(place.incarnation, phase.restore + 1)
        self._regroup(phase.restore + 1, restarting=frozenset(range(self.shape.stages)))
        first = not self.incidents and phase.wait_for_all
        because = (
            "every worker is up"
            if first
            else (
                f"every stage has a worker again; the nearest state is that of step {phase.restore}, "
                f"in {self._nearest()[1]}"
            )
        )
        self.phase = Planning(self.epoch, because, phase.restore, None, {})
        return [
            ComputePlan(epoch=self.epoch, broken={}, dead=self._not_among(self.members[-1]), because=because)
        ]

    def _resume_from_checkpoint(self, event: PlanComputed, restore: int, because: str) -> list[Action]:
        self._void_from(restore + 1)
        self.recorded = restore
        self.sealed.clear()
        return [
            ResumeStep(
                worker=worker,
                because=because,
                order=Resume(
                    epoch=event.epoch,
                    attempts=self.attempts,
                    step=restore + 1,
                    steady=event.steady[worker],
                    steady_hosts=event.steady_hosts,
                    members=self.members,
                    restore=restore,
                    until=self.until,
                ),
            )
            for worker in self._having(Member)
        ]
