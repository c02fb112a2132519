"""What the planner chooses against what it put second, on real processes.

    python bench/choices.py                          all situations, four side by side
    python bench/choices.py --only spare "back soon" --beside 2 --json

Each situation (`harness/choice_situations.py`) is made twice per try: a coordinator, agents, workers, and the
same event. The first time the planner decides. The second time its runner-up is forced: of all alternatives
that `everstep explain plan` shows for the event, the one that is least behind and can be told apart by a
measurement (`harness/forced_coordinator.py`); where the story lets a lost node come back, the planner is free
again from then on.

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
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.choice_situations import (
    BATCH,
    BLOCKS,
    EARLIER,
    REST_MS,
    SETTLED,
    SITUATIONS,
    ChoiceSituation,
    Scene,
)
from harness.cluster import Cluster

TELL = 0.05  # of the WAF: what two runs of the same may differ by
STEP_WORK_S = BATCH * BLOCKS * 2 * REST_MS / 1e3  # seconds of one slot


class Rivals(NamedTuple):
    chosen: dict[str, Any]
    second: dict[str, Any]
    passed_over: int  # alternatives that are too close to tell


def one(at: ChoiceSituation, forced: dict[str, Any], window_s: float) -> dict[str, Any]:
    """One run of one situation."""
    folder = Path(tempfile.mkdtemp(prefix="choices-", dir="/tmp"))
    force = folder / "force.json"
    program = [sys.executable, "-m", "harness.forced_coordinator", str(force)]
    try:
        with Cluster(folder, eager=True, program=program) as cluster:
            scene = Scene(cluster, at, folder, force, forced)
            cluster.start_coordinator()
            began = time.monotonic()
            for node, slots in at.nodes.items():
                cluster.start_agent(node, slots=slots)
            cluster.nodes_up(len(at.nodes))
            scene.start_s = time.monotonic() - began
            return follow(scene, window_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def follow(scene: Scene, window_s: float) -> dict[str, Any]:
    at = scene.at
    scene.one_change_of_shape()
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
        time.sleep(max(0.0, began + seconds - min(scene.start_s, seconds / 2) - time.time()))
        deed(scene)  # an agent that is promised back begins to start before that
    time.sleep(max(0.0, began + window_s + 0.5 - time.time()))
    new = [plan for plan in reversed(plans(scene)) if plan["event"] not in plans_before]
    return {
        "situation": at.name,
        "forced": scene.forced,
        "before": before,
        "waf": waf(scene, began, window_s),
        "plans": [{**plan, "at": plan["at"] - began} for plan in new],
        "steps": {name: steps(scene, name, began, window_s) for name in names(scene)},
        "stopped_s": {name: stopped_s(scene, name, began, window_s) for name in names(scene)},
    }


def names(scene: Scene) -> list[str]:
    found = [task["task"] for task in scene.cluster.client.get("/v1/status")["tasks"]]
    return [name for name in found if name != EARLIER.name]


def plans(scene: Scene) -> list[Any]:
    found: list[Any] = scene.cluster.client.get("/v1/plans")
    return found


def step_rows(scene: Scene, name: str) -> list[tuple[float, int, float]]:
    path = scene.folder / "state-first" / "tasks" / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["at"], row["step"], row["seconds"]) for row in rows]


def stopped_s(scene: Scene, name: str, began: float, seconds: float) -> list[float]:
    """How long no step was recorded, where that was longer than three usual steps."""
    at = [row[0] for row in step_rows(scene, name) if began - 5.0 <= row[0] <= began + seconds]
    gaps = [later - sooner for sooner, later in pairwise(at)]
    usual = sorted(gaps)[len(gaps) // 2] if gaps else 0.0
    return [round(gap, 2) for gap in gaps if gap > 3 * usual]


def steps(scene: Scene, name: str, began: float, seconds: float) -> float:
    """How far it came: a step done again counts once; of the step under way the part that is over."""
    rows = step_rows(scene, name)

    def reached(at: float) -> float:
        done = [row for row in rows if row[0] <= at]
        if not done:
            return 0.0
        last_at, step, usual = done[-1]
        return step + min(0.99, (at - last_at) / usual) if usual > 0 and at - last_at < usual else float(step)

    return max(0.0, reached(began + seconds) - reached(began))  # of a step that is begun again, less is done


def waf(scene: Scene, began: float, seconds: float) -> float:
    weights = {task["task"]: task["weight"] for task in scene.cluster.client.get("/v1/status")["tasks"]}
    done = sum(weights[name] * steps(scene, name, began, seconds) for name in names(scene))
    return round(done * STEP_WORK_S / seconds, 4)


def runner_up(found: dict[str, Any], asked: str, window_s: float, tell: float) -> Rivals | None:
    """What was done and what comes second, by the last plan that was made for the event itself.

    A change of shape that waits, and that the run has not made by the end of the window, was not done: it is
    what comes second. An alternative that is predicted to earn as much within `tell` is passed over: two runs
    of the same differ by more.
    """
    for plan in reversed([plan for plan in found["plans"] if re.match(asked, plan["because"])]):
        others = [option for option in plan["weighed"] if not option["chosen"]]
        chosen = {option["task"]: option for option in plan["weighed"] if option["chosen"]}
        made = {name for later in found["plans"] if later["at"] >= plan["at"] for name in later["shapes"]}
        for name in plan["wishes"].keys() - made:
            stay = [o for o in others if o["task"] == name and o["what"].startswith("continue")]
            if stay:
                return Rivals(min(stay, key=lambda o: o["behind"]), chosen[name], 0)
        for close, option in enumerate(sorted(others, key=lambda option: option["behind"])):
            if predicted(plan, chosen[option["task"]], option, window_s) > tell:
                return Rivals(chosen[option["task"]], option, close)
    return None


def predicted(plan: dict[str, Any], chosen: dict[str, Any], option: dict[str, Any], window_s: float) -> float:
    """By what share an alternative should earn less within the window."""
    every = [each for each in plan["weighed"] if each["chosen"] and each["throughput"] > 0]
    earns = sum(each["earns"] for each in every)
    if not earns:
        return 1.0
    pays = option["pays"] - chosen["pays"]
    running_s = min(each["earns"] / each["throughput"] for each in every)  # the lightest task has weight 1
    return ((option["behind"] - pays) / running_s + pays / window_s) / (earns / running_s)


def pair(at: ChoiceSituation, given: argparse.Namespace) -> dict[str, Any]:
    """Both, in turn, each run in a process of its own."""
    window_s = given.window or at.window_s
    firsts, seconds, rivals = [], [], None
    for _ in range(given.tries):
        first = child(at, {}, window_s, given.limit)
        if "error" in first:
            return {"situation": at.name, "error": first["error"]}
        rivals = rivals or runner_up(first, at.asked, window_s, given.tell)
        if rivals is None:
            return {"situation": at.name, "error": "no alternative was weighed", "plans": first["plans"]}
        wanted = {"workers": rivals.second["workers"], "shape": rivals.second["shape"]}
        second = child(at, {rivals.second["task"]: wanted}, window_s, given.limit)
        if "error" in second:
            return {"situation": at.name, "error": second["error"]}
        firsts.append(first)
        seconds.append(second)
    both = list(zip(firsts, seconds, strict=True))
    return {
        "situation": at.name,
        "story": at.story,
        "window_s": window_s,
        "task": rivals.chosen["task"],
        "chosen": rivals.chosen["what"],
        "because": rivals.chosen["because"],
        "runner_up": rivals.second["what"],
        "why_not": rivals.second["because"],
        "passed_over": rivals.passed_over,
        "prepared": any(plan["prepared"] for first in firsts for plan in first["plans"]),
        "waf_before": firsts[0]["before"],
        "waf_chosen": fmean(first["waf"] for first in firsts),
        "waf_runner_up": fmean(second["waf"] for second in seconds),
        "tries": [[first["waf"], second["waf"]] for first, second in both],
        **{
            key: [[first[key], second[key]] for first, second in both]
            for key in ("plans", "stopped_s", "steps")
        },
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
        last = next(
            (text for text in reversed(str(row["error"]).splitlines()) if "Error" in text), row["error"]
        )
        last = str(last).strip()[:120].replace("\n", " ")
        return f"| {row['situation']} | failed: {last} | | | | | |"
    gain = _gain(row["waf_chosen"], row["waf_runner_up"])
    options = f"{row['task']}: {row['chosen']} | {row['runner_up']}"
    figures = f"{row['waf_before']:.2f} | {row['waf_chosen']:.2f} | {row['waf_runner_up']:.2f} | {gain}"
    if len(row["tries"]) > 1:
        figures += f" ({', '.join(_gain(mine, other) for mine, other in row['tries'])})"
    return f"| {row['situation']} | {options} | {figures} |"


def _gain(mine: float, other: float) -> str:
    return f"{mine / other - 1:+.0%}" if other > 0.01 else "the other earned nothing"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], choices=[at.name for at in SITUATIONS])
    parser.add_argument("--beside", type=int, default=4, help="situations at a time")
    parser.add_argument("--window", type=float, default=0.0, help="seconds; 0: each situation's own")
    parser.add_argument("--tries", type=int, default=1, help="of both, in turn; their means are compared")
    parser.add_argument(
        "--tell", type=float, default=TELL, help="alternatives nearer than this are passed over"
    )
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
    named = {at.name: at for at in SITUATIONS}
    wanted = [named[name] for name in given.only] or list(SITUATIONS)
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
