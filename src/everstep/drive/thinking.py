"""What is known of tasks beside the coordinator's state: how long ops take. It feeds schedules and verdicts.

It is not in the journal: a restart forgets it, and workers report their times again within a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.task import Task
from everstep.core.words import cluster_messages as msg
from everstep.core.words import events as ev
from everstep.diagnose.watch import Watch
from everstep.schedule.modes import training_mode
from everstep.schedule.task_scheduler import TaskScheduler


class Thinking:
    """Schedulers and watches, one of each per task, made when they are first needed."""

    def __init__(self) -> None:
        self.schedulers: dict[str, TaskScheduler] = {}
        self._watches: dict[str, Watch] = {}

    def scheduler(self, task: Task) -> TaskScheduler:
        if task.name not in self.schedulers:
            self.schedulers[task.name] = TaskScheduler(task.shape, mode_of(task.job))
        return self.schedulers[task.name]

    def learn(self, task: Task, report: msg.TimesReported) -> Iterable[msg.ClusterEvent]:
        """Op times of a worker; what they say about its speed."""
        self.scheduler(task).learn(report)
        if task.name not in self._watches:
            self._watches[task.name] = Watch(task.name, task.speeds.slow)
        return self._watches[task.name].reported(report)

    def answer(self, machine: Coordinator, action: msg.Think) -> msg.PlanAnswered | None:
        task = machine.tasks.get(action.task)
        if task is None:
            return None
        answer = self.scheduler(task).answer(action.question, action.slow)
        return msg.PlanAnswered(task=action.task, event=answer)

    def outdated(self, task: Task, step: int, first: int) -> msg.PlanAnswered | None:
        """After this step: another schedule, if times have changed. `first`: the first step of this run."""
        if step >= task.steps:
            return None
        stale = self.scheduler(task).wants_new_schedule(step - first + 1, step)
        if stale is None:
            return None
        event = ev.ProfileChanged(because=f"a new schedule: {stale}")
        return msg.PlanAnswered(task=task.name, event=event)

    def forget(self, task: str) -> None:
        self.schedulers.pop(task, None)
        self._watches.pop(task, None)


def mode_of(job: Any) -> str:
    stagger = (job or {}).get("optimizer", {}).get("stagger")
    return training_mode(stagger=stagger != "never")
