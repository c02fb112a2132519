"""Figures of the planner, each made by a command and printed as text (`--json` for one document):

    python bench/plan.py errors    the throughput model against every published row, as in docs/planner.md
    python bench/plan.py fit       the model's constants fitted again, and what each row gets when left out
    python bench/plan.py mixes     six tasks on 128 GPUs: rules of thumb and the plan
    python bench/plan.py dimensions    the same mixes: what shards gain over replicas x stages alone
    python bench/plan.py times     planning time, its growth, and the look-up after an event

Times are seconds of this process (least of a few), so that others on the machine count little.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from everstep.plan import Assignment, Cluster, PlanNode, TaskSpec, decide, from_table
from everstep_lab.plan.assign import assign
from everstep_lab.plan.events import PlanWorld, after
from everstep_lab.plan.hardware import GPUS, Stack
from everstep_lab.plan.models import PRESETS
from everstep_lab.plan.published import ROWS, PublishedRow
from everstep_lab.plan.stacks import MEGATRON
from everstep_lab.plan.table import NextEvents
from everstep_lab.plan.throughput import from_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from tools.planner_tables import Table, dimensions, errors, mixes, show, summary_of_errors

# ------------------------------------------------------------------ the model against what was published


FITTED = ("matmul_efficiency", "matmul_half", "traffic", "reduce_exposed")


def fit() -> Table:
    """Least squares of log(predicted / published) over the A100 rows; each row once left out."""
    from scipy.optimize import minimize

    rows = [row for row in ROWS if row.gpu.name == "A100"]
    start = [getattr(MEGATRON, name) for name in FITTED]

    def stack_of(row: PublishedRow, values: Any) -> Stack:
        return replace(row.stack, **dict(zip(FITTED, map(float, values), strict=True)))

    def miss(row: PublishedRow, values: Any) -> float:
        return math.log(row.predict(stack_of(row, values))[0] / row.published)

    def best(used: list[PublishedRow]) -> Any:
        def loss(values: Any) -> float:
            if min(values) < 0 or values[0] > 1 or values[3] > 1:
                return 1e3
            return sum(miss(row, values) ** 2 for row in used)

        return minimize(loss, start, method="Nelder-Mead", options={"maxiter": 300, "xatol": 1e-3}).x

    whole = best(rows)
    table: Table = [
        {"row": "constants", **{name: round(float(x), 4) for name, x in zip(FITTED, whole, strict=True)}}
    ]
    for row in rows:
        without = best([other for other in rows if other is not row])
        table.append(
            {
                "row": f"{row.source} {row.model.name} {row.recompute}",
                "error": f"{math.expm1(miss(row, whole)):+.1%}",
                "left out": f"{math.expm1(miss(row, without)):+.1%}",
            }
        )
    own = next(row for row in ROWS if row.source == "everstep")
    as_megatron = replace(own.stack, matmul_efficiency=MEGATRON.matmul_efficiency)
    table.append(
        {
            "row": "everstep, with Megatron's matmul_efficiency",
            "error": f"{own.predict(as_megatron)[0] / own.published - 1:+.1%}",
        }
    )
    return table


# ------------------------------------------------------------------ rules of thumb


# ------------------------------------------------------------------ how long planning takes


def world(tasks: int, gpus: int, kind: str) -> tuple[Cluster, list[TaskSpec]]:
    """Whole nodes of eight. Tables have a value for every node count, so nothing is sparse about them."""
    draw = np.random.default_rng(1)
    cluster = Cluster(nodes=[PlanNode(name=f"node-{i}") for i in range(gpus // 8)], whole_nodes=True)
    found = []
    x = np.arange(gpus + 1.0)
    models = list(PRESETS)
    curves = {}
    if kind == "models":
        chip = GPUS["H100"]
        curves = {name: from_model(PRESETS[name], chip, MEGATRON, most=gpus) for name in models}
    for i in range(tasks):
        weight = float(draw.uniform(0.5, 2.0))
        match kind:
            case "models":
                curve = curves[models[i % len(models)]]
            case "alike":
                weight, curve = 1.0, from_table(1e12 * x**0.85, shards=8, stages=1)
            case "bumpy":
                bumps = draw.uniform(0.7, 1.0, len(x))
                bumps[0] = 1.0
                scaled = draw.uniform(0.8, 1.25) * 1e12 * x ** draw.uniform(0.8, 0.85)
                curve = from_table(scaled * bumps, shards=8, stages=1)
            case _:
                scaled = draw.uniform(0.8, 1.25) * 1e12 * x ** draw.uniform(0.8, 0.85)
                curve = from_table(scaled, shards=8, stages=1)
        found.append(TaskSpec(name=f"t{i}", weight=weight, min_workers=8, curve=curve))
    return cluster, found


def best_of(runs: int, work: Callable[[], object]) -> float:
    spent = []
    for _ in range(runs):
        gc.collect()
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return min(spent)


def times(runs: int, sizes: list[tuple[int, int]], kinds: list[str]) -> Table:
    rows: Table = []
    for tasks, gpus in sizes:
        for kind in kinds:
            cluster, specs = world(tasks, gpus, kind)
            first = assign(cluster, specs, Assignment(), second=False)
            here = PlanWorld(cluster, specs, first.assignment)
            busy = max(first.allocation, key=lambda name: first.allocation[name])
            seat = next(spot for spot in first.assignment.of(busy) if spot is not None)
            hence = after(f"lose {seat.node}", here)
            table = NextEvents(here)
            event = f"lose {seat.node}"
            table.look_up(event)
            rows.append(
                {
                    "tasks": tasks,
                    "GPUs": gpus,
                    "curves": kind,
                    "plan s": _told(best_of(runs, lambda c=cluster, t=specs: decide(c, t, Assignment()))),
                    "with places s": _told(
                        best_of(runs, lambda c=cluster, t=specs: assign(c, t, Assignment(), second=False))
                    ),
                    "node lost: plan s": _told(
                        best_of(runs, lambda w=hence: decide(w.cluster, w.tasks, w.now))
                    ),
                    "with places s ": _told(
                        best_of(runs, lambda w=hence: assign(w.cluster, w.tasks, w.now, second=False))
                    ),
                    "look-up ms": f"{best_of(runs, lambda t=table, e=event: _many(t, e)) * 1e3 / 100:.4f}",
                    "answers": table.num_decisions(),
                    "used": sum(first.allocation.values()),
                }
            )
            print(f"{tasks} x {gpus} {kind} done", file=sys.stderr)
    return rows


def _many(table: NextEvents, event: str) -> None:
    for _ in range(100):
        assert table.look_up(event).allocation


def _told(seconds: float) -> str:
    return f"{seconds:.3f}"


# ------------------------------------------------------------------ printing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("errors", "fit", "mixes", "dimensions", "times"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="times: also smaller sizes")
    parser.add_argument("--kinds", default="smooth,bumpy,alike,models")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    note = ""
    match args.what:
        case "errors":
            rows, note = errors(), summary_of_errors()
        case "fit":
            rows = fit()
        case "mixes":
            rows = mixes()
        case "dimensions":
            rows = dimensions()
        case _:
            sizes = [(64, 8_192), (256, 131_072)]
            if args.growth:
                sizes = [(64, 1_024), (64, 4_096), (64, 8_192), (64, 32_768), (16, 32_768), (256, 131_072)]
            rows = times(args.runs, sizes, args.kinds.split(","))
    if args.json:
        print(json.dumps({"what": args.what, "rows": rows, "note": note}))
    else:
        print(show(rows))
        if note:
            print(f"\n{note}")


if __name__ == "__main__":
    main()
