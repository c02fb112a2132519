"""A task's scheduler at work: it learns how long ops take, answers recovery's questions, and thinks ahead."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.actions import ComputePlan
from everstep.core.events import PlanComputed
from everstep.core.ops import Worker
from everstep.core.survey import Shape
from everstep.schedule.answer import answer
from everstep.schedule.cache import PlanCache
from everstep.schedule.profile import Profile

FIRST_LOOK = 3  # steps after which the schedule is made again, with measured times
LOOK_EVERY = 20  # steps


class SchedulerDesk:
    def __init__(self, shape: Shape, mode: str) -> None:
        self.profile = Profile(shape)
        self._mode = mode
        self._plans: PlanCache | None = None
        self._gone: frozenset[Worker] = frozenset()
        self._all_ready = False

    def learn(self, worker: Worker, times: Mapping[str, float]) -> None:
        self.profile.learn(worker, times)

    def answer(self, question: ComputePlan) -> PlanComputed:
        if self._plans is None or self.profile.drift() is not None:
            self._plans = PlanCache(self.profile.instance())
        self._gone, self._all_ready = question.dead, False
        return answer(question, self._plans, self._mode)

    def wants_new_schedule(self, steps_run: int, step: int) -> str | None:
        """After this step: is the schedule in force out of date? One sentence if so."""
        if steps_run == FIRST_LOOK or step % LOOK_EVERY == 0:
            return self.profile.drift()
        return None

    def think_ahead(self) -> None:
        """In an idle moment: plan for one of the deaths that may come next."""
        if self._plans is not None and not self._all_ready:
            self._all_ready = self._plans.prepare(self._gone, self._mode, most=1) == 0
