"""Unicron's trace-b, shortened in time, on real processes: Everstep beside a restart from the checkpoint.

    python -m bench.trace                           three tasks on 8 nodes, 2 days of the trace in 3 minutes
    python -m bench.trace --days 7 --minutes 10

Two clusters side by side see the same failures at the same moments: a severe one kills a node with all that
runs there and brings it back when it is repaired; another one kills the worker on the node. Three tasks of
weights 4, 2 and 1 train, whose ops rest, so that a core serves several workers. `restart`: whenever a worker
of a task is lost, all of the task end at once and start again from its last checkpoint as soon as there are
nodes for all of them; as fast as Everstep starts processes, and without the time until somebody notices. What
counts is the weighted number of steps that are done, of those that a cluster without failures would do. What
a restart takes is not shortened with the trace, so the ratio belongs to this length.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.errors import EverstepError
from everstep_lab.study.failures import DAY_S, Failure
from everstep_lab.study.sources import trace_b
from harness import slow_workers
from harness.cluster import Cluster

TASKS = {"heavy": (4.0, 2, 2), "middle": (2.0, 2, 1), "light": (1.0, 1, 2)}  # weight, replicas, stages
WARM_S = 10.0  # without failures, from the moment that every task trains


@dataclass
class Policy:
    """One cluster and how it answers failures."""

    cluster: Cluster
    restarts: bool
    args: argparse.Namespace
    names: dict[str, str] = field(default_factory=dict)  # task: as it was submitted last
    best: dict[str, int] = field(default_factory=dict)  # task: steps
    num_restarts: int = 0
    later: list[threading.Thread] = field(default_factory=list)  # repairs and restarts under way

    def start(self) -> None:
        self.cluster.start_coordinator()
        for number in range(self.args.nodes):
            self.cluster.start_agent(f"n{number}", slots=1)
        self.cluster.nodes_up(self.args.nodes)
        for task in TASKS:
            self._submit(task)
        for task in TASKS:
            self.cluster.all_members(self.names[task])

    def _submit(self, task: str) -> None:
        weight, replicas, stages = TASKS[task]
        shape = {"replicas": replicas, "stages": stages, "microbatches": 8 // replicas, "steps": 1_000_000}
        keep = {"folder": str(self.cluster.folder / task), "interval": self.args.interval, "keep": 2}
        rests = {"rest_ms": [self.args.rest] * stages, "weight_ms": self.args.rest}
        self.names[task] = f"{task}-{self.num_restarts}"
        more = {"min_workers": replicas * stages} if self.restarts else {}
        job = slow_workers.job_of(**rests, **shape, checkpoint=keep)
        self.cluster.submit(job, self.names[task], weight=weight, **more)

    def steps(self) -> dict[str, int]:
        for task, name in self.names.items():
            with contextlib.suppress(EverstepError):
                self.best[task] = max(self.best.get(task, 0), self.cluster.task(name)["step"])
        return dict(self.best)

    def strike(self, failure: Failure) -> None:
        """On the node of the trace, if it is up."""
        node = f"n{failure.node}"
        if self.cluster.agents[node].poll() is not None:
            return
        rows = [
            (task, row) for task, name in self.names.items() for row in self.cluster.workers(name).values()
        ]
        hit = [(task, row["pid"]) for task, row in rows if row["node"] == node]
        if failure.severity == 1:
            self.cluster.signal_node(node, signal.SIGKILL)
            self.cluster.agents[node].wait()
            away_s = failure.repair_s / DAY_S * 60.0 * self.args.minutes / self.args.days
            self._later(threading.Timer(away_s, self.cluster.start_agent, (node,), {"slots": 1}))
        for task, pid in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if self.restarts:
                self._later(threading.Thread(target=self._restart, args=(task,)))

    def _later(self, what: threading.Thread) -> None:
        self.later.append(what)
        what.start()

    def end(self) -> None:
        for what in self.later:
            if isinstance(what, threading.Timer):
                what.cancel()
            what.join()

    def _restart(self, task: str) -> None:
        self.num_restarts += 1
        self.cluster.client.post(f"/v1/tasks/{self.names[task]}/cancel")
        self.cluster.finished(self.names[task])
        self._submit(task)


def live(policy: Policy, failures: list[tuple[float, Failure]], until_s: float) -> dict[str, Any]:
    """Steps done from the first failure's clock on, and how many it would have been without failures."""
    began, first = time.monotonic(), policy.steps()
    time.sleep(WARM_S)
    warm = {task: (done - first[task]) / (time.monotonic() - began) for task, done in policy.steps().items()}
    began, first = time.monotonic(), policy.steps()
    for at_s, failure in failures:
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        with contextlib.suppress(EverstepError, OSError):  # a question that its answer came too late for
            policy.strike(failure)
    time.sleep(max(0.0, began + until_s - time.monotonic()))
    lasted, last = time.monotonic() - began, policy.steps()
    weights = {task: TASKS[task][0] * TASKS[task][1] * TASKS[task][2] for task in TASKS}
    done = sum(weights[t] * (last[t] - first[t]) * (1 / warm[t]) for t in TASKS)
    return {
        "steps": {task: last[task] - first[task] for task in TASKS},
        "steps_per_s_before": warm,
        "efficiency": done / (sum(weights.values()) * lasted),
        "restarts": policy.num_restarts,
        "seconds": lasted,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--days", type=float, default=2.0, help="of the trace's seven")
    parser.add_argument("--minutes", type=float, default=3.0, help="that they are shortened to")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rest", type=float, default=10.0, help="milliseconds of F, of I and of W")
    parser.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()
    scale = 60.0 * args.minutes / (args.days * DAY_S)
    trace = trace_b(args.seed, nodes=args.nodes)
    cut = sorted((f for f in trace.failures if f.at_s < args.days * DAY_S), key=lambda f: f.at_s)
    failures = [(f.at_s * scale, f) for f in cut]
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), eager=True) as cluster:
            policy = Policy(cluster, name == "restart", args)
            policy.start()
            found[name] = live(policy, failures, 60.0 * args.minutes)
            policy.end()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("everstep", "restart")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    severe = sum(failure.severity == 1 for _, failure in failures)
    print(f"{len(failures)} failures, {severe} of nodes, in {60 * args.minutes:g} s", file=sys.stderr)
    found["ratio"] = found["everstep"]["efficiency"] / found["restart"]["efficiency"]
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
