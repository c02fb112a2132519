"""A race: one fault trace, one model, equal slots, the same time; Everstep and others.

    python bench/peers/race.py --seconds 120 --only everstep --only torchrun
    python bench/peers/race.py --at-once 3 --pin --out race.json
    python bench/peers/race.py --seeds 1,2,3 --only everstep --only torchft --at-once 6 --pin --model large
    python bench/peers/race.py --read race.json --clean-from clean.json        only the table

Two workers on two nodes (groups of processes here). A seed gives the faults: three kills, a hang (SIGSTOP),
a lost node that returns after 15 s, a slow worker. Every worker keeps a diary (step, loss, CLOCK_MONOTONIC),
and all numbers are computed from diaries, in the same way for all. The clock of systems that race at once
starts when the last of them has finished a step; the first 40 s are without faults and give the pace.
README.md beside this file says how each system is set up, and why so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from racing.course import Course
from racing.systems import SYSTEMS

from harness.race_models import CHOICE, MODELS
from harness.race_score import apart, score
from harness.race_trace import KINDS, Fault, trace

Result = dict[str, Any]


def main() -> None:
    args = arguments()
    if args.read:
        document = joined([json.loads(Path(path).read_text()) for path in args.read])
    else:
        document = race(args)
        if args.out:
            Path(args.out).write_text(json.dumps(document))
    clean = json.loads(Path(args.clean_from).read_text())["losses"] if args.clean_from else {}
    for each in races(document) if clean else ():
        compare(each, clean)
    print(json.dumps(document) if args.json else table(document))


def arguments() -> argparse.Namespace:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", action="append", choices=list(SYSTEMS), help="a system; may be repeated")
    parser.add_argument("--model", choices=list(MODELS), default="small", help="which all systems train")
    parser.add_argument(
        "--seed", "--seeds", dest="seeds", type=numbers, default=[1], help="of the faults; 1,2,3: a race each"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=sorted(set(KINDS)), help="faults of a trial; else all six"
    )
    parser.add_argument("--seconds", type=float, default=200, help="of each system, from its first step")
    parser.add_argument("--start-limit-s", type=float, default=60, help="from launch to the first step")
    parser.add_argument("--clean", action="store_true", help="no faults: the clean curves")
    parser.add_argument("--clean-from", help="losses of `racing.clean`, to compare with")
    parser.add_argument("--at-once", type=int, default=1, help="systems that race side by side, of all seeds")
    parser.add_argument(
        "--pin", action="store_true", help="share out the cores: each system keeps to its own"
    )
    parser.add_argument("--keep", help="folder for logs and diaries; a temporary one if not given")
    parser.add_argument("--out", help="file for the results")
    parser.add_argument("--read", nargs="+", help="results of races that are over; nothing is run")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def race(args: argparse.Namespace) -> Result:
    os.environ[CHOICE] = args.model  # every process of the race inherits it
    kinds = tuple(args.kinds or KINDS)
    faults = {seed: () if args.clean else trace(seed, args.seconds, kinds=kinds) for seed in args.seeds}
    runs = [(seed, name) for seed in args.seeds for name in args.only or SYSTEMS]
    shares = core_shares(args.at_once) if args.pin else [None] * args.at_once
    root = Path(args.keep or tempfile.mkdtemp(prefix="race-")).resolve()
    results: dict[tuple[int, str], Result] = {}
    courses: list[Course] = []
    signal.signal(signal.SIGTERM, lambda *_: [course.stop.set() for course in courses])
    for first in range(0, len(runs), args.at_once):
        threads, together = [], runs[first : first + args.at_once]
        start = threading.Barrier(len(together))
        for number, (seed, name) in enumerate(together):
            # Ten for each, below those that the system gives to connections.
            port = 20_000 + os.getpid() % 60 * 200 + 10 * ((first + number) % 20)
            folder = root / f"{name}-{seed}"
            run = (seed, name, folder, port, shares[number], faults[seed], args, results, courses, start)
            threads.append(threading.Thread(target=one, args=run))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not args.keep:
        shutil.rmtree(root, ignore_errors=True)
    machine = {"cpu": cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    model = MODELS[args.model]
    trained = {"name": model.name, "parameters": model.parameters, "tokens": model.tokens}
    trained |= {"checkpoint_every": model.checkpoint_every}
    header = {"seconds": args.seconds, "clean": args.clean, "machine": machine, "model": trained}
    found = [
        {"seed": seed, **header, "systems": {name: results[of, name] for of, name in runs if of == seed}}
        for seed in args.seeds
    ]
    return joined(found)


def one(
    seed: int,
    name: str,
    folder: Path,
    port: int,
    cores: str | None,
    faults: tuple[Fault, ...],
    args: argparse.Namespace,
    results: dict[tuple[int, str], Result],
    courses: list[Course],
    start: threading.Barrier,
) -> None:
    folder.mkdir(parents=True)
    system, began = SYSTEMS[name], time.monotonic()

    label = system.name if len(args.seeds) == 1 else f"{system.name}, seed {seed}"

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f}  {label}: {line}", file=sys.stderr, flush=True)

    course = Course(system, folder, port=port, cores=cores, say=say)
    courses.append(course)
    ran = course.run(faults, args.seconds, args.start_limit_s, start)
    at_s = [note["at_s"] for note in course.happened]
    found = score(course.lines(), at_s, args.seconds, course.began) if ran else None
    result: Result = {"name": system.name, "version": version(system.package), "settings": system.settings}
    if found is not None:
        result |= {
            "useful_steps": found.useful_steps,
            "redone_steps": found.redone_steps,
            "healthy_step_s": round(found.healthy_step_s, 4),
            "goodput": round(found.goodput, 4),
            "lost_s": [round(lost, 2) for lost in found.lost_s],
            "stalled_s": [round(stall, 2) for stall in found.stalled_s],
            "last_loss": found.last_loss,
            "relaunched": course.relaunched,
            "faults": course.happened,
            "useful_at": [round(at, 2) for at in found.useful_at],
            "losses": {str(step): loss for step, loss in found.losses.items()},
        }
    results[seed, name] = result
    say(f"{result.get('useful_steps', 'no')} useful steps, {result.get('redone_steps', 0)} redone")


def core_shares(number: int) -> list[str | None]:
    every = sorted(os.sched_getaffinity(0))
    each = len(every) // number
    return [",".join(map(str, every[k * each : (k + 1) * each])) for k in range(number)]


def compare(document: Result, clean: dict[str, float]) -> None:
    """How far every system's losses are from those of a run without faults: before its first fault (that is
    how much the order of sums matters), at the last step that both have, and at most.
    """
    for result in document["systems"].values():
        losses = _by_step(result.get("losses", {}))
        found = apart(losses, _by_step(clean))
        if found is None:
            continue
        faults = [fault["at_s"] for fault in result["faults"]]
        before = sum(at <= min(faults, default=float("inf")) for at in result["useful_at"])
        early = apart({step: loss for step, loss in losses.items() if step <= before}, _by_step(clean))
        result["clean"] = {"step": found[0], "apart": found[1], "most_apart": found[2]}
        result["clean"]["before_faults"] = early[2] if early else None


def _by_step(losses: dict[str, float]) -> dict[int, float]:
    return {int(step): loss for step, loss in losses.items()}


def races(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One for every seed."""
    return document.get("races", [document])


def joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Races of one model, as one document."""
    found = [race for document in documents for race in races(document)]
    return found[0] if len(found) == 1 else {"races": found}


def sums(documents: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of a table: a system under each seed, and under all."""
    names = [name for name in documents[0]["systems"] if all(_ran(each, name) for each in documents)]
    seeds = [f"seed {each['seed']}: useful steps, ms" for each in documents]
    rows = [["system", *seeds, "all useful steps", "redone", "lost, s", "longest without a step, s"]]
    for name in names:
        found = [each["systems"][name] for each in documents]
        per_seed = [f"{one['useful_steps']}, {1e3 * one['healthy_step_s']:.0f}" for one in found]
        total = [sum(one[key] for one in found) for key in ("useful_steps", "redone_steps")]
        lost = sum(sum(one["lost_s"]) for one in found)
        longest = max((still for one in found for still in one["stalled_s"]), default=0.0)
        rows.append([found[0]["name"], *per_seed, *map(str, total), f"{lost:.0f}", f"{longest:.1f}"])
    return rows


def _ran(document: dict[str, Any], name: str) -> bool:
    return "useful_steps" in document["systems"].get(name, {})


def aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def table(document: Result) -> str:
    found = races(document)
    if len(found) == 1:
        return one_table(document)
    each = [f"seed {part['seed']}\n{one_table(part)}\n" for part in found]
    return "\n".join([*each, f"all seeds\n{aligned(sums(found))}"])


def one_table(document: Result) -> str:
    rows = [
        f"{'':18} {'version':>10} {'useful':>6} {'redone':>6} {'goodput':>7} {'step ms':>7} {'lost s':>7}  "
        f"{'seconds lost per fault (without a step)':70} {'loss':>7}  against clean"
    ]
    for result in document["systems"].values():
        if "useful_steps" not in result:
            rows.append(f"{result['name']:18} {result['version']:>10} did not finish a step")
            continue
        kinds = [fault["kind"] for fault in result["faults"]]
        per_fault = zip(kinds, result["lost_s"], result["stalled_s"], strict=True)
        lost = " ".join(f"{kind} {lost:.1f} ({still:.1f})" for kind, lost, still in per_fault)
        clean = result.get("clean")
        told = (
            f"{clean['apart']:.1e} at step {clean['step']}, at most {clean['most_apart']:.1e}"
            if clean
            else "-"
        )
        rows.append(
            f"{result['name']:18} {result['version']:>10} {result['useful_steps']:6} "
            f"{result['redone_steps']:6} {result['goodput']:7.1%} {1e3 * result['healthy_step_s']:7.0f} "
            f"{sum(result['lost_s']):7.1f}  {lost:70} {result['last_loss']:7.4f}  {told}"
        )
    return "\n".join(rows)


def version(package: str | None) -> str:
    try:
        return importlib.metadata.version(package or "everstep")
    except importlib.metadata.PackageNotFoundError:
        return "this tree" if package is None else "?"


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
