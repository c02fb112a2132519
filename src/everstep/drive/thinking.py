"""What is known of tasks beside the coordinator's state: how long ops, steps and changes take. It feeds
schedules, verdicts and the planner.

Times of ops are not in the journal: a restart forgets them, and workers report them again within a step.
Times of steps are derived from what is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.slowness import slow_links
from everstep.core.cluster.task import OVER, Task
from everstep.core.task.states import Member
from everstep.drive.link_watch import LinkWatch
from everstep.drive.ports import HandledEvent
from everstep.drive.slowness_watch import Watch
from everstep.errors import clipped
from everstep.plan.ask import PlanQuestion, Thought, chosen, question, think
from everstep.plan.measured import Measurements
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.schedule.modes import STAGGERED, training_mode
from everstep.schedule.recovery_answer import plain_answer
from everstep.schedule.task_scheduler import TaskScheduler


class Thinking:
    """Schedulers and watches, one of each per task, made when they are first needed."""

    def __init__(self) -> None:
        self.schedulers: dict[str, TaskScheduler] = {}
        self.measured = Measurements()
        self._watches: dict[str, Watch] = {}
        self._links: dict[str, LinkWatch] = {}

    def scheduler(self, task: Task) -> TaskScheduler:
        if task.name not in self.schedulers:
            self.schedulers[task.name] = TaskScheduler(task.shape, mode_of(task))
        return self.schedulers[task.name]

    def learn(self, machine: Coordinator, report: msg.TimesReported) -> Iterable[msg.ClusterEvent]:
        """Op times of a worker and rates of its links; what they say about its speed and theirs."""
        if (task := machine.tasks.get(report.task)) is None:
            return []
        self.scheduler(task).learn(report)
        ops_s = sum(seconds for _, seconds in report.ops.values())
        self.measured.of(task.name).learn_collectives(report.shard_waits, ops_s)
        if task.name not in self._watches:
            self._watches[task.name] = Watch(task.name, task.speeds.slow)
            self._links[task.name] = LinkWatch.of(task.name, slow_links(machine.log, task))
        peers, links = {str(worker): worker for worker in task.seats}, self._links[task.name]
        return [
            *self._watches[task.name].reported(report),
            *links.reported(report, peers),
            *links.suspected(lambda: len({seat.node for seat in task.seats.values()}) == 2),
        ]

    def answer(self, machine: Coordinator, action: msg.Think) -> list[msg.ClusterEvent]:
        task = machine.tasks.get(action.task)
        return [] if task is None else answered(self.scheduler(task), action)

    def choose(
        self, machine: Coordinator, action: msg.ChooseAssignment, now: float
    ) -> list[msg.ClusterEvent]:
        """How many workers each task gets, and in which shape."""
        try:
            asked = self.question(machine, now)
            return [self.chosen(machine, action, None if asked is None else think(asked), now)]
        except Exception as error:  # whatever a planner can raise: tasks must not wait without end
            return unchosen(machine, action, sentence(error))

    def question(self, machine: Coordinator, now: float) -> PlanQuestion | None:
        """What the planner is asked, if anything."""
        for name, scheduler in self.schedulers.items():
            if (task := machine.tasks.get(name)) is not None:
                known = self.measured.of(name)
                known.times = scheduler.profile.stages(task.speeds.slow)
                known.is_staggered = scheduler.mode == STAGGERED
        return question(machine, now, self.measured)

    def chosen(
        self,
        machine: Coordinator,
        action: msg.ChooseAssignment,
        thought: Thought | None,
        now: float,
    ) -> msg.AssignmentChosen:
        return chosen(machine, action.version, action.because, thought, self.measured, now)

    def handled(self, one: HandledEvent, machine: Coordinator) -> None:
        """Learn from what was handled, also from what is read from the journal."""
        for action in one.actions:
            match action:
                case msg.RecordRow():
                    if (task := machine.tasks.get(action.task)) is not None:
                        self.measured.stepped(task.name, task.shape, _members(task), one.at)
                case msg.TaskReshaped():
                    self.measured.reshaped(action.task)
                    self.forget(action.task)
                case msg.TaskEnded(state=state):
                    self.measured.paused(action.task) if state == "paused" else self.measured.ended(
                        action.task
                    )
                    self.forget(action.task)

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
        self._links.pop(task, None)


def answered(scheduler: TaskScheduler, action: msg.Think) -> list[msg.ClusterEvent]:
    """The scheduler's answer. A worker that is lost must not wait for a bug to be fixed: a scheduler that
    raises is an incident, and a plain schedule is its answer.
    """
    try:
        answer = scheduler.answer(action.question, action.slow)
    except Exception as error:  # whatever it can raise
        return unanswered(scheduler, action, sentence(error))
    return [msg.PlanAnswered(task=action.task, event=answer)]


def unanswered(scheduler: TaskScheduler, action: msg.Think, because: str) -> list[msg.ClusterEvent]:
    plain = plain_answer(action.question, scheduler.profile.shape)
    failed = msg.PlanFailed(task=action.task, because=because)
    return [failed, msg.PlanAnswered(task=action.task, event=plain)]


def unchosen(machine: Coordinator, action: msg.ChooseAssignment, because: str) -> list[msg.ClusterEvent]:
    return [msg.PlanFailed(task="", because=because), _plain_assignment(machine, action)]


def _plain_assignment(machine: Coordinator, action: msg.ChooseAssignment) -> msg.AssignmentChosen:
    """Tasks keep what they have, and free slots go to them in their order."""
    workers: dict[str, int] = {}
    free = machine.roster.num_free
    for task in machine.tasks.values():
        if task.state in OVER:
            continue
        has, shape = len(task.staying()), task.shape
        most = min(shape.replicas * shape.stages, has + free // shape.shards)
        workers[task.name] = most if most >= shape.stages else has
        free -= max(0, workers[task.name] - has) * shape.shards
    because = f"{action.because}; without the planner, which failed"
    return msg.AssignmentChosen(version=action.version, workers=workers, because=because)


def sentence(error: Exception) -> str:
    return clipped(f"{type(error).__name__}: {error}")


def _members(task: Task) -> int:
    places = task.recovery.places if task.recovery is not None else {}
    return sum(isinstance(place, Member) for place in places.values())


def mode_of(task: Task) -> str:
    """Sharded states are updated when the norm of all stages is known."""
    stagger = (task.job or {}).get("optimizer", {}).get("stagger")
    return training_mode(stagger=stagger != "never" and not task.shape.chunks)
