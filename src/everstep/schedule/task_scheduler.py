"""A task's scheduler at work: it learns how long ops take, answers recovery's questions, and thinks ahead.

Three things change a schedule in force: a stage's share of the work or a hop that has become another
(`drift`) and updates that begin or cease to wait for the norm of all stages (`mode`), which are asked for
here; and a worker that has become slow, which the coordinator asks for, with the speeds.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.protocol.actions import ComputePlan
from everstep.protocol.events import PlanComputed
from everstep.protocol.messages import TimesReported
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.schedule.cache import PlanCache
from everstep.schedule.instance import Instance
from everstep.schedule.modes import DECOUPLED
from everstep.schedule.profile import Profile
from everstep.schedule.recovery_answer import answer
from everstep.schedule.schedule import Planned
from everstep.schedule.stash_limits import capped

FIRST_LOOK = 3  # steps after which the schedule is made again, with measured times
LEAST_STEPS = 20  # between two schedules for the sake of stages' shares
LOOKS = 5  # steps on end that must show another share
SELDOM, MOSTLY = 0.3, 0.7  # updates that are eager: below, a barrier is planned; above, none


class TaskScheduler:
    def __init__(self, shape: Shape, mode: str) -> None:
        """`mode`: what the job allows. Near the clip updates wait all the same: then that is planned."""
        self.profile = Profile(shape)
        self._allowed = self.mode = mode  # `mode`: of the schedule in force
        self._plans: PlanCache | None = None
        self._slow: dict[Worker, float] = {}
        self._gone: frozenset[Worker] = frozenset()
        self._stale = 0  # steps on end
        self._asked_at = 0
        self._all_ready = False

    def learn(self, report: TimesReported) -> None:
        self.profile.learn(report.worker, report.times, report.ops or None, report.sent)

    def answer(self, question: ComputePlan, slow: Mapping[Worker, float] | None = None) -> PlanComputed:
        """`slow`: workers that take so many times as long as their stage."""
        known = dict(slow or {})
        if self._plans is None or known != self._slow or self._outdated() is not None:
            self._slow, self.mode = known, self._mode_now()
            healthy = capped(self.profile.instance(known), self.mode, self.profile.rooms)
            self._plans = PlanCache(healthy)
        self._gone, self._all_ready = question.dead, False
        return answer(question, self._plans, self.mode)

    def wants_new_schedule(self, steps_run: int, step: int) -> str | None:
        """After this step: is the schedule in force out of date? One sentence if so."""
        stale = self._outdated()
        self._stale = self._stale + 1 if stale is not None else 0
        if steps_run == FIRST_LOOK or (self._stale >= LOOKS and step - self._asked_at >= LEAST_STEPS):
            self._stale, self._asked_at = 0, step
            return stale
        return None

    def _mode_now(self) -> str:
        eager = self.profile.eager()
        if eager is None or SELDOM <= eager <= MOSTLY:
            return self.mode
        return self._allowed if eager > MOSTLY else DECOUPLED

    def _outdated(self) -> str | None:
        if (stale := self.profile.drift()) is not None or self._mode_now() == self.mode:
            return stale
        return f"{self.profile.eager():.0%} of the updates did not wait for the norm of all stages"

    def in_force(self) -> tuple[Planned, Instance] | None:
        """The schedule of steps as they are now, and the times it was made with."""
        if self._plans is None:
            return None
        return self._plans.get(self._gone, self.mode), self._plans.healthy

    def think_ahead(self) -> None:
        """In an idle moment: plan for one of the deaths that may come next."""
        if self._plans is not None and not self._all_ready:
            self._all_ready = self._plans.prepare(self._gone, self.mode, most=1) == 0
