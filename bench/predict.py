"""Does the schedule tell the truth? Predicted over measured step time, before and after a death.

    python bench/predict.py
    python bench/predict.py --replicas 2 --stages 2 --json

The prediction is the planner's period for the op times that the workers report; the measurement is the median
step of the same run. The killed worker is not brought back, so that both states last. With fewer cores than
workers an op's time holds the wait for a core, and the workers of one machine are not as independent as the
planner thinks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from typing import Any

from everstep.core.ops import Worker
from everstep.core.cluster import Patience
from everstep.engine.job import DataSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local import LocalTask
from everstep.node.nursery import Nursery
from everstep.schedule import plan

KILL_AT, STEPS, SETTLE = 20, 40, 4


def measure(replicas: int, stages: int, preset: str, depth: int) -> dict[str, Any]:
    job = Job(
        model=ModelSpec(preset=preset, options={"depth": depth}),
        data=DataSpec(kind="synthetic", rows=4),
        optimizer=OptimizerSpec(clip=None),
        replicas=replicas,
        stages=stages,
        steps=STEPS,
    )
    victim = Worker(0, stages - 1)
    predicted: dict[str, float] = {}

    def watch(kind: str, what: Any) -> None:
        nonlocal predicted
        if kind == "step" and what.step in (KILL_AT - 1, STEPS - 1):
            after = what.step >= KILL_AT
            instance = task.profile.instance()
            dead = frozenset({victim}) if after else frozenset()
            predicted["after" if after else "before"] = plan(replace(instance, dead=dead), "staggered").period
        if kind == "step" and what.step == KILL_AT - 1:
            task.kill(victim)

    nursery = Nursery().start()
    task = LocalTask(job, nursery=nursery, watch=watch, patience=Patience(restarts_per_place=0))
    rows = task.run().by_step()
    nursery.close()
    spans = {"before": range(SETTLE + 1, KILL_AT), "after": range(KILL_AT + SETTLE, STEPS)}
    measured = {name: statistics.median(rows[s].seconds for s in span) for name, span in spans.items()}
    return {
        name: {
            "predicted_ms": round(predicted[name] * 1e3, 1),
            "measured_ms": round(measured[name] * 1e3, 1),
            "ratio": round(predicted[name] / measured[name], 3),
        }
        for name in spans
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--preset", default="gpt-tiny")
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = measure(given.replicas, given.stages, given.preset, given.depth)
    if given.json:
        print(json.dumps(result))
    else:
        print(f"{given.replicas} x {given.stages}")
        for name, row in result.items():
            print(f"  {name:8}" + "".join(f"{key:>14} {value}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
