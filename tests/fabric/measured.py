"""What planned traffic is worth, measured on a network of namespaces (root).

    python -m tests.fabric.measured ecmp      real TCP over 4 spines: planned against hashing, over seeds
    python -m tests.fabric.measured moving    a link cut to a tenth, or dead, while data flows
    python -m tests.fabric.measured test      both, its claims checked: `make fabric-test`

`--json` prints one document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also when run by path

from everstep_fabric import allocate
from everstep_fabric.watch import WatchLimits
from tests.fabric import fabric_testbed
from tests.fabric.fabric_testbed import Testbed
from tests.fabric.traffic import bulk_rates, flow, watched_run

LINE_RATE = 0.93  # of a link, that every planned flow must reach; headers take 0.044 of it


# ---------------------------------------------------------------------- measured


def run_ecmp(args: argparse.Namespace) -> dict[str, Any]:
    """Cases: 4 flows between 2 leaves; 8 flows, 4 out of each of 2 leaves and 4 into each of 2 others.

    A busy machine starves all flows alike. A planned measurement below the line is therefore made again, and
    counted; with two flows on one link it would fail every time.
    """
    cases = {
        "2 leaves, 4 flows": (2, 100.0, [flow(f"f{n}", 1, 2) for n in range(4)]),
        "4 leaves, 8 flows": (
            4,
            50.0,
            [flow(f"f{a}.{k}", a, 3 + (a + k) % 2) for a in (1, 2) for k in range(4)],
        ),
    }
    table: dict[str, Any] = {}
    heads = ("case", "slowest planned, worst seed", "slowest hashed, median", "worst", "ratio to median")
    say("| " + " | ".join((*heads, "to worst", "sum planned", "sum hashed", "repeated")) + " |")
    for name, (leaves, rate, flows) in cases.items():
        testbed = Testbed(leaves=leaves, spines=4, rate_mbit=rate)
        routing = allocate(testbed.topology(), flows)
        rows: list[dict[str, dict[str, float]]] = []
        repeated = 0
        with testbed.up():
            for seed in range(1, args.seeds + 1):
                testbed.seed(seed)
                hashed = bulk_rates(testbed, flows, None, warm_s=args.warm, seconds=args.seconds)
                planned = bulk_rates(testbed, flows, routing, warm_s=args.warm, seconds=args.seconds)
                left = args.repeats
                while min(planned) < LINE_RATE * rate and left > 0:
                    left -= 1
                    planned = bulk_rates(testbed, flows, routing, warm_s=args.warm, seconds=args.seconds)
                repeated += args.repeats - left
                measured = {"hashed": hashed, "planned": planned}
                rows.append(
                    {k: {"slowest": min(v) / rate, "sum": sum(v) / rate} for k, v in measured.items()}
                )
                say(f"{name}, seed {seed}: " + ", ".join(f"{k} {_short(v)}" for k, v in measured.items()))
        table[name] = _ecmp_summary(rows) | {
            "rate_mbit": rate,
            "seeds": args.seeds,
            "planned_repeated": repeated,
            "rows": rows,
        }
        _tell_ecmp(name, table[name])
    return table


def _ecmp_summary(rows: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    hashed = [row["hashed"]["slowest"] for row in rows]
    planned = [row["planned"]["slowest"] for row in rows]
    return {
        "planned_slowest_min": min(planned),
        "hashed_slowest_median": statistics.median(hashed),
        "hashed_slowest_min": min(hashed),
        "planned_sum_median": statistics.median(row["planned"]["sum"] for row in rows),
        "hashed_sum_median": statistics.median(row["hashed"]["sum"] for row in rows),
        "hashed_sum_min": min(row["hashed"]["sum"] for row in rows),
    }


def _tell_ecmp(name: str, row: dict[str, Any]) -> None:
    worst = row["planned_slowest_min"]
    say(
        f"| {name} | {worst:.3f} | {row['hashed_slowest_median']:.3f} | {row['hashed_slowest_min']:.3f} "
        f"| {worst / row['hashed_slowest_median']:.2f} | {worst / row['hashed_slowest_min']:.2f} "
        f"| {row['planned_sum_median']:.2f} | {row['hashed_sum_median']:.2f} | {row['planned_repeated']} |"
    )


def run_moving(args: argparse.Namespace) -> dict[str, Any]:
    testbed = Testbed(leaves=2, spines=4, rate_mbit=100.0)
    table: dict[str, Any] = {}
    with testbed.up():
        for num_flows in (3, 4):
            for harm in ("cut", "dead"):
                runs = []
                for seed in range(1, args.turns + 1):
                    testbed.seed(seed)
                    run = watched_run(
                        testbed,
                        num_flows=num_flows,
                        harm=harm,
                        before_s=2.5,
                        after_s=5.0,
                        limits=WatchLimits(),
                    )
                    runs.append(_moving_row(run))
                name = f"{num_flows} flows, {harm}"
                table[name] = {key: statistics.median(row[key] for row in runs) for key in runs[0]}
                table[name]["worst_full_s"] = max(row["full_s"] for row in runs)
                say(f"| {name} | " + " | ".join(f"{k} {v:.2f}" for k, v in table[name].items()) + " |")
    return table


def _moving_row(run: Any) -> dict[str, float]:
    """Of the flow that was hurt: when it was moved, when it was back at what it has in the end."""
    hurt = run.streams[run.hurt]
    moved = min((at for at, _, _ in run.moves), default=float("inf"))
    after = hurt.mbit(run.end - 2.0, run.end)
    bins = np.arange(run.broken_at, run.end - 0.25, 0.05)
    full = next((t for t in bins if t >= moved and hurt.mbit(t, t + 0.25) >= 0.9 * after), float("inf"))
    return {
        "moved_s": moved - run.broken_at,
        "full_s": float(full) - run.broken_at,
        "before_mbit": hurt.mbit(run.broken_at - 1.5, run.broken_at),
        "during_mbit": hurt.mbit(run.broken_at + 0.1, min(moved, run.end)),
        "after_mbit": after,
        "others_after_mbit": min(s.mbit(run.end - 2.0, run.end) for s in run.streams if s is not hurt),
        "sum_before_mbit": sum(s.mbit(run.broken_at - 1.5, run.broken_at) for s in run.streams),
        "sum_after_mbit": sum(s.mbit(run.end - 2.0, run.end) for s in run.streams),
    }


def run_test(args: argparse.Namespace) -> dict[str, Any]:
    """The claims. Exit code 1 if one does not hold."""
    args.turns = 1
    found = {"ecmp": run_ecmp(args), "moving": run_moving(args)}
    claims = {
        f"{name}: every planned flow ≥ {LINE_RATE} of its link, {row['seeds']} seeds": row[
            "planned_slowest_min"
        ]
        >= LINE_RATE
        for name, row in found["ecmp"].items()
    }
    for name, row in found["moving"].items():
        claims[f"moving, {name}: moved within 2 s"] = row["moved_s"] <= 2.0
        claims[f"moving, {name}: back within 3 s"] = row["worst_full_s"] <= 3.0
        if name.startswith("3"):  # a path was free; a busy machine slows all flows alike: they are compared
            claims[f"moving, {name}: then as fast as the others"] = (
                row["after_mbit"] >= 0.9 * row["others_after_mbit"]
            )
        else:  # two flows must share a path, and TCP may share it unevenly
            claims[f"moving, {name}: then faster than before the move"] = (
                row["after_mbit"] > row["during_mbit"]
            )
            claims[f"moving, {name}: all together ≥ 2.2 of the 3 links left"] = row["sum_after_mbit"] >= 220
    for claim, holds in claims.items():
        say(f"{'holds' if holds else 'FAILS'}  {claim}")
    found["claims"] = claims
    if not all(claims.values()):
        args.exit_code = 1
    return found


# ---------------------------------------------------------------------- telling


def say(line: str) -> None:
    print(line, file=sys.stderr if QUIET else sys.stdout, flush=True)


def _short(rates: list[float]) -> str:
    return f"slowest {min(rates):.0f} sum {sum(rates):.0f} Mbit/s"


QUIET = False
RUNS = {"ecmp": run_ecmp, "moving": run_moving, "test": run_test}


def main() -> None:
    global QUIET
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=RUNS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one traffic measurement")
    parser.add_argument("--warm", type=float, default=0.6, help="before it")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of a planned measurement that the machine disturbed"
    )
    parser.add_argument("--turns", type=int, default=3, help="of moving")
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument(
        "--skip", action="store_true", help="exit 0 with a reason where no testbed can be made"
    )
    given = [word for word in sys.argv[1:] if not word.startswith("--inside")]
    args = parser.parse_args(given)
    QUIET = args.as_json
    args.exit_code = 0
    reason = fabric_testbed.why_not()
    if reason is not None:
        print(f"skipped: {reason}" if args.skip else f"tests/fabric/measured.py: {reason}.", file=sys.stderr)
        sys.exit(0 if args.skip else 2)
    fabric_testbed.move_into_own_namespaces()
    table = RUNS[args.what](args)
    if args.as_json:
        print(json.dumps(table))
    sys.exit(args.exit_code)


if __name__ == "__main__":
    main()
