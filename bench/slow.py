"""A worker turns slow while it trains: how soon that is known, what is done, and how good it is.

    python bench/slow.py                      factors 1.5, 2 and 3: a table
    python bench/slow.py --factors 2 --json   one JSON document
    python bench/slow.py innocent             runs in which nobody is slow: how many are accused
    python bench/slow.py others               a slow link, a worker without a peer: told, and what follows
    python bench/slow.py move                 with and without a spare slot: does the slow worker move, and is
                                              that worth what the planner said

Real workers, links, schedules and losses; only the arithmetic of a layer is a rest of some milliseconds,
which stands for a device's time: four workers then do not need four cores, and two cores do not measure the
operating system. The slow worker takes `factor` times as long for every op, from one step to another.

verdict     in which step of its slowness the verdict was there: 1 is the first slow step
balanced    the first step that ran whole by the new schedule, counted alike
bound       what no division of the work and no order of ops can beat, with the true speeds of all workers
            (schedule/bounds.py), from op times measured before the slowness
ratio       the step after balancing over that bound
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.cluster import Cluster
from harness.slow_workers import (
    SETTLED,
    SLOW_FROM,
    SLOW_UNTIL,
    STEPS,
    SlowRun,
    job_of,
    of_slowness,
    step_s,
    train,
)

# ------------------------------------------------------------------ a slow worker


def measure(factor: float, worker: tuple[int, int], clean: SlowRun, **more: Any) -> dict[str, Any]:
    from everstep.protocol.ops import Worker
    from everstep_lab.schedule.normalize import steady_bound

    slow = Worker(*worker)
    fault = (
        f"replica={slow.replica},stage={slow.stage},step={SLOW_FROM},how=slow,factor={factor:g},"
        f"until={SLOW_UNTIL}"
    )
    told = train(job_of(**more), (fault,))
    incidents = of_slowness(told)
    true = told.instance
    for kind in ("forward", "input_grad", "weight_grad"):
        grid = [list(row) for row in getattr(true, kind)]
        grid[slow.replica][slow.stage] *= factor
        true = replace(true, **{kind: tuple(map(tuple, grid))})
    bound = steady_bound(true, "staggered")
    row = {
        "factor": factor,
        "worker": str(slow),
        "accused": [str(w) for i in incidents for w in i.workers],
        "incidents": len(told.outcome.incidents),
        "before_ms": step_s(told, SETTLED, SLOW_FROM - 1) * 1e3,
        "bound_ms": bound * 1e3,
        "same_losses": [r.loss for r in told.rows] == [r.loss for r in clean.rows],
        "committed_once": told.outcome.issued == told.outcome.committed,
    }
    mine = [i for i in incidents if i.workers == [slow]]
    if not mine:
        return row | {"verdict": None, "balanced": None, "ratio": None}
    verdict_at = mine[0].verdict.at if len(mine[0].remedies) == 1 else mine[0].evidence_at
    in_step = next(r.step for r in told.rows if r.at >= verdict_at)
    old_epoch = next(r.epoch for r in told.rows if r.step == SLOW_FROM - 1)
    first_new = next((r.step for r in told.rows if r.step >= SLOW_FROM and r.epoch > old_epoch), STEPS)
    balanced = first_new + 1  # the step in which it was told is finished by either schedule
    epochs_while = {r.epoch for r in told.rows if balanced <= r.step <= SLOW_UNTIL}
    after_s = step_s(told, balanced + 1, SLOW_UNTIL)
    closed = [i.resumed_at for i in mine if i.resumed_at is not None]
    back = next((r.step for r in told.rows if closed and r.at >= closed[0]), None)
    return row | {
        "verdict": in_step - SLOW_FROM + 1,
        "balanced": balanced - SLOW_FROM + 1,
        "during_ms": step_s(told, SLOW_FROM, first_new - 1) * 1e3,
        "after_ms": after_s * 1e3,
        "ratio": after_s / bound,
        "unbalanced_ratio": step_s(told, SLOW_FROM, first_new - 1) / bound,
        "schedules_while_slow": len(epochs_while),
        "factor_told": float(mine[0].verdict.because.split(" takes ")[1].split()[0]),
        "back_after": None if back is None else back - SLOW_UNTIL,
        "restored_ms": None if back is None else step_s(told, back + 2, STEPS) * 1e3,
        "because": mine[0].verdict.because,
        "remedy": f"{mine[0].remedies[0].what}: {mine[0].remedies[0].because}",
        "outcome": mine[0].remedies[0].outcome,
    }


def slowness(factors: list[float], worker: tuple[int, int]) -> dict[str, Any]:
    clean = train(job_of())
    rows = []
    for factor in factors:
        rows.append(measure(factor, worker, clean))
        print(line_of(rows[-1]), file=sys.stderr, flush=True)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "clean_ms": step_s(clean, SETTLED, STEPS) * 1e3,
        "clean_accused": [str(w) for i in of_slowness(clean) for w in i.workers],
        "rows": [rounded(row) for row in rows],
    }


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def line_of(row: dict[str, Any]) -> str:
    if row["verdict"] is None:
        return f"x{row['factor']:<4g} worker {row['worker']}: no verdict, accused {row['accused']}"
    restored = f"{row['restored_ms']:.0f}" if row["restored_ms"] is not None else "-"
    return (
        f"x{row['factor']:<4g} worker {row['worker']}  verdict in step {row['verdict']}  balanced from step "
        f"{row['balanced']}  before {row['before_ms']:.0f}  during {row['during_ms']:.0f}  after "
        f"{row['after_ms']:.0f}  bound {row['bound_ms']:.0f} ms  ratio {row['ratio']:.3f}  again "
        f"{restored} ms after {row['back_after']} steps  losses {'equal' if row['same_losses'] else 'DIFFER'}"
    )


# ------------------------------------------------------------------ nobody is slow


@contextlib.contextmanager
def crowd(number: int) -> Iterator[None]:
    """Processes that burn cores, on and off."""
    code = "import time\nwhile True:\n    e=time.time()+.4\n    while time.time()<e: pass\n    time.sleep(.3)"
    burning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def innocents() -> dict[str, tuple[dict[str, Any], int]]:
    """By name: a job, and how many others burn cores meanwhile."""
    small = {
        "replicas": 2,
        "stages": 2,
        "steps": STEPS,
        "model": {"preset": "gpt-tiny"},
        "data": {"kind": "synthetic"},
    }
    return {
        "even": (job_of(), 0),
        "stage imbalance": (job_of(rest_ms=[6.0, 6.0, 18.0, 18.0]), 0),
        "sequence lengths": (job_of(lengthy=True), 0),
        "sequence lengths, 4 replicas": (job_of(lengthy=True, replicas=4, microbatches=4), 0),
        "crowded rests": (job_of(), 4),
        "real ops, shared cores": ({**small}, 0),
        "real ops, crowded": ({**small}, 3),
        "real ops, 3 stages": ({**small, "stages": 3, "replicas": 2}, 0),
    }


def innocent(turns: int) -> list[dict[str, Any]]:
    rows = []
    for turn in range(turns):
        for name, (table, others) in innocents().items():
            with crowd(others):
                told = train({**table, "seed": turn})
            slow = of_slowness(told) + of_slowness(told, "slow link")
            accused = [f"{w} {i.what}" for i in slow for w in i.workers]
            epochs = len({row.epoch for row in told.rows})
            rows.append(
                {
                    "run": name,
                    "accused": accused,
                    "why": [i.verdict.because for i in slow],
                    "schedules": epochs,  # the first, and the one with measured times
                    "step_ms": round(step_s(told, SETTLED, STEPS) * 1e3, 1),
                }
            )
            print(f"{name:32} accused {accused}  schedules {epochs}", file=sys.stderr, flush=True)
    return rows


# ------------------------------------------------------------------ slow, and not to be balanced


def others() -> list[dict[str, Any]]:
    """A link whose messages come late, and a worker that is the only one of its stage."""
    lag = f"replica=0,stage=0,step={SLOW_FROM},how=lag,factor=60,until={SLOW_UNTIL}"
    alone = f"replica=0,stage=1,step={SLOW_FROM},how=slow,factor=2,until={SLOW_UNTIL}"
    rows = []
    for name, table, fault in (
        ("a link 60 ms late", job_of(), lag),
        ("the only worker of a stage", job_of(replicas=1), alone),
    ):
        told = train(table, (fault,))
        incidents = of_slowness(told) + of_slowness(told, "slow link")
        rows.append(
            {
                "run": name,
                "verdicts": [f"{i.verdict.kind}: {i.verdict.because}" for i in incidents],
                "remedies": [f"{r.what}: {r.because}" for i in incidents for r in i.remedies],
                "found_in_step": [
                    next(r.step for r in told.rows if r.at >= i.evidence_at) - SLOW_FROM + 1
                    for i in incidents
                ],
                "schedules": len({row.epoch for row in told.rows}),
            }
        )
    return rows


# ------------------------------------------------------------------ slow, and moved where that pays

MOVE_STEPS, AFTER_STEPS = 400, 20


def moves(factor: float) -> list[dict[str, Any]]:
    """With a spare slot and many steps to go; without a spare; with a spare, and the task is nearly over."""
    scenes = (("a spare slot", True, MOVE_STEPS), ("no spare slot", False, MOVE_STEPS))
    return [_move(name, factor, spare=spare, steps=steps) for name, spare, steps in scenes] + [
        _move("a spare slot, the task ends soon", factor, spare=True, steps=SLOW_FROM + 12)
    ]


def _move(name: str, factor: float, *, spare: bool, steps: int) -> dict[str, Any]:
    slow = f"replica=1,stage=1,step={SLOW_FROM},how=slow,factor={factor:g},until=100000"
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.start_coordinator()
        for node in ("a", "b"):
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(2)
        cluster.submit(job_of(steps=steps), faults=[slow])
        cluster.all_members()
        if spare:
            cluster.start_agent("c", slots=1)
            cluster.nodes_up(3)
        home = {seat["worker"]: seat["node"] for seat in cluster.task()["seats"]}
        found_at = cluster.until(lambda: _slow_incident(cluster), "the worker is found slow")["opened_at"]
        moved_step = 0
        with contextlib.suppress(TimeoutError, AssertionError):
            cluster.until(lambda: _has_moved(cluster, home) or _is_over(cluster), "a move", within_s=45)
            moved_step = int(cluster.task()["step"]) if _has_moved(cluster, home) else 0
        until = min(steps, (moved_step or int(cluster.task()["step"])) + AFTER_STEPS)
        cluster.step_reached(until)
        rows = {row["step"]: row["at"] for row in cluster.task()["rows"]}
        remedies = [r for i in cluster.incidents() for r in i["remedies"] if r["what"].startswith("move")]
    found_step = min(step for step, at in rows.items() if at >= found_at)
    spans = {
        "before": (SETTLED, SLOW_FROM - 1),
        "slow": (SLOW_FROM + 1, found_step),
        "balanced": (found_step + 2, moved_step or until),
        "moved": (moved_step + 3, until) if moved_step else (1, 0),
    }
    rates = {what: _rate(rows, first, last) for what, (first, last) in spans.items()}
    return {
        "run": name,
        "moved": bool(moved_step),
        "steps_per_s": rates,
        "price": remedies[0]["because"] if remedies else None,
    }


def _slow_incident(cluster: Cluster) -> Any:
    return next((i for i in cluster.incidents() if i["what"] == "is slow"), None)


def _has_moved(cluster: Cluster, home: dict[str, str]) -> bool:
    seats = cluster.task()["seats"]
    now = {seat["worker"]: seat["node"] for seat in seats}
    return len(now) == len(home) and now != home


def _is_over(cluster: Cluster) -> bool:
    return bool(cluster.task()["state"] in ("finished", "failed"))


def _rate(rows: dict[int, float], first: int, last: int) -> float | None:
    times = [rows[step] for step in range(first, last + 1) if step in rows]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return round(1 / statistics.median(gaps), 3) if gaps else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="slow", choices=("slow", "innocent", "others", "move"))
    parser.add_argument("--factors", default="1.5,2,3")
    parser.add_argument("--worker", default="1:1", help="replica:stage")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    factors = [float(text) for text in given.factors.split(",")]
    document: Any
    if given.what == "innocent":
        document = innocent(given.turns)
    elif given.what == "others":
        document = others()
    elif given.what == "move":
        document = moves(factors[-1])
    else:
        replica, stage = map(int, given.worker.split(":"))
        document = slowness(factors, (replica, stage))
    if given.json:
        print(json.dumps(document))
    elif given.what == "slow":
        print(f"{document['cores']} cores; a step without a slow worker {document['clean_ms']:.0f} ms")
        for row in document["rows"]:
            print(line_of(row))
            if row["verdict"] is not None:
                print(f"      {row['because']}\n      {row['remedy']}\n      {row['outcome']}")
    elif given.what == "innocent":
        print(f"{len(document)} runs, {sum(bool(row['accused']) for row in document)} with somebody accused")
    else:
        print(json.dumps(document, indent=1))
    if given.what == "slow":
        good = all(row["verdict"] and row["same_losses"] for row in document["rows"])
        return 0 if good and not document["clean_accused"] else 1
    if given.what == "move":
        return 0 if [row["moved"] for row in document] == [True, False, False] else 1
    return 1 if given.what == "innocent" and any(row["accused"] for row in document) else 0


if __name__ == "__main__":
    sys.exit(main())
