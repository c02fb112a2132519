"""What the planner chooses against what it put second, on real processes.

    python bench/choices.py                          all situations, four side by side
    python bench/choices.py --only spare "back soon" --beside 2 --json

Each situation (`harness/choice_situations.py`) is made twice: a coordinator, agents, workers, and the same
event. The first time the planner decides. The second time its runner-up is forced: of all alternatives that
`everstep explain plan` shows for the event, the one that is least behind (`harness/forced_coordinator.py`);
where the story lets a lost node come back, the planner is free again from then on.

WAF: the sum over tasks of weight x committed steps per second, from the event on, over a window that holds
the transition; in slots' worth of work, as a step of every task here is the same work. A step that is done
again does not count again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from harness.choice_situations import BATCH, BLOCKS, REST_MS, SETTLED, SITUATIONS, ChoiceSituation, Scene
from harness.cluster import Cluster

STEP_WORK_S = BATCH * BLOCKS * 2 * REST_MS / 1e3  # seconds of one slot


def one(at: ChoiceSituation, forced: dict[str, Any], window_s: float) -> dict[str, Any]:
    """One run of one situation."""
    folder = Path(tempfile.mkdtemp(prefix="choices-", dir="/tmp"))
    force = folder / "force.json"
    program = [sys.executable, "-m", "harness.forced_coordinator", str(force)]
    try:
        with Cluster(folder, eager=True, program=program) as cluster:
            scene = Scene(cluster, at, folder, force, forced)
            cluster.start_coordinator()
            for node, slots in at.nodes.items():
                cluster.start_agent(node, slots=slots)
            cluster.nodes_up(len(at.nodes))
            return follow(scene, window_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def follow(scene: Scene, window_s: float) -> dict[str, Any]:
    at = scene.at
    for task in at.tasks:
        scene.submit(task)
    for task in at.tasks:
        scene.all_members(task.name, task.first_workers)
    for task in at.tasks:
        scene.steps_more(task.name, SETTLED)
    at.prepare(scene)
    before = waf(scene, time.time() - 5.0, 5.0)
    if scene.forced:
        scene.force.write_text(json.dumps(scene.forced))
    began, plans_before = time.time(), {plan["event"] for plan in plans(scene)}
    at.event(scene)
    for seconds, deed in at.later:
        time.sleep(max(0.0, began + seconds - time.time()))
        deed(scene)
    time.sleep(max(0.0, began + window_s + 0.5 - time.time()))
    new = [plan for plan in reversed(plans(scene)) if plan["event"] not in plans_before]
    return {
        "situation": at.name,
        "forced": scene.forced,
        "before": before,
        "waf": waf(scene, began, window_s),
        "plans": [{**plan, "at": plan["at"] - began} for plan in new],
        "steps": {name: steps(scene, name, began, window_s) for name in names(scene)},
    }


def names(scene: Scene) -> list[str]:
    return [task["task"] for task in scene.cluster.client.get("/v1/status")["tasks"]]


def plans(scene: Scene) -> list[Any]:
    found: list[Any] = scene.cluster.client.get("/v1/plans")
    return found


def steps(scene: Scene, name: str, began: float, seconds: float) -> float:
    """How far it came: a step done again counts once; of the step under way the part that is over."""
    path = scene.folder / "state-first" / "tasks" / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [(row["at"], row["step"], row["seconds"]) for row in rows]

    def reached(at: float) -> float:
        done = [row for row in rows if row[0] <= at]
        if not done:
            return 0.0
        last_at, step, usual = done[-1]
        return step + min(0.99, (at - last_at) / usual) if usual > 0 and at - last_at < usual else float(step)

    return reached(began + seconds) - reached(began)


def waf(scene: Scene, began: float, seconds: float) -> float:
    weights = {task["task"]: task["weight"] for task in scene.cluster.client.get("/v1/status")["tasks"]}
    done = sum(weight * steps(scene, name, began, seconds) for name, weight in weights.items())
    return round(done * STEP_WORK_S / seconds, 4)


def runner_up(found: dict[str, Any], asked: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What was chosen and what is least behind, of the last plan that was made for the event itself."""
    for plan in reversed([plan for plan in found["plans"] if re.match(asked, plan["because"])]):
        others = [option for option in plan["weighed"] if not option["chosen"]]
        if others:
            second = min(others, key=lambda option: option["behind"])
            chosen = next(o for o in plan["weighed"] if o["chosen"] and o["task"] == second["task"])
            return chosen, second
    return None


def pair(at: ChoiceSituation, given: argparse.Namespace) -> dict[str, Any]:
    """Both runs, each in a process of its own."""
    window_s = given.window or at.window_s
    first = child(at, {}, window_s, given.limit)
    if "error" in first:
        return {"situation": at.name, "error": first["error"]}
    found = runner_up(first, at.asked)
    if found is None:
        return {"situation": at.name, "error": "no alternative was weighed", "plans": first["plans"]}
    chosen, second = found
    forced = {second["task"]: {"workers": second["workers"], "shape": second["shape"]}}
    other = child(at, forced, window_s, given.limit)
    if "error" in other:
        return {"situation": at.name, "error": other["error"]}
    return {
        "situation": at.name,
        "story": at.story,
        "window_s": window_s,
        "task": chosen["task"],
        "chosen": chosen["what"],
        "because": chosen["because"],
        "runner_up": second["what"],
        "why_not": second["because"],
        "prepared": any(plan["prepared"] for plan in first["plans"]),
        "waf_before": first["before"],
        "waf_chosen": first["waf"],
        "waf_runner_up": other["waf"],
        "plans": [first["plans"], other["plans"]],
        "steps": [first["steps"], other["steps"]],
    }


def child(at: ChoiceSituation, forced: dict[str, Any], window_s: float, limit_s: float) -> dict[str, Any]:
    words = [sys.executable, os.path.abspath(__file__), "--one", at.name, "--force", json.dumps(forced)]
    words += ["--window", str(window_s)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not over within {limit_s:g} s"}
    _say(f"{at.name}: {'the runner-up is forced' if forced else 'the planner decides'}: rc {done.returncode}")
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    with contextlib.suppress(ValueError, IndexError):
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    return {"error": f"no answer: {done.stdout[-500:]}"}


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        last = str(row["error"]).strip().splitlines()[0] if str(row["error"]).strip() else "?"
        return f"| {row['situation']} | failed: {last} | | | | | |"
    gain = row["waf_chosen"] / max(1e-9, row["waf_runner_up"]) - 1 if row["waf_runner_up"] else float("inf")
    options = f"{row['task']}: {row['chosen']} | {row['runner_up']}"
    figures = f"{row['waf_before']:.2f} | {row['waf_chosen']:.2f} | {row['waf_runner_up']:.2f} | {gain:+.0%}"
    return f"| {row['situation']} | {options} | {figures} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], choices=[at.name for at in SITUATIONS])
    parser.add_argument("--beside", type=int, default=4, help="situations at a time")
    parser.add_argument("--window", type=float, default=0.0, help="seconds; 0: each situation's own")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for all rows, written as they come")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--force", type=json.loads, default={}, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        at = next(at for at in SITUATIONS if at.name == given.one)
        print(json.dumps(one(at, given.force, given.window)))
        return 0
    wanted = [at for at in SITUATIONS if not given.only or at.name in given.only]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(given.beside) as pool:
        for each in as_completed([pool.submit(pair, at, given) for at in wanted]):
            row = each.result()
            rows.append(row)
            _say(line(row))
            if given.out:
                given.out.write_text(json.dumps(rows))
    done = [row for row in rows if "error" not in row]
    won = sum(row["waf_chosen"] > row["waf_runner_up"] for row in done)
    if given.json:
        print(json.dumps({"rows": rows, "won": won, "of": len(rows)}))
    else:
        print(
            "| situation | chosen | runner-up | WAF before | chosen | runner-up | gain |\n" + "|---" * 7 + "|"
        )
        print("\n".join(line(row) for row in rows))
        print(f"the chosen option earned more in {won} of {len(rows)}")
    return 0 if len(done) == len(rows) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
