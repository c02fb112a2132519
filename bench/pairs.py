"""Every pair of features through a kill: do they work together, and is the loss curve still the clean run's?

    python bench/pairs.py                         all pairs, one at a time
    python bench/pairs.py --jobs 4 --json         several at a time, as one JSON document
    python bench/pairs.py --only shards,ema       pairs of these with all others
    python bench/pairs.py --together 6            up to 6 features per run: every pair is in one of them
    python bench/pairs.py --set tied,ema,lora     these together, once

Each pair trains a small GPT on 2 x 2 workers twice, clean and with one worker killed, and compares losses and
evaluations to the bit. `reshape` goes on in the shape 1 x 2 after half of the steps. A pair that is refused
before the start, in one sentence and with exit code 2, counts as refused: it is listed, and no failure. With
`--together` a tenth of the runs cover all pairs; a run that fails does not say which pair is to blame.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FEATURES = (
    "bf16",
    "fp16",
    "fp8",
    "recompute",
    "compile",
    "evaluation",
    "ema",
    "shards",
    "sharded",
    "tied",
    "frozen",
    "lora",
    "weighted",
    "stream",
    "early-stop",
    "reshape",
    "experts",
)
APART = [{"sharded", "tied"}, {"shards", "lora"}, {"shards", "fp8"}]  # refused, so never among others
NEVER = [{"bf16", "fp16"}, {"bf16", "fp8"}, {"fp16", "fp8"}]  # no pairs
LIMIT_S = 600.0  # of one run: compiled shards are twelve processes


def groups(pairs: list[tuple[str, ...]], most: int) -> list[tuple[str, ...]]:
    """Few sets of at most so many features, with every pair in one of them."""
    left = [set(pair) for pair in pairs]
    found: list[set[str]] = [pair for pair in left if pair in APART]
    left = [pair for pair in left if pair not in APART]
    while left:
        group = set(left[0])
        while len(group) < most:
            fits = [
                f
                for f in FEATURES
                if f not in group and not any(apart <= {f, *group} for apart in [*APART, *NEVER])
            ]
            gains = {f: sum({f, other} in left for other in group) for f in fits}
            best = max(gains, key=lambda f: gains[f], default="")
            if not gains.get(best):
                break
            group.add(best)
        found.append(group)
        left = [pair for pair in left if not pair <= group]
    return [tuple(f for f in FEATURES if f in group) for group in found]


def tried(pair: tuple[str, ...]) -> dict[str, Any]:
    began = time.monotonic()
    clean = trained(pair, killed=False)
    killed = clean if clean["refused"] or clean["error"] else trained(pair, killed=True)
    if clean["refused"]:
        verdict = "refused"
    elif clean["error"] or killed["error"]:
        verdict = "failed"
    else:
        equal = clean["losses"] == killed["losses"] and clean["scores"] == killed["scores"]
        verdict = "equal" if equal and killed["incidents"] and clean["losses"] else "differs"
    why = clean["refused"] or clean["error"] or killed["error"]
    seconds = round(time.monotonic() - began, 1)
    return {
        "pair": list(pair),
        "verdict": verdict,
        "why": why,
        "steps": len(clean["losses"]),
        "seconds": seconds,
    }


def trained(pair: tuple[str, ...], *, killed: bool) -> dict[str, Any]:
    """The losses of a run; of two in a row where the shape changes."""
    features = [feature for feature in pair if feature != "reshape"]
    with tempfile.TemporaryDirectory() as folder:
        if "reshape" not in pair:
            return run([*features, "steps=8"], "stage=1,replica=0,step=3,op=F1" if killed else None)
        kept = f"folder={folder}"
        first = run([*features, "steps=4", kept], "stage=0,replica=1,step=3,op=I1" if killed else None)
        if first["error"] or first["refused"]:
            return first
        again = run([*features, "steps=8", "shape=1x2", kept], None)
        return again | {"incidents": first["incidents"]}


def run(words: list[str], kill: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--json", "--no-web"]
    command += ["--kill", kill] if kill else []
    command += [str(ROOT / "harness" / "pair_script.py"), *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {LIMIT_S:.0f} s", "refused": "", "losses": {}}
    lines = done.stderr.strip().splitlines()
    said = lines[-1] if lines else ""
    document = json.loads(done.stdout) if done.stdout.strip().startswith("{") else {}
    return {
        "refused": said if done.returncode == 2 else "",
        "error": "" if done.returncode in (0, 2) else f"exit {done.returncode}: {said}",
        "losses": document.get("losses", {}),
        "scores": document.get("evaluations", {}),
        "incidents": len(document.get("incidents", [])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="A,B", help=f"pairs with one of these; of {', '.join(FEATURES)}")
    parser.add_argument("--together", type=int, default=2, metavar="N", help="features per run, at most")
    parser.add_argument("--set", metavar="A,B,C", help="one run, of these features")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="pairs at a time")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    only = set(options.only.split(",")) if options.only else set(FEATURES)
    one = tuple(options.set.split(",")) if options.set else ()
    if unknown := only.union(one) - set(FEATURES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(FEATURES)}")
    every = [pair for pair in itertools.combinations(FEATURES, 2) if set(pair) not in NEVER]
    pairs: list[tuple[str, ...]] = [pair for pair in every if only & set(pair)]
    if one:
        pairs = [one]
    elif options.together > 2:
        pairs = groups(pairs, options.together)
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(tried, pairs):
            rows.append(row)
            if not options.json:
                print(
                    f"{row['verdict']:8} {' + '.join(row['pair']):28}{row['seconds']:7} s {row['why'][:160]}",
                    flush=True,
                )
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows)
        for verdict in ("equal", "refused", "differs", "failed")
    }
    if options.json:
        print(json.dumps({"pairs": rows, "counts": counts}))
    else:
        what = "sets" if one or options.together > 2 else "pairs"
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"of {len(rows)} {what}")
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
