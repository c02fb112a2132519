"""One machine's cable at a tenth of its bandwidth, while training goes on: is it found live, and is it named?

    python -m bench.slow_link                     one try
    python -m bench.slow_link --tries 3 --json
    python -m bench.slow_link --spare             a fourth machine is free: the worker moves if that pays

Three machines of one slot each on one host (`harness/machines.py`; needs root), a task of 3 x 1 workers,
every cable with 12.5 MB/s. At a step the cable of one machine, both directions, gets 10 % of that, and later
all of it again (with --spare it stays slow). What the coordinator says meanwhile (`diagnose.link_watch`), and
what a step takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from bench.machines import WHOLE_RATE, Scene
from harness.cluster import small_job
from harness.machines import Machines, absent, inside

NODES = ("n1", "n2", "n3")
VICTIM, PART = "n2", 0.1
BEFORE, DURING, AFTER = 15, 10, 10  # steps


def attempt(folder: Path, seed: int, *, spare: bool) -> dict[str, Any]:
    nodes = (*NODES, "n4") if spare else NODES
    with Machines(folder, ["c1", *nodes], seed) as machines:
        switch, scene = machines.switch, Scene(machines, ["c1"])
        for name in nodes:
            switch.out[name].bytes_per_s = switch.into[name].bytes_per_s = WHOLE_RATE
        scene.start_coordinator("c1")
        scene.until(lambda: scene.client, "the coordinator answers")
        for name in NODES:
            scene.start_agent(name, slots=1)
        joined = lambda: len(scene.client.get("/v1/status")["nodes"]) == len(NODES)  # noqa: E731
        scene.until(joined, "all agents joined")
        job = small_job(machines.shared, steps=10_000, replicas=3, stages=1, microbatches=1)
        scene.client.post("/v1/tasks", {"name": "job", "job": job})
        if spare:  # it comes later, so that the task is on the other three
            _step(scene, 1)
            scene.start_agent("n4", slots=1)
        marks = [_step(scene, BEFORE)]
        at = time.time()
        switch.out[VICTIM].bytes_per_s = switch.into[VICTIM].bytes_per_s = PART * WHOLE_RATE
        if spare:
            return _moved(scene, marks[0], at)
        marks.append(_step(scene, marks[0] + DURING))
        healed = time.time()
        switch.out[VICTIM].bytes_per_s = switch.into[VICTIM].bytes_per_s = WHOLE_RATE
        marks.append(_step(scene, marks[1] + AFTER))
        return _found(scene, marks, at, healed)


def _moved(scene: Scene, slow_from: int, at: float) -> dict[str, Any]:
    """Until its worker has left the slow machine, and some steps more."""

    def left() -> int:
        task = scene.task()
        seats = {seat["node"] for seat in task["seats"]}
        return int(task["step"]) if VICTIM not in seats and len(task["seats"]) == len(NODES) else 0

    moved_at = scene.until(left, f"the worker has left {VICTIM}", within_s=240)
    moved_s = time.time() - at
    last = _step(scene, moved_at + AFTER)
    rows = {row["step"]: row["at"] for row in scene.task()["rows"]}
    spans = [(3, slow_from), (slow_from + 1, moved_at), (moved_at + 3, last)]
    slow = [i for i in scene.client.get("/v1/incidents") if "at the link to" in i["what"]]
    remedies = [r for i in slow for r in i["remedies"] if r["what"].startswith("move")]
    step_s = [_median(rows, first, last) for first, last in spans]
    return {
        "step_s": step_s,
        "steps_per_s": [round(1 / each, 3) for each in step_s],
        "moved_after_s": round(moved_s, 2),
        "price": remedies[0]["because"] if remedies else None,
        "links": len(slow),
        "right": len(slow),
        "found_after_s": round(min((i["opened_at"] for i in slow), default=float("nan")) - at, 2),
        "open_after_it_healed": 0,
        "because": [(i["verdict"] or {}).get("because") for i in slow][:3],
    }


def _step(scene: Scene, step: int) -> int:
    scene.until(lambda: scene.task()["step"] >= step, f"step {step}", within_s=240)
    return int(scene.task()["step"])


def _found(scene: Scene, marks: list[int], at: float, healed: float) -> dict[str, Any]:
    task, incidents = scene.task(), scene.client.get("/v1/incidents")
    nodes = {str(seat["worker"]): seat["node"] for seat in task["seats"]}
    rows = {row["step"]: row["at"] for row in task["rows"]}
    spans = [(3, marks[0]), (marks[0] + 1, marks[1]), (marks[1] + 4, marks[2])]
    steps = [_median(rows, first, last) for first, last in spans]
    slow = [i for i in incidents if "at the link to" in i["what"]]
    named = [(i["workers"][0], i["what"].split()[-1]) for i in slow]
    return {
        "step_s": steps,
        "links": len(slow),
        "right": sum(VICTIM in (nodes[a], nodes[b]) for a, b in named),
        "found_after_s": round(min((i["opened_at"] for i in slow), default=float("nan")) - at, 2),
        "open_after_it_healed": sum(i["closed_at"] is None for i in slow),
        "because": [(i["verdict"] or {}).get("because") for i in slow][:3],
        "other_incidents": len(incidents) - len(slow),
    }


def _median(rows: dict[int, float], first: int, last: int) -> float:
    times = [rows[step] for step in range(first, last + 1) if step in rows]
    gaps = [b - a for a, b in pairwise(times)]
    return round(statistics.median(gaps), 3) if gaps else float("nan")


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spare", action="store_true", help="a machine is free: the worker can move")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    parser.add_argument("--skip", action="store_true", help="end with 0 where there can be no machines")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if why := absent():
        print(f"no machines: {why}.", file=sys.stderr)
        return 0 if given.skip else 2
    inside(["-m", "bench.slow_link", *sys.argv[1:]])
    folder = Path(tempfile.mkdtemp(prefix="everstep-slow-link-", dir="/var/tmp"))
    tries = [
        attempt(folder / str(number), given.seed + number, spare=given.spare) for number in range(given.tries)
    ]
    if not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        print(json.dumps(tries))
    else:
        for one in tries:
            before, during, after = one["step_s"]
            print(f"a step takes {before} s before, {during} s at 10 %, {after} s afterwards")
            print(
                f"  {one['links']} slow links, {one['right']} of them at {VICTIM}; the first after "
                f"{one['found_after_s']} s; {one['open_after_it_healed']} still open at the end"
            )
            print("  " + "\n  ".join(map(str, one["because"])))
            if given.spare:
                print(f"  moved after {one['moved_after_s']} s: {one['price']}")
    return 0 if all(one["links"] and one["links"] == one["right"] for one in tries) else 1


if __name__ == "__main__":
    raise SystemExit(main())
