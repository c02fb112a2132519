"""Callbacks: user code, called for every step, evaluation, checkpoint and incident, each exactly once.

They run in the launcher, between two turns of the run: never in a worker, and no fault of a worker reaches
them. A step that is done again after a restore is reported once, also over several starts.
What a callback raises ends that callback and not the run; `sys.exit` and Ctrl-C in it end the run, in good
order.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everstep.drive.step_rows import StepRow
from everstep.engine.state.schedules import Rate
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.launch.local.history import History
from everstep.launch.local.report import incident_document
from everstep.launch.local.run import LocalTask, Watcher
from everstep.log import warn
from everstep.protocol.incidents import Incident
from everstep.store.folder import root_of

METHODS = ("on_start", "on_step", "on_eval", "on_checkpoint", "on_incident", "on_end")


class StepFunction:
    """A function as a callback: it is called for steps."""

    def __init__(self, function: Callable[[dict[str, Any]], Any]) -> None:
        self.on_step = function
        self.name = getattr(function, "__name__", type(function).__name__)


def checked(callbacks: Any) -> list[Any]:
    """What a user gave as callbacks."""
    given = [callbacks] if not isinstance(callbacks, Sequence) else list(callbacks)
    found = []
    for callback in given:
        if isinstance(callback, type):
            raise UserError(
                f"callbacks has the class {callback.__name__}; give an object: {callback.__name__}(...)."
            )
        if any(callable(getattr(callback, method, None)) for method in METHODS):
            found.append(callback)
        elif callable(callback):
            found.append(StepFunction(callback))
        else:
            raise UserError(
                f"callbacks has a {type(callback).__name__}, which has none of {', '.join(METHODS)}; give a "
                "function of a step, or an object with some of these methods."
            )
    return found


class CallbackWatcher:
    """A watcher in front of another."""

    def __init__(
        self,
        job: Job,
        callbacks: Sequence[Any],
        history: History,
        watch: Watcher,
        rate: Rate | None = None,
    ) -> None:
        """`rate`: the learning rate of a step, from 1; that of the job's own words if not given."""
        self._job, self._history, self._watch = job, history, watch
        self._rate = rate or (lambda step: job.optimizer.lr * job.rate(step - 1))
        self._callbacks = list(callbacks)
        self._task: LocalTask | None = None
        self._stopping = False
        self._leaving: BaseException | None = None  # sys.exit or Ctrl-C in a callback

    def __call__(self, kind: str, what: Any) -> None:
        match kind, what:
            case "tick", _ if self._leaving is not None:  # here nothing is half done
                leaving, self._leaving = self._leaving, None
                raise leaving
            case "tick", LocalTask():
                if self._task is None and what.recovery is not None:
                    self._begin(what)
            case "step", StepRow():
                row = self._row(what)
                if self._history.step(row):
                    self._tell("on_step", row)
            case "evaluation", (step, values):
                if self._history.evaluated(step, values):
                    self._tell("on_eval", step, values)
            case "checkpoint", step:
                assert self._job.checkpoint is not None
                root = root_of(Path(self._job.base), self._job.checkpoint.folder)
                self._tell("on_checkpoint", step, f"{root}/step-{step:08d}")
            case "incident", Incident() if self._task is not None:
                self._tell("on_incident", incident_document(what, self._task.outcome, 0.0))
        self._watch(kind, what)

    def end(self, result: Any) -> None:
        """`result`: None if the run has failed."""
        if self._task is not None:
            self._tell("on_end", result)
        self._history.close()
        if self._leaving is not None and result is not None:
            raise self._leaving

    def _begin(self, task: LocalTask) -> None:
        self._task = task
        resumed_from = task.outcome.resumed_from
        self._history.begin(resumed_from)
        evaluations = {step: v for step, v in self._history.evaluations.items() if step <= resumed_from}
        facts = {"steps": self._job.steps, "resumed_from": resumed_from, "evaluations": evaluations}
        self._tell("on_start", facts)

    def _row(self, row: StepRow) -> dict[str, Any]:
        document = row.document()
        facts = {name: document[name] for name in ("step", "loss", "grad_norm", "seconds")}
        return facts | {"lr": self._rate(row.step)}

    def _tell(self, method: str, *what: Any) -> None:
        for callback in list(self._callbacks):
            called = getattr(callback, method, None)
            if called is None:
                continue
            try:
                answer = called(*copy.deepcopy(what))  # what one of them changes, no other one sees
            except Exception as error:  # the user's code
                self._callbacks.remove(callback)
                name = callback.name if isinstance(callback, StepFunction) else type(callback).__name__
                where = name if isinstance(callback, StepFunction) else f"{name}.{method}"
                warn(f"callback {where} raised {type(error).__name__}: {error}")
                warn(traceback.format_exc(limit=20).rstrip())
                warn(f"training continues without {name}")
                continue
            except BaseException as error:
                self._leaving = self._leaving or error
                continue
            if answer and self._task is not None and not self._stopping:
                self._stopping = True
                name = callback.name if isinstance(callback, StepFunction) else type(callback).__name__
                because = f"stopped by {name}" + (f": {answer}" if isinstance(answer, str) else "")
                self._task.finish_early(because)
