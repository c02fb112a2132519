"""Does the schedule tell the truth? Predicted over measured step time, before and after a death.

    python bench/predict.py
    python bench/predict.py --replicas 2 --stages 2 --turns 3 --json

The job is the demo's. The prediction is made of what the workers report: the planner's order, run in virtual
time with the seconds each op keeps a core busy, the workers sharing the cores of this machine (see
`schedule/sharing.py`). The measurement is the median step of the same run. The killed worker is not brought
back, so that both states last. `foreseen` is the step after the death as predicted before it, from times that
the whole crew reported; `no sharing` is the planner's own period, which takes every worker to have a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from everstep.job.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience
from everstep.protocol.ops import Kind, Worker
from everstep.schedule import Planned, plan
from everstep.schedule.profile import Profile
from everstep.schedule.sharing import Machine, shared_period

KILL_AT, STEPS, SETTLE = 20, 40, 4
NOBODY: frozenset[Worker] = frozenset()


def measure(replicas: int, stages: int, preset: str, depth: int) -> dict[str, dict[str, float]]:
    job = Job(
        model=ModelSpec(preset=preset, options={"depth": depth}),
        data=DataSpec(kind="synthetic", rows=4),
        optimizer=OptimizerSpec(clip=None),
        replicas=replicas,
        stages=stages,
        steps=STEPS,
    )
    gone = frozenset({Worker(0, stages - 1)})
    predicted: dict[str, tuple[float, float]] = {}

    def watch(kind: str, what: Any) -> None:
        if kind != "step":
            return
        profile = task.scheduler.profile
        if what.step == KILL_AT - 1:
            predicted["before"] = predict(profile, NOBODY, NOBODY)
            predicted["foreseen"] = predict(profile, NOBODY, gone)
            for worker in gone:
                task.kill(worker)
        elif what.step == STEPS - 1:
            predicted["after"] = predict(profile, gone, gone)

    fork_server = ForkServer().start()
    task = LocalTask(job, fork_server=fork_server, watch=watch, patience=Patience(restarts_per_place=0))
    rows = task.run().by_step()
    fork_server.close()
    before = statistics.median(rows[s].seconds for s in range(SETTLE + 1, KILL_AT))
    after = statistics.median(rows[s].seconds for s in range(KILL_AT + SETTLE, STEPS))
    measured = {"before": before, "foreseen": after, "after": after}
    return {
        name: {
            "predicted_ms": round(shared * 1e3, 1),
            "measured_ms": round(measured[name] * 1e3, 1),
            "ratio": round(shared / measured[name], 3),
            "no_sharing": round(separate / measured[name], 3),
        }
        for name, (shared, separate) in predicted.items()
    }


def predict(profile: Profile, dead_then: frozenset[Worker], dead: frozenset[Worker]) -> tuple[float, float]:
    """The step's time with these dead, from times that were told when those were: sharing cores, and not."""
    instance = profile.instance()
    planned = plan(replace(instance, dead=dead), "staggered")
    alone = profile.alone(hosted(plan(replace(instance, dead=dead_then), "staggered")))
    assert alone is not None, "the workers have not told how long their ops keep a core busy"
    machine = Machine(frozenset(instance.workers()), len(os.sched_getaffinity(0)))
    return shared_period(planned, replace(alone, dead=dead), [machine]), planned.period


def hosted(planned: Planned) -> Counter[Worker]:
    return Counter(w for w, ops in planned.schedule.ops.items() for op in ops if op.kind is Kind.F)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--preset", default="gpt-tiny")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    turns = [
        measure(given.replicas, given.stages, given.preset, given.depth) for _ in range(max(1, given.turns))
    ]
    if given.json:
        print(json.dumps(turns))
        return 0
    cores = len(os.sched_getaffinity(0))
    print(f"{given.replicas} x {given.stages} workers, {cores} cores")
    for turn in turns:
        for name, row in turn.items():
            print(f"  {name:10}" + "".join(f"{key:>14} {value:<8}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
