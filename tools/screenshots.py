"""Pictures of the dashboard, before, during and after a kill: real coordinator, agents, workers and browser.

    python -m tools.screenshots /tmp/pictures             # all 36: three pages, three moments, four looks
    python -m tools.screenshots docs/dashboard --few      # those that the documentation shows
    python -m tools.screenshots /tmp/pictures --nodes 1000

Three nodes of two slots train a GPT on 3 replicas x 2 stages. One node is killed with all that runs on it;
there is no spare slot, so its work is done by peers until the node is back.

With `--nodes` so many agents without workers join, in racks of 16. A rack falls silent, and nodes are drained
one by one: pictures of the page and of `everstep report`, and how long the page takes for its first picture
and for a change (from the decision on record to the frame that shows it).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from harness.browser import Page, browser
from harness.cluster import EVERSTEP, Cluster, small_job
from harness.fake_agents import Crowd, FakeAgent

VIEWS = ("cluster", "task", "incident")
LOOKS = {
    "wide-light": (1280, 900, False),
    "wide-dark": (1280, 900, True),
    "phone-light": (390, 844, False),
    "phone-dark": (390, 844, True),
}
FEW = {
    ("cluster", "during", "wide-light"),
    ("task", "during", "wide-light"),
    ("incident", "after", "wide-light"),
    ("task", "after", "wide-dark"),
    ("cluster", "during", "phone-dark"),
}
SETTLE_S = 0.7  # for readings, which are asked for twice a second


class Pictures:
    def __init__(self, cluster: Cluster, page: Page, folder: Path, *, few: bool) -> None:
        self.cluster, self.page, self.folder, self.few = cluster, page, folder, few
        self.made: list[Path] = []

    async def take(self, moment: str) -> None:
        for view in VIEWS:
            looks = [look for look in LOOKS if not self.few or (view, moment, look) in FEW]
            if not looks:
                continue
            await self.page.value(f"location.hash = {self._hash(view)!r}")
            for look in looks:
                width, height, dark = LOOKS[look]
                await self.page.look(width=width, height=height, dark=dark)
                if view == "cluster" and moment != "before":
                    await self.page.value("document.querySelector('#unwell button')?.click(); scrollTo(0, 0)")
                await asyncio.sleep(SETTLE_S)
                overflow = await self.page.value("document.documentElement.scrollWidth - innerWidth")
                if overflow > 0:
                    print(f"{view} {moment} {look}: {overflow} px wider than the window")
                path = self.folder / f"{view}-{moment}-{look}.png"
                await self.page.picture(path, whole=width < 600 and not self.few)
                if self.few:
                    _shrink(path)
                self.made.append(path)

    def _hash(self, view: str) -> str:
        if view == "cluster":
            return "#/"
        if view == "task":
            return "#/task/gpt"
        numbers = [one["number"] for one in self.cluster.incidents()]
        return f"#/incident/{numbers[0]}" if numbers else "#/incidents"


def _shrink(path: Path) -> None:
    """A page has few colours: a palette is a third of the bytes."""
    from PIL import Image

    with Image.open(path) as image:
        rare_too = Image.Quantize.MAXCOVERAGE  # a small mark in its own colour is the point of the picture
        few = image.convert("RGB").quantize(
            256, method=rare_too, kmeans=5
        )  # which keeps the background as it is
        few.save(path, optimize=True)


OBSERVE = """
window.behind = []; window.long = 0;
new PerformanceObserver((list) => { for (const mark of list.getEntriesByName("shown"))
  for (const at of mark.detail) behind.push(performance.timeOrigin + mark.startTime - 1000 * at);
}).observe({entryTypes: ["mark"]});
new PerformanceObserver((list) => { long += list.getEntries().length; }).observe({entryTypes: ["longtask"]});
"""
RACK = 16
CHANGES = 40


@asynccontextmanager
async def crowded(cluster: Cluster, number: int) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """By rack, what keeps its nodes alive."""
    headers = {"Authorization": f"Bearer {cluster.token}"}
    crowd = Crowd([cluster.addresses["first"]], headers, beat_s=0.4)
    racks: dict[str, list[FakeAgent]] = {}
    for index in range(number):
        name, rack = f"n{index:04}", f"rack {index // RACK + 1}"
        crowd.agents[name] = FakeAgent(name, crowd, slots=8, rack=rack)
        racks.setdefault(rack, []).append(crowd.agents[name])

    async def live(session: aiohttp.ClientSession, nodes: list[FakeAgent]) -> None:
        await asyncio.gather(*(node.live(session) for node in nodes))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        living = {rack: asyncio.create_task(live(session, nodes)) for rack, nodes in racks.items()}
        try:
            yield living
        finally:
            for task in living.values():
                task.cancel()
            await asyncio.gather(*living.values(), return_exceptions=True)


async def play_crowd(cluster: Cluster, folder: Path, number: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    address = cluster.addresses["first"]
    async with crowded(cluster, number) as racks, browser() as chromium, chromium.page() as page:
        await asyncio.to_thread(cluster.nodes_up, number)
        for task, replicas in (("llama", number // 8), ("gpt", number // 16), ("waits", number + 1)):
            job = small_job(folder, steps=100_000, replicas=replicas, stages=8)
            asked = {"name": task, "job": job, "min_workers": 8 * replicas}
            await asyncio.to_thread(cluster.client.post, "/v1/tasks", asked)
        await page.sign_in(address, cluster.token)
        await page.look(width=1280, height=900, dark=False)
        first_ms = []
        for _ in range(5):
            await page.open("about:blank")
            await page.open(f"{address}/#/")
            first_ms.append(await page.until('performance.getEntriesByName("first")[0]?.startTime'))
        await page.value(OBSERVE)
        for index in range(CHANGES):
            name, verb = f"n{number - 1 - index // 2:04}", ("drain", "readmit")[index % 2]
            await asyncio.to_thread(cluster.client.post, f"/v1/nodes/{name}/{verb}", {})
            await asyncio.sleep(0.15)
        await asyncio.sleep(SETTLE_S)
        behind_ms = sorted(await page.value("behind"))
        long = await page.value("long")
        racks[f"rack {max(1, len(racks) - 4)}"].cancel()
        await page.until("document.getElementById('headline').innerText.includes('silent')")
        await asyncio.sleep(SETTLE_S)
        for view, place in (("cluster", "#/"), ("tasks", "#/tasks")):
            await page.value(f"location.hash = {place!r}")
            await asyncio.sleep(3 * SETTLE_S)
            await page.picture(folder / f"{view}-{number}-nodes.png")
            _shrink(folder / f"{view}-{number}-nodes.png")
        if page.complaints:
            raise RuntimeError(f"the page complains: {page.complaints}")
        report = [*EVERSTEP, "report", "--since", "7d", "--picture", str(folder / "report.svg")]
        environment = os.environ | {"EVERSTEP_ADDRESS": address, "EVERSTEP_TOKEN": cluster.token}
        await asyncio.to_thread(subprocess.run, report, env=environment, check=True)
    at = {share: behind_ms[min(len(behind_ms) - 1, int(share * len(behind_ms)))] for share in (0.5, 0.95, 1)}
    return [
        f"{number} nodes in {len(racks)} racks",
        f"first picture, ms after the page was opened: {', '.join(f'{one:.0f}' for one in first_ms)}",
        f"a change, ms from its record to its frame, p50 / p95 / max of {len(behind_ms)}: "
        + " / ".join(f"{one:.0f}" for one in at.values()),
        f"main-thread tasks over 50 ms meanwhile: {long}",
    ]


async def play(cluster: Cluster, folder: Path, *, few: bool) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    async with browser() as chromium, chromium.page() as page:
        await page.sign_in(cluster.addresses["first"], cluster.token)
        pictures = Pictures(cluster, page, folder, few=few)
        await asyncio.to_thread(cluster.step_reached, 8, "gpt")
        await pictures.take("before")
        cluster.signal_node("node-b", signal.SIGKILL)
        cluster.agents["node-b"].wait()
        await asyncio.to_thread(cluster.until, lambda: cluster.incidents() or None, "an incident")
        step = cluster.task("gpt")["step"]
        await asyncio.to_thread(cluster.step_reached, step + 2, "gpt")
        await pictures.take("during")
        cluster.start_agent("node-b", slots=2)
        await asyncio.to_thread(cluster.all_members, "gpt")
        await asyncio.to_thread(cluster.step_reached, cluster.task("gpt")["step"] + 4, "gpt")
        await pictures.take("after")
        if page.complaints:
            raise RuntimeError(f"the page complains: {page.complaints}")
        return pictures.made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--few", action="store_true", help="only those of the documentation")
    parser.add_argument("--nodes", type=int, default=0, help="so many without workers; how quick the page is")
    given = parser.parse_args()
    if given.nodes:
        with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name, Cluster(Path(name)) as cluster:
            cluster.start_coordinator()
            for line in asyncio.run(play_crowd(cluster, given.folder, given.nodes)):
                print(line)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name, Cluster(Path(name)) as cluster:
        cluster.start_coordinator()
        for node in ("node-a", "node-b", "node-c"):
            cluster.start_agent(node, slots=2)
        cluster.nodes_up(3)
        model = {"preset": "gpt-tiny", "depth": 4}
        optimizer = {"lr": 1e-2, "warmup": 4}
        job = small_job(Path(name), steps=4000, replicas=3, stages=2, model=model, optimizer=optimizer)
        cluster.submit(job, name="gpt")
        made = asyncio.run(play(cluster, given.folder, few=given.few))
    size = sum(path.stat().st_size for path in made)
    print(f"{len(made)} pictures, {size >> 10} kB, in {time.monotonic() - began:.0f} s, in {given.folder}")


if __name__ == "__main__":
    main()
