"""What one task costs its coordinator as it grows, with virtual agents (`harness/fleet.py`): no torch, no
sockets, one process.

    python -m bench.size                                     64, 512 and 4,096 workers
    python -m bench.size --workers 16384                     the largest task that a job may ask for
    python -m bench.size --workers 512 --scenes submit,death --json
    python -m bench.size --tasks 300                         many tasks of 8 workers instead: the last submit

One row for each size and scene: events, CPU milliseconds of an event (median and largest, with its name), CPU
seconds of all of them, megabytes of orders, bytes per worker, kilobytes of the largest journal entry.

    submit     until it trains          node      a node of 8 workers is lost, and replaced
    seat       the one event of it      silent    16 nodes fall silent at once, and all others wait
    death      one worker, until back   restart   another coordinator reads the journal

Exit code 1 if an event takes longer than its budget (100 ms; above 4,096 workers 500 ms), if a death costs
more than 3 KiB of orders per worker, or, with --tasks, if a restart takes longer than 2 s. Times are CPU
seconds of this process; on a machine that others use they are longer all the same (caches, frequency), so a
figure is to be taken alone. Collections of garbage count, and are kept short as a daemon does it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.server.term import keep_collections_short
from harness.fleet import MOST_BYTES, SCENES, STAGES, measure, measure_tasks

MOST_RESTART_S = 2.0
COLUMNS = ("scene", "events", "p50_ms", "max_ms", "slowest", "total_s", "order_mb", "entry_kb")


def holds(row: dict[str, Any]) -> bool:
    if "tasks" in row:
        return row["scene"] != "restart" or bool(row["total_s"] <= MOST_RESTART_S)
    return bool(row["within_budget"]) and (
        row["scene"] != "death" or row["order_bytes_per_worker"] <= MOST_BYTES
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[64, 512, 4096], help="a multiple of 8 each"
    )
    parser.add_argument("--tasks", type=int, metavar="N", help="so many small tasks, instead of one large")
    parser.add_argument("--scenes", default=",".join(SCENES), help=f"of {', '.join(SCENES)}")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    scenes = tuple(given.scenes.split(","))
    if unknown := [scene for scene in scenes if scene not in SCENES]:
        parser.error(f"--scenes: {unknown[0]!r} is not one of {', '.join(SCENES)}.")
    if bad := [workers for workers in given.workers if workers < 32 or workers % STAGES]:
        parser.error(f"--workers: {bad[0]} is not a multiple of {STAGES}, 32 or more.")
    if given.tasks is not None and not 0 < given.tasks <= 2000:
        parser.error(f"--tasks: {given.tasks} is not from 1 to 2000.")
    keep_collections_short()
    rows: list[dict[str, Any]] = []
    of, sizes = ("workers", given.workers) if given.tasks is None else ("tasks", [given.tasks])
    columns = (of, *COLUMNS)
    if not given.json:
        print("".join(f"{name:>{_width(name)}}" for name in columns))
    for size in sizes:
        for row in measure(size, scenes) if given.tasks is None else measure_tasks(size):
            rows.append(row)
            if not given.json:
                missed = "" if holds(row) else "   over its budget"
                print("".join(f"{row[name]!s:>{_width(name)}}" for name in columns) + missed, flush=True)
    if given.json:
        print(json.dumps({"rows": rows, "holds": all(map(holds, rows))}, indent=2))
    return 0 if all(map(holds, rows)) else 1


def _width(name: str) -> int:
    return 18 if name == "slowest" else 10


if __name__ == "__main__":
    sys.exit(main())
