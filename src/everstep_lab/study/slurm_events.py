"""Node failures as Slurm keeps them: `sacctmgr -P show event`, or jobs with state NODE_FAIL in `sacct -P`.

Only nodes that the file names are known; nodes that never failed are asked for with `--nodes`. A repair that
the file does not end lasts longer than the study.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from datetime import datetime

from everstep.errors import UserError
from everstep_lab.study.failures import Failure, Seen, Trace

DOWN = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "DRAIN")  # what a task can no longer run on
MOST_NODES = 100_000
Outage = tuple[float, float, str, str]  # from, to (infinite: not known), node, cause


def node_events(text: str, name: str = "events", seed: int = 0) -> Trace:
    outages: list[Outage] = []
    times: list[float] = []
    for line, row in _rows(text):
        start = _time(row, "TimeStart", name, line)
        end = _time(row, "TimeEnd", name, line) if row.get("TimeEnd") else None
        times += [t for t in (start, end) if t is not None]
        state = row.get("State", "DOWN").upper()
        if start is None or not row.get("NodeName", "").strip() or not state.startswith(DOWN):
            continue
        for node in expand(row["NodeName"], f"{name}: line {line}"):
            cause = row.get("Reason") or state
            outages.append((start, math.inf if end is None else end, node, cause.strip()))
    return _trace(name, outages, times, set())


def job_records(text: str, name: str = "jobs", seed: int = 0) -> Trace:
    """A node fails when a job ends with NODE_FAIL, and is back when the next job starts on it. Without
    FailedNode the job's first node counts.
    """
    failed: list[tuple[float, str]] = []
    starts: list[tuple[float, str]] = []
    times: list[float] = []
    nodes: set[str] = set()
    for line, row in _rows(text):
        if "." in row["JobID"]:  # a step of a job
            continue
        start, end = (_time(row, key, name, line) for key in ("Start", "End"))
        times += [t for t in (start, end) if t is not None]
        used = expand(row["NodeList"], f"{name}: line {line}")
        nodes.update(used)
        if start is not None:
            starts += [(start, node) for node in used]
        if row["State"].startswith("NODE_FAIL") and end is not None:
            named = expand(row.get("FailedNode") or "", f"{name}: line {line}")
            failed += [(end, node) for node in named or used[:1]]
    starts.sort()
    outages = [
        (at, next((s for s, n in starts if n == node and s > at), math.inf), node, "NODE_FAIL")
        for at, node in failed
    ]
    return _trace(name, outages, times, nodes)


def _trace(name: str, outages: list[Outage], times: list[float], nodes: set[str]) -> Trace:
    if not outages:
        raise UserError(f"{name} holds no failed node; a study needs at least one.")
    numbers = {node: i for i, node in enumerate(sorted(nodes | {o[2] for o in outages}))}
    first, last = min(times), max(times)
    failures = tuple(
        Failure(
            at_s=start - first,
            node=numbers[node],
            severity=1,
            seen=Seen.SILENCE,
            cause=cause,
            repair_s=max(1.0, end - start),
        )
        for start, end, node, cause in sorted(outages)
    )
    return Trace(name=name, horizon_s=max(last - first, 1.0), nodes=len(numbers), failures=failures)


def _rows(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(io.StringIO(text.strip()), delimiter="|", quoting=csv.QUOTE_NONE)
    for row in reader:
        yield reader.line_num, {str(k).strip(): v or "" for k, v in row.items() if isinstance(v, str | None)}


def _time(row: dict[str, str], key: str, name: str, line: int) -> float | None:
    text = row.get(key, "").strip()
    if text in ("", "Unknown", "None"):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UserError(
            f"{name}: line {line}: {key} is {text!r}; Slurm writes times as 2024-05-01T10:00:00."
        ) from None


def expand(text: str, where: str) -> list[str]:
    """`gpu[01-03,7],login` as names; `None assigned` as none."""
    text = text.strip()
    if not text or text.lower() in ("none assigned", "none", "unknown"):
        return []
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[\]]*)(?:\[([^\]]*)\])?([^\[\]]*)", part)
        if match is None or text.count("[") != text.count("]"):
            raise UserError(f"{where}: {text!r} is not a list of nodes such as gpu[01-03,7].")
        head, ranges, tail = match[1], match[2], match[3]
        for number in _numbers(ranges, where) if ranges is not None else [""]:
            found.append(head + number + tail)
            if len(found) > MOST_NODES:
                raise UserError(f"{where}: a list names more than {MOST_NODES} nodes.")
    return found


def _numbers(ranges: str, where: str) -> Iterator[str]:
    for one in ranges.split(","):
        low, dash, high = one.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise UserError(f"{where}: [{ranges}] is not a range of nodes such as [01-03,7].")
        for number in range(int(low), int(high if dash else low) + 1):
            yield str(number).zfill(len(low))
