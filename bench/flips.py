"""Single bits flipped at random in one worker: found, by whom, after how many steps, with which losses?

    python bench/flips.py                       20 trials of each kind, every contribution is checked
    python bench/flips.py --trials 4 --json
    python bench/flips.py --votes sampled --cost 0.1 --only weights
    python bench/flips.py --clean 500           no flips: false alarms in so many steps
    python bench/flips.py --device cuda --trials 3

Kinds: activation, gradient, boundary tensor, master weights and optimizer state are flipped in a worker
process of a real run of 2 or 3 replicas; a bit of a memory copy and of a checkpoint is flipped in its file.
`right`: the worker with the flip is the only one named. `losses`: every loss of the run has the bits of a run
without a flip.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from everstep.engine.telemetry.faults import FLIPPED
from everstep.launch.local.run import LocalTask
from everstep.node.fork_server import ForkServer
from harness.flips import Flips, draw, flip_in_checkpoint, flip_in_memory_copy, job_for

OF_FILES = {"memory copy": flip_in_memory_copy, "checkpoint part": flip_in_checkpoint}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20, help="of each kind")
    parser.add_argument("--only", choices=[*FLIPPED, *OF_FILES], action="append", help="these kinds alone")
    parser.add_argument("--votes", choices=["every", "sampled", "off"], default="every")
    parser.add_argument("--cost", type=float, default=0.01, help="for --votes sampled")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where workers compute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean", type=int, default=0, metavar="STEPS", help="no flips: count false alarms")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    given = parser.parse_args()
    server = ForkServer().start()
    try:
        found = clean(server, given) if given.clean else flips(server, given)
    finally:
        server.close()
    print(json.dumps(found, indent=1) if given.json else table(found))
    return 0 if found["ok"] else 1


def flips(server: ForkServer, given: argparse.Namespace) -> dict[str, Any]:
    runner, rows = Flips(server, votes=given.votes, cost=given.cost, device=given.device), []
    for what in given.only or [*FLIPPED, *OF_FILES]:
        rng = random.Random(f"{given.seed} {what}")
        for number in range(given.trials):
            if what in OF_FILES:
                rows.append(OF_FILES[what](rng))
                continue
            trial = draw(rng, what, microbatches=2)
            row = runner.run(trial)
            rows.append(row)
            if not row["losses_equal"] or row["innocent"]:
                print(f"{what} {number}: {row}", file=sys.stderr, flush=True)
    kinds = {row["what"] for row in rows}
    return {
        "votes": given.votes,
        "trials": rows,
        "kinds": {what: summary([row for row in rows if row["what"] == what]) for what in sorted(kinds)},
        "ok": given.votes != "every" or all(row["losses_equal"] and not row.get("innocent") for row in rows),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    after = [row["after_steps"] for row in rows if row.get("after_steps") is not None]
    return {
        "trials": len(rows),
        "found": sum(row["found"] for row in rows),
        "right": sum(row["right"] for row in rows),
        "innocent": sum(bool(row.get("innocent")) for row in rows),
        "losses_equal": sum(row["losses_equal"] for row in rows),
        "most_steps": max(after, default=0),
    }


def clean(server: ForkServer, given: argparse.Namespace) -> dict[str, Any]:
    """Every contribution of every step is checked, and nothing is wrong."""
    job = job_for(3, 2, votes=given.votes, cost=given.cost, steps=given.clean, device=given.device)
    outcome = LocalTask(job, fork_server=server).run()
    alarms = [incident.what for incident in outcome.incidents]
    return {"votes": given.votes, "steps": given.clean, "false_alarms": alarms, "ok": not alarms}


def table(found: dict[str, Any]) -> str:
    if "kinds" not in found:
        return f"{found['steps']} steps, votes {found['votes']}: {len(found['false_alarms'])} false alarms"
    names = ("trials", "found", "right", "innocent", "losses", "steps")
    lines = [f"{'flipped in':16} " + " ".join(f"{name:>8}" for name in names)]
    for what, row in found["kinds"].items():
        numbers = [row[key] for key in ("trials", "found", "right", "innocent", "losses_equal", "most_steps")]
        lines.append(f"{what:16} " + " ".join(f"{number:8}" for number in numbers))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
