"""Many deaths in one run, each at its exact moment, each after the replacements of the last have rejoined.

A run of one death spends most of its time on starting processes; here that is paid once. Every loss of the
run is compared with that of a run without deaths.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everstep.core.task.recovery import Recovery
from everstep.core.task.states import Member
from everstep.engine.telemetry.faults import parse_fault
from everstep.job.job import DataSpec, Job
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.run import TASK, LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience

ROOT = Path(__file__).resolve().parents[1]
EAGER = Patience(restarts_per_place=10_000, restarts_per_node=10_000, backoff_s=0.0)
AHEAD = 2  # steps from planting a fault to its moment


@dataclass(slots=True)
class DeathsInARow:
    """Watches a task, and plants the faults of the next point once every worker is there again."""

    points: list[tuple[str, ...]]  # each with its faults, whose steps count from that of the first
    limit_s: float
    struck: list[int] = field(default_factory=list)  # their numbers
    missed: list[int] = field(default_factory=list)
    first_op_ms: list[float] = field(default_factory=list)
    _last_step: int | None = None  # of the faults that are planted
    _has_struck: bool = False
    _began: float = field(default_factory=time.monotonic)
    _healthy: int = 0  # steps since all were there

    def __call__(self, kind: str, what: Any) -> None:
        if kind == "step":
            self._healthy += 1
        elif kind == "incident" and what.resumed_at is not None and what.killed_at is not None:
            self.first_op_ms.append(round((what.resumed_at - what.killed_at) * 1e3, 1))
        elif kind == "tick" and what.recovery is not None:
            self._look(what, what.recovery)

    def _look(self, task: LocalTask, recovery: Recovery) -> None:
        if time.monotonic() - self._began > self.limit_s:
            task.finish("the time is up")
        elif not all(isinstance(place, Member) for place in recovery.places.values()):
            self._healthy, self._has_struck = 0, self._last_step is not None
        elif self._last_step is not None and recovery.recorded > self._last_step:
            number = len(self.struck) + len(self.missed)
            (self.struck if self._has_struck else self.missed).append(number)
            self._last_step, self._has_struck = None, False
        elif self._last_step is None and self._healthy >= 2:
            number = len(self.struck) + len(self.missed)
            if number == len(self.points):
                task.finish("all have died")
            else:
                self._plant(task, recovery.recorded + 1 + AHEAD, self.points[number])

    def _plant(self, task: LocalTask, step: int, texts: tuple[str, ...]) -> None:
        faults = [parse_fault(text) for text in texts]
        first = min(fault.step for fault in faults)
        for fault in faults:
            moved = replace(fault, step=fault.step - first + step)
            task.workers.plant(TASK, moved.worker, (moved.text(),))
        self._last_step = max(fault.step for fault in faults) - first + step


def run_in_a_row(
    job: Job, points: list[tuple[str, ...]], server: ForkServer, *, rest_s: float, limit_s: float
) -> tuple[DeathsInARow, Outcome]:
    """`rest_s`: so long takes the data of each microbatch, or hundreds of steps pass until a rejoin."""
    data = job.data
    options = {"preset": job.model.preset, "rows": data.rows, "rest_s": rest_s, "sequence": data.sequence}
    slow = DataSpec(build="harness.slow_data:SlowSynthetic", rows=data.rows, options=options)
    watch = DeathsInARow(points, limit_s)
    slowed = replace(job, steps=1_000_000, data=slow, base=str(ROOT))
    outcome = LocalTask(slowed, fork_server=server, watch=watch, patience=EAGER).run()
    return watch, outcome
