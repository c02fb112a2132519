"""Where failures come from: published traces and rates, and files of real ones. Text in, a `Trace` out.

    trace-a    8 weeks, 10 severe and 33 other failures on 16 nodes, repairs of 1 to 7 days     (Unicron)
    trace-b    7 days, 26 severe and 80 other: about twenty times as often                      (Unicron)
    poisson    any published rate, per 1,000 node-days
    llama3     the interruptions of 54 days of Llama-3 405B on 16,384 GPUs, by their table
    c4         a month of one job of 4,096 GPUs with 40 crashes, by C4's table of causes          (C4)
    titan      GPU lifetimes of Titan: a window in time, consecutive locations mapped onto nodes

Spot traces are read by `readers.py`.

The counts and durations of trace-a and trace-b are as we recall them from the paper, whose traces were not
released; when and where the failures fall is drawn from the seed. How long a repair takes in trace-b is
not known at all: see `TRACE_B_REPAIR_H`.
"""

from __future__ import annotations

import csv
import io
import math
from datetime import datetime

from everstep.errors import UserError
from everstep_lab.draw import Draw
from everstep_lab.study.failures import (
    CAUSES,
    DAY_S,
    HOUR_S,
    Failure,
    FailureCause,
    Seen,
    Trace,
    of_any_but,
    of_severity,
    pick,
)

TRACE_A_REPAIR_H = (24.0, 168.0)
# Amplified twenty times with repairs of days, most nodes would be away at any time; repairs were scaled too,
# so that the pool stays stable, and we do not know how far. An eighth of trace-a's: about two of 16 nodes are
# away at any time. docs/simulator.md shows what other choices give.
TRACE_B_REPAIR_H = (3.0, 21.0)
RATES = {  # interruptions per 1,000 node-days of 8 GPUs
    "ft-hsdp": 2.3,
    "rsc-2": 2.34,
    "bloom": 3.0,
    "llama3": 3.8,
    "rsc-1": 6.5,
    "opt": 16.0,
}
# Llama-3 405B, 54 days, 2,048 nodes: unexpected interruptions, and how they would be seen.
LLAMA3 = (
    FailureCause("faulty GPU", 148, 1, Seen.EXCEPTION),
    FailureCause("HBM3 memory", 72, 1, Seen.EXCEPTION),
    FailureCause("software bug", 54, 2, Seen.EXIT),
    FailureCause("switch or cable", 35, 3, Seen.STATISTICS),
    FailureCause("host maintenance", 32, 1, Seen.SILENCE),
    FailureCause("GPU SRAM", 19, 1, Seen.EXCEPTION),
    FailureCause("GPU system processor", 17, 1, Seen.EXCEPTION),
    FailureCause("NIC", 7, 1, Seen.EXCEPTION),
    FailureCause("NCCL watchdog", 7, 2, Seen.STATISTICS),
    FailureCause("silent data corruption", 6, 1, Seen.EXCEPTION),
    FailureCause("thermal", 6, 1, Seen.EXCEPTION),
    FailureCause("SSD, PSU, chassis, IO board, CPU, DRAM", 14, 1, Seen.SILENCE),
    FailureCause("dependency", 2, 2, Seen.EXIT),
)
LLAMA3_DAYS, LLAMA3_NODES, LLAMA3_COUNT = 54.0, 2048, 419
LLAMA3_REPAIR_H = (4.0, 72.0)  # an assumption: the report says nothing of how long a host is away
# C4, table I, as recalled: shares of crashes, and how many of each are local to a node (82.5 % of all).
C4_CRASHES, C4_DAYS, C4_NODES = 40, 30.0, 512
C4 = (
    FailureCause("CUDA error", 12.5, 1, Seen.EXCEPTION),
    FailureCause("ECC or NVLink error", 27.5, 1, Seen.EXCEPTION),
    FailureCause("NCCL timeout, local", 15.0, 1, Seen.STATISTICS),
    FailureCause("NCCL timeout, not local", 5.0, 3, Seen.STATISTICS),
    FailureCause("ACK timeout, local", 22.5, 1, Seen.STATISTICS),
    FailureCause("ACK timeout, not local", 5.0, 3, Seen.STATISTICS),
    FailureCause("network or other, local", 5.0, 1, Seen.EXIT),
    FailureCause("network or other, not local", 7.5, 3, Seen.EXIT),
)


def trace_a(seed: int, *, nodes: int = 16) -> Trace:
    return _unicron(seed, "trace-a", 56, 10, 33, TRACE_A_REPAIR_H, nodes)


def trace_b(seed: int, *, nodes: int = 16, repair_h: tuple[float, float] = TRACE_B_REPAIR_H) -> Trace:
    return _unicron(seed, "trace-b", 7, 26, 80, repair_h, nodes)


def _unicron(
    seed: int, name: str, days: int, severe: int, other: int, repair_h: tuple[float, float], nodes: int
) -> Trace:
    draw = Draw(seed, name)
    horizon = days * DAY_S
    failures = []
    for i in range(severe + other):
        cause = of_severity(1, draw) if i < severe else of_any_but(1, draw)
        failures.append(
            Failure(
                at_s=draw.uniform(0, horizon),
                node=draw.below(nodes),
                severity=cause.severity,
                seen=cause.seen,
                cause=cause.name,
                repair_s=draw.uniform(*repair_h) * HOUR_S if i < severe else 0.0,
            )
        )
    return _trace(name, horizon, nodes, failures)


def poisson(
    seed: int,
    *,
    nodes: int,
    days: float,
    per_1000_node_days: float,
    repair_h: tuple[float, float] = (4.0, 72.0),
    causes: tuple[FailureCause, ...] = CAUSES,
    name: str = "poisson",
) -> Trace:
    """Independent failures at one rate; the kinds by their shares."""
    draw = Draw(seed, name)
    horizon = days * DAY_S
    rate = per_1000_node_days * nodes / 1000 / DAY_S
    failures = []
    at = _gap(draw, rate)
    while at < horizon:
        cause = pick(causes, draw)
        failures.append(
            Failure(
                at_s=at,
                node=draw.below(nodes),
                severity=cause.severity,
                seen=cause.seen,
                cause=cause.name,
                repair_s=draw.uniform(*repair_h) * HOUR_S if cause.severity == 1 else 0.0,
            )
        )
        at += _gap(draw, rate)
    return _trace(name, horizon, nodes, failures)


def llama3(seed: int, *, nodes: int = LLAMA3_NODES, days: float = LLAMA3_DAYS) -> Trace:
    rate = 1000 * LLAMA3_COUNT / (LLAMA3_NODES * LLAMA3_DAYS)
    return poisson(
        seed,
        nodes=nodes,
        days=days,
        per_1000_node_days=rate,
        repair_h=LLAMA3_REPAIR_H,
        causes=LLAMA3,
        name="llama3",
    )


def c4(seed: int, *, nodes: int = C4_NODES, repair_h: tuple[float, float] = (4.0, 72.0)) -> Trace:
    """Forty crashes in a month, whatever the number of nodes."""
    draw = Draw(seed, "c4")
    horizon = C4_DAYS * DAY_S
    failures = []
    for _ in range(C4_CRASHES):
        cause = pick(C4, draw)
        failures.append(
            Failure(
                at_s=draw.uniform(0, horizon),
                node=draw.below(nodes),
                severity=cause.severity,
                seen=cause.seen,
                cause=cause.name,
                repair_s=draw.uniform(*repair_h) * HOUR_S if cause.severity == 1 else 0.0,
            )
        )
    return _trace("c4", horizon, nodes, failures)


def titan(
    text: str,
    *,
    nodes: int = 128,
    gpus_per_node: int = 8,
    start: str = "2016-06-01",
    days: float = 90.0,
    first_location: int = 0,
    repair_h: tuple[float, float] = (4.0, 72.0),
    seed: int = 0,
) -> Trace:
    """A window in time of consecutive locations: neighbours share a node, so bursts stay bursts."""
    begin = datetime.fromisoformat(start)
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows or "location" not in rows[0]:
        raise UserError("the Titan file needs the columns location, remove and event.")
    locations = sorted({row["location"] for row in rows})
    chosen = locations[first_location : first_location + nodes * gpus_per_node]
    if len(chosen) < nodes * gpus_per_node:
        raise UserError(
            f"the Titan file has {len(locations)} locations; {nodes * gpus_per_node} are asked for."
        )
    node_of = {location: i // gpus_per_node for i, location in enumerate(chosen)}
    draw = Draw(seed, "titan")
    failures = []
    for row in rows:
        if row["event"] not in ("DBE", "OTB") or row["location"] not in node_of:
            continue
        at = (datetime.fromisoformat(row["remove"]) - begin).total_seconds()
        if 0 <= at < days * DAY_S:
            failures.append(
                Failure(
                    at_s=at,
                    node=node_of[row["location"]],
                    severity=1,
                    seen=Seen.EXCEPTION,
                    cause="double-bit ECC" if row["event"] == "DBE" else "off the bus",
                    repair_s=draw.uniform(*repair_h) * HOUR_S,
                )
            )
    return _trace("titan", days * DAY_S, nodes, failures)


def _gap(draw: Draw, rate: float) -> float:
    return -math.log(1.0 - draw.random()) / rate if rate > 0 else math.inf


def _trace(name: str, horizon: float, nodes: int, failures: list[Failure]) -> Trace:
    ordered = tuple(sorted(failures, key=lambda f: (f.at_s, f.node)))
    return Trace(name=name, horizon_s=horizon, nodes=nodes, failures=ordered)
