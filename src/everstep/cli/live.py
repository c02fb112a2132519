"""The live view of a run: the op of each worker, the loss, and the events so far.

The thread that runs recovery also draws, from the beacons: never during a recovery, and at most ten times per
second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from everstep.cli.render import Console
from everstep.drive.step_rows import StepRow
from everstep.engine.telemetry.beacon import BeaconReading
from everstep.errors import UserError
from everstep.job.job import Job
from everstep.launch.local.pace import Pace
from everstep.launch.local.report import death, evaluation_line, resume_line, times, tried
from everstep.launch.local.run import LocalTask
from everstep.protocol import actions as act
from everstep.protocol.ops import Kind, Worker, parse_op

FRAME_S = 0.1
_CELL = 27
_LOOKS = {
    Kind.F: ("forward", "cyan"),
    Kind.I: ("input grad", "green"),
    Kind.W: ("weight grad", "blue"),
    Kind.R: ("reduce", "yellow"),
    Kind.U: ("update", "yellow"),
}


class LiveView:
    """A watcher that draws. `other`: losses of the same job in another run, to compare with as it runs."""

    def __init__(
        self,
        job: Job,
        *,
        console: Console | None = None,
        other: Mapping[int, float] | None = None,
        other_name: str = "",
    ) -> None:
        self.job, self.other, self.other_name = job, other, other_name
        self.console = console or Console(stderr=True, highlight=False)
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0
        self._row: StepRow | None = None
        self._begun = False
        self._gone: dict[Worker, tuple[float, str]] = {}
        self._back: set[Worker] = set()
        self._worst = 0.0
        self._pace = Pace(steps=job.steps)
        self._spinner = Spinner("dots", Text("starting the workers", style="dim"))

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        self._live.update(self._spinner, refresh=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def __call__(self, kind: str, what: Any) -> None:
        self._pace.hear(kind, what)
        match kind, what:
            case "tick", LocalTask():
                self._tick(what)
            case "step", StepRow():
                self._row = what
                if self.other is not None and what.step in self.other:
                    self._worst = max(self._worst, relative(what.loss, self.other[what.step]))
            case "incident", incident if not incident.stops_training:
                self.tell("[yellow]~[/yellow]", incident.step, death(incident), tried(incident))
            case "incident", incident:
                for worker in incident.workers:
                    self._gone[worker] = (time.monotonic(), incident.what)
                *when, redone = times(incident)
                self.tell("[red]✗[/red]", incident.step, f"{death(incident)}; {redone}", " · ".join(when))
            case "evaluation", (step, values):
                self.say(f"[cyan]=[/cyan] {escape(evaluation_line(step, values))}")
            case "page", page:
                self._live.console.print(
                    f"page: {escape(page.address)}", soft_wrap=True
                )  # as one word to click
            case "warning", sentence:
                self.say(f"[yellow]~[/yellow] {escape(sentence)}")
            case "raised", (worker, error, traceback):
                self.say(f"[red]![/red] worker {worker} raised {escape(error)}")
                if not error.startswith("UserError: "):  # a sentence about the model or the job
                    self.say(f"[dim]{escape(traceback.rstrip())}[/dim]")
            case "action", action:
                self._action(action)

    def say(self, markup: str) -> None:
        self._live.console.print(markup)

    def tell(self, sign: str, step: int, what: str, detail: str = "") -> None:
        """One event: a sign, the step, what happened, and below it the durations."""
        self.say(f"{sign} step {step:<5} {escape(what)}")
        if detail:
            self.say(f"{'':13}[dim]{escape(detail)}[/dim]")

    def _action(self, action: act.Action) -> None:
        match action:
            case act.StartWorker() if action.incarnation > 1:
                self.tell("[yellow]↻[/yellow]", self._step + 1, f"worker {action.worker} restarts")
                self._back.add(action.worker)
            case act.CopyState():
                self.tell("[yellow]↻[/yellow]", self._step + 1, action.because)
            case act.ResumeWorkers(orders=orders):
                for worker in sorted(self._back & orders.keys()):
                    self._back.discard(worker)
                    self._gone.pop(worker, None)
                    self.tell("[green]✓[/green]", orders[worker].step, f"worker {worker} is back")

    @property
    def _step(self) -> int:
        return self._row.step if self._row is not None else 0

    # -------------------------------------------------------------- drawing

    def _tick(self, task: LocalTask) -> None:
        if not self._begun:
            self._begin(task)
        now = time.monotonic()
        if now - self._drawn_at >= FRAME_S:
            self._drawn_at = now
            begun = task.running or self._row is not None
            self._live.update(self._frame(task) if begun else self._spinner, refresh=True)

    def _begin(self, task: LocalTask) -> None:
        self._begun = True
        for refused in task.outcome.refused_checkpoints:
            self.say(f"[red]✗[/red] refused: {escape(refused)}")
        folder = self.job.checkpoint.folder if self.job.checkpoint else ""
        if (resumed := resume_line(task.outcome, folder)) is not None:
            self.say(f"[green]✓[/green] {escape(resumed)}")

    def _frame(self, task: LocalTask) -> Group:
        return Group(Text(), self._grid(task), Text(), self._facts())

    def _grid(self, task: LocalTask) -> Table:
        readings = task.readings()
        table = Table.grid(padding=(0, 1))
        table.add_column(width=10)
        shown = range(min(self.job.stages, max(1, (self.console.width - 12) // (_CELL + 1))))
        for _ in shown:
            table.add_column(width=_CELL)
        table.add_row("", *(Text(f"  stage {stage}", style="bold") for stage in shown))
        for replica in range(min(self.job.replicas, 12)):
            cells = [self._cell(Worker(replica, stage), readings) for stage in shown]
            table.add_row(Text(f"replica {replica}", style="bold"), *cells)
        hidden = self.job.replicas * self.job.stages - len(shown) * min(self.job.replicas, 12)
        if hidden:
            table.add_row("", Text(f"  and {hidden} workers more", style="dim"))
        return table

    def _cell(self, worker: Worker, readings: Mapping[Worker, BeaconReading | None]) -> Text:
        if worker not in readings:
            since, what = self._gone.get(worker, (time.monotonic(), "gone"))
            return Text(f"✗ {what}, {time.monotonic() - since:.1f} s", style="bold red")
        reading = readings[worker]
        if reading is None or worker in self._back:
            return Text("↻ copying state" if reading is not None else "↻ starting", style="yellow")
        return _doing(worker, reading)

    def _facts(self) -> Table:
        row = self._row
        table = Table.grid(padding=(0, 1))
        table.add_column(width=10)
        table.add_column()
        bar = ProgressBar(total=self.job.steps, completed=self._step, width=40)
        table.add_row(Text("step", style="bold"), _beside(bar, f"{self._step}/{self.job.steps}"))
        loss = Text("-") if row is None else Text(f"{row.loss:.6f}")
        if row is not None and self.other is not None and row.step in self.other:
            same = "bit-identical so far" if self._worst == 0 else f"differs by at most {self._worst:.1e}"
            loss.append(
                f"   {self.other_name} {self.other[row.step]:.6f}, {same}",
                style="green" if self._worst <= 1e-6 else "red",
            )
        table.add_row(Text("loss", style="bold"), loss)
        if row is not None:
            table.add_row(Text("time", style="bold"), Text(f"{row.seconds * 1e3:.0f} ms per step"))
            table.add_row(Text("pace", style="bold"), Text(" · ".join(self._pace.words()[1:])))
        return table


def relative(a: float, b: float) -> float:
    """How far two losses are apart, as a part of the larger."""
    return abs(a - b) / max(abs(a), abs(b), 1e-300) if a != b else 0.0


def _doing(worker: Worker, reading: BeaconReading) -> Text:
    if not reading.busy:
        return Text({"Finished": "  done", "Paused": "  paused"}.get(reading.doing, "  waiting"), style="dim")
    try:
        op = parse_op(reading.doing)
    except UserError:
        return Text(f"▶ {reading.doing}")
    name, style = _LOOKS[op.kind]
    if op.microbatch is None:
        return Text(f"▶ {name}", style=style)
    text = Text(f"▶ {name} {op.microbatch}", style=style)
    if op.microbatch.home != worker.replica:
        text.append(f" ↪ from {op.microbatch.home}", style="bold magenta")
    return text


def _beside(bar: ProgressBar, text: str) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row(bar, text)
    return table
