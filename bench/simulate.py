"""Figures of the simulator, each by a command:

    python bench/simulate.py storms --seeds 0:10000     how many pass, how fast on one core
    python bench/simulate.py storms --kind moves        another kind: cluster, moves, hangs, sharded-cluster
    python bench/simulate.py storms --seeds fresh:5000 --jobs 8
    python bench/simulate.py mutants                    every planted bug: seeds until it is seen, seconds
    python bench/simulate.py mutants --names a,b        these planted bugs only
    python bench/simulate.py studies                    8 weeks of 128 GPUs, 90 days of 16,384: seconds
    python bench/simulate.py published                  Unicron over Megatron: mixes x repair times

Times are CPU seconds of this process. Each takes --json. The exit code is 1 if a storm failed or a planted
bug was not seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the planted bugs, which are in harness/

from everstep_lab.storm import StormKind, draw_storm, is_of_cluster, run_storm
from everstep_lab.study.request import Request
from everstep_lab.study.study import run_study

WITHIN = 2000
PIECE = 50  # storms between two looks at the clock


def storms(args: argparse.Namespace) -> dict[str, Any]:
    """In pieces, by `--jobs` processes; a failing seed is printed when it is found."""
    first, last = _range(args.seeds)
    kind: StormKind = "cluster" if args.cluster else args.kind
    pieces = [(kind, at, min(at + PIECE, last)) for at in range(first, last, PIECE)]
    done, failed, events, deaths = 0, [], 0, 0
    began, spent = time.monotonic(), 0.0
    with multiprocessing.Pool(args.jobs, initializer=gc.disable) as pool:
        for piece in pool.imap_unordered(_piece, pieces):
            done, events, deaths = done + piece.seeds, events + piece.events, deaths + piece.deaths
            spent += piece.cpu_seconds
            failed += piece.failed
            for row in piece.failed:
                told = f"{kind or 'plain'} seed {row['seed']}: {row['violation']}"
                print(told, file=sys.stderr, flush=True)
            if args.within_s and time.monotonic() - began > args.within_s:
                pool.terminate()
                break
    wall = time.monotonic() - began
    return {
        "kind": kind or "plain",
        "seeds": done,
        "from": first,
        "passed": done - len(failed),
        "cpu_seconds": round(spent, 1),
        "seeds_per_second": round(done / spent, 1),
        "wall_seconds": round(wall, 1),
        "seeds_per_wall_second": round(done / wall, 1),
        "events": events,
        "deaths": deaths,
        "failed": failed,
    }


@dataclass(frozen=True)
class Piece:
    """What a few storms gave."""

    seeds: int
    events: int
    deaths: int
    cpu_seconds: float
    failed: list[dict[str, Any]]


def _piece(given: tuple[StormKind, int, int]) -> Piece:
    kind, first, last = given
    began = time.process_time()
    reports = [run_storm(draw_storm(s, kind), cluster=is_of_cluster(kind)) for s in range(first, last)]
    failed = [{"seed": r.seed, "violation": r.violation[:200]} for r in reports if r.violation is not None]
    found = Piece(
        seeds=last - first,
        events=sum(r.events for r in reports),
        deaths=sum(r.deaths for r in reports),
        cpu_seconds=time.process_time() - began,
        failed=failed,
    )
    gc.collect()
    return found


def _range(seeds: str) -> tuple[int, int]:
    first, last = seeds.split(":")
    if first == "fresh":
        drawn = secrets.randbelow(1 << 40)
        return drawn, drawn + int(last)
    return int(first), int(last)


def mutants(args: argparse.Namespace) -> dict[str, Any]:
    """A table: each planted bug, the seeds until one sees it, CPU seconds, and which invariant broke."""
    from harness.agent_mutants import CANCEL_MUTANTS, CLUSTER_MUTANTS, MEMORY_MUTANTS, TIMER_MUTANTS
    from harness.mutants import GROUP_MUTANTS, MUTANTS, NODE_MUTANTS, SHARD_MUTANTS, VIRTUAL_MUTANTS

    kinds: dict[str, StormKind] = {
        **dict.fromkeys(MUTANTS, ""),
        **dict.fromkeys(NODE_MUTANTS, "crowded"),
        **dict.fromkeys(SHARD_MUTANTS, "sharded"),
        **dict.fromkeys(GROUP_MUTANTS, "groups"),
        **dict.fromkeys(VIRTUAL_MUTANTS, "virtual"),
        **dict.fromkeys(CLUSTER_MUTANTS, "cluster"),
        **dict.fromkeys(MEMORY_MUTANTS, "moves"),
        **dict.fromkeys(CANCEL_MUTANTS, "plans"),
        **dict.fromkeys(TIMER_MUTANTS, "hangs"),
        "no_timer_of_isolated_slot": "flips",
        "no_timer_of_broken_links": "cuts",
        "no_timer_of_review_of_a_plan": "plans",
    }
    wanted = args.names.split(",") if args.names else list(kinds)
    rows = {}
    for name in wanted:
        kind = kinds[name]
        rows[name] = _first_seed(name, kind)
        if not args.json:
            row = rows[name]
            spent = f"{row['seeds']!s:>5s} seeds {row['cpu_seconds']:7.1f} s"
            print(f"{name:40s} {kind or 'recovery':9s} {spent}  {row['seen_as']}", flush=True)
    return {
        "caught": sum(row["seeds"] is not None for row in rows.values()),
        "of": len(rows),
        "mutants": rows,
    }


def _first_seed(name: str, kind: StormKind) -> dict[str, Any]:
    """A seed that fails without the bug does not count."""
    from harness.mutants import planted

    began = time.process_time()
    for seed in range(WITHIN):
        spec = draw_storm(seed, kind)
        with planted(name):
            violation = run_storm(spec, cluster=is_of_cluster(kind)).violation
        if violation is not None and run_storm(spec, cluster=is_of_cluster(kind)).violation is None:
            spent = round(time.process_time() - began, 1)
            return {"seeds": seed + 1, "cpu_seconds": spent, "seen_as": violation.split(":")[0]}
    return {"seeds": None, "cpu_seconds": round(time.process_time() - began, 1), "seen_as": "not seen"}


def studies(_: argparse.Namespace) -> dict[str, Any]:
    """From nothing to the table: curves, first plan, all policies, one life each."""
    found = {}
    for name, request in {
        "8 weeks, 128 GPUs, six tasks, all policies": Request(trace="trace-a", seeds=1),
        "8 weeks, 128 GPUs, six tasks, everstep": Request(trace="trace-a", seeds=1, policies=("everstep",)),
        "90 days, 16,384 GPUs, Llama-3's failures, everstep": Request(
            trace="llama3", days=90, seeds=1, policies=("everstep",)
        ),
        "90 days, 16,384 GPUs, Llama-3's failures, all policies": Request(trace="llama3", days=90, seeds=1),
    }.items():
        began = time.process_time()
        traces = request.traces()
        summaries = run_study(request.setup(traces[0]), traces, request.chosen())
        found[name] = {
            "cpu_seconds": round(time.process_time() - began, 2),
            "failures": len(traces[0].failures),
            "earned": {n: round(s.results[0].share, 4) for n, s in summaries.items()},
        }
    return found


def published(args: argparse.Namespace) -> dict[str, Any]:
    """Accumulated WAF over Megatron's. Published for Unicron: 1.2 on trace-a, 1.9 on trace-b."""
    rows = {}
    for mix in "12345":
        for label, trace, repair in (
            ("trace-a, 24:168 h", "trace-a", None),
            ("trace-b, 1.2:8.4 h", "trace-b", (1.2, 8.4)),
            ("trace-b, 3:21 h", "trace-b", (3.0, 21.0)),
            ("trace-b, 6:42 h", "trace-b", (6.0, 42.0)),
        ):
            request = Request(
                trace=trace,
                mix=mix,
                repair_hours=repair,
                seeds=args.lives,
                policies=("megatron", "unicron", "everstep", "ideal"),
            )
            traces = request.traces()
            found = run_study(request.setup(traces[0]), traces, request.chosen())
            mean = {name: summary.mean(lambda r: r.share) for name, summary in found.items()}
            rows[f"mix {mix}, {label}"] = {n: round(x / mean["megatron"], 3) for n, x in mean.items()}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {f.__name__: f for f in (storms, mutants, studies, published)}
    parser.add_argument("what", choices=list(commands))
    parser.add_argument("--seeds", default="0:10000")
    parser.add_argument("--cluster", action="store_true", help="as --kind cluster")
    parser.add_argument("--kind", default="", choices=get_args(StormKind))
    parser.add_argument("--jobs", type=int, default=1, help="processes, of `storms`")
    parser.add_argument("--within-s", type=float, default=0.0, help="stop after so many seconds")
    parser.add_argument("--lives", type=int, default=10, help="random lives, of `published`")
    parser.add_argument("--names", default="", help="planted bugs, by name, of `mutants`")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = commands[args.what](args)
    if args.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            if args.what == "mutants" and key == "mutants":
                continue  # its table is printed as it grows
            if isinstance(value, dict):
                print(f"{key:56s} " + "  ".join(f"{k} {v}" for k, v in value.items()))
            else:
                print(f"{key:20s} {value}")
    return 1 if found.get("failed") or found.get("caught") != found.get("of") else 0


if __name__ == "__main__":
    sys.exit(main())
