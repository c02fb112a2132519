"""SIGKILL at every kind of moment, with real processes: does each run end with the clean run's losses?

    python bench/sweep.py                 every point, a table
    python bench/sweep.py --device cuda --precision bf16
    python bench/sweep.py --device cuda --transport nccl --side-by-side 4 --results done.jsonl
    python bench/sweep.py --only reduce --json
    python bench/sweep.py --points 1,2,3 --in-a-row 60    all in one run, each after the rejoin of the last
    python bench/sweep.py --shard         with sharded optimizer states, and 31 points more
    python bench/sweep.py --shards 2      80 points; each worker is two processes
    python bench/sweep.py --crowded       18 other points: two replicas of a stage on each of two nodes

Each point is one short job with scripted deaths. Losses are compared step by step with those of a run without
faults. A point whose deaths did not all happen is tried again, and fails in the end: it has shown nothing. A
point that passed in `--results` is not run again, nor is a clean run that is there. Not under MPS: for
a while after clients were killed it refuses others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.sweep import Losses, Point, Sweep, crowded, points, sharded

Numbered = list[tuple[int, Point]]


def passed_in(results: Path | None) -> dict[str, Any]:
    """By name: the points that passed in earlier runs."""
    if results is None or not results.exists():
        return {}
    rows = (json.loads(line) for line in results.read_text().splitlines())
    passed = [row for row in rows if row.get("ok")]
    return {name: row for row in passed for name in row.get("points", [row["point"]])}


def clean_in(results: Path | None) -> dict[str, Losses]:
    """The losses of clean runs that were made in earlier runs."""
    if results is None or not results.exists():
        return {}
    rows = (json.loads(line) for line in results.read_text().splitlines())
    return {
        row["clean"]: {int(s): loss for s, loss in row["losses"].items()} for row in rows if "clean" in row
    }


def shared_out(chosen: Numbered, among: int) -> list[Numbered]:
    """Points of one shape together, for they share a clean run, which takes as long as a point."""

    def shape(numbered: tuple[int, Point]) -> str:
        point = numbered[1]
        return f"{point.replicas} {point.stages} {point.job}"

    ordered = sorted(chosen, key=shape)
    new = [i == 0 or shape(ordered[i]) != shape(ordered[i - 1]) for i in range(len(ordered))]
    each = (len(ordered) + sum(new) + among) / among
    parts: list[Numbered] = [[] for _ in range(among)]
    cost = 0.0
    for numbered, is_new in zip(ordered, new, strict=True):
        cost += 1 + is_new
        parts[min(among - 1, int((cost - 1) // each))].append(numbered)
    return [part for part in parts if part]


def side_by_side(given: argparse.Namespace, chosen: Numbered) -> list[dict[str, Any]]:
    """Parts of the sweep in processes of their own; what each found is in the results' file."""
    command = [sys.executable, __file__, "--results", str(given.results), "--preset", given.preset]
    command += ["--device", given.device, "--precision", given.precision, "--transport", given.transport]
    command += ["--graphs", given.graphs, "--in-a-row", str(given.in_a_row), "--rest", str(given.rest)]
    command += [
        "--shards",
        str(given.shards),
        *(["--shard"] if given.shard else []),
    ]
    command += ["--crowded"] if given.crowded else []
    running = [
        subprocess.Popen([*command, "--points", ",".join(str(number) for number, _ in part)])
        for part in shared_out(chosen, given.side_by_side)
    ]
    for one in running:
        one.wait()
    known = passed_in(given.results)
    return [known.get(point.name, {"point": point.name, "ok": False}) for _, point in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--preset", default="gpt-tiny")
    parser.add_argument(
        "--transport", default="auto", help="of healed runs: auto, tcp, nccl; on CPUs files, pipe"
    )
    parser.add_argument(
        "--graphs", default="never", help="auto: healed runs record their ops, clean ones do not"
    )
    parser.add_argument("--part", default="1/1", help="2/4: every fourth point, from the second on")
    parser.add_argument("--points", default="", help="their numbers, separated by commas")
    parser.add_argument("--side-by-side", type=int, default=1, help="as many processes; needs --results")
    parser.add_argument("--results", type=Path, help="a file of rows; what passed in it is not run again")
    parser.add_argument(
        "--shards", type=int, default=1, help="processes per worker; kills strike each in turn"
    )
    parser.add_argument("--only", default="", help="points whose name contains this")
    parser.add_argument("--after", type=int, default=0, help="leave out so many points: to resume")
    parser.add_argument("--shard", action="store_true", help="with sharded optimizer states")
    parser.add_argument("--crowded", action="store_true", help="the points of replicas that share nodes")
    parser.add_argument(
        "--in-a-row",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="one run of so many seconds at most, each point after the rejoin of those that died before",
    )
    parser.add_argument("--rest", type=float, default=0.1, help="with --in-a-row: seconds per microbatch")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.side_by_side > 1 and given.results is None:
        parser.error("--side-by-side needs --results")
    every = [*points(given.shards), *(sharded(given.shards) if given.shard else ())]
    every = crowded() if given.crowded else every
    part, parts = map(int, given.part.split("/"))
    wanted = {int(number) for number in given.points.split(",") if number}
    matching = [
        (number, point)
        for number, point in enumerate(every, 1)
        if given.only in point.name and (not wanted or number in wanted)
    ]
    known = passed_in(given.results)
    chosen = [
        numbered for numbered in matching[part - 1 :: parts][given.after :] if numbered[1].name not in known
    ]
    if given.side_by_side > 1:
        results = side_by_side(given, chosen)
    else:
        results = one_by_one(given, chosen * given.repeat)
    total = len(known) + len(results)
    passed = len(known) + sum(result["ok"] for result in results)
    if given.json:
        print(json.dumps({"points": total, "passed": passed, "results": results}))
    elif not wanted:
        print(f"{passed} of {total} points end with the clean run's losses")
    return 0 if passed == total else 1


def one_by_one(given: argparse.Namespace, chosen: Numbered) -> list[dict[str, Any]]:
    sweep = Sweep(
        device=given.device,
        precision=given.precision,
        preset=given.preset,
        transport=given.transport,
        shards=given.shards,
        shard=given.shard,
        graphs=given.graphs,
        clean=clean_in(given.results),
        per_node=2 if given.crowded else 0,
    )
    known = set(sweep.clean)
    results: list[dict[str, Any]] = []
    tries: list[tuple[int, str, Callable[[], dict[str, Any]]]] = [
        (number, point.name, partial(sweep.try_point, point)) for number, point in chosen
    ]
    if given.in_a_row:
        all_of_them = [point for _, point in chosen]
        in_a_row = partial(sweep.try_in_a_row, all_of_them, rest_s=given.rest, limit_s=given.in_a_row)
        tries = [(0, f"{len(chosen)} points in a row", in_a_row)]
    try:
        for number, name, run in tries:
            try:
                result = run()
            except Exception as error:  # one point that cannot be tried does not end the others
                result = {"point": name, "ok": False, "failure": f"{type(error).__name__}: {error}"}
            results.append(result)
            if given.results is not None:
                new = [{"clean": key, "losses": sweep.clean[key]} for key in set(sweep.clean) - known]
                known |= set(sweep.clean)
                with given.results.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in [*new, result])
            if not given.json:
                print(
                    f"{number:3} {'ok  ' if result['ok'] else 'FAIL'} {result['point']:72} "
                    f"{result.get('seconds', 0):5.1f} s ({result.get('first_step_s', 0):.1f} to start)  "
                    f"difference {result.get('max_relative_loss_difference', 1):.1e}"
                    f"{'' if result['ok'] else '  ' + str(result)}",
                    flush=True,
                )
    finally:
        sweep.close()
    return results


if __name__ == "__main__":
    sys.exit(main())
