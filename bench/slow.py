"""A worker turns slow while it trains: how soon that is known, what is done, and how good it is.

    python bench/slow.py                      factors 1.5, 2 and 3: a table
    python bench/slow.py --factors 2 --json   one JSON document
    python bench/slow.py innocent             runs in which nobody is slow: how many are accused
    python bench/slow.py others               a slow link, a worker without a peer: told, and what follows
    python bench/slow.py move                 a slow slot, machine, only worker of a stage, rank of a script,
                                              with and without a spare slot: does it move, and is that worth
                                              what the planner said
    python bench/slow.py move --only script

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
from dataclasses import dataclass, replace
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
SOON = SLOW_FROM + 5  # less is left than another process takes to start


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A task on two nodes with as many slots as it needs; then `spare` more slots on a third one."""

    run: str
    spare: int
    moves: bool  # what is to come of it
    slow: tuple[str, ...] = ("1:1",)
    nodes: tuple[int, ...] = (2, 2)
    replicas: int = 2
    steps: int = MOVE_STEPS


ALONE: dict[str, Any] = {"slow": ("0:1",), "nodes": (1, 1), "replicas": 1}
SCENES = (
    Scene(run="slow slot, a spare slot", spare=1, moves=True),
    Scene(run="slow slot, no spare slot", spare=0, moves=False),
    Scene(run="slow slot, a spare slot, the task ends soon", spare=1, moves=False, steps=SOON),
    Scene(run="slow machine (2 workers), 2 spare slots", spare=2, moves=True, slow=("1:0", "1:1")),
    Scene(run="slow machine (2 workers), no spare slot", spare=0, moves=False, slow=("1:0", "1:1")),
    Scene(run="only worker of a stage, a spare slot", spare=1, moves=True, **ALONE),
    Scene(run="only worker of a stage, no spare slot", spare=0, moves=False, **ALONE),
)


def moves(factor: float, named: str) -> list[dict[str, Any]]:
    rows = []
    for scene in (one for one in SCENES if named in one.run):
        rows.append(_move(scene, factor))
        print(move_line(rows[-1]), file=sys.stderr, flush=True)
    rows += [_moved_script(spare) for spare in (True, False) if not named or "script" in named]
    for row in rows[-2:] if not named or "script" in named else ():
        print(move_line(row), file=sys.stderr, flush=True)
    return rows


def move_line(row: dict[str, Any]) -> str:
    rates = "  ".join(f"{what} {rate or '-':>6}" for what, rate in row["steps_per_s"].items())
    moved = ("moved" if row["moved"] else "stays") + ("" if row["as_wanted"] else " (NOT AS WANTED)")
    told = f"measured {row['measured'] or '-'}; planner: {row['price']}"
    return f"{row['run']:44} {moved}  steps/s: {rates}  {told}"


def _move(scene: Scene, factor: float) -> dict[str, Any]:
    faults = [
        f"replica={worker[0]},stage={worker[2]},step={SLOW_FROM},how=slow,factor={factor:g},until=100000"
        for worker in scene.slow
    ]
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        cluster.start_coordinator()
        for node, slots in zip("ab", scene.nodes, strict=True):
            cluster.start_agent(node, slots=slots)
        cluster.nodes_up(2)
        cluster.submit(job_of(steps=scene.steps, replicas=scene.replicas), faults=faults)
        cluster.all_members()
        if scene.spare:
            cluster.start_agent("c", slots=scene.spare)
            cluster.nodes_up(3)
        home = {seat["worker"]: seat["node"] for seat in cluster.task()["seats"]}
        found_at = cluster.until(
            lambda: _found_slow(cluster, len(scene.slow)), "the workers are found slow", within_s=240
        )
        moved_step = 0
        with contextlib.suppress(TimeoutError, AssertionError):
            cluster.until(
                lambda: _has_moved(cluster, home, scene.slow) or _is_over(cluster), "a move", within_s=240
            )
            moved_step = int(cluster.task()["step"]) if _has_moved(cluster, home, scene.slow) else 0
        until = min(scene.steps, (moved_step or int(cluster.task()["step"])) + AFTER_STEPS)
        cluster.step_reached(until)
        rows = {row["step"]: row["at"] for row in cluster.task()["rows"]}
        remedies = [r for i in cluster.incidents() for r in i["remedies"] if r["what"].startswith("move")]
    found_step = min(step for step, at in rows.items() if at >= found_at)
    spans = {
        "before": (SETTLED, SLOW_FROM - 1),
        "slow": (SLOW_FROM + 1, found_step),
        "balanced": (found_step + 2, moved_step or until),
        "after": (moved_step + 3, until) if moved_step else (1, 0),
    }
    rates = {what: _rate(rows, first, last) for what, (first, last) in spans.items()}
    return _row(scene.run, rates, bool(moved_step), scene.moves, remedies)


def _row(
    run: str, rates: dict[str, float | None], moved: bool, wanted: bool, remedies: list[Any]
) -> dict[str, Any]:
    slow, after = rates["balanced"] or rates["slow"], rates["after"]
    return {
        "run": run,
        "moved": moved,
        "as_wanted": moved == wanted,
        "steps_per_s": rates,
        "measured": f"{after / slow - 1:+.0%}" if moved and slow and after else None,
        "price": remedies[0]["because"] if remedies else None,
    }


# Ranks on node b take three times as long; which node it is, the command line of their agent says.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import everstep
pid, node = os.getpid(), ""
while pid > 1 and not node:
    words = open(f"/proc/{pid}/cmdline").read().split("\\0")
    node = words[words.index("--node") + 1] if "--node" in words else ""
    pid = int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
dist.init_process_group("gloo")
step = int(open("step").read()) if os.path.exists("step") else 0
while not os.path.exists("stop"):
    time.sleep(0.15 if node == "b" and step >= 40 else 0.05)
    dist.all_reduce(torch.ones(1))
    step += 1
    if dist.get_rank() == 0:
        open("steps", "a").write(f"{step} {time.time()} {dist.get_world_size()}\\n")
        open("step.new", "w").write(str(step))
        os.replace("step.new", "step")
    everstep.progress(step, saved=dist.get_rank() == 0 and step % 20 == 0)
"""


def _moved_script(spare: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, Cluster(Path(name)) as cluster:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        cluster.start_coordinator()
        for node in "ab":
            cluster.start_agent(node, slots=1)
        cluster.nodes_up(2)
        ranks = {"command": ["train.py"], "folder": name, "ranks": 1, "least": 2, "most": 2}
        cluster.client.post("/v1/tasks", {"name": "job", "ranks": ranks})
        cluster.until(lambda: cluster.task()["script"]["world"] == 2, "both nodes take part", within_s=240)
        if spare:
            cluster.start_agent("c", slots=1)
            cluster.nodes_up(3)
        slow = lambda: next((i for i in cluster.incidents() if "slow" in i["what"]), None)  # noqa: E731
        found_at = cluster.until(slow, "the rank is found slow", within_s=240)["opened_at"]
        nodes = lambda: {group["node"] for group in cluster.task()["script"]["groups"]}  # noqa: E731
        with contextlib.suppress(TimeoutError):
            cluster.until(lambda: nodes() == {"a", "c"}, "a move", within_s=60)
        moved, at = nodes() == {"a", "c"}, _script_steps(folder)[-1][0]
        cluster.until(lambda: _script_steps(folder)[-1][0] >= at + 3 * AFTER_STEPS, "more steps")
        rows, remedies = _script_steps(folder), [r for i in cluster.incidents() for r in i["remedies"]]
    times = dict(rows)
    found = min(step for step, when in rows if when >= found_at)
    rates = {
        "before": _rate(times, 10, 39),
        "slow": _rate(times, 42, found),
        "balanced": _rate(times, found + 1, at if not moved else max(found + 3, at - 10)),
        "after": _rate(times, at + 5, at + 3 * AFTER_STEPS) if moved else None,
    }
    moves = [remedy for remedy in remedies if remedy["what"].startswith("move")]
    name = f"slow rank of a script, {'a spare node' if spare else 'no spare node'}"
    return _row(name, rates, moved, spare, moves)


def _script_steps(folder: Path) -> list[tuple[int, float]]:
    rows = [line.split() for line in (folder / "steps").read_text().splitlines()]
    return [(int(row[0]), float(row[1])) for row in rows if len(row) == 3]


def _found_slow(cluster: Cluster, count: int) -> float | None:
    """When the last of so many workers was found slow."""
    found = sorted(i["opened_at"] for i in cluster.incidents() if i["what"] == "is slow")
    return found[count - 1] if len(found) >= count else None


def _has_moved(cluster: Cluster, home: dict[str, str], slow: tuple[str, ...]) -> bool:
    """And do all workers take part again?"""
    task = cluster.task()
    seats = {seat["worker"]: seat["node"] for seat in task["seats"]}
    return task["working"] == len(home) == len(seats) and all(seats[w] != home[w] for w in slow)


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
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="of `move`: runs whose name has these words"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    factors = [float(text) for text in given.factors.split(",")]
    document: Any
    if given.what == "innocent":
        document = innocent(given.turns)
    elif given.what == "others":
        document = others()
    elif given.what == "move":
        document = moves(factors[-1], given.only)
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
        return 0 if all(row["as_wanted"] for row in document) else 1
    return 1 if given.what == "innocent" and any(row["accused"] for row in document) else 0


if __name__ == "__main__":
    sys.exit(main())
