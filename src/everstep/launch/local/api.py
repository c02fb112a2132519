"""`everstep.train`: your model, data and optimizer, trained by workers that recover.

The script that calls it is run once by the launcher (`everstep run train.py`, or plain `python train.py`) and
once by every worker. Up to the call all of them do the same; in the launcher the call checks the job, starts
the workers and returns a `Result`; in a worker it trains and ends the process.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.engine.datasets.data import START, Dataset, dataset_of, trained_on
from everstep.engine.datasets.order import RowOrder
from everstep.engine.layers.model import Loss
from everstep.engine.prepare import context
from everstep.engine.prepare.preflight import preflight
from everstep.engine.prepare.program import Program
from everstep.engine.prepare.resolve import evaluation_of, optimizer_of, schedule_of
from everstep.engine.stage.evaluation import Metric
from everstep.engine.state.optimizer import OptimizerFactory
from everstep.engine.state.schedules import Rate
from everstep.engine.telemetry.faults import PlantedFault, check_fault, parse_fault
from everstep.errors import EverstepError, UserError
from everstep.job.job import Job
from everstep.launch.local import callbacks as callbacks_module
from everstep.launch.local import fork_servers
from everstep.launch.local.arguments import (
    Layers,
    check_optimizer,
    evaluation_table,
    job_of_call,
    model_given,
    named_optimizer,
    shape_of_call,
)
from everstep.launch.local.data_needs import buffered, prepare, steps_of, tokens_of_each
from everstep.launch.local.history import History, settings_of
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.pace import workload_of
from everstep.launch.local.page import RunPage
from everstep.launch.local.plain_lines import LiveLine, PlainLines
from everstep.launch.local.report import document, stopped_line, summary_line
from everstep.launch.local.resuming import first_row, refuse_another_model, with_compile_settled
from everstep.launch.local.run import TASK, LocalTask, Watcher
from everstep.log import say
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience

Batch = Callable[[int, int], Any]
USUAL_STEPS = 100  # if neither steps nor epochs are given
GRACE_S = 25.0  # Kubernetes gives 30
SAME_SIGNAL_S = 1.0  # a scheduler may send one and the same to a process and to its group


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """The result of a run, earlier starts included: the loss of every step, evaluations, incidents."""

    losses: dict[int, float]  # by step, from 1; means over all microbatches
    grad_norms: dict[int, float]  # global, before clipping
    evaluations: dict[int, dict[str, float]]  # by the step whose weights were evaluated: loss and metrics
    document: dict[str, Any]  # what `everstep run --json` prints

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """Recovered failures, each with worker, step, noticed_ms, replanned_ms, resumed_ms and steps_lost."""
        found: list[dict[str, Any]] = self.document["incidents"]
        return found

    def __repr__(self) -> str:
        return f"Result({summary_line(self.document)})"


@dataclass(slots=True, kw_only=True)
class LocalLaunch:
    """What `everstep run` adds to the script's own words, and what it gets back."""

    script: list[str]
    overrides: Mapping[str, int] = field(default_factory=dict)
    kills: Sequence[str] = ()
    watch: Callable[[Job], AbstractContextManager[Watcher]] = lambda job: own_watch(job)
    page: Callable[[bool], AbstractContextManager[RunPage | None]] = lambda wanted: own_page(wanted)
    grace_s: float | None = None
    is_own: bool = False  # of a plain `python train.py`: nothing else says how it ended
    result: Result | None = None


launch: LocalLaunch | None = None  # set by `everstep run`; a plain `python train.py` makes its own


def train(
    *positional: Any,
    model: Layers | None = None,
    data: Dataset | Batch | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | str | None = None,
    schedule: Any = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    eval_batches: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Any = (),
    replicas: int = 1,
    stages: int = 1,
    microbatches: int = 4,
    steps: int | None = None,
    page: bool = True,
    **settings: Any,
) -> Result:
    """Train `model` on `replicas` x `stages` workers; each replica brings `microbatches` to every step.

    model       a `Model`, such as `everstep.hf` gives, or its layers: a dict or list of functions that each
                build one `nn.Module`
    data        `everstep.rows`, `tokens`, `table` or `stream`; or an object with batch(step, microbatch), or
                that function: it gives (inputs, targets), or a dict that the first layer and the loss both
                get; the same arguments must give the same tensors
    loss        of (output, targets): a mean, or (sum, weight) such as `everstep.token_loss`; cross entropy if
                not given
    optimizer   a function of named parameters, such as `lambda named: torch.optim.SGD(named, lr=0.1)`, or the
                name of one of torch's, with `lr` and `optimizer_options`; AdamW if not given, set by lr,
                betas, eps and weight_decay
    schedule    of the rate: a function of the step (from 1) that gives what it is multiplied with, a function
                that makes one of torch's schedulers of an optimizer, or the name of one, with
                `schedule_options`; else `warmup`, `decay`, `floor`
    eval_data   as `data`; its loss and `metrics` (name -> function of (output, targets): a mean, or (sum,
                weight)) are found every `eval_every` steps (ten times in a run if not given) and after the
                last, over `eval_batches` batches
    callbacks   functions of a step, or objects with on_step, on_eval, on_checkpoint, on_incident
    page        serve a page that shows the run, and print its address
    settings    `epochs` instead of `steps` (100 if neither is given), where the data has rows; other keys of
                a job: precision, accumulate, recompute, seed, device, threads, load_ahead, log, checkpoint
                (a folder, or {"folder": ..., "interval": 100, "keep": 3}); and of its optimizer: clip, ema,
                stagger
    """
    context.refuse_in_import("everstep.train")
    if positional or model is None or data is None:
        raise UserError(
            "everstep.train takes named arguments, and needs model and data: "
            "everstep.train(model=..., data=..., steps=...)."
        )
    found = model_given(model, loss)
    check_optimizer(optimizer)
    given, factory = dataset_of(data), optimizer if callable(optimizer) else None
    tested = None if eval_data is None else dataset_of(eval_data, "eval_data")
    here = context.current_worker()
    if here is not None:
        job = here.job
        there = None if tested is None else evaluation_of(job, tested, metrics or {})
        rate, build = schedule_of(job, found, schedule, factory), factory or optimizer_of(job)
        here.train(Program(job, found, trained_on(given, job), build, there, rate))
        raise SystemExit(0)
    call = _this_launch()
    callbacks = callbacks_module.checked(callbacks)
    if steps is not None and "epochs" in settings:
        raise UserError("steps and epochs are both given; give one of them.")
    count = USUAL_STEPS if steps is None else steps
    shape = {"replicas": replicas, "stages": stages, "microbatches": microbatches, "steps": count}
    shape = shape_of_call(shape, call.overrides)
    checkpoint = settings.get("checkpoint")
    if "epochs" in settings:
        shape["steps"] = steps_of(given, settings.pop("epochs"), shape, checkpoint)
    if factory is not None or schedule is not None:
        settings.setdefault("decay", "constant")  # the rate is the optimizer's own, unless the call says more
    settings |= named_optimizer(optimizer, settings)
    if tested is not None:
        settings["evaluation"] = evaluation_table(tested, eval_every, eval_batches, metrics or {}, shape)
    elif eval_every is not None or metrics:
        raise UserError("eval_every and metrics need eval_data; give the data to evaluate on.")
    job = job_of_call(shape, settings, found.assembly.card)
    job, notes = with_compile_settled(job, tokens_of_each(given, tested))
    if hasattr(given, "order_in"):
        order = given.order_in(job.microbatches_in_step, job.seed)
        if start := first_row(checkpoint, order):
            job = replace(job, data=replace(job.data, options={START: start}))
    faults = parse_kills(call.kills, job)
    with buffered(job, given, tested) as job:
        dataset = trained_on(given, job)
        evaluation = None if tested is None else evaluation_of(job, tested, metrics or {})
        prepare(job, dataset, evaluation)
        checked = preflight(
            job, model=found, data=dataset, evaluation=evaluation, optimizer=factory, schedule=schedule
        )
        refuse_another_model(job, checked.model)
        for sentence in (*notes, *checked.notes):
            say(sentence)
        with call.page(page) as shown, call.watch(job) as watch:
            watch("workload", workload_of(job, checked.model, checked.batch))
            outcome = run_with_callbacks(
                job,
                callbacks,
                rate=checked.rate,
                order=dataset.order if hasattr(given, "order_in") else None,
                watch=watch,
                faults=faults,
                script=call.script,
                page=shown,
                grace_s=GRACE_S if call.grace_s is None else call.grace_s,
            )
    call.result = result_of(outcome, job)
    if call.is_own:
        say(summary_line(call.result.document))
    if outcome.failure is not None:
        raise EverstepError(outcome.failure)
    return call.result


def parse_kills(texts: Sequence[str], job: Job) -> tuple[PlantedFault, ...]:
    """The faults of `--kill`, each of which must be able to strike."""
    faults = tuple(parse_fault(text) for text in texts)
    for fault in faults:
        check_fault(fault, job)
    return faults


def run_job(
    job: Job,
    *,
    faults: tuple[PlantedFault, ...] = (),
    patience: Patience | None = None,
    watch: Watcher = lambda kind, what: None,
    script: list[str] | None = None,
    fork_server: ForkServer | None = None,
    page: RunPage | None = None,
    grace_s: float = GRACE_S,
    name: str = "",
) -> Outcome:
    """Start the workers, run the job to its end, and leave no process behind, however it ends.

    `fork_server`: the fork server to use, for several runs in a row. `page`: where people may watch it.
    `grace_s`: after SIGTERM, until its state must be saved. `name`: what its page and its lines call it; the
    script's, if not given.
    """
    if job.python is not None:
        raise UserError("python is for tasks of a cluster; start this run with that Python, without the key.")
    home = (
        fork_servers.open_server(job.threads, _modules(job))
        if fork_server is None
        else nullcontext(fork_server)
    )
    with home as server, _Interrupts(grace_s) as interrupts:
        task = LocalTask(
            job,
            fork_server=server,
            faults=faults,
            patience=patience,
            watch=interrupts.watching(watch),
            script=script,
            page=page,
            name=task_name(name or (script or [TASK])[0]),
        )
        try:
            outcome = task.run()
        except BaseException as error:
            if interrupts.first:
                say(stopped_line(task.outcome, task.last_step, job))
            if interrupts.first and isinstance(error, EverstepError):
                say(f"while it stopped: {error}")
                raise interrupts.exception from error
            raise
        if interrupts.first and task.last_step < job.steps:
            say(stopped_line(outcome, task.last_step, job))
            if outcome.failure is not None:  # said, but the exit code is that of the signal
                say(f"while it stopped: {outcome.failure}")
            raise interrupts.exception
        return outcome


def task_name(path: str) -> str:
    """Of a run of this script or job file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-.")[:60] or TASK


def _modules(job: Job) -> tuple[str, ...]:
    """What workers will want, and what takes long to import: that of a job file, or what this script has."""
    ours = "everstep.engine.hf.model"
    models = [name for name in sys.modules if re.fullmatch(r"transformers\.models\.\w+\.modeling_\w+", name)]
    lightning = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    return job.modules() or (*((ours, *sorted(models)) if ours in sys.modules else ()), *lightning)


def run_with_callbacks(
    job: Job,
    callbacks: Sequence[Any] = (),
    *,
    watch: Watcher,
    rate: Rate | None = None,
    order: RowOrder | None = None,
    **more: Any,
) -> Outcome:
    """`run_job` with callbacks, and with the losses of earlier starts. `rate`: the rate of a step."""
    history = History.of(job)
    history.settings = settings_of(job, order)
    watcher = callbacks_module.CallbackWatcher(job, callbacks, history, watch, rate)
    try:
        outcome = run_job(job, watch=watcher, **more)
    except BaseException:
        watcher.end(None)
        raise
    history.add_earlier(outcome)
    watcher.end(None if outcome.failure is not None else result_of(outcome, job))
    return outcome


def result_of(outcome: Outcome, job: Job) -> Result:
    return Result(
        losses=outcome.all_losses(),
        grad_norms=outcome.all_grad_norms(),
        evaluations=dict(sorted(outcome.evaluations.items())),
        document=document(outcome, steps=job.steps),
    )


# ------------------------------------------------------------------ from a call to a job


def own_watch(job: Job) -> AbstractContextManager[Watcher]:
    """One live line on a terminal, lines elsewhere."""
    return LiveLine(job) if sys.stderr.isatty() else nullcontext(PlainLines(job))


def own_page(wanted: bool) -> AbstractContextManager[RunPage | None]:
    """The page of a script's run; it costs one socket until a browser connects."""
    if not wanted:
        return nullcontext()
    return RunPage()


def _this_launch() -> LocalLaunch:
    global launch
    if launch is None:
        path = getattr(sys.modules["__main__"], "__file__", None)
        if path is None or not os.path.isfile(path):  # a prompt, a notebook, `python -c`, `python < FILE`
            raise UserError(
                "everstep.train was called outside a script, and workers need one to run; put "
                "the call in a file, and run it with everstep run FILE."
            )
        launch = LocalLaunch(script=[path, *sys.argv[1:]], is_own=True)
    if launch.result is not None:
        raise UserError("everstep.train was called a second time; a script trains once.")
    return launch


def overrides() -> dict[str, int]:
    """What `everstep run` says of the shape, in the launcher."""
    return dict(_this_launch().overrides)


# ------------------------------------------------------------------ ending early


class _Interrupts:
    """Ctrl-C and SIGTERM end a run after the step it is in, whose state is saved; a second one, at once.
    After SIGTERM saving may take `grace_s`.
    """

    def __init__(self, grace_s: float) -> None:
        self.first = 0  # the signal
        self._grace_s = grace_s
        self._first_at = 0.0
        self._stops_at: float | None = None  # between two turns; those that follow are of the ending
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exception(self) -> BaseException:
        return KeyboardInterrupt() if self.first == signal.SIGINT else SystemExit(128 + self.first)

    def watching(self, watch: Watcher) -> Watcher:
        def both(kind: str, what: Any) -> None:
            watch(kind, what)
            if kind == "tick" and self.first:
                self._look(what)

        return both

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self.first:
            self.first, self._first_at = number, time.monotonic()
        elif time.monotonic() - self._first_at > SAME_SIGNAL_S:
            raise self.exception

    def _look(self, task: LocalTask) -> None:
        if self._stops_at is None:
            can_save = task.job.checkpoint is not None and task.last_step > task.outcome.saved
            waits_s = self._grace_s if self.first == signal.SIGTERM else math.inf
            self._stops_at = time.monotonic() + waits_s if can_save else 0.0
            if can_save:
                name = signal.Signals(self.first).name
                say(f"{name}: stops after this step and saves its state; a second signal stops it at once")
                task.finish_early(f"stopped by {name}")
        if time.monotonic() >= self._stops_at:
            self._stops_at = math.inf
            raise self.exception
