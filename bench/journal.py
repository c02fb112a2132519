"""What the coordinator's journal costs, and what a kill costs it: SQLite and etcd.

    python bench/journal.py                    about two minutes; etcd only where it is installed
    python bench/journal.py --kills 50 --takeovers 20 --json

append          one entry of 300 bytes, or 100 at once, until it is durable; `fsync` is a bare write and fsync
                of the same bytes, for scale
read back       open, read and check a journal of so many entries
kills           SIGKILL of a writer at random moments; how many acknowledged entries were lost, how many holes
take-over       kill -9 of the leading coordinator to the moment another has read the journal and leads; the
                lease is 3 s and renewed each second, so 2 to 3 s of it is waiting for the lease
slept           the leader is stopped (SIGSTOP) until another leads, then goes on: how many appends of it were
                acknowledged after that
both            kill -9 of the leading coordinator and of etcd's own leader at once (of three)
resign          take-over when the leader resigns
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from everstep.server.etcd import EtcdJournal
from everstep.server.journal import Journal, SqliteJournal
from harness.etcd import ABSENT, BINARY, Etcd, Member
from harness.journal_writer import read_back

ROOT = Path(__file__).parent.parent
ENTRY = b"x" * 300
Found = dict[str, Any]


def spread(seconds: list[float], unit: float = 1e3) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in QUANTILES.items()
    }
    return {name: round(value * unit, 3) for name, value in at.items()} | {
        "max": round(ordered[-1] * unit, 3)
    }


QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


async def timed(times: int, work: Callable[[], Awaitable[object]]) -> list[float]:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        await work()
        found.append(time.perf_counter() - began)
    return found


async def append_costs(journal: Journal, appends: int) -> Found:
    await journal.open()
    await journal.campaign()
    try:
        await timed(20, lambda: journal.append([ENTRY]))
        one = await timed(appends, lambda: journal.append([ENTRY]))
        hundred = await timed(appends // 10, lambda: journal.append([ENTRY] * 100))
        return {
            "append_ms": spread(one),
            "append_100_ms": spread(hundred),
            "entries_per_s": round(100 / statistics.median(hundred)),
        }
    finally:
        await journal.close()


def fsync_costs(folder: Path, times: int) -> list[float]:
    found = []
    with (folder / "bare").open("wb", buffering=0) as file:
        for _ in range(times):
            began = time.perf_counter()
            file.write(ENTRY)
            os.fsync(file.fileno())
            found.append(time.perf_counter() - began)
    return found


async def read_costs(path: Path, entries: int) -> Found:
    writing = SqliteJournal(path)
    await writing.open()
    for _ in range(entries // 1000):
        await writing.append([ENTRY] * 1000)
    await writing.close()
    began = time.perf_counter()
    reading = SqliteJournal(path)
    await reading.open()
    num_read = len(await reading.entries())
    seconds = time.perf_counter() - began
    await reading.close()
    return {"entries": num_read, "seconds": round(seconds, 3)}


def writer(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harness.journal_writer", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def last_acknowledged(process: subprocess.Popen[bytes], otherwise: int) -> int:
    assert process.stdout is not None
    lines = process.stdout.read().splitlines(keepends=True)
    process.wait()
    return max((int(line) for line in lines if line.endswith(b"\n")), default=otherwise)


def kills(path: Path, times: int, seed: int) -> Found:
    """SIGKILL while it writes, at once after `leads` or up to 0.3 s later; then read everything."""
    draw, last, lost, holes = random.Random(seed), 0, 0, 0

    async def look() -> int:
        journal = SqliteJournal(path)
        await journal.open()
        try:
            return await read_back(journal)
        finally:
            await journal.close()

    for _ in range(times):
        process = writer("sqlite", str(path))
        assert first_line(process) == b"leads\n"
        time.sleep(draw.uniform(0, 0.3))
        process.kill()
        acknowledged = last_acknowledged(process, last)
        try:
            last = asyncio.run(look())
        except AssertionError:
            holes += 1
        lost += max(0, acknowledged - last)
    return {"kills": times, "entries": last, "acknowledged_lost": lost, "holes": holes}


def takeovers(etcd: Etcd, times: int, seed: int) -> Found:
    """Each dead leader is followed by the one that waits; a new one begins to wait."""
    draw, names, found, lost, last = random.Random(seed), itertools.count(), list[float](), 0, 0

    def coordinator() -> subprocess.Popen[bytes]:
        return writer("etcd", ",".join(etcd.endpoints), "/takeovers", str(next(names)))

    leader = coordinator()
    assert first_line(leader) == b"leads\n"
    for _ in range(times):
        standby = coordinator()
        time.sleep(1 + draw.uniform(0, 1))  # until it waits; then any moment of the lease
        began = time.perf_counter()
        leader.kill()
        acknowledged = last_acknowledged(leader, last)
        assert first_line(standby) == b"leads\n"
        found.append(time.perf_counter() - began)
        last = int(first_line(standby))  # what it has read
        lost += max(0, acknowledged - last)
        leader = standby
    leader.kill()
    leader.wait()
    return {"trials": times, "seconds": spread(found, 1.0), "acknowledged_lost": lost}


def both_die(etcd: Etcd, times: int) -> dict[str, float]:
    """etcd elects a leader first, and every lease begins anew."""
    found = []
    for n in range(times):
        leader, standby = (
            writer("etcd", ",".join(etcd.endpoints), f"/both{n}", name) for name in ("leader", "standby")
        )
        first, _, _ = select.select([leader.stdout, standby.stdout], [], [])
        if standby.stdout in first:
            leader, standby = standby, leader
        time.sleep(1)
        member = next(member for member in etcd.members if _leads(member))
        began = time.perf_counter()
        member.kill()
        leader.kill()
        assert first_line(standby) == b"leads\n"
        found.append(time.perf_counter() - began)
        standby.kill()
        leader.wait()
        standby.wait()
        etcd.start(member)
    return spread(found, 1.0)


def _leads(member: Member) -> bool:
    question = urllib.request.Request(f"{member.client}/v3/maintenance/status", data=b"{}", method="POST")
    with urllib.request.urlopen(question, timeout=5) as answer:
        told = json.load(answer)
    return bool(told["leader"] == told["header"]["member_id"])


def sleepers(etcd: Etcd, times: int) -> Found:
    """A leader that wakes up believing it still leads must find out before it has written anything."""
    acknowledged_asleep, noticed_ms = 0, list[float]()
    for n in range(times):
        sleeper = writer("etcd", ",".join(etcd.endpoints), f"/sleepers{n}", "sleeper")
        assert first_line(sleeper) == b"leads\n"
        standby = writer("etcd", ",".join(etcd.endpoints), f"/sleepers{n}", "standby")
        time.sleep(0.5)
        sleeper.send_signal(signal.SIGSTOP)
        assert first_line(standby) == b"leads\n"
        read = int(first_line(standby))
        began = time.perf_counter()
        sleeper.send_signal(signal.SIGCONT)
        last = last_acknowledged(sleeper, 0)  # it ends by LostLeadership
        noticed_ms.append(time.perf_counter() - began)
        acknowledged_asleep += max(0, last - read)
        standby.kill()
        standby.wait()
    return {"trials": times, "acknowledged": acknowledged_asleep, "ended_ms": spread(noticed_ms)}


async def resignations(etcd: Etcd, times: int) -> list[float]:
    found = []
    for n in range(times):
        first, second = (EtcdJournal(etcd.endpoints, prefix="/resign", name=f"{n}{k}") for k in "ab")
        await first.open()
        await first.campaign()
        await second.open()
        waiting = asyncio.create_task(second.campaign())
        await asyncio.sleep(0.3)
        began = time.perf_counter()
        await first.close()
        await waiting
        found.append(time.perf_counter() - began)
        await second.close()
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> Found:
    found: Found = {"cpus": os.cpu_count(), "seed": arguments.seed}
    note("sqlite: appends")
    found["fsync_ms"] = spread(fsync_costs(folder, arguments.appends))
    found["sqlite"] = asyncio.run(append_costs(SqliteJournal(folder / "appends"), arguments.appends))
    note("sqlite: read back")
    found["sqlite"]["read_back"] = asyncio.run(read_costs(folder / "read", arguments.entries))
    note(f"sqlite: {arguments.kills} kills")
    found["sqlite"]["killed"] = kills(folder / "kills", arguments.kills, arguments.seed)
    if BINARY is None:
        found["etcd"] = ABSENT
        return found
    for members in (1, 3):
        note(f"etcd of {members}: appends, {arguments.takeovers} take-overs")
        with Etcd(folder / f"etcd{members}", members=members) as etcd:
            journal = EtcdJournal(etcd.endpoints, prefix="/appends", name="bench", lease_s=30)
            row = asyncio.run(append_costs(journal, arguments.appends))
            row["take_over"] = takeovers(etcd, arguments.takeovers, arguments.seed)
            if members == 3:
                row["both_die_s"] = both_die(etcd, max(1, arguments.takeovers // 5))
            row["slept"] = sleepers(etcd, max(1, arguments.takeovers // 5))
            row["resign_ms"] = spread(asyncio.run(resignations(etcd, 5)))
            found[f"etcd_{members}"] = row
    return found


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(found: Found) -> str:
    lines = [f"{'':10}{'append ms p50 / p95 / p99':>28}{'100 at once':>24}{'entries/s':>12}"]
    lines.append(f"{'fsync':10}{_three(found['fsync_ms']):>28}")
    for name in ("sqlite", "etcd_1", "etcd_3"):
        if name in found:
            row = found[name]
            one, hundred = _three(row["append_ms"]), _three(row["append_100_ms"])
            lines.append(f"{name:10}{one:>28}{hundred:>24}{row['entries_per_s']:>12,}")
    read, killed = found["sqlite"]["read_back"], found["sqlite"]["killed"]
    lines.append(f"sqlite: {read['entries']:,} entries opened, checked and read in {read['seconds']} s")
    lines.append(
        f"sqlite: {killed['kills']} SIGKILLs, {killed['entries']:,} entries, "
        f"{killed['acknowledged_lost']} acknowledged lost, {killed['holes']} holes"
    )
    for name in ("etcd_1", "etcd_3"):
        if name in found:
            take, resign = found[name]["take_over"], found[name]["resign_ms"]
            lines.append(
                f"{name}: take-over after kill -9 p50 {take['seconds']['p50']:.2f} s, max "
                f"{take['seconds']['max']:.2f} s ({take['trials']} trials, {take['acknowledged_lost']} "
                f"acknowledged lost); after resigning p50 {resign['p50']:.0f} ms"
            )
            slept = found[name]["slept"]
            lines.append(
                f"{name}: {slept['trials']} leaders slept through their lease, {slept['acknowledged']} of "
                f"their later appends acknowledged, ended {slept['ended_ms']['p50']:.0f} ms after waking"
            )
    if "etcd_3" in found:
        both = found["etcd_3"]["both_die_s"]
        lines.append(
            f"etcd_3: take-over when etcd's leader dies too p50 {both['p50']:.2f} s, max {both['max']:.2f} s"
        )
    if isinstance(found.get("etcd"), str):
        lines.append(found["etcd"])
    return "\n".join(lines)


def _three(values: dict[str, float]) -> str:
    return " / ".join(f"{values[name]:.2f}" for name in QUANTILES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--appends", type=int, default=500)
    parser.add_argument("--entries", type=int, default=100_000, help="of the journal that is read back")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--takeovers", type=int, default=5, help="for each size of etcd")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-journal-") as folder:
        found = measure(arguments, Path(folder))
    print(json.dumps(found, indent=2) if arguments.json else table(found))


if __name__ == "__main__":
    main()
