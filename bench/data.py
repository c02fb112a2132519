"""Data and evaluation under random kills and reshapes, on real workers: what was trained on and scored.

    python bench/data.py                     a table, 6 seeds of each
    python bench/data.py --seeds 20 --first 100 --only stream --json

    rows      a data set of 37 rows in shuffled epochs that writes down every batch it gives, to whom
    stream    an iterable that can be read once, through the buffer on disk; whoever reads it may die
    eval      evaluation of 13 uneven batches every 4 steps, with a metric, beside training

For every seed a run without faults and a run with: every 2 to 5 steps a random worker is killed, or the task
takes another shape. Asked afterwards: were all workers that asked for a microbatch given the
same rows; did every row come once per epoch, every element of the stream once and in order; is every loss
and every score that of the calm run, to the bit; were all microbatches committed once.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.engine.prepare.resolve import data_of
from everstep.errors import UserError
from everstep.job.job import DataSpec, EvaluationSpec, Job, ModelSpec, OptimizerSpec
from everstep.launch.local.report import incident_line
from everstep.launch.local.run import LocalNode, LocalTask
from everstep.node.fork_server import ForkServer
from everstep.protocol.messages import Patience
from harness.counted_rows import ROWS, elements

HARNESS = Path(__file__).resolve().parents[1] / "harness"
SHAPES = ((2, 2), (3, 2), (1, 2), (2, 1), (3, 1), (6, 1))  # of 6 slots; steps have 6 microbatches
COUNTED = Job(
    model=ModelSpec(build="counted_rows:model"),
    data=DataSpec(build="counted_rows:Data"),
    optimizer=OptimizerSpec(lr=1e-3),
    steps=40,
    replicas=2,
    stages=2,
    microbatches=3,
    base=str(HARNESS),
)
EVALUATED = replace(
    COUNTED,
    model=ModelSpec(build="evaluated_model:model"),
    data=DataSpec(build="evaluated_model:Data"),
    evaluation=EvaluationSpec(
        every=4,
        batches=13,
        data=DataSpec(build="evaluated_model:Data", options={"seed": 1}),
        metrics=["evaluated_model:error"],
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", choices=("rows", "stream", "eval"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    server = ForkServer(threads=1).start()
    rows = []
    try:
        for seed in range(given.first, given.first + given.seeds):
            for kind in ("rows", "stream", "eval"):
                if given.only in (None, kind):
                    rows.append(one(kind, seed, server))
                    for line in [_line(rows[-1]), *(f"       {told}" for told in rows[-1]["unplanned"])]:
                        print(line, file=sys.stderr if given.json else sys.stdout, flush=True)
    finally:
        server.close()
    bad = [row for row in rows if row["wrong"]]
    if given.json:
        print(json.dumps({"runs": len(rows), "wrong": len(bad), "rows": rows}))
    else:
        for kind in sorted({row["kind"] for row in rows}):
            mine = [row for row in rows if row["kind"] == kind]
            total = {
                key: sum(row[key] for row in mine) for key in ("kills", "reshapes", "incidents", "asked")
            }
            print(
                f"{kind:6}  {len(mine)} runs, {total['kills']} kills, {total['reshapes']} reshapes, "
                f"{total['incidents']} incidents; batches asked for {total['asked']} times; "
                f"{sum(bool(row['wrong']) for row in mine)} runs wrong"
            )
    return 1 if bad else 0


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['kind']:6} seed {row['seed']:4}  kills {row['kills']:2}  reshapes {row['reshapes']}  "
        f"incidents {row['incidents']:2}  {row['seconds']:5.1f} s  {row['wrong'] or 'as the calm run'}"
    )


def one(kind: str, seed: int, server: ForkServer) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="everstep-data-") as folder:
        calm = run(_job(kind, seed, Path(folder) / "calm"), server, None)
        faults = Faults(seed)
        rough_job = _job(kind, seed, Path(folder) / "rough")
        rough = run(rough_job, server, faults)
        wrong = compared(calm, rough)
        asked = 0
        if kind != "eval" and not wrong:
            wrong, asked = looked_at(kind, Path(folder), rough_job)
    return {
        "kind": kind,
        "seed": seed,
        "kills": faults.kills,
        "reshapes": faults.reshaped,
        "incidents": len(rough.outcome.incidents),
        "asked": asked,
        "unplanned": [incident_line(one) for one in rough.outcome.incidents if one.killed_at is None],
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


class Faults:
    """What is done to a run, by seed: at some recorded steps a kill, or another shape."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._next = self._draw.randint(2, 5)
        self.kills = self.reshaped = 0

    def step(self, task: LocalTask, step: int) -> None:
        if step < self._next or step > task.job.steps - 2:
            return
        self._next = step + self._draw.randint(2, 5)
        if self._draw.random() < 0.3:
            now = (task.shape.replicas, task.shape.stages)
            try:
                task.reshape(*self._draw.choice([shape for shape in SHAPES if shape != now]))
            except UserError:  # a shape is being changed at this moment
                return
            self.reshaped += 1
        elif task.processes:
            task.kill(self._draw.choice(sorted(task.processes)))
            self.kills += 1


def run(job: Job, server: ForkServer, faults: Faults | None) -> LocalTask:
    def watch(kind: str, what: Any) -> None:
        if kind == "step" and faults is not None:
            faults.step(task, what.step)

    patience = Patience(restarts_per_node=999, restarts_per_place=999)
    task = LocalTask(job, fork_server=server, watch=watch, node=LocalNode(slots=6), patience=patience)
    task.run()
    return task


def _job(kind: str, seed: int, folder: Path) -> Job:
    folder.mkdir()
    if kind == "eval":
        return replace(EVALUATED, seed=seed)
    options = {"folder": str(folder)}
    if kind == "rows":
        return replace(COUNTED, seed=seed, data=replace(COUNTED.data, options=options))
    options["where"] = str(folder / "stream")
    job = replace(COUNTED, seed=seed, data=DataSpec(build="counted_rows:StreamData", options=options))
    data: Any = data_of(job)
    data.prepare(fresh=True)
    return job


def compared(calm: LocalTask, rough: LocalTask) -> str:
    for task in (calm, rough):
        if task.outcome.failure is not None:
            return task.outcome.failure
    if rough.outcome.all_losses() != calm.outcome.all_losses():
        return "losses differ"
    if rough.outcome.evaluations != calm.outcome.evaluations:
        return "scores differ"
    if rough.outcome.committed != rough.job.microbatches_in_step * rough.job.steps:
        return f"{rough.outcome.committed} microbatches committed"
    return ""


def looked_at(kind: str, folder: Path, job: Job) -> tuple[str, int]:
    """What is wrong with what the data has given, and how often it was asked."""
    given, asked = _seen(folder / "rough")
    if given is None:
        return "two workers were given different rows for one microbatch", asked
    if given != _seen(folder / "calm")[0]:
        return "other rows than in the calm run", asked
    keys = [(step, m) for step in range(1, job.steps + 1) for m in range(job.microbatches_in_step)]
    if sorted(given) != keys:
        return "microbatches are missing", asked
    if kind == "stream":
        source = elements()
        expected = [next(source)[0][0].tolist() for _ in keys]
        return ("" if [given[key][0] for key in keys] == expected else "elements skipped or repeated"), asked
    taken = [row for key in keys for row in given[key]]
    for epoch in range(len(taken) // ROWS):
        counts = Counter(taken[epoch * ROWS : (epoch + 1) * ROWS])
        if len(counts) != ROWS or set(counts.values()) != {1}:
            return f"epoch {epoch} has not every row once", asked
    return "", asked


def _seen(folder: Path) -> tuple[dict[tuple[int, int], list[Any]] | None, int]:
    found: dict[tuple[int, int], list[Any]] = {}
    lines = (folder / "seen.jsonl").read_text().splitlines()
    for line in lines:
        told = json.loads(line)
        if found.setdefault((told["step"], told["microbatch"]), told["rows"]) != told["rows"]:
            return None, len(lines)
    return found, len(lines)


if __name__ == "__main__":
    sys.exit(main())
