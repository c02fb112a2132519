"""The same storm twice: real processes killed at scripted steps, and the virtual world with the same kills.

A short run with three kills of its own measures how long things take on this machine (ops, the start of a
process, the copy of a state, the notice of a death). Then come the storm and its prediction: the virtual
world runs the real recovery, worker states and schedules with those times, and nothing is left to chance.
What is compared is the time that the kills have cost, over the whole run.

Workers have a core each (2 replicas x 1 stage by default): the world knows nothing of workers that wait for a
core.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from everstep.core.task.states import Copied, Entering, Joining, Member
from everstep.core.worker.rules import TaskRules
from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol import actions as act
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Kind, Worker
from everstep.schedule import Instance
from everstep_lab.draw import Draw
from everstep_lab.storm.faults import FaultKind, StormFault
from everstep_lab.storm.spec import Spec, Weather
from everstep_lab.storm.strikes import Strikes
from everstep_lab.storm.world import World

FIRST_KILL, BETWEEN = 12, 14  # steps
REPLICAS, STAGES, MICROBATCHES = 2, 1, 4
EAGER = Patience(
    restarts_per_node=10_000,
    restarts_per_place=10_000,
    backoff_first_s=0.0,
    backoff_s=0.0,
    forget_after_s=1e-6,
)


@dataclass(frozen=True, slots=True)
class Script:
    """Kill number i: right after step `step` is on record, and `share` of a step later."""

    kills: tuple[tuple[int, Worker, float], ...]
    steps: int


def script(kills: int, seed: int) -> Script:
    draw = Draw(seed, "script")
    return Script(
        tuple(
            (FIRST_KILL + BETWEEN * i, Worker(i % REPLICAS, 0), round(draw.uniform(0.05, 0.95), 2))
            for i in range(kills)
        ),
        FIRST_KILL + BETWEEN * kills,
    )


@dataclass(slots=True)
class Watch:
    """Carries the script out on real processes, and notes when things happen."""

    script: Script
    task: LocalTask | None = None
    instance: Instance | None = None
    ends: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    started: dict[Worker, float] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    copying: dict[Worker, float] = field(default_factory=dict)
    copies: list[float] = field(default_factory=list)
    killed: int = 0

    def __call__(self, kind: str, what: Any) -> None:
        now = time.monotonic()
        if kind == "step":
            self.ends.append(now)
            if what.step == FIRST_KILL - 1 and self.task is not None:
                self.instance = self.task.scheduler.profile.instance()  # as it is while nothing fails
            for step, worker, share in self.script.kills:
                if step == what.step:
                    threading.Timer(share * self.healthy(), self._kill, (worker,)).start()
        elif kind == "incident" and what.killed_at:
            self.noticed.append(what.evidence_at - what.killed_at)
        elif kind == "action":
            if isinstance(what, act.StartWorker):
                self.started[what.worker] = now
            elif isinstance(what, act.CopyState):
                self.copying[what.joiner] = now
        elif kind == "tick":
            self._look(what, now)

    def _look(self, task: LocalTask, now: float) -> None:
        if task.recovery is None:
            return
        for worker, place in task.recovery.places.items():
            if isinstance(place, Joining | Member) and worker in self.started:
                self.starts.append(now - self.started.pop(worker))
            copied = isinstance(place, Member | Copied | Entering)
            if copied and worker in self.copying:
                self.copies.append(now - self.copying.pop(worker))

    def _kill(self, worker: Worker) -> None:
        assert self.task is not None
        if worker in self.task.processes:
            self.killed += 1
            self.task.kill(worker)

    def healthy(self) -> float:
        """A step while nothing fails: those before the first kill, the first few left out."""
        early = self.ends[3:FIRST_KILL]
        return statistics.median(b - a for a, b in itertools.pairwise(early))

    def lost(self) -> float:
        steps = len(self.ends) - FIRST_KILL
        return self.ends[-1] - self.ends[FIRST_KILL - 1] - steps * self.healthy()


def run_real(plan: Script, fork_server: ForkServer, depth: int) -> Watch:
    job = Job(
        model=ModelSpec(preset="gpt-tiny", options={"depth": depth}),
        data=DataSpec(kind="synthetic", rows=4),
        optimizer=OptimizerSpec(clip=None),
        replicas=REPLICAS,
        stages=STAGES,
        microbatches=MICROBATCHES,
        steps=plan.steps,
    )
    watch = Watch(plan)
    watch.task = LocalTask(job, fork_server=fork_server, watch=watch, patience=EAGER)
    watch.task.run()
    return watch


def measured_weather(watch: Watch) -> Weather:
    assert watch.instance is not None
    times = {
        kind: max(
            1, round(1e6 * statistics.mean(watch.instance.time(kind, w) for w in watch.instance.workers()))
        )
        for kind in Kind
    }
    work = MICROBATCHES * sum(times[k] for k in (Kind.F, Kind.I, Kind.W)) + times[Kind.R] + times[Kind.U]
    rest = max(300, round(watch.healthy() * 1e6) - work)  # messages of the reduce, and between the ops
    return Weather(
        op_us=times[Kind.F],
        op_times_us=times,
        hop_us=rest // 3,
        order_us=300,
        plan_us=1_000,
        sync_us=1,
        start_us=round(statistics.median(watch.starts) * 1e6),
        exit_us=round(statistics.median(watch.noticed) * 1e6),
        copy_us=round(statistics.median(watch.copies) * 1e6),
    )


def predict(plan: Script, weather: Weather, *, with_kills: bool) -> list[float]:
    """When each step is on record, in seconds of virtual time."""
    step_us = 0.0
    if with_kills:
        clean = predict(plan, weather, with_kills=False)
        step_us = 1e6 * statistics.median(b - a for a, b in itertools.pairwise(clean))
    faults = tuple(
        StormFault(
            what=FaultKind.KILL, at_us=int(share * step_us), target=worker.replica, after="record", nth=step
        )
        for step, worker, share in plan.kills
        if with_kills
    )
    rules = TaskRules(replicas=REPLICAS, stages=STAGES, microbatches=MICROBATCHES, steps=plan.steps)
    world = World(Spec(seed=0, rules=rules, mode="staggered", weather=weather, faults=faults))
    strikes = Strikes(world, faults)
    ends: list[float] = []
    inner = world.on_trigger

    def on_trigger(what: str, count: int, worker: Worker) -> None:
        if what == "record":
            ends.append(world.agenda.now_us / 1e6)
        if inner is not None:
            inner(what, count, worker)

    world.on_trigger = on_trigger
    world.begin()
    while world.outcome is None and world.agenda.step():
        pass
    assert len(strikes.struck) == len(faults)
    return ends


def lost_in(ends: list[float], step_s: float) -> float:
    return ends[-1] - ends[FIRST_KILL - 1] - (len(ends) - FIRST_KILL) * step_s


def compare(*, kills: int, seed: int, depth: int = 6) -> dict[str, Any]:
    fork_server = ForkServer().start()
    try:
        weather = measured_weather(run_real(script(3, seed + 1), fork_server, depth))
        plan = script(kills, seed)
        real = run_real(plan, fork_server, depth)
    finally:
        fork_server.close()
    clean = predict(plan, weather, with_kills=False)
    step_s = statistics.median(b - a for a, b in itertools.pairwise(clean))
    predicted = lost_in(predict(plan, weather, with_kills=True), step_s)
    return {
        "kills": real.killed,
        "steps": len(real.ends),
        "step_ms": {"measured": round(real.healthy() * 1e3, 1), "predicted": round(step_s * 1e3, 1)},
        "calibration_ms": {
            **{str(kind): round(us / 1e3, 1) for kind, us in (weather.op_times_us or {}).items()},
            "message": round(weather.hop_us / 1e3, 1),
            "notice": round(weather.exit_us / 1e3, 1),
            "start": round(weather.start_us / 1e3, 1),
            "copy": round(weather.copy_us / 1e3, 1),
        },
        "lost_s": {"measured": round(real.lost(), 3), "predicted": round(predicted, 3)},
        "predicted_over_measured": round(predicted / real.lost(), 3),
    }
