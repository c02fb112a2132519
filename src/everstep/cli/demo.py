"""`everstep demo`: train, kill two workers, recover, and compare with a failure-free run."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli import render
from everstep.cli.render import AsJson, Console
from everstep.cli.train import own_page
from everstep.errors import EverstepError, UserError, one_sentence
from everstep.job.job import Job
from everstep.protocol.ops import Worker

if TYPE_CHECKING:
    from everstep.launch.local.outcome import Outcome
    from everstep.launch.local.page import RunPage
    from everstep.launch.local.run import Watcher
    from everstep.node.fork_server import ForkServer

_LAYERS = 8  # an embedding, six blocks, a head
_MODEL = {"preset": "gpt-tiny", "depth": _LAYERS - 2}
_DATA = {"kind": "synthetic", "rows": 4}
_WORKER_BYTES = 150 << 20  # a forked worker, its share of torch not counted
_LEAST_STEPS = 12
_STEPS, _WEB_STEPS = 50, 300  # with a page, people need time to click


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Which worker is killed in which step, and how many steps later it rejoins."""

    kills: tuple[tuple[Worker, int], ...]
    rejoin_after_steps: int


class Killer:
    """A watcher that sends SIGKILL from outside, once the victim is seen at work in the middle of its step.

    Not by `--kill`, which names an op: after an incident the planner may have given that op to another one.
    Once a person hurts a worker on the page, the kills that are left are not sent.
    """

    def __init__(self, script: Script, watch: Watcher) -> None:
        self._left, self._watch = list(script.kills), watch
        self._sent: list[Worker] = []  # whose incidents are still to come

    def __call__(self, kind: str, what: Any) -> None:
        if kind == "tick" and self._left:
            worker, step = self._left[0]
            reading = what.readings().get(worker)
            if reading is not None and reading.step >= step and reading.done >= 3 and reading.num_ops >= 2:
                self._left.pop(0)
                self._sent.append(worker)
                what.kill(worker)
        if kind == "incident":
            for worker in what.workers:
                if worker in self._sent:
                    self._sent.remove(worker)
                else:
                    self._left.clear()
        self._watch(kind, what)


def demo_command(
    replicas: Annotated[
        int,
        typer.Option(help="Data-parallel replicas; at least 2, because a failed worker needs a live peer."),
    ] = 2,
    stages: Annotated[int, typer.Option(help=f"Pipeline stages; at most {_LAYERS}.")] = 2,
    steps: Annotated[
        int | None,
        typer.Option(help=f"Optimizer steps per run; {_STEPS}, or {_WEB_STEPS} with --web."),
    ] = None,
    web: Annotated[
        bool,
        typer.Option("--web", help="Open a page that shows the run; kill, stop or slow down workers there."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """See training survive the loss of two workers; takes about a minute on a laptop.

    The demo trains a small GPT twice: once with two workers killed in mid-step, once without failures. It
    draws both loss curves.

    [bold]Examples[/bold]

      everstep demo

      everstep demo --replicas 3 --stages 4

      everstep demo --web

      everstep demo --json > demo.json
    """
    job = demo_job(replicas, stages, steps or (_WEB_STEPS if web else _STEPS))
    script = story(job)
    console = _console(quiet=as_json)
    _title(console, job, script, web=web)
    started = time.monotonic()
    with _page() if web else contextlib.nullcontext() as page:
        clean, healed = _both_runs(job, script, console, page, as_json=as_json)
        found = summary(job, clean, healed) | {"seconds": round(time.monotonic() - started, 3)}
        if as_json:
            render.emit(found)
        _show(console, found)
        if page is not None:
            page.compare({row.step: row.loss for row in clean.rows})
            if page.watched and sys.stderr.isatty():
                console.print("\n  the page stays open until you press Ctrl-C")
                page.stay()
    return 0 if found["max_relative_loss_difference"] <= 1e-6 else 1


def demo_job(replicas: int, stages: int, steps: int) -> Job:
    """The job, or one sentence on why this machine or this model cannot run it."""
    if replicas < 2:
        raise UserError(f"--replicas is {replicas}; give at least 2: a failed worker needs a live peer.")
    if not 1 <= stages <= _LAYERS:
        raise UserError(f"--stages is {stages}; the demo's model has {_LAYERS} layers: give 1 to {_LAYERS}.")
    if steps < _LEAST_STEPS:
        raise UserError(f"--steps is {steps}; give at least {_LEAST_STEPS}.")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = replicas * stages
    needed = workers * _WORKER_BYTES
    if needed > free + (1 << 30):
        raise UserError(
            f"--replicas {replicas} and --stages {stages} make {workers} workers that need about "
            f"{needed >> 30} GiB of memory, and {free >> 30} GiB are free; use fewer."
        )
    return Job.from_dict(
        {
            "model": _MODEL,
            "data": _DATA,
            "optimizer": {"lr": 1e-2, "warmup": 4},
            "steps": steps,
            "replicas": replicas,
            "stages": stages,
            "microbatches": 4,
            "accumulate": "strict",
            "seed": 1,
        }
    )


def story(job: Job) -> Script:
    """One dies and is back some steps later; then another dies, of another replica and another stage."""
    kills = ((Worker(0, job.stages - 1), job.steps // 5), (Worker(1, 0), job.steps * 3 // 5))
    return Script(kills=kills, rejoin_after_steps=job.steps // 10)


def summary(job: Job, clean: Outcome, healed: Outcome) -> dict[str, Any]:
    """All that the demo claims, from what was measured."""
    from everstep.launch.local.report import document, healthy_step_s

    calm, ours = clean.by_step(), healed.by_step()
    healed_run = document(healed, steps=job.steps, healthy_s=healthy_step_s(clean))
    return {
        "replicas": job.replicas,
        "stages": job.stages,
        "microbatches_per_replica": job.microbatches,
        "max_relative_loss_difference": max(_relative(ours[step].loss, calm[step].loss) for step in calm),
        "replayed_ops_elsewhere": sum(i["replayed_ops_elsewhere"] for i in healed_run["incidents"]),
        "losses_without_faults": {str(step): calm[step].loss for step in sorted(calm)},
        **healed_run,
    }


# ------------------------------------------------------------------ running


def _both_runs(
    job: Job, script: Script, console: Console, page: RunPage | None, *, as_json: bool
) -> tuple[Outcome, Outcome]:
    from everstep.launch.local import fork_servers

    with fork_servers.open_server(job.threads) as fork_server:  # it loads torch while we do
        return _run_twice(job, script, console, fork_server, page, as_json=as_json)


def _run_twice(
    job: Job,
    script: Script,
    console: Console,
    fork_server: ForkServer,
    page: RunPage | None,
    *,
    as_json: bool,
) -> tuple[Outcome, Outcome]:
    from everstep.launch.local import api
    from everstep.protocol.messages import Patience

    patience = Patience(
        rejoin_after_steps=script.rejoin_after_steps,
        restarts_per_place=3 if page is None else 1_000_000,  # people like to click
    )
    console.print("[bold]1[/bold]  with two SIGKILLs")  # first: it is what people want to see
    every = 10 if as_json or not sys.stderr.isatty() else None
    with render.watching(job, as_json=as_json, every=every) as watch:
        healed = _finished(
            api.run_job(
                job,
                watch=Killer(script, watch),
                fork_server=fork_server,
                patience=patience,
                page=page,
                name="demo",
            )
        )
    _say_done(console, healed)
    console.print("[bold]2[/bold]  the same job without failures, for comparison")
    with render.watching(job, as_json=as_json, every=every) as watch:
        clean = _finished(api.run_job(job, watch=watch, fork_server=fork_server))
    _say_done(console, clean)
    return clean, healed


@contextlib.contextmanager
def _page() -> Iterator[RunPage]:
    """The page of the demo, opened in a browser where there is a display."""
    with own_page(0, may_hurt=True) as page, tempfile.TemporaryDirectory(prefix="everstep-") as name:
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
            # By a file only we can read: every user can read a browser's command line, and so the token.
            door = Path(name) / "demo.html"
            door.write_text(f'<meta http-equiv="refresh" content="0;url={page.address}">', encoding="utf-8")
            webbrowser.open(door.as_uri())
        yield page


def _say_done(console: Console, outcome: Outcome) -> None:
    console.print(f"   done: loss {outcome.rows[0].loss:.3f} → {outcome.rows[-1].loss:.3f}\n")


def _finished(outcome: Outcome) -> Outcome:
    if outcome.failure is not None:
        raise EverstepError(f"the demo's training ended: {one_sentence(outcome.failure)}")
    return outcome


# ------------------------------------------------------------------ showing


def _console(*, quiet: bool) -> Console:

    return Console(stderr=True, highlight=False, quiet=quiet)


def _title(console: Console, job: Job, script: Script, *, web: bool) -> None:
    console.print(
        "\n[bold]everstep demo[/bold]  "
        f"a small GPT on {job.replicas} replicas × {render.count(job.stages, 'stage')}, {job.steps} steps "
        f"of {job.microbatches_in_step} microbatches"
    )
    (first, early), (second, late) = script.kills
    console.print(
        f"[dim]SIGKILL will hit worker {first} (replica:stage) in step {early}, "
        f"and {second} in step {late}{', unless you hurt one on the page first' * web}[/dim]\n"
    )


def _show(console: Console, found: Mapping[str, Any]) -> None:
    difference, batches = found["max_relative_loss_difference"], found["microbatches"]
    for name, value in (
        (
            "largest loss difference",
            "0: bit-identical in every step" if difference == 0 else f"{difference:.2e}, relative",
        ),
        ("microbatches", f"{batches['issued']} issued, {batches['committed']} committed once"),
        (
            "ops replayed",
            f"{sum(i['replayed_ops'] for i in found['incidents'])} of the failed workers, "
            f"{found['replayed_ops_elsewhere']} on other stages",
        ),
        ("step without failures", f"{found['healthy_step_ms']:.0f} ms"),
    ):
        console.print(f"  {name:<24} {value}")
    head = f"{'incident':<24} {'noticed':>8} {'replanned':>11} {'resumed':>9} {'lost':>12}"
    console.print(f"\n  [bold]{head}[/bold]")
    for incident in found["incidents"]:
        what = f"step {incident['step']}, worker {incident['worker']}"
        console.print(f"  {what:<24} {_costs(incident)}")


def _relative(a: float, b: float) -> float:
    """How far two losses are apart, as a part of the larger."""
    return abs(a - b) / max(abs(a), abs(b), 1e-300) if a != b else 0.0


def _costs(incident: Mapping[str, Any]) -> str:
    noticed, replanned, resumed = (
        "?" if (ms := incident[f"{name}_ms"]) is None else f"{ms:.0f}"
        for name in ("noticed", "replanned", "resumed")
    )
    return f"{noticed:>5} ms {replanned:>8} ms {resumed:>6} ms {incident['steps_lost']:6.2f} steps"
