"""SIGKILL at every kind of moment, with real processes: does each run end with the clean run's losses?

    python bench/sweep.py                 every point, a table
    python bench/sweep.py --device cuda --precision bf16
    python bench/sweep.py --device cuda --transport nccl --part 1/4      beside three others
    python bench/sweep.py --only reduce --json
    python bench/sweep.py --shard         with sharded optimizer states, and 31 points more

Each point is one short job with scripted deaths. Losses are compared step by step with those of a run without
faults.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.sweep import Sweep, points, sharded


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--preset", default="gpt-tiny")
    parser.add_argument("--transport", default="auto", help="auto, tcp, shm, nccl, pipe; clean runs by tcp")
    parser.add_argument("--part", default="1/1", help="2/4: every fourth point, from the second on")
    parser.add_argument(
        "--shards", type=int, default=1, help="processes per worker; kills strike each in turn"
    )
    parser.add_argument("--only", default="", help="points whose name contains this")
    parser.add_argument("--after", type=int, default=0, help="leave out so many points: to resume")
    parser.add_argument("--shard", action="store_true", help="with sharded optimizer states")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sweep = Sweep(
        device=given.device,
        precision=given.precision,
        preset=given.preset,
        transport=given.transport,
        shards=given.shards,
        shard=given.shard,
    )
    every = [*points(given.shards), *(sharded() if given.shard else ())]
    part, parts = map(int, given.part.split("/"))
    chosen = [p for p in every if given.only in p.name][part - 1 :: parts][given.after :] * given.repeat
    results = []
    try:
        for number, point in enumerate(chosen, 1):
            try:
                result = sweep.try_point(point)
            except TimeoutError as error:
                result = {"point": point.name, "ok": False, "failure": str(error)}
            results.append(result)
            if not given.json:
                print(
                    f"{number:3}/{len(chosen)} {'ok  ' if result['ok'] else 'FAIL'} {point.name:72} "
                    f"{result.get('seconds', 0):5.1f} s  "
                    f"difference {result.get('max_relative_loss_difference', 1):.1e}"
                    f"{'' if result['ok'] else '  ' + str(result)}",
                    flush=True,
                )
    finally:
        sweep.close()
    passed = sum(result["ok"] for result in results)
    if given.json:
        print(json.dumps({"points": len(results), "passed": passed, "results": results}))
    else:
        print(f"{passed} of {len(results)} points end with the clean run's losses")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
