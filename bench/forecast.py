"""What storms on real processes earned, against what the simulator expects of the same faults.

    python bench/storm_real.py --seed 21 22 --minutes 6 --trace traces
    python bench/forecast.py traces/*.json

Earned: steps on record when the storm ended, weighted by the weight of the task; all tasks do the same work
per step, so this is the WAF up to a factor. Expected: `everstep_lab.forecast`: the real coordinator and
planner decide about coarse nodes and workers. Its inputs: what was done to which process and when, and
when a killed coordinator or agent was up again, from the trace; seconds per step, and until a killed worker
takes part again, measured by the storm before its first fault. Calm: the same without faults.

    python bench/forecast.py traces/storm-22.json traces/storm-23.json --calibrate traces/storm-21.json

What the coarse model leaves out (changes of shape, a full disk) is then one factor, earned over expected of
another storm. It is never taken from a storm that it is judged by.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep_lab.forecast.storm_forecast import forecast, weighed

NO_FAULTS = ("submit", "coordinator up", "agent up")


def row(path: Path, factor: float) -> dict[str, Any]:
    storm = json.loads(path.read_text())
    expected, calm = forecast(storm), forecast(storm, faults=False)
    earned = weighed(storm["done"])
    return {
        "seed": storm["seed"],
        "minutes": round(storm["seconds"] / 60, 1),
        "faults": sum(entry["what"] not in NO_FAULTS for entry in storm["trace"]),
        "earned": storm["done"],
        "expected": expected,
        "expected_over_earned": round(factor * weighed(expected) / max(1.0, earned), 3),
        "share_of_calm": round(earned / max(1.0, weighed(calm)), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--calibrate", nargs="+", type=Path, default=[], help="traces of other storms")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if shared := {path.name for path in given.calibrate} & {path.name for path in given.traces}:
        parser.error(f"{min(shared)} is calibrated with; it cannot be judged too.")
    others = [row(path, 1.0)["expected_over_earned"] for path in given.calibrate]
    factor = 1 / statistics.fmean(others) if others else 1.0
    rows = [row(path, factor) for path in given.traces]
    ratio = statistics.median(each["expected_over_earned"] for each in rows)
    if given.json:
        print(json.dumps({"storms": rows, "median": ratio, "factor": factor}))
        return 0
    for each in rows:
        print("  ".join(f"{key} {value}" for key, value in each.items()))
    print(f"expected over earned, median: {ratio} (factor {factor:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
