"""Throughput with dead workers, on real processes whose ops rest instead of computing: a core serves several.

    python -m bench.dead                        4 x 4 with 0 to 5 dead, against the share alive
    python -m bench.dead ablation               3 x 4 x 6 with one dead: fused backward, decoupled, staggered
    python -m bench.dead roles                  8 x 2 with three dead at stage 0: one of stage 1 moves there

Every run is the whole program: coordinator, scheduler, worker processes, their links. F, I and W of a
microbatch rest for `--rest` milliseconds each, so times are those of the schedule while the cores keep up.
`planned` is the period that the scheduler promises, with the times that the workers measured; they measure no
fused backward. `roles` is a cluster of a coordinator and nine agents, three of which are killed: its planner
decides on the move by itself.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.core.cluster.task import Task
from everstep.core.task.places import Places
from everstep.core.task.states import Member
from everstep.drive.thinking import Thinking
from everstep.job.job import Job
from everstep.launch.local.run import LocalNode, LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Worker
from everstep.schedule.modes import MODES
from everstep.schedule.task_scheduler import TaskScheduler
from harness import slow_workers
from harness.cluster import Cluster

ALONE = Patience(restarts_per_place=0)  # who is dead stays dead
MAY_START = Places._may_start
SETTLED = 5  # steps after the deaths that are not counted
Row = dict[str, Any]


class InOneMode(Thinking):
    """Schedules of one mode, whatever workers report of their updates."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self._mode = mode

    def scheduler(self, task: Task) -> TaskScheduler:
        if task.name not in self.schedulers:
            self.schedulers[task.name] = found = TaskScheduler(task.shape, self._mode)
            found._mode_now = lambda: self._mode  # type: ignore[method-assign]
        return self.schedulers[task.name]


class Deaths:
    """Kills these workers after a few steps; keeps the times of the steps after that."""

    def __init__(self, dead: list[Worker], steps: int) -> None:
        self.dead, self.steps = dead, steps
        self.seconds: list[float] = []
        self.planned = 0.0
        self._left = list(dead)
        self._quiet = 0

    def __call__(self, kind: str, what: Any) -> None:
        if kind == "tick":
            self._look(what)
        elif kind == "step":
            self._quiet += 1
            if not self._left and self._quiet > SETTLED:
                self.seconds.append(what.seconds)

    def _look(self, task: LocalTask) -> None:
        if task.recovery is None:
            return
        members = sum(isinstance(place, Member) for place in task.recovery.places.values())
        if (
            self._left
            and self._quiet >= 3
            and members == len(task.recovery.places) - len(self.dead) + len(self._left)
        ):
            self._quiet = 0
            self._keep_dead()
            task.kill(self._left.pop())
        if len(self.seconds) >= self.steps:
            planned = task.scheduler.in_force()
            self.planned = 0.0 if planned is None else planned[0].period
            task.finish("enough steps were measured")

    def _keep_dead(self) -> None:
        """A worker that is given the slot of its own dead process would start with a clean record."""
        kind: Any = Places
        kind._may_start = lambda places, worker: worker not in self.dead and worker in places.granted


def measure(
    server: ForkServer, shape: tuple[int, int, int], dead: list[Worker], mode: str, args: argparse.Namespace
) -> Row:
    replicas, stages, microbatches = shape
    table = slow_workers.job_of(
        rest_ms=[args.rest] * stages,
        weight_ms=args.rest,
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        steps=1_000_000,
        optimizer={"clip": None, "lr": 1e-3, **({} if mode == "staggered" else {"stagger": "never"})},
    )
    deaths = Deaths(dead, args.steps)
    task = LocalTask(
        Job.from_dict(table),
        fork_server=server,
        watch=deaths,
        patience=ALONE,
        node=LocalNode(slots=replicas * stages),
    )
    task._thinking = InOneMode(mode)
    try:
        outcome = task.run()
    finally:
        Places._may_start = MAY_START  # type: ignore[method-assign]
    if outcome.failure is not None:
        raise RuntimeError(outcome.failure)
    return {
        "dead": [str(worker) for worker in dead],
        "mode": mode,
        "step_s": statistics.median(deaths.seconds),
        "planned_s": deaths.planned,
        "exactly_once": outcome.issued == outcome.committed,
    }


def run_throughput(server: ForkServer, args: argparse.Namespace) -> list[Row]:
    """Deaths go from stage to stage, and no stage loses its last worker."""
    replicas, stages = args.shape
    order = [
        Worker(number // stages, (number + number // stages) % stages) for number in range(replicas * stages)
    ]
    rows = []
    print("| dead | share alive | step, s | planned, s | throughput of the healthy task |")
    print("|---|---|---|---|---|", flush=True)
    for count in range(args.most + 1):
        row = measure(server, (replicas, stages, args.microbatches), order[:count], "staggered", args)
        row["share_alive"] = 1 - count / (replicas * stages)
        row["throughput"] = (rows[0]["step_s"] if rows else row["step_s"]) / row["step_s"]
        rows.append(row)
        print(
            f"| {count} | {row['share_alive']:.3f} | {row['step_s']:.3f} | {row['planned_s']:.3f} "
            f"| {row['throughput']:.3f} |",
            flush=True,
        )
    return rows


def run_ablation(server: ForkServer, args: argparse.Namespace) -> list[Row]:
    """ReCycle's worked example: with unit ops it takes 33, 29 and 27 slots, and 27 without a failure."""
    rows = []
    print("| dead | mode | step, s | slots of a rest | planned |")
    print("|---|---|---|---|---|", flush=True)
    for dead in ([], [Worker(1, args.stage)]):
        for mode in args.modes.split(","):
            row = measure(server, (3, 4, 6), dead, mode, args)
            rows.append(row)
            unit = args.rest / 1e3
            print(
                f"| {', '.join(row['dead']) or 'none'} | {mode} | {row['step_s']:.3f} "
                f"| {row['step_s'] / unit:.1f} "
                + ("| - |" if MODES[mode].fused else f"| {row['planned_s'] / unit:.1f} |"),
                flush=True,
            )
    return rows


def run_roles(server: ForkServer, args: argparse.Namespace) -> list[Row]:
    """Three nodes with a worker of stage 0 each are lost: 64 microbatches on five workers take 13 rounds, and
    11 on six. First without a change of stage; then on a cluster whose planner may, where a run without a
    loss comes first: the losses of both must have the same bits.
    """
    three = [Worker(replica, 0) for replica in range(3)]
    rows = []
    print("| workers of the stages | steps | step, s | rounds of F, I and W |")
    print("|---|---|---|---|", flush=True)
    for dead in ([], three):
        row = measure(server, (8, 2, args.microbatches), dead, "staggered", args)
        rows.append(_of_members((8 - len(dead), 8), [row["step_s"]] * args.steps, args))
    table = slow_workers.job_of(
        rest_ms=[args.rest] * 2,
        weight_ms=args.rest,
        replicas=8,
        stages=2,
        microbatches=args.microbatches,
        steps=3 * args.steps,
    )
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.start_coordinator()
        cluster.start_agent("large", slots=8)
        for number in range(8):
            cluster.start_agent(f"small-{number}", slots=1)
        cluster.nodes_up(9)
        cluster.submit(table, "clean")
        clean = cluster.finished("clean")
        cluster.submit(table, "job")
        cluster.step_reached(8)
        held = {seat["worker"]: seat["node"] for seat in cluster.task()["seats"]}
        lost = [n for worker, n in sorted(held.items()) if worker.endswith(":0") and n != "large"]
        for node in lost[:3]:
            cluster.signal_node(node, signal.SIGKILL)
        told, members = _watched(cluster)
    seconds = {row["step"]: row["seconds"] for row in told["rows"]}
    for found in dict.fromkeys(members.values()):
        steps = [step for step, of in members.items() if of == found and step in seconds]
        rows.append(_of_members(found, [seconds[step] for step in steps[1:]], args))
    same = [row["loss"] for row in clean["rows"]] == [row["loss"] for row in told["rows"]]
    print(f"{len(told['rows'])} losses are those of the run without a loss, to the bit: {same}")
    return [*rows, {"same_losses": same}]


def _watched(cluster: Cluster) -> tuple[dict[str, Any], dict[int, tuple[int, ...]]]:
    """The task at its end, and how many members each stage had in every step."""
    members: dict[int, tuple[int, ...]] = {}

    def over() -> Any:
        task = cluster.task()
        there = Counter(int(s["worker"].split(":")[1]) for s in task["seats"] if s["state"] == "member")
        members[task["step"] + 1] = tuple(count for _, count in sorted(there.items()))
        return task if task["state"] in ("finished", "failed") else None

    return cluster.until(over, "the task is over", within_s=400.0), members


def _of_members(members: tuple[int, ...], seconds: list[float], args: argparse.Namespace) -> Row:
    middle = statistics.median(seconds) if seconds else float("nan")
    rounds = middle / (3e-3 * args.rest)
    print(f"| {members} | {len(seconds)} | {middle:.3f} | {rounds:.1f} |", flush=True)
    return {"members": members, "steps": len(seconds), "step_s": middle}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("throughput", "ablation", "roles"), default="throughput")
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), default=(4, 4))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--most", type=int, default=5, help="throughput: dead workers")
    parser.add_argument("--stage", type=int, default=2, help="ablation: of the dead worker")
    parser.add_argument("--modes", default="reroute,decoupled,staggered", help="ablation: those to measure")
    parser.add_argument("--rest", type=float, default=20.0, help="milliseconds of F, of I and of W")
    parser.add_argument("--steps", type=int, default=15, help="that are measured")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    server = ForkServer().start()
    try:
        rows = {"throughput": run_throughput, "ablation": run_ablation, "roles": run_roles}[args.what](
            server, args
        )
    finally:
        server.close()
    if args.json is not None:
        args.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
