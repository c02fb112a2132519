"""How fast is a fault noticed, and is the right worker named? Real processes, real signals.

    python -m bench.detect --trials 20 --minutes 10 --json

sigkill      from the signal to the evidence in the coordinator's hands
exception    from the raise to the evidence
hang         SIGSTOP of a random worker at a random moment; from the signal to the verdict, in healthy steps
silence      an agent and all its workers are stopped; from the signal to the node given up
false alarms incidents in so many minutes of training while hogs take the CPUs
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.core.task.states import Member
from everstep.engine.telemetry.faults import parse_fault
from everstep.job.job import Job
from everstep.launch.local.outcome import StepRow
from everstep.launch.local.run import LocalNode, LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.incidents import Incident
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.cluster import Cluster, small_job

EAGER = Patience(restarts_per_place=10_000, restarts_per_node=10_000, backoff_s=0.0)  # faults come on and on
ENDLESS = 100_000  # steps


def job(steps: int = ENDLESS) -> Job:
    return Job.from_dict(small_job(Path.cwd(), steps=steps))


class Striker:
    """Watches a task; once everybody is there for two steps, strikes a random worker at a random moment."""

    def __init__(self, number: int, trials: int, seed: int) -> None:
        self.number, self.trials, self.random = number, trials, random.Random(seed)
        self.struck: list[tuple[float, Worker]] = []
        self.noticed: list[Incident] = []
        self.healthy_s: list[float] = []
        self._quiet_steps = 0
        self._due = 0.0

    def __call__(self, kind: str, what: Any) -> None:
        match kind:
            case "step":
                self._step(what)
            case "incident":
                self.noticed.append(what)
                self._quiet_steps, self._due = 0, 0.0
            case "tick":
                self._tick(what)

    def _step(self, row: StepRow) -> None:
        self._quiet_steps += 1
        if self._quiet_steps > 2:
            self.healthy_s.append(row.seconds)

    def _tick(self, task: LocalTask) -> None:
        if len(self.noticed) < len(self.struck) or task.recovery is None:
            return
        everybody = all(isinstance(place, Member) for place in task.recovery.places.values())
        if not everybody or self._quiet_steps < 3:
            return
        if len(self.struck) == self.trials:
            task.finish("enough trials")
            return
        now = time.monotonic()
        if not self._due:
            self._due = now + self.random.uniform(0, statistics.median(self.healthy_s or [0.3]))
        if now < self._due:
            return
        worker = self.random.choice(sorted(task.processes))
        self.struck.append((time.monotonic(), worker))
        os.kill(task.processes[worker].child.pid, self.number)

    def delays_s(self) -> list[float]:
        return [
            incident.evidence_at - at for incident, (at, _) in zip(self.noticed, self.struck, strict=True)
        ]

    def wrong(self) -> int:
        return sum(
            incident.workers != [worker]
            for incident, (_, worker) in zip(self.noticed, self.struck, strict=True)
        )


def strike(number: int, trials: int, fork_server: ForkServer, seed: int) -> Striker:
    striker = Striker(number, trials, seed)
    LocalTask(job(), fork_server=fork_server, watch=striker, patience=EAGER).run()
    return striker


def exceptions(trials: int, fork_server: ForkServer) -> list[float]:
    """Each worker raises once a run, in a step and an op of its own."""
    delays: list[float] = []
    while len(delays) < trials:
        faults = tuple(
            parse_fault(f"stage={w.stage},replica={w.replica},step={4 + 4 * i},op=F{i % 4},how=raise")
            for i, w in enumerate(Worker(k, s) for k in (0, 1) for s in (0, 1))
        )
        found: list[Incident] = []
        LocalTask(
            job(steps=20),
            fork_server=fork_server,
            faults=faults,
            patience=EAGER,
            watch=lambda kind, what, found=found: found.append(what) if kind == "incident" else None,
        ).run()
        delays += [i.evidence_at - i.killed_at for i in found if i.killed_at is not None]
    return delays[:trials]


def silences(trials: int, folder: Path, seed: int) -> list[float]:
    chance = random.Random(seed)
    delays: list[float] = []
    with Cluster(folder, eager=True) as cluster:
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        cluster.submit(small_job(folder, steps=ENDLESS))
        cluster.step_reached(4)
        for trial in range(trials):
            cluster.all_members()
            cluster.step_reached(cluster.task()["step"] + 3)
            time.sleep(chance.uniform(0, 0.3))
            node, before = chance.choice("ab"), len(cluster.incidents())
            at = time.time()
            cluster.signal_node(node, signal.SIGSTOP)
            found = cluster.until(lambda n=before: cluster.incidents()[n:] or None, "the silence is noticed")
            delays.append(found[0]["opened_at"] - at)
            if found[0]["node"] != node:
                raise AssertionError(f"node {node} was stopped and {found[0]['node']} is blamed")
            cluster.signal_node(node, signal.SIGCONT)
            cluster.nodes_up(2)
            print(f"silence {trial + 1}/{trials}: {delays[-1] * 1e3:.0f} ms", file=sys.stderr)
    return delays


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
    """The first minute without hogs, to see how much they slow the steps; the rest with."""
    found: list[Incident] = []
    seconds: list[float] = []
    began = time.monotonic()

    def watch(kind: str, what: Any) -> None:
        if kind == "incident":
            found.append(what)
        elif kind == "step" and what.step > 5:
            seconds.append(what.seconds)
        elif kind == "tick" and time.monotonic() > until:
            what.finish("time is over")

    quiet_s = min(60.0, minutes * 6)
    until = began + quiet_s
    LocalTask(job(), fork_server=fork_server, watch=watch).run()
    alone, seconds = statistics.median(seconds), []
    until = time.monotonic() + minutes * 60
    with hogs(os.cpu_count() or 1):
        LocalTask(job(), fork_server=fork_server, watch=watch).run()
    for incident in found:
        print(f"false alarm: {incident.what}", file=sys.stderr)
    return {"false_alarms": len(found), "slowdown": statistics.median(seconds) / alone, "steps": len(seconds)}


def overhead(turns: int, fork_server: ForkServer) -> dict[str, Any]:
    """Runs with and without detection in turn; the median step of each, and what the watcher itself uses."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    watcher_s: dict[bool, float] = {True: 0.0, False: 0.0}
    wall_s = {True: 0.0, False: 0.0}
    for turn in range(2 * turns):
        detect = turn % 2 == 0
        found: list[StepRow] = []
        used, began = time.process_time(), time.monotonic()
        LocalTask(
            job(steps=25),
            fork_server=fork_server,
            node=LocalNode(detect=detect),
            watch=lambda kind, what, found=found: found.append(what) if kind == "step" else None,
        ).run()
        watcher_s[detect] += time.process_time() - used
        wall_s[detect] += time.monotonic() - began
        seconds[detect] += [row.seconds for row in found[5:]]
    on, off = (statistics.median(seconds[detect]) for detect in (True, False))
    return {
        "overhead_of_step": round(on / off - 1, 4),
        "step_ms_on": round(on * 1e3, 2),
        "step_ms_off": round(off * 1e3, 2),
        "watcher_share_of_a_core": {
            "on": round(watcher_s[True] / wall_s[True], 4),
            "off": round(watcher_s[False] / wall_s[False], 4),
        },
    }


def quantiles(values: list[float], scale: float, digits: int = 1) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered) * scale, digits),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] * scale, digits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10.0, help="of training under hogs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["sigkill", "exception", "hang", "silence", "alarms", "overhead"])
    given = parser.parse_args()
    told: dict[str, Any] = {"trials": given.trials}
    fork_server = ForkServer(threads=1)
    if given.only != "silence":
        fork_server.start()

    def wanted(name: str) -> bool:
        return given.only in (None, name)

    try:
        if wanted("sigkill"):
            kills = strike(signal.SIGKILL, given.trials, fork_server, given.seed)
            told["sigkill_ms"] = quantiles(kills.delays_s(), 1e3)
        if wanted("exception"):
            told["exception_ms"] = quantiles(exceptions(given.trials, fork_server), 1e3)
        if wanted("hang"):
            stops = strike(signal.SIGSTOP, given.trials, fork_server, given.seed + 1)
            healthy = statistics.median(stops.healthy_s)
            told["hang_ms"] = quantiles(stops.delays_s(), 1e3)
            told["hang_steps"] = quantiles(stops.delays_s(), 1 / healthy, 3)
            told["hang_wrong_worker"] = stops.wrong()
            told["step_ms"] = round(healthy * 1e3, 1)
        if wanted("overhead"):
            told |= overhead(given.trials // 2, fork_server)
        if wanted("alarms") and given.minutes > 0:
            told |= false_alarms(given.minutes, fork_server)
    finally:
        fork_server.close()
    if wanted("silence"):
        with tempfile.TemporaryDirectory() as folder:
            told["node_silence_ms"] = quantiles(silences(given.trials, Path(folder), given.seed), 1e3)
    if given.json:
        print(json.dumps(told, indent=2))
        return
    for name, value in told.items():
        print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
