"""What has happened on a cluster, for those who look: the machine's state, its news, the steps of its tasks.

All of it is derived from the journal: what is replayed comes here too, and the rows of steps, which would go
with the entries that a snapshot replaces, are in the snapshot. So a restart, and a coordinator on another
machine that takes over, show the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.task import OVER, Task
from everstep.core.faults.detector import Heartbeats
from everstep.drive.goodput import Accounts, account_from
from everstep.drive.ports import HandledEvent
from everstep.drive.recent_events import RecentEvents
from everstep.drive.step_rows import StepRows, begins_training, metric_names, rows_document, rows_from
from everstep.log import say
from everstep.plan.measured import Measurements
from everstep.protocol import messages as msg
from everstep.protocol.codec import encode
from everstep.protocol.table import OPERATOR, TABLE
from everstep.server import words
from everstep.server.step_files import StepFiles

KEPT_NEWS = 2000
MOST_ALIKE = 40  # orders that follow from one event are told one by one; a task may be on thousands of nodes
KEPT_PLANS = 50
KEPT_AUDIT = 1000
KEPT_ROWS_OVER = 20_000  # of all tasks that are over, together
LEAST_ROWS_OVER = 100  # of each of them
SILENCE_S = 1.0
_AUDIT, _ACCOUNTS = ".audit", ".accounts"  # in a snapshot, beside tasks: no name of one begins with a dot


class ClusterRecord:
    def __init__(
        self,
        *,
        files: StepFiles | None = None,
        say: Callable[[str], None] = say,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`files`: where each task's rows are also written."""
        self.say, self.clock = say, clock
        self.machine = Coordinator()
        self.hearts = Heartbeats(patience_s=SILENCE_S)
        self.leads = False
        self.number = 0  # of the last event
        self.ahead_s = 0.0  # from the machine's moments to those of the wall clock
        self.measured = Measurements()  # of the tasks; the coordinator's
        self.steps: dict[str, StepRows] = {}
        self.news: deque[dict[str, Any]] = deque(maxlen=KEPT_NEWS)
        self.plans: deque[dict[str, Any]] = deque(maxlen=KEPT_PLANS)
        self.accounts = Accounts()  # where the time of each task went
        self.audit: deque[dict[str, Any]] = deque(maxlen=KEPT_AUDIT)  # what people asked for, and who
        self.listeners: set[Callable[[dict[str, Any]], None]] = set()
        self.handled_s: deque[float] = deque(maxlen=10_000)  # time to decide
        self.files = files
        self.recent = RecentEvents(of_event=words.event, of_action=words.decision)

    def begin(self, machine: Coordinator, hearts: Heartbeats, number: int, steps: Any) -> None:
        """Another state takes the place of this one. `steps`: the rows it comes with, from a snapshot."""
        self.machine, self.hearts, self.number = machine, hearts, number
        self.leads = False
        self.news.clear()
        self.plans.clear()
        self.audit.clear()
        kept = dict(steps or {})
        self.audit.extend(kept.pop(_AUDIT, ()))
        self.accounts = Accounts()
        for task, document in kept.pop(_ACCOUNTS, {}).items():
            self.accounts.tasks[task] = account_from(document)
        self.recent = RecentEvents(of_event=words.event, of_action=words.decision)
        self.steps = {task: rows_from(document) for task, document in kept.items()}

    def lead(self) -> None:
        """The journal is read: from here on things happen now."""
        self.leads = True
        if self.files is not None:
            for task, steps in self.steps.items():
                self.files.complete(task, [row.document() for row in steps.rows])

    def snapshot(self) -> dict[str, Any]:
        rows = {task: rows_document(steps) for task, steps in self.steps.items()}
        accounts = {task: account.document() for task, account in self.accounts.tasks.items()}
        return rows | {_AUDIT: list(self.audit), _ACCOUNTS: accounts}

    def publish(self, news: dict[str, Any]) -> None:
        for listener in list(self.listeners):
            listener(news)

    # -------------------------------------------------------------- what the driver hands over

    def handled(self, one: HandledEvent) -> None:
        self.number = one.number
        self.recent.handled(one)
        at = one.at + self.ahead_s
        if one.event is not None and OPERATOR in TABLE[type(one.event)].by:
            by = getattr(one.event, "by", getattr(one.event, "owner", ""))
            self.audit.append({"event": one.number, "at": at, "by": by, "text": words.event(one.event)})
        if isinstance(one.event, msg.AssignmentChosen) and one.event.version == self.machine.version:
            self._keep_plan(one.event, one.number, at)
        rows = [action for action in one.actions if isinstance(action, msg.RecordRow)]
        steps = [(row.task, row.record.step) for row in rows if row.record.trains]
        if isinstance(one.event, msg.FromNode) and isinstance(told := one.event.report, msg.RankProgressed):
            steps.append((told.task, told.step))
        self.accounts.handled(self.machine, steps, at)
        if any(isinstance(action, msg.TaskEnded) for action in one.actions):
            self._trim_steps()
            self.accounts.forget(at)
        begun: set[str] = set()
        alike: dict[type[msg.Order], list[msg.Dispatch]] = {}
        for action in one.actions:
            if begins_training(action):
                assert isinstance(action, msg.Dispatch)
                if (task := getattr(action.order, "task", "")) not in begun:
                    begun.add(task)
                    self._begin(task, at, is_recorded=any(row.task == task for row in rows))
                continue
            if isinstance(action, msg.RecordRow):
                self._record(action, at, live=not one.replayed)
                continue
            if isinstance(action, msg.TaskEnded) and action.task in self.steps:
                over = self.machine.tasks[action.task]
                self._catch_up(over, over.progress.recorded, at)
            if isinstance(action, msg.Dispatch):
                orders = alike.setdefault(type(action.order), [])
                orders.append(action)
                if len(orders) > MOST_ALIKE:
                    continue
            self._announce(action, at)
            if not one.replayed:
                self._say(action)
        for orders in alike.values():
            if rest := orders[MOST_ALIKE:]:
                self._announce(rest[-1], at, more=f"the last of {len(rest)} more orders like these: ")

    def _keep_plan(self, chosen: msg.AssignmentChosen, number: int, at: float) -> None:
        plan = {
            "event": number,
            "at": at,
            "because": chosen.because,
            "workers": dict(chosen.workers),
            "shapes": {task: [s.shape.replicas, s.shape.stages] for task, s in chosen.shapes.items()},
            "wishes": {task: [s.replicas, s.stages] for task, s in chosen.wishes.items()},
            "review_s": chosen.review_s,
            "weighed": [encode(option) for option in chosen.weighed],
        }
        self.plans.append(plan)

    def newest_plans(self, count: int | None) -> list[dict[str, Any]]:
        """`None`: all that are kept."""
        return list(reversed(self.plans))[:count]

    def _trim_steps(self) -> None:
        """Tasks that are forgotten have no rows here, and those that ended first have fewer; their step logs
        on disk have all.
        """
        tasks = self.machine.tasks
        self.steps = {name: steps for name, steps in self.steps.items() if name in tasks}
        over = [tasks[name] for name in self.steps if tasks[name].state in OVER]
        over.sort(key=lambda task: task.ended_at)
        kept = sum(len(self.steps[task.name].rows) for task in over)
        for task in over:
            rows = self.steps[task.name].rows
            while kept > KEPT_ROWS_OVER and len(rows) > LEAST_ROWS_OVER:
                rows.popleft()
                kept -= 1

    def _begin(self, name: str, at: float, *, is_recorded: bool) -> None:
        """`is_recorded`: rows of the same event bring the steps up to where it stands."""
        task = self.machine.tasks.get(name)
        if task is None or task.managed is None or is_recorded:
            return self._steps(name).begin(at)
        self._catch_up(task, task.managed.recorded, at)

    def _catch_up(self, task: Task, recorded: int, at: float) -> None:
        """Steps whose reports were lost with their node, or with the coordinator's journal, have no rows."""
        done = min(recorded, task.steps or recorded)
        total = task.shape.replicas * task.shape.microbatches
        self._steps(task.name).begin(at, done=done, microbatches=total)

    def _steps(self, task: str) -> StepRows:
        if task not in self.steps:
            self.steps[task] = StepRows()
        return self.steps[task]

    def _record(self, action: msg.RecordRow, at: float, *, live: bool) -> None:
        if action.record.scores:
            self._evaluated(action, at, live=live)
        if not action.record.trains:
            return
        row = self._steps(action.task).add(action.record, at).document()
        if live and self.files is not None:
            self.files.append(action.task, row)
        self.publish({"at": at, "kind": "step", "task": action.task, "row": row})

    def _evaluated(self, action: msg.RecordRow, at: float, *, live: bool) -> None:
        task = self.machine.tasks.get(action.task)
        names = metric_names(task.job if task is not None else {})
        values = self._steps(action.task).evaluate(action.record, names)
        step = action.record.step - 1
        text = f"task {action.task}: evaluation after step {step}: " + ", ".join(
            f"{name} {value:.6f}" for name, value in values.items()
        )
        if live:
            self.say(text)
        known = {name: value for name, value in values.items() if math.isfinite(value)}
        self.publish(
            {
                "at": at,
                "kind": "evaluation",
                "task": action.task,
                "step": step,
                "values": known,
                "text": text,
                "because": "",
            }
        )

    def _announce(self, action: msg.ClusterAction, at: float, more: str = "") -> None:
        news: dict[str, Any] = {
            "at": at,
            "kind": type(action).__name__,
            "text": more + words.decision(action),
            "because": action.because,
            "event": action.cause,
        }
        match action:
            case msg.Dispatch(node=node, order=order):
                news |= {"node": node, "order": type(order).__name__, "task": getattr(order, "task", "")}
                if (worker := getattr(order, "worker", None)) is not None:
                    news["worker"] = str(worker)
            case msg.NodeChanged(node=node, state=state):
                news |= {"node": node, "state": state}
            case msg.TaskEnded(task=task, state=state):
                news |= {"task": task, "state": state}
            case msg.IncidentClosed(number=number):
                news |= {"incident": number}
            case msg.Think(task=task):
                news |= {"task": task}
        self.news.append(news)
        self.publish(news)

    def _say(self, action: msg.ClusterAction) -> None:
        match action:
            case msg.TaskEnded():
                self.say(f"task {action.task} is {action.state}: {action.because}")
            case msg.TaskReshaped():
                self.say(f"task {action.task}: {action.because}")
            case msg.NodeChanged():
                self.say(f"node {action.node} is {action.state}: {action.because}")
            case msg.IncidentClosed():
                self.say(f"incident {action.number} is closed: {action.because}")
