"""How fast a task heals: SIGKILL at random moments, from outside, and what happens until training goes on.

    python bench/heal.py                       4 workers, 30 kills
    python bench/heal.py --growth              the same for 4, 8 and 16 workers
    python bench/heal.py --shapes 4x2,4x4,8x4,8x8 --rest 20 --kills 20     8 to 64 workers, on 16 cores
    python bench/heal.py --kills 50 --json

first op        from SIGKILL to the first op that any survivor runs in the new epoch
next step       from SIGKILL to the next step that is sealed at every stage, in healthy steps of the same run;
                a run without faults would show 0.5 on average
Every killed worker is brought back and has rejoined before the next one is killed. With `--rest` ops rest so
many milliseconds instead of computing (`harness.slow_workers`): then a core serves several workers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.core.task.states import Member
from everstep.job.job import DataSpec, Job, ModelSpec
from everstep.launch.local.outcome import Outcome, StepRow
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.incidents import Incident
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker
from harness import slow_workers

EAGER = Patience(restarts_per_place=10_000, restarts_per_node=10_000, backoff_s=0.0)  # chaos kills on and on


class Chaos:
    """Watches a task; kills a random worker at a random moment of a step once everybody is there."""

    def __init__(self, kills: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.kills = kills
        self.killed: list[tuple[float, Worker]] = []
        self.steps: list[float] = []
        self.incidents: list[Incident] = []
        self.healthy_since = 0
        self._armed = False

    def __call__(self, kind: str, what: Any) -> None:
        match kind:
            case "step":
                self._stepped(what)
            case "incident":
                self.incidents.append(what)
            case "tick":
                self._look(what)

    def _stepped(self, row: StepRow) -> None:
        self.steps.append(row.at)
        self.healthy_since += 1

    def _look(self, task: LocalTask) -> None:
        everybody = all(isinstance(place, Member) for place in task.recovery.places.values())
        if not everybody:
            self.healthy_since = 0
            self._armed = False
        elif self.healthy_since >= 3 and not self._armed and len(self.killed) < self.kills:
            self._armed = True
            step = statistics.median(b - a for a, b in zip(self.steps[-4:], self.steps[-3:], strict=False))
            threading.Timer(self.random.random() * step, self._kill, (task,)).start()
        elif len(self.killed) == self.kills and self.healthy_since >= 5:
            task.finish("every worker has been killed often enough")

    def _kill(self, task: LocalTask) -> None:
        worker = self.random.choice(sorted(task.processes))
        self.killed.append((time.monotonic(), worker))
        task.kill(worker)


def measure(
    replicas: int, stages: int, kills: int, preset: str, fork_server: ForkServer, seed: int, **more: Any
) -> dict[str, Any]:
    rest_ms = more.pop("rest", 0.0)
    shape = {"replicas": replicas, "stages": stages, "microbatches": 4, "steps": 1_000_000}
    if rest_ms:
        rests = {"rest_ms": [rest_ms] * stages, "weight_ms": rest_ms}
        job = Job.from_dict(slow_workers.job_of(**rests, **shape, **more))
    else:
        job = Job(
            **more,
            **shape,
            model=ModelSpec(preset=preset),
            data=DataSpec(kind="synthetic", rows=4),
        )
    chaos = Chaos(kills, seed)
    outcome = LocalTask(job, fork_server=fork_server, watch=chaos, patience=EAGER).run()
    return evaluate(chaos, outcome)


def evaluate(chaos: Chaos, outcome: Outcome) -> dict[str, Any]:
    ends = [row.at for row in outcome.rows]
    times = [moment for moment, _ in chaos.killed]
    touched = [(t, next((e for e in ends if e > t), t)) for t in times]
    rejoined = {i for i, e in enumerate(ends) if any(t <= e <= done + 1.0 for t, done in touched)}
    healthy = statistics.median(
        b - a for i, (a, b) in enumerate(itertools.pairwise(ends), 1) if i not in rejoined
    )
    first = [(i.resumed_at - i.killed_at) * 1e3 for i in chaos.incidents if i.resumed_at and i.killed_at]
    noticed = [(i.evidence_at - i.killed_at) * 1e3 for i in chaos.incidents if i.killed_at]
    following = [(done - t) / healthy for t, done in touched]
    return {
        "kills": len(times),
        "healthy_step_ms": round(healthy * 1e3, 1),
        "noticed_ms": spread(noticed),
        "first_op_ms": spread(first),
        "next_step_in_healthy_steps": spread(following, 2),
        "steps_redone": len(outcome.rows) - len(outcome.by_step()),
        "microbatches": {"issued": outcome.issued, "committed": outcome.committed},
    }


def spread(values: list[float], digits: int = 1) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), digits),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], digits),
        "max": round(ordered[-1], digits),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--preset", default="gpt-tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--transport", default="auto", help="auto, tcp, shm, nccl, pipe")
    parser.add_argument("--growth", action="store_true", help="4, 8 and 16 workers")
    parser.add_argument("--shapes", default="2x2", help="replicas x stages, several with commas")
    parser.add_argument("--rest", type=float, default=0.0, help="milliseconds of an op instead of computing")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = ["2x2", "4x2", "4x4"] if given.growth else given.shapes.split(",")
    shapes = [tuple(map(int, name.split("x"))) for name in names]
    fork_server = ForkServer().start()
    results = {}
    for replicas, stages in shapes:
        job = {name: getattr(given, name) for name in ("device", "precision", "transport", "rest")}
        result = measure(replicas, stages, given.kills, given.preset, fork_server, given.seed, **job)
        results[f"{replicas}x{stages}"] = result
        if not given.json:
            print(
                f"{replicas} x {stages}: {result['kills']} kills, healthy step {result['healthy_step_ms']} ms"
            )
            for name in ("noticed_ms", "first_op_ms", "next_step_in_healthy_steps"):
                print(f"  {name:28} " + "  ".join(f"{k} {v:8}" for k, v in result[name].items()))
            print(f"  microbatches {result['microbatches']}", flush=True)
    fork_server.close()
    if given.json:
        print(json.dumps(results[names[0]] | ({"growth": results} if len(names) > 1 else {})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
