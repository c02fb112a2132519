"""Files of real failures: text in, a `Trace` out. `FORMS` has a row per form of file; the first line decides.

Spot files say who came and went, or only how many were there. Which instance a count lost is not in the file,
so it is drawn from the seed. A study begins when the fleet's first request has been filled: at the last join
of the file's first ten minutes, with the nodes that are there then.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from everstep.errors import UserError
from everstep_lab.draw import Draw
from everstep_lab.study.failures import DAY_S, LOST, Failure, Seen, Trace

RAMP_S = 600.0
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
Samples = list[tuple[float, int]]  # (time, nodes that are there), by time


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One form of file: what it is called, its first lines, how it is recognised and read."""

    name: str
    example: str
    fits: Callable[[str], bool]  # the first line that is neither empty nor a comment (#)
    read: Callable[[str, str, int], Trace]  # text, name, seed


def read(text: str, *, name: str, seed: int = 0) -> Trace:
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    for form in FORMS:
        if form.fits(first):
            return form.read(text, name, seed)
    raise UserError(f"{name} is not a trace that can be read; use {forms()}.")


def forms() -> str:
    """All forms in words, for refusals and for help."""
    each = [f"{form.name} ({form.example})" for form in (*FORMS, TITAN)]
    return ", ".join(each[:-1]) + f" or {each[-1]}"


# ------------------------------------------------------------------ who came and went


def spot(text: str, name: str = "spot", seed: int = 0) -> Trace:
    """Bamboo's form. A removed instance comes back only if the file says so."""
    numbers: dict[str, int] = {}
    events: list[tuple[float, int, int]] = []  # time, 0 for a loss and 1 for a join, node
    for line, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if not row:
            continue
        cells = [cell.strip() for cell in row]
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not cells[0].isdigit():
            raise UserError(f"{name}: line {line} is not of the form 1200,add,node7.")
        node = numbers.setdefault(cells[2], len(numbers))
        events.append((int(cells[0]) / 1e3, int(cells[1] == "add"), node))
    if not any(kind for _, kind, _ in events):
        raise UserError(f"{name} adds no node; give lines such as 1200,add,node7.")
    events.sort()
    start = _filled([(at, 1 if kind else -1) for at, kind, _ in events])
    return _onto_places(name, start, events)


def segments(text: str, name: str = "segments", seed: int = 0) -> Trace:
    """Parcae's form, a row per minute: `[60000, "remove", {"nodes": ["node-3"], "duration": 60000}]`. The
    strategies that its planner noted in each row are not read.
    """
    numbers: dict[str, int] = {}
    events: list[tuple[float, int, int]] = []
    end = 0.0
    for line, row in enumerate(text.splitlines(), 1):
        if not row.strip() or row.startswith("#"):
            continue
        try:
            at_ms, what, about = json.loads(row)
            at, duration = float(at_ms) / 1e3, float(about.get("duration", 0)) / 1e3
            nodes = [str(node) for node in about["nodes"]]
        except MALFORMED:
            what, at, duration, nodes = "", 0.0, 0.0, []
        if what not in ("add", "remove", "no-op") or not (math.isfinite(at + duration) and at >= 0):
            raise UserError(f"{name}: line {line} is not of the form {SEGMENT}.")
        events += [(at, int(what == "add"), numbers.setdefault(node, len(numbers))) for node in nodes]
        end = max(end, at + duration)
    if not any(kind for _, kind, _ in events):
        raise UserError(f"{name} adds no node; give lines such as {SEGMENT}.")
    events.sort()
    start = _filled([(at, 1 if kind else -1) for at, kind, _ in events])
    trace = _onto_places(name, start, events)
    return replace(trace, horizon_s=max(trace.horizon_s, end - start))


SEGMENT = '[1200, "add", {"nodes": ["node-7"]}]'


def _onto_places(name: str, start: float, events: Sequence[tuple[float, int, int]]) -> Trace:
    """Instances come and go under ever new names; what a policy sees is a pool of as many places as ever ran
    at once.
    """
    there: dict[int, int] = {}
    for at, kind, node in events:
        if at <= start:
            there[node] = kind
    first = sorted(node for node, kind in there.items() if kind)
    place_of = {node: place for place, node in enumerate(first)}
    free: list[int] = []
    places = len(first)
    lost, come = [], []
    for at, kind, node in events:
        if at <= start:
            continue
        if not kind and node in place_of:
            free.append(place_of.pop(node))
            lost.append(_taken(at - start, free[-1]))
        elif kind and node not in place_of:
            if not free:
                free.append(places)
                places += 1
            place_of[node] = free.pop()
            come.append((at - start, place_of[node]))
    return Trace(
        name=name,
        horizon_s=events[-1][0] - start,
        nodes=places,
        failures=tuple(lost),
        joins=tuple(come),
        absent=tuple(range(len(first), places)),
        spot=True,
    )


def _filled(changes: Sequence[tuple[float, int]]) -> float:
    """When the first request is filled: the last join within ten minutes of the first."""
    joins = [at for at, change in changes if change > 0]
    return max(at for at in joins if at <= joins[0] + RAMP_S)


# ------------------------------------------------------------------ which nodes were faulty

FAULT = '{"node_id": "a", "event_time": 3.9, "event_type": "fault_start", "fault_type": {"Class": "GPU"}}'
# How a fault of this class shows in a running task; others take the node away.
SHOWS: dict[str, Seen] = {
    "GPU": Seen.EXCEPTION,
    "NIC": Seen.STATISTICS,
    "Parameter Plane Cable": Seen.STATISTICS,
}


def faults(text: str, name: str = "faults", seed: int = 0) -> Trace:
    """StepFun's InfiniteHBD form: a JSON list of faults that start and end, in days. Faults of one node that
    overlap are one. A fault that has only its end in the file was there at the start; one without an end
    lasts longer than the study. Nodes that never failed are not in the file: `--nodes` adds them.
    """
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {error}.") from None
    events: list[tuple[float, int, str, str]] = []  # time, 1 for a start and 0 for an end, node, class
    for number, row in enumerate(rows, 1):
        try:
            at, what = float(row["event_time"]) * DAY_S, row["event_type"]
            node, kind = str(row["node_id"]), str(row.get("fault_type", {}).get("Class", "fault"))
        except MALFORMED:
            what, at, node, kind = "", 0.0, "", ""
        if what not in ("fault_start", "fault_end") or not (math.isfinite(at) and at >= 0):
            raise UserError(f"{name}: entry {number} is not of the form {FAULT}.")
        events.append((at, int(what == "fault_start"), node, kind))
    if not events:
        raise UserError(f"{name} has no fault; a study needs at least one, such as [{FAULT}].")
    events.sort(key=lambda event: (event[0], -event[1]))
    numbers = {node: i for i, node in enumerate(sorted({node for _, _, node, _ in events}))}
    horizon = events[-1][0]
    found = [
        Failure(
            at_s=start,
            node=numbers[node],
            severity=1,
            seen=SHOWS.get(kind, Seen.SILENCE),
            cause=kind,
            repair_s=max(1.0, end - start),
        )
        for start, end, node, kind in _outages(events)
    ]
    found.sort(key=lambda failure: (failure.at_s, failure.node))
    return Trace(name=name, horizon_s=max(horizon, 1.0), nodes=len(numbers), failures=tuple(found))


def _outages(events: Sequence[tuple[float, int, str, str]]) -> Iterator[tuple[float, float, str, str]]:
    """(start, end, node, class) of what is left when overlapping faults of a node are joined."""
    open_: dict[str, tuple[float, int, str]] = {}  # node -> since when, how many faults, class of the first
    ended: set[str] = set()
    for at, starts, node, kind in events:
        since, count, first = open_.get(node, (at, 0, kind))
        if starts:
            open_[node] = since, count + 1, first
        elif count > 1:
            open_[node] = since, count - 1, first
        elif count == 1:
            del open_[node]
            yield since, at, node, first
        elif node not in ended:
            yield 0.0, at, node, kind
        ended.add(node)
    for node, (since, _, first) in open_.items():
        yield since, math.inf, node, first


# ------------------------------------------------------------------ how many were there


def available(text: str, name: str = "available", seed: int = 0) -> Trace:
    """SkyPilot's form: {"metadata": {"gap_seconds": 195}, "data": [16, 15, ...]}."""
    try:
        document = json.loads(text)
        gap, counts = float(document["metadata"]["gap_seconds"]), [int(x) for x in document["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{name} is not a spot-availability file: it needs metadata.gap_seconds and data, "
            f"a list of counts ({type(error).__name__})."
        ) from None
    if not (math.isfinite(gap) and gap > 0):
        raise UserError(f"{name}: metadata.gap_seconds is {gap:g}; make it more than 0.")
    return from_counts(name, [(i * gap, count) for i, count in enumerate(counts)], seed, last_s=gap)


def logged(text: str, name: str = "log", seed: int = 0) -> Trace:
    """GCP availability logs as Bamboo has them: `2021-12-11, 11:11:30, 55`. Stamps may be out of order."""
    samples: Samples = []
    for line, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if not row:
            continue
        try:
            date, clock, count = (cell.strip() for cell in row)
            samples.append((datetime.fromisoformat(f"{date}T{clock}").timestamp(), int(count)))
        except ValueError:
            raise UserError(f"{name}: line {line} is not of the form 2021-12-11, 11:11:30, 55.") from None
    return from_counts(name, samples, seed)


def plain(text: str, name: str = "counts", seed: int = 0) -> Trace:
    """`time,up`: seconds or dates with a clock, and how many nodes are up from then on."""
    samples: Samples = []
    for line, row in enumerate(csv.reader(io.StringIO(text)), 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (line == 1 and [c.lower() for c in cells] == ["time", "up"]):
            continue
        try:
            at, count = cells
            samples.append((_moment(at), int(count)))
        except ValueError:
            raise UserError(
                f"{name}: line {line} is not of the form 300,16 or 2024-05-01T10:00:00,16 (time,up)."
            ) from None
    return from_counts(name, samples, seed)


def from_counts(name: str, samples: Samples, seed: int, *, last_s: float = 0.0) -> Trace:
    """`last_s`: how long the last count holds."""
    if any(count < 0 for _, count in samples):
        raise UserError(f"{name}: a count of nodes is below 0.")
    samples = sorted(samples)
    most = max((count for _, count in samples), default=0)
    if most < 1:
        raise UserError(f"{name} holds no time at which a node was available.")
    changes = [
        (at, count - before)
        for (at, count), before in zip(samples, (0, *(c for _, c in samples)), strict=False)
        if count != before
    ]
    start = _filled(changes)
    draw = Draw(seed, "victims")
    here = list(range(sum(change for at, change in changes if at <= start)))
    away = list(range(len(here), most))
    absent, lost, come = tuple(away), [], []
    for at, change in changes:
        if at <= start:
            continue
        for _ in range(-change):
            away.append(here.pop(draw.below(len(here))))
            lost.append(_taken(at - start, away[-1]))
        for _ in range(change):
            here.append(away.pop(0))
            come.append((at - start, here[-1]))
    return Trace(
        name=name,
        horizon_s=samples[-1][0] + last_s - start,
        nodes=most,
        failures=tuple(lost),
        joins=tuple(come),
        absent=absent,
        spot=True,
    )


def _moment(text: str) -> float:
    try:
        at = float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
    if not math.isfinite(at):
        raise ValueError(text)
    return at


def _taken(at_s: float, node: int) -> Failure:
    return Failure(at_s=at_s, node=node, severity=1, seen=LOST.seen, cause="taken away", repair_s=math.inf)


# ------------------------------------------------------------------ the forms


def _columns(*names: str) -> Callable[[str], bool]:
    return lambda first: set(names) <= {cell.strip() for cell in first.split("|")}


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda first: re.fullmatch(pattern, first) is not None


FORMS = (
    TraceFile("Parcae's segments", SEGMENT, _matches(r'\[[^\[\]{"]+,.*'), segments),
    TraceFile("InfiniteHBD's faults", f"[{FAULT}]", lambda first: first.startswith("["), faults),
    TraceFile("spot events", "1200,add,node7", _matches(r"[^,]*,\s*(add|remove)\s*,[^,]*"), spot),
    TraceFile(
        "a GCP availability log",
        "2021-12-11, 11:11:30, 55",
        _matches(r"[^,]*-[^,]*,[^,]*:[^,]*,[^,]*"),
        logged,
    ),
    TraceFile("counts", "time,up", _matches(r"[^,|{]+,[^,]+"), plain),
    TraceFile(
        "SkyPilot JSON",
        '{"metadata": {"gap_seconds": 195}, "data": [16, 15]}',
        lambda first: first.startswith("{"),
        available,
    ),
)
TITAN = TraceFile(
    "Titan lifetimes", "SN,location,insert,remove,...", lambda first: first.startswith("SN,"), spot
)
