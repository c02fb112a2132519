"""Storms by seed: thousands of random ones around the real decisions.

    python -m tests.storms --seeds 0:1000                      one task's recovery
    python -m tests.storms --kind cluster --seeds fresh:200    around the whole coordinator; seeds drawn now
    python -m tests.storms --kind moves --seeds 0:500 --json
    python -m tests.storms --seeds 583 --keep 0,3 --transcript

Each seed is one storm: it determines shape, network and faults. Invariants are checked after every event. The
faults end after a while, and training must then finish. A failing seed is reduced to few faults and printed
with the command that replays it. The exit code is 1 if a storm failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import sys
import time
from typing import Any, get_args

from tests.storms import StormKind, draw_storm, is_of_cluster, run_storm
from tests.storms.shrink import shrink

SHOWN = 3  # failing seeds printed in full
TAIL = 40  # lines of their transcripts
KINDS = ["task", *(kind for kind in get_args(StormKind) if kind)]


def seeds(text: str) -> range:
    first, _, last = text.partition(":")
    if first == "fresh" and last.isdigit() and int(last):
        drawn = secrets.randbelow(1 << 40)
        return range(drawn, drawn + int(last))
    if first.isdigit() and not last:
        return range(int(first), int(first) + 1)
    if first.isdigit() and last.isdigit() and int(first) < int(last):
        return range(int(first), int(last))
    raise argparse.ArgumentTypeError(f"{text!r} is not of the form 0:1000, 17 or fresh:100.")


def numbers(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of fault numbers such as 0,3.")
    return tuple(int(part) for part in text.split(","))


def replay(seed: int, kind: StormKind, few: tuple[int, ...] | None = None) -> str:
    kept = "" if few is None else f" --keep {','.join(map(str, few))}"
    return f"python -m tests.storms --kind {kind or 'task'} --seeds {seed}{kept} --transcript"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.storms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seeds", type=seeds, default=range(1000), metavar="A:B|N|fresh:N", help="B is excluded"
    )
    parser.add_argument("--kind", choices=KINDS, default="task")
    parser.add_argument("--keep", type=numbers, help="only these faults of the one seed, by number")
    parser.add_argument(
        "--transcript", action="store_true", help="every event of the one seed, in virtual time"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    kind: StormKind = "" if given.kind == "task" else given.kind
    if given.transcript or given.keep is not None:
        if len(given.seeds) != 1:
            parser.error("--transcript and --keep look at one storm; give one seed, as in --seeds 17.")
        return show_one(parser, given, kind)
    return run_all(given, kind)


def show_one(parser: argparse.ArgumentParser, given: argparse.Namespace, kind: StormKind) -> int:
    spec = draw_storm(given.seeds[0], kind)
    if given.keep is not None:
        if any(number >= len(spec.faults) for number in given.keep):
            parser.error(f"--keep names a fault that the seed does not have; it has {len(spec.faults)}.")
        spec = spec.keep(given.keep)
    report = run_storm(spec, record=given.transcript, cluster=is_of_cluster(kind))
    if given.json:
        fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
        print(json.dumps(fields | {"spec": spec.lines()}))
    else:
        print("\n".join([*spec.lines(), *report.transcript]))
        print(f"hash {report.hash}; {report.violation or 'passed'}")
    return 0 if report.violation is None else 1


def run_all(given: argparse.Namespace, kind: StormKind) -> int:
    gc.disable()  # millions of small objects and no cycle worth the look
    began = time.process_time()
    failed: list[tuple[int, str]] = []
    events = deaths = incidents = moved = digest = 0
    for seed in given.seeds:
        report = run_storm(draw_storm(seed, kind), cluster=is_of_cluster(kind))
        events += report.events
        deaths += report.deaths
        incidents += report.incidents
        moved += report.roles
        digest = (digest * 31 + int(report.hash, 16)) % (1 << 64)
        if report.violation is not None:
            failed.append((seed, report.violation))
            print(
                f"seed {seed}: {report.violation[:160]}\n  {replay(seed, kind)}", file=sys.stderr, flush=True
            )
        if seed % 500 == 499:
            gc.collect()
    spent = time.process_time() - began
    gc.enable()
    count = len(given.seeds)
    result: dict[str, Any] = {
        "seeds": [given.seeds[0], given.seeds[-1] + 1],
        "passed": count - len(failed),
        "failed": [{"seed": s, "violation": v, "replay": replay(s, kind)} for s, v in failed],
        "events": events,
        "deaths": deaths,
        "incidents": incidents,
        "changes_of_stage": moved,
        "cpu_seconds": round(spent, 2),
        "seeds_per_second": round(count / max(spent, 1e-9), 1),
        "hash": f"{digest:016x}",
    }
    if given.json:
        print(json.dumps(result))
    else:
        tell(result, failed, kind)
    return 1 if failed else 0


def tell(result: dict[str, Any], failed: list[tuple[int, str]], kind: StormKind) -> None:
    first, last = result["seeds"]
    print(
        f"{kind or 'task'} seeds {first}:{last}: {result['passed']} passed, {len(failed)} failed; "
        f"{result['events']} events, {result['deaths']} deaths, {result['incidents']} incidents, "
        f"{result['changes_of_stage']} changes of stage; {result['cpu_seconds']} s of one core, "
        f"{result['seeds_per_second']} seeds/s; hash {result['hash']}"
    )
    for seed, _ in failed[:SHOWN]:
        spec = draw_storm(seed, kind)
        few = shrink(spec, cluster=is_of_cluster(kind))
        report = run_storm(spec.keep(few), record=True, cluster=is_of_cluster(kind))
        print("\n".join(["", *spec.keep(few).lines()]))
        print("\n".join(line[:200] for line in report.transcript[-TAIL:]))
        print(f"seed {seed}: {report.violation}")
        print(f"with {len(few)} of its {len(spec.faults)} faults: {replay(seed, kind, few)}")


if __name__ == "__main__":
    sys.exit(main())
