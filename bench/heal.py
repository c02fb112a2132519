"""How fast a fault is noticed and a task heals: real processes, real signals, at random moments.

    python bench/heal.py                                 4 workers, 30 kills
    python bench/heal.py --fault stop --times 20         SIGSTOP; or raise, silence
    python bench/heal.py --alarms 10                     ten minutes of training beside hogs, without a fault
    python bench/heal.py --shapes 2x2,4x2,4x4 --json     8 and 16 workers, too
    python bench/heal.py --shapes 4x4,8x8 --rest 20      ops rest for 20 ms instead of computing

noticed     from the fault to the evidence, and whether the right worker (or node) was named
first op    from SIGKILL to the first op that any survivor runs in the new epoch
next step   from SIGKILL to the next step that is sealed at every stage, in healthy steps of the same run;
            a run without faults would show 0.5 on average
Every struck worker is back before the next one is struck. Exit code 1 if a microbatch was not committed once,
a step was redone, the wrong worker was named, or there was a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.core.task.states import Member
from everstep.engine.telemetry.faults import parse_fault
from everstep.job.job import DataSpec, Job, ModelSpec
from everstep.launch.local.outcome import Outcome, StepRow
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.incidents import Incident
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker
from harness import slow_workers
from harness.cluster import Cluster, small_job

EAGER = Patience(restarts_per_place=10_000, restarts_per_node=10_000, backoff_s=0.0)  # faults come on and on
ENDLESS = 1_000_000  # steps


class Striker:
    """Watches a task; strikes a random worker at a random moment of a step once everybody is there."""

    def __init__(self, times: int, seed: int, number: int) -> None:
        self.random, self.times, self.number = random.Random(seed), times, number
        self.struck: list[tuple[float, Worker]] = []
        self.steps: list[float] = []
        self.incidents: list[Incident] = []
        self.healthy_since = 0
        self._armed = False

    def __call__(self, kind: str, what: Any) -> None:
        match kind:
            case "step":
                self.steps.append(what.at)
                self.healthy_since += 1
            case "incident":
                self.incidents.append(what)
                self.healthy_since = 0
            case "tick":
                self._look(what)

    def _look(self, task: LocalTask) -> None:
        if task.recovery is None or len(self.incidents) < len(self.struck):
            return
        if not all(isinstance(place, Member) for place in task.recovery.places.values()):
            self.healthy_since = 0
            self._armed = False
        elif self.healthy_since >= 4 and not self._armed and len(self.struck) < self.times:
            self._armed = True
            step = statistics.median(b - a for a, b in itertools.pairwise(self.steps[-4:]))
            threading.Timer(self.random.random() * step, self._strike, (task,)).start()
        elif len(self.struck) == self.times and self.healthy_since >= 5:
            task.finish("struck often enough")

    def _strike(self, task: LocalTask) -> None:
        worker = self.random.choice(sorted(task.processes))
        self.struck.append((time.monotonic(), worker))
        os.kill(task.processes[worker].child.pid, self.number)

    def wrong(self) -> int:
        """How often another worker was named, or none."""
        named = [incident.workers for incident in self.incidents]
        return sum([worker] != names for (_, worker), names in zip(self.struck, named, strict=True))


def job_of(replicas: int, stages: int, preset: str, rest_ms: float, **more: Any) -> Job:
    shape = {"replicas": replicas, "stages": stages, "microbatches": 4, "steps": ENDLESS}
    if rest_ms:
        rests = {"rest_ms": [rest_ms] * stages, "weight_ms": rest_ms}
        return Job.from_dict(slow_workers.job_of(**rests, **shape, **more))
    return Job(**more, **shape, model=ModelSpec(preset=preset), data=DataSpec(kind="synthetic", rows=4))


def strike(job: Job, times: int, seed: int, number: int, fork_server: ForkServer) -> dict[str, Any]:
    striker = Striker(times, seed, number)
    outcome = LocalTask(job, fork_server=fork_server, watch=striker, patience=EAGER).run()
    return evaluate(striker, outcome)


def evaluate(striker: Striker, outcome: Outcome) -> dict[str, Any]:
    ends = [row.at for row in outcome.rows]
    times = [moment for moment, _ in striker.struck]
    touched = [(t, next((e for e in ends if e > t), t)) for t in times]
    rejoined = {i for i, e in enumerate(ends) if any(t <= e <= done + 1.0 for t, done in touched)}
    healthy = statistics.median(
        b - a for i, (a, b) in enumerate(itertools.pairwise(ends), 1) if i not in rejoined
    )
    noticed = [i.evidence_at - t for i, t in zip(striker.incidents, times, strict=True)]
    first = [i.resumed_at - t for i, t in zip(striker.incidents, times, strict=True) if i.resumed_at]
    return {
        "times": len(times),
        "healthy_step_ms": round(healthy * 1e3, 1),
        "noticed_ms": spread(noticed, 1e3),
        "first_op_ms": spread(first, 1e3),
        "next_step_in_healthy_steps": spread([done - t for t, done in touched], 1 / healthy, 2),
        "wrong_worker": striker.wrong(),
        "steps_redone": len(outcome.rows) - len(outcome.by_step()),
        "microbatches": {"issued": outcome.issued, "committed": outcome.committed},
    }


def exceptions(times: int, fork_server: ForkServer) -> dict[str, Any]:
    """Each worker raises once a run, in a step and an op of its own."""
    delays: list[float] = []
    while len(delays) < times:
        faults = tuple(
            parse_fault(f"stage={w.stage},replica={w.replica},step={4 + 4 * i},op=F{i % 4},how=raise")
            for i, w in enumerate(Worker(k, s) for k in (0, 1) for s in (0, 1))
        )
        found: list[Incident] = []
        LocalTask(
            Job.from_dict(small_job(Path.cwd(), steps=20)),
            fork_server=fork_server,
            faults=faults,
            patience=EAGER,
            watch=lambda kind, what, found=found: found.append(what) if kind == "incident" else None,
        ).run()
        delays += [i.evidence_at - i.killed_at for i in found if i.killed_at is not None]
    return {"times": times, "noticed_ms": spread(delays[:times], 1e3)}


def silences(times: int, folder: Path, seed: int) -> dict[str, Any]:
    """An agent and all its workers are stopped; until the node is given up."""
    chance, delays, wrong = random.Random(seed), [], 0
    with Cluster(folder, eager=True) as cluster:
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        cluster.submit(small_job(folder, steps=ENDLESS))
        cluster.step_reached(4)
        for _ in range(times):
            cluster.all_members()
            cluster.step_reached(cluster.task()["step"] + 3)
            time.sleep(chance.uniform(0, 0.3))
            node, before = chance.choice("ab"), len(cluster.incidents())
            at = time.time()
            cluster.signal_node(node, signal.SIGSTOP)
            found = cluster.until(lambda n=before: cluster.incidents()[n:] or None, "the silence is noticed")
            delays.append(found[0]["opened_at"] - at)
            wrong += found[0]["node"] != node
            cluster.signal_node(node, signal.SIGCONT)
            cluster.nodes_up(2)
    return {"times": times, "noticed_ms": spread(delays, 1e3), "wrong_worker": wrong}


@contextlib.contextmanager
def hogs(number: int) -> Iterator[None]:
    taken = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in taken:
            process.kill()
            process.wait()


def false_alarms(minutes: float, fork_server: ForkServer) -> dict[str, Any]:
    """The first tenth of the time without hogs, to see how much they slow the steps."""
    found: list[Incident] = []
    medians = []
    for seconds, number in ((minutes * 6, 0), (minutes * 54, os.cpu_count() or 1)):
        rows: list[StepRow] = []
        until = time.monotonic() + seconds

        def watch(kind: str, what: Any, rows: list[StepRow] = rows, until: float = until) -> None:
            if kind == "incident":
                found.append(what)
            elif kind == "step":
                rows.append(what)
            elif kind == "tick" and time.monotonic() > until and len(rows) > 6:
                what.finish("time is over")

        with hogs(number):
            job = Job.from_dict(small_job(Path.cwd(), steps=ENDLESS))
            LocalTask(job, fork_server=fork_server, watch=watch).run()
        medians.append(statistics.median(row.seconds for row in rows[5:]))
    for incident in found:
        print(f"false alarm: {incident.what}", file=sys.stderr)
    return {"minutes": minutes, "false_alarms": len(found), "slowdown": round(medians[1] / medians[0], 2)}


def spread(values: list[float], scale: float, digits: int = 1) -> dict[str, float]:
    ordered = sorted(value * scale for value in values)
    return {
        "p50": round(statistics.median(ordered), digits),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], digits),
        "max": round(ordered[-1], digits),
    }


def holds(result: dict[str, Any]) -> bool:
    counts = result.get("microbatches", {"issued": 0, "committed": 0})
    bad = [result.get(name, 0) for name in ("wrong_worker", "steps_redone", "false_alarms")]
    return counts["issued"] == counts["committed"] and not any(bad)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--fault", choices=["kill", "stop", "raise", "silence"], default="kill")
    parser.add_argument("--alarms", type=float, metavar="MINUTES", help="count false alarms instead")
    parser.add_argument("--preset", default="gpt-tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--transport", default="auto", help="auto, tcp, ipc, nccl")
    parser.add_argument("--shapes", default="2x2", help="replicas x stages, several with commas")
    parser.add_argument("--rest", type=float, default=0.0, help="milliseconds of an op instead of computing")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    if given.fault == "silence":
        with tempfile.TemporaryDirectory() as folder:
            results["silence"] = silences(given.times, Path(folder), given.seed)
    else:
        with contextlib.closing(ForkServer(threads=1).start()) as fork_server:
            if given.alarms:
                results["alarms"] = false_alarms(given.alarms, fork_server)
            elif given.fault == "raise":
                results["raise"] = exceptions(given.times, fork_server)
            else:
                number = signal.SIGKILL if given.fault == "kill" else signal.SIGSTOP
                more = {name: getattr(given, name) for name in ("device", "precision", "transport")}
                for name in given.shapes.split(","):
                    job = job_of(*map(int, name.split("x")), given.preset, given.rest, **more)
                    results[name] = strike(job, given.times, given.seed, number, fork_server)
    if given.json:
        print(json.dumps(results))
    for name, result in () if given.json else results.items():
        print(name)
        for key, value in result.items():
            shown = "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"  {key:28} {shown}")
    return 0 if all(map(holds, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
