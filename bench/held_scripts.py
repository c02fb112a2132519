"""A script whose ranks are killed at random moments gives the numbers of a run without failures, bit for bit.

    python bench/held_scripts.py --runs 10 --ranks 3 --lives 6 -- --steps 60

Each run kills every process of the script after a random time (`--lives` seconds on average), also
replacements. Printed: kills, lines that are the same, restarts (a death that was not held, with its reason),
how long ranks were held, by what the dead rank was doing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "launch" / "held_script.py"
HELD = re.compile(r"held (\d+\.\d+) s: parked (\d+\.\d+) s, replaced (\d+\.\d+) s")


def run(
    script: Sequence[str], ranks: int, lives_s: float | None, options: Sequence[str]
) -> tuple[dict, dict]:
    own = {} if lives_s is None else {"HELD_LIVES_S": str(lives_s)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "everstep.cli.main",
                "run",
                "--nproc",
                str(ranks),
                "--json",
                *options,
                *script,
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **own},
            capture_output=True,
            text=True,
        )
    if not done.stdout:
        sys.exit(done.stderr[-3000:])
    found: dict[tuple[str, str], set[str]] = {}
    kills: list[tuple[int, str]] = []
    for line in done.stderr.splitlines():
        if match := re.match(r"\[(\d+)\] (step \d+ \w+|final)(.*)", line):
            found.setdefault((match[1], match[2]), set()).add(match[3])
        elif match := re.match(r"\[(\d+)\] killed in (\w+)", line):
            kills.append((int(match[1]), match[2]))
    told = json.loads(done.stdout)
    return found, {**told, "kills": kills, "heard": done.stderr}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--lives", type=float, default=6.0)
    parser.add_argument("--keep", type=Path, help="folder for what was printed in runs that differ")
    parser.add_argument("script", nargs="*", default=["--steps", "60"])
    given = parser.parse_args()
    script = [str(SCRIPT), *given.script]
    plain, told = run(script, given.ranks, None, ["--no-hold", "--copy-every", "100000"])
    print(f"without failures: {len(plain)} lines, {told['seconds']:.1f} s", flush=True)
    held_s: dict[str, list[float]] = {}
    kills = same_runs = falls = 0
    for number in range(given.runs):
        found, told = run(script, given.ranks, given.lives, ["--max-restarts", "100", "--copy-every", "5"])
        reasons: list[str] = []
        left = list(told["kills"])
        for incident in told["incidents"]:
            of_rank = [each for each in left if incident["rank"] in (None, each[0])]
            if of_rank:
                left.remove(of_rank[0])
            for text in incident["evidence"]:
                if match := HELD.search(text):
                    moment = "several" if incident["rank"] is None else of_rank[0][1] if of_rank else "?"
                    held_s.setdefault(moment, []).append(float(match[1]))
                elif "not held" in text:
                    reasons.append(text)
        same = sum(found.get(key) == value for key, value in plain.items())
        kills += len(told["kills"])
        falls += told["restarts"]
        is_same = same == len(plain) and found.keys() <= plain.keys()
        same_runs += is_same
        if not is_same and given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            (given.keep / f"run-{number}.txt").write_text(told["heard"])
        what = f"{len(told['kills'])} kills, {told['restarts']} restarts, code {told['exit_code']}"
        took = f"{told['seconds']:.0f} s"
        print(
            f"run {number}: {same} of {len(plain)} lines the same; {what}, {took}",
            *reasons,
            sep="\n  ",
            flush=True,
        )
    for moment, values in sorted(held_s.items()):
        print(f"  {moment}: held {shown(values)}")
    whole = shown([each for values in held_s.values() for each in values])
    print(f"{same_runs} of {given.runs} runs the same, {kills} kills, {falls} restarts; held {whole}")
    if same_runs < given.runs:
        sys.exit(1)


def shown(values: list[float]) -> str:
    p50, p95 = (1e3 * percentile(values, share) for share in (0.5, 0.95))
    return f"p50 {p50:.0f} ms, p95 {p95:.0f} ms ({len(values)})"


if __name__ == "__main__":
    main()
