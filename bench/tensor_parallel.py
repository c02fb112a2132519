"""Tensor parallel workers with everything else that a job can ask for: do the losses stay the same?

    python bench/tensor_parallel.py                      a table, every combination
    python bench/tensor_parallel.py --only tied --json
    python bench/tensor_parallel.py --part 1/4           every fourth row, beside three others

Each row is one job on 2 replicas x 2 stages with 1, 2 and 4 shards, without faults; then with two shards, of
which one is killed in an all-reduce. The losses of several shards are compared with those of one process
(rounding differs), those of the healed run with the clean one's (not a bit may differ).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.job.job import CheckpointSpec, DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.outcome import Outcome
from harness.sweep import Sweep, compare

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # relative, of the losses of 1, 2 and 4 shards
KILL = "stage=0,replica=1,step=4,op=I1,when=inside,shard=1"


def gpt(**options: Any) -> ModelSpec:
    return ModelSpec(preset="gpt-tiny", options=options)


COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied weights over two stages": {"model": gpt(tied=True)},
    "tied weights, bf16": {"model": gpt(tied=True), "precision": "bf16"},
    "recompute": {"recompute": True},
    "dropout and recompute": {"model": gpt(dropout=0.1), "recompute": True},
    "clip": {"optimizer": OptimizerSpec(clip=0.05)},
    "clip, eager": {"optimizer": OptimizerSpec(clip=0.05, stagger="always")},
    "no clip": {"optimizer": OptimizerSpec(clip=None)},
    "an average of the weights": {"optimizer": OptimizerSpec(ema=0.9)},
    "evaluation": {"evaluation": EvaluationSpec(every=3, batches=3, data=DataSpec(kind="synthetic"))},
    "evaluation, tied": {
        "model": gpt(tied=True),
        "evaluation": EvaluationSpec(every=3, batches=3, data=DataSpec(kind="synthetic")),
    },
    "bf16": {"precision": "bf16"},
    "sums in 31 bits": {"accumulate": "strict32"},
    "sums in fp64": {"accumulate": "fp64"},
    "shared memory": {"transport": "shm"},
    "tcp": {"transport": "tcp"},
    "copies in memory": {"memory_interval": 2},
    "checkpoints": {"checkpoint": CheckpointSpec(folder="", interval=2)},
    "grouped heads": {"model": gpt(heads=8, kv_heads=4)},
    "SGD": {"optimizer": OptimizerSpec(name="SGD", lr=0.1)},
    "no loader ahead": {"load_ahead": 0},
    "split sequence": {"sequence_parallel": True},
    "split sequence, tied, dropout, recompute, clip": {
        "sequence_parallel": True,
        "model": gpt(tied=True, dropout=0.1),
        "recompute": True,
        "optimizer": OptimizerSpec(clip=0.05, ema=0.9),
    },
    "split sequence, evaluation": {
        "sequence_parallel": True,
        "evaluation": EvaluationSpec(every=3, batches=3, data=DataSpec(kind="synthetic")),
    },
    "split sequence, bf16, shm": {"sequence_parallel": True, "precision": "bf16", "transport": "shm"},
}


def try_row(sweep: Sweep, name: str, shards: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {"combination": name, "ok": True}
    with tempfile.TemporaryDirectory() as folder:
        one, job = run(sweep, name, 1, (), folder)
        for count in shards:
            many, job = run(sweep, name, count, (), folder)
            found[f"t{count}"] = difference = apart(one, many, job)
            found["ok"] &= many.failure is None and difference <= TOLERANCE[job.precision]
            failures = [many.failure]
            if count == 2:
                healed, job = run(sweep, name, 2, (KILL,), folder)
                found["healed"] = apart(many, healed, job)
                found["incidents"] = [incident.what for incident in healed.incidents]
                found["ok"] &= compare(many, healed, job)["ok"] and bool(healed.incidents)
                found["ok"] &= found["healed"] == 0.0
                failures.append(healed.failure)
            if any(failures):
                found["failure"] = "; ".join(filter(None, failures))
    return found


def run(sweep: Sweep, name: str, count: int, faults: tuple[str, ...], folder: str) -> tuple[Outcome, Job]:
    changes = dict(COMBINATIONS[name])
    if "checkpoint" in changes:
        place = Path(folder) / f"{count}-{len(faults)}"
        changes["checkpoint"] = replace(changes["checkpoint"], folder=str(place))
    job = replace(sweep.job, replicas=2, stages=2, shards=count, **changes)
    return sweep.run(job, faults), job


def apart(one: Outcome, other: Outcome, job: Job) -> float:
    """The greatest relative difference of two runs' losses, of training and of evaluation."""
    found: float = compare(one, other, job)["max_relative_loss_difference"]
    for step, values in one.evaluations.items():
        theirs = other.evaluations.get(step, {})
        found = max(found, *(abs(theirs.get(k, math.inf) - v) / abs(v) for k, v in values.items()))
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--part", default="1/1", help="2/4: every fourth row, from the second on")
    parser.add_argument("--shards", default="2,4", help="numbers of shards to compare with one process")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    chosen = [name for name in COMBINATIONS if given.only in name][part - 1 :: parts]
    counts = tuple(map(int, given.shards.split(",")))
    sweep, rows = Sweep(steps=given.steps), []
    try:
        for name in chosen:
            try:
                row = try_row(sweep, name, counts)
            except TimeoutError as error:
                row = {"combination": name, "ok": False, "failure": str(error)}
            rows.append(row)
            if not given.json:
                print(f"{'ok  ' if row['ok'] else 'FAIL'} {name:32} {row}", flush=True)
    finally:
        sweep.close()
    if given.json:
        print(json.dumps(rows))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
