"""A leader that is deposed without dying, again and again: one coordinator acts at a time, nothing is lost.

    python bench/depose.py --times 20
    python bench/depose.py --times 4 --json

Two coordinators share an etcd, each through a proxy of this script; two agents and a task train meanwhile.
In turn the leader is stopped (SIGSTOP) for longer than its lease, or its way to etcd is cut, and nothing else
of it. The other must lead with a higher term; then the first goes on. An impostor that claims an old term is
among the addresses of the agents: whenever an agent looks for a leader it may meet it, and must refuse it.

    took over     seconds until the other leads
    both claim    looks at which both said that they lead; what they wrote is decided by etcd alone
    refused       lines of agents that refuse a coordinator of an old term
    losses, rows  of the task at the end, compared with a run without failures
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from aiohttp import web

from everstep.job.job import Job
from everstep.launch.local.api import run_job

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when run by path

from harness.cluster import Cluster, small_job
from harness.etcd import ABSENT, BINARY, Etcd

LEASE_S = 3.0
NAMES = ("first", "second")


class Proxy:
    """Passes bytes to etcd, or nothing at all while it is cut."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self._target, self.cut, self.port = (host, int(port)), False, 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection(*self._target)
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                while self.cut:
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
        writer.close()


class Impostor:
    """Says that it leads, of a term that is long over, and orders all workers to be ended."""

    def __init__(self) -> None:
        self.port, self.met = 0, 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", self._serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        with contextlib.suppress(ConnectionError, TypeError, TimeoutError):
            await line.receive(timeout=10)
            self.met += 1
            await line.send_json({"welcome": "x", "heard": 0, "term": 1})
            order = {"is": "KeepOnly", "keep": []}
            await line.send_json({"number": 10**9, "order": order, "because": "old", "term": 1})
            await line.receive(timeout=10)
        return line


class Watch:
    """Asks both coordinators, many times per second, whether they lead."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.addresses, self.both, self.looks = addresses, 0, 0
        self.leads = dict.fromkeys(addresses, False)
        self.over = False
        for name in addresses:  # one each: a stopped one answers late
            threading.Thread(target=self._run, args=(name,), daemon=True).start()

    def _run(self, name: str) -> None:
        while not self.over:
            self.leads[name] = self._leads(self.addresses[name])
            self.looks += 1
            self.both += all(self.leads.values())
            time.sleep(0.05)

    def _leads(self, address: str) -> bool:
        try:
            with urllib.request.urlopen(f"{address}/v1/health", timeout=2) as answer:
                return bool(json.load(answer)["leads"])
        except (OSError, ValueError):
            return False

    def leader(self) -> str | None:
        leading = [name for name, leads in self.leads.items() if leads]
        return leading[0] if len(leading) == 1 else None

    def until_leads(self, names: tuple[str, ...], within_s: float = 60.0) -> str:
        deadline = time.monotonic() + within_s
        while (leader := self.leader()) not in names:
            if time.monotonic() > deadline:
                raise TimeoutError(f"none of {names} leads: {self.leads}")
            time.sleep(0.02)
        assert leader is not None
        return leader


def serve(*servers: Any) -> None:
    ready = threading.Event()

    async def main() -> None:
        for server in servers:
            await server.start()
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
    ready.wait(10)


def run(times: int, folder: Path, say: Any) -> dict[str, Any]:
    job = small_job(folder, steps=100_000, optimizer={"decay": "constant"})
    job |= {"data": {"kind": "synthetic", "rows": 1, "sequence": 16}}
    rows = []
    with Etcd(folder / "etcd") as etcd:
        proxies = {name: Proxy(etcd.endpoints[0]) for name in NAMES}
        impostor = Impostor()
        serve(impostor, *proxies.values())
        with Cluster(folder, etcd=etcd.endpoints, eager=True) as cluster:
            for name in NAMES:
                cluster.etcd = [f"http://127.0.0.1:{proxies[name].port}"]
                cluster.start_coordinator(name, wait=name == "first")
            addresses = [*cluster.addresses.values(), f"http://127.0.0.1:{impostor.port}"]
            for node in "ab":
                cluster.start_agent(node, slots=2, through=",".join(addresses))
            watch = Watch(cluster.addresses)
            watch.until_leads(NAMES)
            cluster.nodes_up(2)
            cluster.submit(job)
            cluster.step_reached(1)
            for number in range(times):
                try:
                    rows.append(deposed(number, cluster, watch, proxies, impostor))
                except TimeoutError:
                    say(cluster.logs()[-6000:])
                    raise
                say(json.dumps(rows[-1]))
            last = cluster.task()["step"] + 3
            cluster.step_reached(last)
            told = cluster.task()
            watch.over = True
    refused = sum(path.read_text().count("its orders are refused") for path in folder.glob("agent-*.log"))
    losses = {row["step"]: row["loss"] for row in told["rows"]}
    clean = run_job(Job.from_dict(job | {"steps": max(losses)}))
    return {
        "rows": rows,
        "steps": max(losses),
        "missing": sorted(set(range(1, max(losses) + 1)) - set(losses))[:5],
        "both_claim": watch.both,
        "looks": watch.looks,
        "refused": refused,
        "clean_steps": len(clean.by_step()),
        "apart": [s for s, row in clean.by_step().items() if s in losses and row.loss != losses[s]][:5],
    }


def deposed(
    number: int, cluster: Cluster, watch: Watch, proxies: dict[str, Proxy], impostor: Impostor
) -> Any:
    leader = watch.until_leads(NAMES)
    other = next(name for name in NAMES if name != leader)
    step, met, how = cluster.task()["step"], impostor.met, ("stopped", "cut from etcd")[number % 2]
    process, began = cluster.coordinators[leader], time.monotonic()
    if how == "stopped":
        process.send_signal(signal.SIGSTOP)
    else:
        proxies[leader].cut = True
    watch.until_leads((other,))
    took_s = time.monotonic() - began
    cluster.step_reached(step + 1)
    if how == "stopped":
        process.send_signal(signal.SIGCONT)
    else:
        proxies[leader].cut = False
    cluster.nodes_up(2)
    cluster.step_reached(cluster.task()["step"] + 1)
    return {
        "how": how,
        "took_over_s": round(took_s, 2),
        "step_before": step,
        "step_after": cluster.task()["step"],
        "impostor_met": impostor.met - met,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if BINARY is None:
        print(ABSENT, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="depose-") as name:
        report = run(arguments.times, Path(name), lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(report))
    else:
        print(f"{'':3} {'the leader is':14} {'took over':>10} {'step before':>12} {'step after':>11}")
        for number, row in enumerate(report["rows"], 1):
            times = f"{row['took_over_s']:8.2f} s {row['step_before']:12} {row['step_after']:11}"
            print(f"{number:3} {row['how']:14} {times}")
        for key in ("steps", "missing", "apart", "both_claim", "looks", "refused"):
            print(f"{key:12} {report[key]}")
    return 1 if report["missing"] or report["apart"] or not report["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
