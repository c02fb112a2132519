"""Bugs planted in the machines, and the storms that must see them.

    python -m tests.storms.seek_mutants                 every planted bug: seeds until it is seen, seconds
    python -m tests.storms.seek_mutants --names a,b     these planted bugs only

Times are CPU seconds of this process. The exit code is 1 if a planted bug was not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from tests.storms import StormKind, draw_storm, is_of_cluster, run_storm

WITHIN = 2000


def mutants(args: argparse.Namespace) -> dict[str, Any]:
    """A table: each planted bug, the seeds until one sees it, CPU seconds, and which invariant broke."""
    from tests.storms.agent_mutants import CANCEL_MUTANTS, CLUSTER_MUTANTS, MEMORY_MUTANTS, TIMER_MUTANTS
    from tests.storms.mutants import GROUP_MUTANTS, MUTANTS, NODE_MUTANTS, SHARD_MUTANTS

    kinds: dict[str, StormKind] = {
        **dict.fromkeys(MUTANTS, ""),
        **dict.fromkeys(NODE_MUTANTS, "crowded"),
        **dict.fromkeys(SHARD_MUTANTS, "sharded"),
        **dict.fromkeys(GROUP_MUTANTS, "groups"),
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
    from tests.storms.mutants import planted

    began = time.process_time()
    for seed in range(WITHIN):
        spec = draw_storm(seed, kind)
        with planted(name):
            violation = run_storm(spec, cluster=is_of_cluster(kind)).violation
        if violation is not None and run_storm(spec, cluster=is_of_cluster(kind)).violation is None:
            spent = round(time.process_time() - began, 1)
            return {"seeds": seed + 1, "cpu_seconds": spent, "seen_as": violation.split(":")[0]}
    return {"seeds": None, "cpu_seconds": round(time.process_time() - began, 1), "seen_as": "not seen"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", default="", help="planted bugs, by name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = mutants(args)
    print(json.dumps(found) if args.json else f"{found['caught']} of {found['of']} were seen")
    return 0 if found["caught"] == found["of"] else 1


if __name__ == "__main__":
    sys.exit(main())
