"""Goodput: where the time of a task went. docs/goodput.md has the definition.

Every moment from a task's submission to its end is in exactly one of these: productive, or lost by one cause.
So the parts add up to the time that has passed, whatever happens; a test checks it on storms.

    waiting  start   step 1   step 2   fault   step 3 (the rest)   reduced ...
    ├───────┼───────┼────────┼────────┼───────┼───────────────────┼──────────

Between two events of the coordinator a task is in one condition, and the time goes to it. While it trains the
time is collected, and divided when its step is recorded: up to the usual time of an undisturbed step with all
workers it is productive; the rest is lost: by a fault in this step (`fault`), by missing workers (`reduced`),
while a checkpoint was written (`save`), or by none of these (`slow`). A step that was done before is lost as
a whole: each step is productive once. There is a cause for each thing that somebody can do about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.lives import Living, Locating, Settling
from everstep.core.cluster.task import OVER, Task, TaskState
from everstep.core.task.states import Gathering, Member, Over, Planning, Running
from everstep.protocol.messages import TaskSubmitted
from everstep.protocol.table import Document, Json

HOUR_S = 3600.0
KEPT_HOURS = 24 * 35
MOST_OVER = 2000  # tasks that have ended
LEAST_USUAL, KEPT_USUAL = 5, 31  # undisturbed steps whose median is the usual time of one
PRODUCTIVE, STEPS = "productive", "steps"


class Cause(StrEnum):
    """Why time was lost."""

    WAIT = "wait"  # for slots: more of them
    PAUSED = "paused"  # by a person
    START = "start"  # before its first step and after its last: processes, checkpoints, an unfinished step
    FAULT = "fault"  # until training goes on as before; work that was done before; what its step took longer
    REDUCED = "reduced"  # slower than usual, with fewer workers than the shape has: spares
    SAVE = "save"  # the same with all workers, while a checkpoint was written: a longer interval
    SLOW = "slow"  # the same for any other reason: a straggler, data


@dataclass(slots=True, kw_only=True)
class TaskAccount:
    since: float  # its submission
    until: float  # accounted up to here
    owner: str = ""
    state: str = TaskState.WAITING
    totals: dict[str, float] = field(default_factory=dict)  # productive, steps, and each cause
    hours: dict[int, dict[str, float]] = field(default_factory=dict)  # the same, by hour since 1970
    open_s: float = 0.0  # of the step in progress: not divided yet
    last: int = 0  # the highest step that was recorded
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_USUAL))
    condition: Cause | None = Cause.WAIT  # None: it trains
    disturbed: bool = False  # a fault fell into the step in progress
    saving: bool = False  # a checkpoint was being written when it began
    shape: str = ""
    held: float = 0.0  # what the last step lost by `held_by`; the next one tells whether it did
    held_by: Cause = Cause.SLOW

    @property
    def wall_s(self) -> float:
        return self.until - self.since

    @property
    def productive_s(self) -> float:
        return self.totals.get(PRODUCTIVE, 0.0)

    @property
    def ratio(self) -> float | None:
        """None: nothing is known yet."""
        known = self.wall_s - self.undivided_s
        return self.productive_s / known if known > 0 else None

    @property
    def undivided_s(self) -> float:
        """Of the last step and the one in progress."""
        return self.open_s + self.held

    def lost(self) -> dict[str, float]:
        return {cause: self.totals.get(cause, 0.0) for cause in Cause}

    @property
    def usual_s(self) -> float | None:
        return median(self.usual) if len(self.usual) >= LEAST_USUAL else None

    def advance(self, at: float) -> None:
        """The time up to here belongs to the condition it was in."""
        seconds = at - self.until
        if seconds <= 0:
            return
        if self.condition is None:
            self.open_s += seconds
        else:
            for hour, part in _hours(self.until, at):
                self._add(hour, self.condition, part)
        self.until = at

    def recorded(self, step: int, *, full: bool, saving: bool = False) -> None:
        """A step is done. `full`: by all the workers that the shape has. `saving`: a checkpoint is being
        written now.
        """
        seconds, self.open_s = self.open_s, 0.0
        hour, clean = int(self.until // HOUR_S), not self.disturbed
        if step <= self.last:
            self._add(hour, Cause.FAULT, seconds)
        else:
            cause = Cause.FAULT if not clean else Cause.REDUCED if not full else Cause.SLOW
            if cause is Cause.SLOW and self.saving:
                cause = Cause.SAVE
            self._divide(hour, seconds, cause, typical=clean and full)
            self._add(hour, STEPS, float(step - self.last) if self.last else 1.0)  # scripts tell some steps
            self.last = step
        self.disturbed, self.saving = False, saving

    def _divide(self, hour: int, seconds: float, cause: Cause, *, typical: bool) -> None:
        """`cause`: of what it took longer than usual."""
        usual = self.usual_s
        good = seconds if usual is None else min(seconds, usual)
        if usual is not None and seconds < usual / 2:
            # Steps that were made while the coordinator was away come at once: the first seemed to be slow.
            back = min(usual - seconds, self.held)
            self.held -= back
            self._add(hour, PRODUCTIVE, seconds + back)
            return
        self._add(hour, self.held_by, self.held)
        if typical:
            self.usual.append(seconds)
        self.held_by, self.held = cause, seconds - good
        self._add(hour, PRODUCTIVE, good)

    def ended(self) -> None:
        hour = int(self.until // HOUR_S)
        self._add(hour, self.held_by, self.held)
        self._add(hour, Cause.START, self.open_s)
        self.open_s = self.held = 0.0
        self.condition = Cause.START

    def _add(self, hour: int, what: str, amount: float) -> None:
        if amount:
            self.totals[what] = self.totals.get(what, 0.0) + amount
            into = self.hours.setdefault(hour, {})
            into[what] = into.get(what, 0.0) + amount
            while len(self.hours) > KEPT_HOURS:
                del self.hours[min(self.hours)]

    def between(self, since: float, until: float) -> dict[str, float]:
        """Productive, steps and each cause in the hours that lie in this time, at least in part."""
        first, last = int(since // HOUR_S), int(until // HOUR_S)
        found: dict[str, float] = {}
        for hour, amounts in self.hours.items():
            if first <= hour <= last:
                for what, amount in amounts.items():
                    found[what] = found.get(what, 0.0) + amount
        return found

    def document(self) -> Document:
        return {
            "since": self.since,
            "until": self.until,
            "owner": self.owner,
            "state": self.state,
            "totals": dict(self.totals),
            "hours": [[hour, dict(amounts)] for hour, amounts in self.hours.items()],
            "open_s": self.open_s,
            "held": self.held,
            "held_by": self.held_by,
            "last": self.last,
            "usual": list(self.usual),
            "condition": self.condition,
            "disturbed": self.disturbed,
            "saving": self.saving,
            "shape": self.shape,
        }


def account_from(document: Mapping[str, Json]) -> TaskAccount:
    """What `document` has written."""
    apart = ("totals", "hours", "usual", "condition", "held_by")
    condition = document["condition"]
    return TaskAccount(
        **{key: value for key, value in document.items() if key not in apart},
        totals=dict(document["totals"]),
        hours={int(hour): dict(amounts) for hour, amounts in document["hours"]},
        usual=deque(document["usual"], maxlen=KEPT_USUAL),
        condition=None if condition is None else Cause(condition),
        held_by=Cause(document["held_by"]),
    )


def _hours(since: float, until: float) -> Iterator[tuple[int, float]]:
    """The parts of a span of time, by hour; a long one is not divided further than what is kept."""
    while since < until:
        hour = int(since // HOUR_S)
        end = until if until - since > KEPT_HOURS * HOUR_S else min(until, (hour + 1) * HOUR_S)
        yield hour, end - since
        since = end


class Accounts:
    """Of all tasks, by name; those of tasks that are over stay as long as their hours are kept."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskAccount] = {}
        # At the last look, for each task: what its condition depends on, beside incidents and steps.
        self._seen: dict[str, tuple[TaskState, TaskSubmitted, object]] = {}
        self._stopped: set[str] = set()
        self._at = self._advanced_at = 0.0

    @property
    def tasks(self) -> dict[str, TaskAccount]:
        """Up to the last event."""
        self.advance()
        return self._tasks

    def advance(self) -> None:
        if self._advanced_at != self._at:
            self._advanced_at = self._at
            for account in self._tasks.values():
                if account.state not in OVER:
                    account.advance(self._at)

    def handled(self, machine: Coordinator, steps: Iterable[tuple[str, int]], at: float) -> None:
        """An event was handled now, and it recorded these steps. Most events change nothing for most tasks:
        of those the time is counted when somebody asks, or something changes.
        """
        tasks, log, only = machine.tasks, machine.log, machine.only_task
        self._at = at
        changed: set[str] = set()
        for name, step in steps:
            if name in tasks and name in self._tasks and self._tasks[name].state not in OVER:
                self._tasks[name].advance(at)
                task = tasks[name]
                self._tasks[name].recorded(step, full=is_full(task), saving=is_saving(task, step))
                changed.add(name)
        stopped = {one.task for one in log.open_ones() if one.stops_training}
        changed |= stopped ^ self._stopped
        self._stopped = stopped
        names: Iterable[str] = tasks
        if only is not None and len(self._seen) == len(tasks):
            names = (changed | {only}) & tasks.keys()
        for name in names:
            task = tasks[name]
            recovery, seen = task.progress.recovery, self._seen.get(name)
            phase = None if recovery is None else recovery.phase
            if (
                seen is None
                or seen[0] is not task.state
                or seen[1] is not task.request
                or seen[2] is not phase
                or name in changed
            ):
                self._seen[name] = (task.state, task.request, phase)
                self._look_at(task, at)
        if len(self._seen) > len(tasks):
            self._seen = {name: self._seen[name] for name in tasks}

    def _look_at(self, task: Task, at: float) -> None:
        """Something has changed that its condition may depend on."""
        name = task.name
        account = self._tasks.get(name)
        if account is None:
            if task.state in OVER:
                return
            owner = task.request.owner
            account = self._tasks[name] = TaskAccount(since=at, until=at, owner=owner)
        elif account.state in OVER:
            return
        condition = condition_of(task, stopped=name in self._stopped, begun=account.last > 0)
        account.disturbed |= condition is Cause.FAULT
        account.advance(at)
        account.state = task.state
        if task.state in OVER:
            account.ended()
        elif account.shape != (shape := str(task.shape)):
            account.shape = shape
            account.usual.clear()
        account.condition = condition

    def forget(self, now: float) -> None:
        oldest = now - KEPT_HOURS * HOUR_S
        over = sorted((one.until, name) for name, one in self._tasks.items() if one.state in OVER)
        for number, (until, name) in enumerate(over):
            if until < oldest or number < len(over) - MOST_OVER:
                del self._tasks[name]


def condition_of(task: Task, *, stopped: bool, begun: bool) -> Cause | None:
    """What the time from now on belongs to. None: it trains. `stopped`: by an incident that is open. `begun`:
    it has made a step.
    """
    match task.state:
        case TaskState.WAITING:
            return Cause.WAIT
        case TaskState.PAUSED:
            return Cause.PAUSED
        case TaskState.SEARCHING:
            return Cause.FAULT if begun else Cause.START
        case TaskState.RUNNING if task.recovery is not None:
            return _of_phase(task.recovery.phase, stopped=stopped, begun=begun)
        case TaskState.RUNNING:
            return None
        case _:
            return Cause.START


def _of_phase(phase: object, *, stopped: bool, begun: bool) -> Cause | None:
    if isinstance(phase, Over):
        return Cause.START
    if isinstance(phase, Gathering | Planning):
        return Cause.FAULT
    if isinstance(phase, Living | Settling | Locating):
        return None
    if not isinstance(phase, Running):
        return Cause.FAULT if begun else Cause.START
    return Cause.FAULT if stopped else None


def is_full(task: Task) -> bool:
    """Does every place of its shape take part?"""
    places = task.recovery.places if task.recovery is not None else {}
    wanted = task.shape.replicas * task.shape.stages
    return sum(isinstance(state, Member) for state in places.values()) >= wanted


def is_saving(task: Task, step: int) -> bool:
    """Once this step is on record: does a checkpoint go on being written while the next one runs?"""
    folder = task.request.needs.checkpoints
    return folder is not None and task.checkpoints.is_saving(step, folder.interval)
