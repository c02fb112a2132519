"""Pictures of the dashboard, before, during and after a kill: real coordinator, agents, workers and browser.

    python -m tools.screenshots /tmp/pictures             # all 36: three pages, three moments, four looks
    python -m tools.screenshots docs/dashboard --few      # those that the documentation shows

Three nodes of two slots train a GPT on 3 replicas x 2 stages. One node is killed with all that runs on it;
there is no spare slot, so its work is done by peers until the node is back.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from pathlib import Path

from harness.browser import Page, browser
from harness.cluster import Cluster, small_job

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
    given = parser.parse_args()
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
