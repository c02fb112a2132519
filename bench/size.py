"""What one task costs its coordinator as it grows, with virtual agents (`harness/fleet.py`): no torch, no
sockets, one process.

    python -m bench.size                                     64, 512 and 4,096 workers
    python -m bench.size --workers 16384                     the largest task that a job may ask for
    python -m bench.size --workers 512 --scenes submit,death --json

One row for each size and scene: events, CPU milliseconds of an event (median and largest, with its name), CPU
seconds of all of them, megabytes of orders, bytes per worker, kilobytes of the largest journal entry.

    submit     until it trains          node      a node of 8 workers is lost, and replaced
    seat       the one event of it      silent    16 nodes fall silent at once, and all others wait
    death      one worker, until back   restart   another coordinator reads the journal

Exit code 1 if an event takes longer than its budget (100 ms; above 4,096 workers 500 ms), or if a death costs
more than 3 KiB of orders per worker. Times are CPU seconds of this process; on a machine that others use they
are longer all the same (caches, frequency), so a figure is to be taken alone. Collections of garbage count,
and are kept short as a daemon does it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.server.term import keep_collections_short
from harness.fleet import Busy, Fleet

STAGES = 8
SLOTS = 8  # per node
NUM_SILENT = 16
MOST_BYTES = 3 << 10  # of orders, per worker and death
SCENES = ("submit", "seat", "death", "node", "silent", "restart")
COLUMNS = ("workers", "scene", "events", "p50_ms", "max_ms", "slowest", "total_s", "order_mb", "entry_kb")


def budget_ms(workers: int) -> float:
    return 100.0 if workers <= 4096 else 500.0


def measure(workers: int, scenes: tuple[str, ...] = SCENES) -> Iterator[dict[str, Any]]:
    """Rows, in the order of the scenes: each one begins where the one before has ended."""
    fleet = Fleet()
    fleet.join(workers // SLOTS + NUM_SILENT + 2, SLOTS)
    submitted = fleet.submit(Shape(workers // STAGES, STAGES, 4))
    seating = [event for event in submitted.events if event[0] == "TaskSubmitted"]
    fleet.seal()
    acts: dict[str, Callable[[], Busy]] = {
        "submit": lambda: submitted,
        "seat": lambda: Busy(events=seating),
        "death": lambda: fleet.exits(Worker(workers // STAGES // 2, 3)),
        "node": lambda: _lose(fleet, 1),
        "silent": lambda: _lose(fleet, min(NUM_SILENT, workers // SLOTS // 4)),
        "restart": lambda: fleet.restart()[1],
    }
    for scene in scenes:
        found = acts[scene]()
        row = found.row()
        yield {
            "workers": workers,
            "scene": scene,
            **{name: row[name] for name in ("events", "p50_ms", "max_ms", "slowest", "total_s", "order_mb")},
            "entry_kb": row["largest_entry_kb"],
            "order_bytes_per_worker": round(found.order_bytes / workers),
            "encode_s": row["encode_s"],
            "schedule_s": row["schedule_s"],
            # A restart is read with pauses in between; what it must not do is take long as a whole.
            "within_budget": scene == "restart" or row["max_ms"] <= budget_ms(workers),
        }
        if scene not in ("submit", "seat", "restart"):
            fleet.seal()


def _lose(fleet: Fleet, number: int) -> Busy:
    """So many nodes fall silent; then a worker of every other node says that it waits."""
    nodes = sorted({one.node for one in fleet.workers.values()})
    lost = set(nodes[:: max(1, len(nodes) // number)][:number])
    busy = fleet.falls_silent(sorted(lost))
    left = [worker for worker, one in fleet.workers.items() if one.node not in lost]
    for worker in [worker for worker, one in fleet.workers.items() if one.node in lost]:
        del fleet.workers[worker]
    _add(busy, fleet.waits(left))
    for _ in range(4):  # those that no peer misses are given up by their timers
        _add(busy, fleet.pass_time(10.0))
    return busy


def _add(busy: Busy, more: Busy) -> None:
    busy.events += more.events
    busy.num_orders += more.num_orders
    busy.order_bytes += more.order_bytes
    busy.largest_order = max(busy.largest_order, more.largest_order)
    busy.largest_entry = max(busy.largest_entry, more.largest_entry)
    busy.encode_s += more.encode_s
    busy.think_s += more.think_s


def holds(row: dict[str, Any]) -> bool:
    return bool(row["within_budget"]) and (
        row["scene"] != "death" or row["order_bytes_per_worker"] <= MOST_BYTES
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[64, 512, 4096], help="a multiple of 8 each"
    )
    parser.add_argument("--scenes", default=",".join(SCENES), help=f"of {', '.join(SCENES)}")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    scenes = tuple(given.scenes.split(","))
    if unknown := [scene for scene in scenes if scene not in SCENES]:
        parser.error(f"--scenes: {unknown[0]!r} is not one of {', '.join(SCENES)}.")
    if bad := [workers for workers in given.workers if workers < 32 or workers % STAGES]:
        parser.error(f"--workers: {bad[0]} is not a multiple of {STAGES}, 32 or more.")
    keep_collections_short()
    rows: list[dict[str, Any]] = []
    if not given.json:
        print("".join(f"{name:>{_width(name)}}" for name in COLUMNS))
    for workers in given.workers:
        for row in measure(workers, scenes):
            rows.append(row)
            if not given.json:
                missed = "" if holds(row) else "   over its budget"
                print("".join(f"{row[name]!s:>{_width(name)}}" for name in COLUMNS) + missed, flush=True)
    if given.json:
        print(json.dumps({"rows": rows, "holds": all(map(holds, rows))}, indent=2))
    return 0 if all(map(holds, rows)) else 1


def _width(name: str) -> int:
    return 18 if name == "slowest" else 10


if __name__ == "__main__":
    sys.exit(main())
