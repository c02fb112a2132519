"""Policies on churn: every kind and every market of `everstep_lab.study`, and files.

    python bench/churn.py                                   all kinds and markets, two models, seed 0
    python bench/churn.py --seeds 5,6,7 --models gpt3-7b --file p3-trace.csv
    python bench/churn.py --ablation                        what each of Everstep's means brings, in points

A row is what each policy earns, in per cent of the ideal, and Everstep over the best of the others that are
charged what they are known to pay. The exit code is 1 if Everstep is more than 1 % behind in any row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from everstep_lab.study.churn import KINDS
from everstep_lab.study.markets import MARKETS, market
from everstep_lab.study.request import Request
from everstep_lab.study.study import ABLATIONS, POLICIES, run_study

CHARGED = ("elastic", "varuna", "bamboo", "oobleck", "recycle", "unicron")
WITHIN = 0.99


def requests(args: argparse.Namespace) -> Iterator[tuple[str, int, Request]]:
    for name in [n for n in args.kinds.split(",") if n] or (*KINDS, *MARKETS):
        for seed in map(int, args.seeds.split(",")):
            for model in args.models.split(","):
                if name in KINDS:
                    request = Request(trace=name, days=args.days, seeds=seed + 1, tasks=(model,))
                else:
                    text = market(name, seed, days=args.days)
                    request = Request(trace=name, text=text, seeds=1, tasks=(model,))
                yield f"{name} {model}", seed, request
    for path in args.file:
        for model in args.models.split(","):
            text = Path(path).read_text(encoding="utf-8")
            yield f"{Path(path).name} {model}", 0, Request(trace=Path(path).name, text=text, tasks=(model,))


def row(request: Request, ablation: bool) -> dict[str, Any]:
    trace = request.traces()[-1]
    chosen = {name: POLICIES[name] for name in (*CHARGED, "oobleck-idealised", "everstep", "ideal")}
    if ablation:
        chosen = {**ABLATIONS, "ideal": POLICIES["ideal"]}
    found = run_study(request.setup(trace), [trace], chosen)
    earned = {name: summary.results[0].accumulated_waf for name, summary in found.items()}
    share = {name: round(100 * waf / earned["ideal"], 3) for name, waf in earned.items()}
    if ablation:
        return {"everstep": share["everstep"]} | {
            name: round(share["everstep"] - share[name], 3) for name in ABLATIONS if name != "everstep"
        }
    best = max(CHARGED, key=lambda name: earned[name])
    return {
        "losses": len(trace.failures),
        **{name: share[name] for name in share if name != "ideal"},
        "best other": best,
        "everstep over it": round(earned["everstep"] / earned[best], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="", help="by name, separated by commas; all if not given")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--models", default="gpt3-1.3b,gpt3-7b")
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--file", action="append", default=[], help="a trace file besides")
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = {}
    for name, seed, request in requests(args):
        found = rows[f"{name} seed {seed}"] = row(request, args.ablation)
        if not args.json:
            print(f"{name:30} seed {seed}  " + "  ".join(f"{k} {v}" for k, v in found.items()), flush=True)
    if args.ablation:
        summary = {
            name: max(found[name] for found in rows.values()) for name in ABLATIONS if name != "everstep"
        }
        behind = []
    else:
        behind = [name for name, found in rows.items() if found["everstep over it"] < WITHIN]
        first = sum(found["everstep over it"] >= 1 for found in rows.values())
        summary = {"rows": len(rows), "first": first, "more than 1 % behind": behind}
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary}))
    else:
        print("\n".join(f"{key:30} {value}" for key, value in summary.items()))
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
