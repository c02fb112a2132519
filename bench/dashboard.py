"""What people who look cost: a cluster of many nodes, many events, many viewers, and one real browser.

    python -m bench.dashboard --nodes 1000 --events 50 --viewers 20 --seconds 20

The coordinator is a process of its own, agents are words (four heartbeats a second each), events are nodes
drained and readmitted, each on disk before it is told. One viewer is chromium with the page open, the rest
read the same line. `behind`: from the moment on record of a decision until it is painted, or read.
`--picture FOLDER` keeps what the page looked like. With --json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.browser import Page, browser
from harness.cluster import Cluster, small_job

TOKEN = "harness"
SIGNED = {"Authorization": f"Bearer {TOKEN}"}
SLOTS = 8
BEAT_S = 0.25
AT_ONCE = 40  # nodes drained
_OBSERVE = """
window.behindMs = []; window.longTasksMs = []; window.paints = 0;
new PerformanceObserver((list) => { for (const entry of list.getEntries()) if (entry.name === "shown") {
  window.paints++;
  for (const at of entry.detail) window.behindMs.push(performance.timeOrigin + entry.startTime - at * 1000);
} }).observe({ type: "mark" });
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasksMs.push(entry.duration);
}).observe({ type: "longtask" });
"""


# ------------------------------------------------------------------ agents that are only words


async def crowd(address: str, number: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=SIGNED) as session:
        await asyncio.gather(*(_agent(session, address, index) for index in range(number)))


async def _agent(session: aiohttp.ClientSession, address: str, index: int) -> None:
    async with session.ws_connect(f"{address}/v1/agent", max_msg_size=1 << 22) as line:
        hello = {"node": f"node-{index:04}", "boot": "1", "slots": SLOTS, "host": "127.0.0.1"}
        await line.send_str(json.dumps({"hello": hello, "done": 0}))
        done = 0

        async def read() -> None:
            nonlocal done
            async for message in line:
                done = max(done, json.loads(message.data).get("number", 0))

        reading = asyncio.create_task(read())
        await asyncio.sleep(random.Random(index).uniform(0, BEAT_S))
        while not reading.done():
            await line.send_str(json.dumps({"beat": 0, "done": done}))
            await asyncio.sleep(BEAT_S)


@contextlib.contextmanager
def crowded(address: str, number: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.dashboard", "--crowd", address, "--nodes", str(number)]
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


# ------------------------------------------------------------------ events and viewers


class Happenings:
    """Nodes in turn are drained, and readmitted a second or two later; several calls under way at a time."""

    def __init__(self, session: aiohttp.ClientSession, address: str, names: list[str], per_s: float) -> None:
        self._session, self._address, self._names, self._per_s = session, address, names, per_s
        self.count = 0

    async def go_on(self) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as posts:
            for number in range(sys.maxsize):
                turn, verb = (number // 2, "drain") if number % 2 == 0 else (number // 2 - AT_ONCE, "readmit")
                posts.create_task(self._post(self._names[turn % len(self._names)], verb))
                await asyncio.sleep(max(0.0, began + (number + 1) / self._per_s - time.monotonic()))

    async def _post(self, node: str, verb: str) -> None:
        async with self._session.post(f"{self._address}/v1/nodes/{node}/{verb}") as answer:
            answer.raise_for_status()
        self.count += 1


@dataclass(slots=True)
class Viewer:
    received_bytes: int = 0
    messages: int = 0
    behind_ms: list[float] = field(default_factory=list)

    async def look(self, session: aiohttp.ClientSession, address: str) -> None:
        async with session.ws_connect(f"{address}/v1/watch?as=page", max_msg_size=1 << 26) as line:
            async for message in line:
                now = time.time()
                told = json.loads(message.data)
                self.received_bytes += len(message.data)
                self.messages += 1
                if told["kind"] == "changes":
                    self.behind_ms += [(now - news["at"]) * 1e3 for news in told.get("news", [])]

    def forget(self) -> None:
        self.received_bytes = self.messages = 0
        self.behind_ms.clear()


# ------------------------------------------------------------------ measuring


def _cpu_s(pid: int) -> float:
    """Of a process and all below it."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    share = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(at * (len(ordered) - 1))], 1) for name, at in share.items()}


async def _share(pid: int, seconds: float) -> float:
    began, used = time.monotonic(), _cpu_s(pid)
    await asyncio.sleep(seconds)
    return round((_cpu_s(pid) - used) / (time.monotonic() - began), 3)


async def _pictures(page: Page, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, height, dark in (("wide", 1600, 1000, False), ("phone", 390, 844, True)):
        await page.look(width=width, height=height, dark=dark)
        await asyncio.sleep(1.0)
        await page.picture(folder / f"{name}.png")


async def measure(given: argparse.Namespace, cluster: Cluster, address: str) -> dict[str, Any]:
    pid = cluster.coordinators["first"].pid
    names = [node["node"] for node in cluster.client.get("/v1/status")["nodes"] if not node["workers"]]
    viewers = [Viewer() for _ in range(given.viewers - 1)]
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=SIGNED) as session,
        browser() as chromium,
        chromium.page() as page,
    ):
        happenings = Happenings(session, address, names, given.events)
        happening = asyncio.create_task(happenings.go_on())
        unseen = await _share(pid, given.seconds / 2)
        looking = [asyncio.create_task(viewer.look(session, address)) for viewer in viewers]
        await page.look(width=1600, height=1000, dark=False)
        await page.sign_in(address, cluster.token)
        await asyncio.sleep(2.0)
        await page.value(_OBSERVE)
        for viewer in viewers:
            viewer.forget()
        page_bytes, events, began = page.received_bytes, happenings.count, time.monotonic()
        browser_s = _cpu_s(chromium.process.pid)
        seen = await _share(pid, given.seconds)
        took, events = time.monotonic() - began, happenings.count - events
        browser_share = (_cpu_s(chromium.process.pid) - browser_s) / took
        told = json.loads(await page.value("JSON.stringify([behindMs, longTasksMs, paints])"))
        told_bytes = page.received_bytes - page_bytes
        if given.picture is not None:
            await _pictures(page, given.picture)
        if happening.done():
            happening.result()
        for task in (happening, *looking):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    behind, long_tasks, paints = told
    received = [told_bytes, *(viewer.received_bytes for viewer in viewers)]
    return {
        "nodes": given.nodes,
        "slots_a_node": SLOTS,
        "viewers": given.viewers,
        "events_per_s": round(events / took, 1),
        "decisions_told_per_s": round(len(behind) / took, 1),
        "page_behind_ms": _spread(behind),
        "page_within_250_ms": round(sum(value <= 250 for value in behind) / max(1, len(behind)), 4),
        "line_behind_ms": _spread([value for viewer in viewers for value in viewer.behind_ms]),
        "page_updates_per_s": round(paints / took, 2),
        "page_tasks_over_50_ms": len(long_tasks),
        "page_longest_task_ms": round(max(long_tasks, default=0.0), 1),
        "browser_cpu_share": round(browser_share, 3),
        "server_cpu_share_unseen": unseen,
        "server_cpu_share_seen": seen,
        "bytes_per_s_a_viewer": round(statistics.fmean(received) / took),
        "complaints_of_the_page": page.complaints,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--events", type=float, default=50.0, help="a second")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tasks", type=int, default=0, help="of 64 workers each, which only hold slots")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--crowd", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.crowd:
        asyncio.run(crowd(given.crowd, given.nodes))
        return
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as name,
        Cluster(Path(name), token=TOKEN) as cluster,
    ):
        address = cluster.start_coordinator()
        with crowded(address, given.nodes):
            cluster.nodes_up(given.nodes)
            for number in range(given.tasks):
                job = small_job(Path(name), steps=1000, replicas=16, stages=4)
                cluster.submit(job, name=f"task-{number}")
            told = asyncio.run(measure(given, cluster, address))
    if given.json:
        print(json.dumps(told, indent=2))
        return
    for key, value in told.items():
        print(f"{key:28} {value}")


if __name__ == "__main__":
    main()
