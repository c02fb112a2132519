"""The page of a run on this machine: it costs a socket until somebody calls, and can fail as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from everstep.cli.client import Client
from everstep.core.cluster.coordinator import Coordinator
from everstep.core.cluster.snapshot import digest
from everstep.drive.driver import Handled
from everstep.errors import EverstepError
from everstep.launch.local import api
from everstep.launch.local.outcome import Outcome
from everstep.launch.local.page import RunPage
from everstep.launch.local.run import _Loop
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from harness.browser import CHROMIUM, browser

NODE, TASK = "here", "task"


class WordyRun:
    """A run without workers: its events are those the test tells."""

    def __init__(self, page: RunPage) -> None:
        self.coordinator, self.outcome = Coordinator(), Outcome()
        self.processes = {Worker(0, 0): SimpleNamespace(incarnation=1, child=SimpleNamespace(pidfd=-1))}
        self.done: list[Any] = []
        self.page, self.loop = page, _Loop()
        page.attach(self, self.loop)  # type: ignore[arg-type]
        self.hear(msg.NodeJoined(node=NODE, boot=NODE, slots=4, host="127.0.0.1"))
        shape = Shape(2, 2, 4)
        self.hear(msg.TaskSubmitted(task=TASK, job={}, shape=shape, steps=9, secret="s"))

    def hear(self, event: msg.ClusterEvent) -> None:
        now = time.monotonic()
        actions = self.coordinator.handle(event, now)
        self.page.handled(Handled(self.coordinator.events, now, event, actions, replayed=False))

    def report(self, number: int, event: ev.Event) -> None:
        told = msg.TaskEvent(task=TASK, event=event)
        sender = msg.Sender(TASK, event.worker, event.incarnation)  # type: ignore[union-attr]
        self.hear(msg.FromNode(node=NODE, boot=NODE, number=number, report=told, sender=sender))

    def meanwhile(self, call: Callable[[], Any]) -> Any:
        """What a call to the page returns, while the run turns."""
        found: list[Any] = []

        def keep() -> None:
            try:
                found.append(call())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=keep, daemon=True)
        thread.start()
        while thread.is_alive():
            self.loop.serve(0.01)
            self.page.tick()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def kill(self, worker: Worker) -> None:
        self.done.append(("kill", worker))

    def slow(self, worker: Worker, factor: float) -> None:
        self.done.append(("slow", worker, factor))

    def finish(self, because: str) -> None:
        self.done.append(("finish", because))

    def readings_document(self) -> list[dict[str, Any]]:
        return [{"worker": "0:0", "incarnation": 1, "pid": 1, "reading": None}]


@contextlib.contextmanager
def running(*, may_hurt: bool = False) -> Iterator[tuple[WordyRun, Client]]:
    with RunPage(may_hurt=may_hurt) as page:
        address, _, token = page.address.partition("/#token=")
        run = WordyRun(page)
        yield run, Client(address=address, token=token)
        page.detach()
        run.loop.close()


def test_until_somebody_calls_the_page_is_a_socket_on_loopback_and_no_process() -> None:
    with running() as (run, _):
        assert run.page._follower is None
        assert urlsplit(run.page.address).hostname == "127.0.0.1"
        for _ in range(3):
            run.loop.serve(0.0)
        assert not run.page.watched


def test_the_follower_is_where_the_run_is_and_follows_it_also_after_its_own_death() -> None:
    with running() as (run, client):
        run.report(1, ev.WorkerStarted(worker=Worker(0, 0), incarnation=1, address=("127.0.0.1", 1)))
        same(run, client)
        run.report(2, ev.WorkerExited(worker=Worker(0, 0), incarnation=1, reason="killed by SIGKILL"))
        same(run, client)
        (incident,) = run.meanwhile(lambda: client.get("/v1/incidents"))
        assert incident["what"] == "killed by SIGKILL"
        assert abs(incident["opened_at"] - time.time()) < 60, "the page tells the wall's time"
        first = run.page._follower
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        run.report(3, ev.WorkerStarted(worker=Worker(0, 1), incarnation=1, address=("127.0.0.1", 2)))
        same(run, client)
        assert run.page._follower is not first


@pytest.mark.alone
def test_a_follower_that_does_not_read_is_let_go_and_never_waited_for() -> None:
    with running() as (run, client):
        run.meanwhile(lambda: client.get("/v1/health"))
        follower = run.page._follower
        assert follower is not None
        os.kill(follower.pid, signal.SIGSTOP)
        long = msg.FromNode(node=NODE, boot=NODE, number=1, report=msg.KernelSpoke(text="x" * 100_000))
        slowest = 0.0
        for _ in range(200):
            began = time.monotonic()
            run.hear(long)
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 1.0
        assert not run.page.watched, "200 times 100 kB, and nobody read them"
        assert follower.poll() is not None


def test_a_page_that_goes_wrong_ends_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as (run, client):
        run.meanwhile(lambda: client.get("/v1/health"))
        run.readings_document = lambda: 1 / 0  # type: ignore[assignment,return-value]
        with contextlib.suppress(EverstepError):
            run.meanwhile(lambda: client.get(f"/v1/tasks/{TASK}/readings"))
        run.report(1, ev.WorkerStarted(worker=Worker(0, 0), incarnation=1, address=("127.0.0.1", 1)))
        assert "page: given up (ZeroDivisionError" in capsys.readouterr().err
        assert not run.page.watched
        assert run.coordinator.tasks[TASK].seats[Worker(0, 0)].incarnation == 1, "the run has heard it"


def test_what_changes_something_needs_the_token_and_comes_from_no_other_page() -> None:
    async def status(method: str, path: str, **headers: str) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, address + path, headers=headers) as answer,
        ):
            return answer.status

    with running(may_hurt=True) as (run, client):
        address, token = client.address, {"Authorization": f"Bearer {client.token}"}
        kill = f"/v1/tasks/{TASK}/workers/0:0/kill"

        def asked(method: str, path: str, **headers: str) -> int:
            code: int = run.meanwhile(lambda: asyncio.run(status(method, path, **headers)))
            return code

        assert asked("GET", "/") == 200
        assert asked("GET", "/v1/status") == 401
        assert asked("POST", kill) == 401
        assert asked("POST", kill, Authorization="Bearer guess") == 401
        assert asked("POST", kill, Origin="http://evil.example", **token) == 403
        assert run.done == []
        assert asked("POST", kill, **token) == 200
        assert run.done == [("kill", Worker(0, 0))]
        assert asked("POST", f"/v1/nodes/{NODE}/drain", **token) == 403
        assert asked("POST", f"/v1/tasks/{TASK}/cancel", **token) == 403, "a demo runs to its end"


def test_workers_are_slowed_and_fast_again_by_the_same_click_and_the_absent_cannot_be_hurt() -> None:
    with running(may_hurt=True) as (run, client):
        workers = f"/v1/tasks/{TASK}/workers"
        assert "3 times as long" in run.meanwhile(lambda: client.post(f"{workers}/0:0/slow"))["said"]
        assert "normal speed again" in run.meanwhile(lambda: client.post(f"{workers}/0:0/slow"))["said"]
        assert run.done == [("slow", Worker(0, 0), 3.0), ("slow", Worker(0, 0), 1.0)]
        with pytest.raises(EverstepError, match="worker 1:1 is not running"):
            run.meanwhile(lambda: client.post(f"{workers}/1:1/kill"))


def test_a_run_that_is_no_demo_can_be_cancelled_and_its_workers_cannot_be_hurt() -> None:
    with running() as (run, client):
        with pytest.raises(EverstepError, match="in a demo only"):
            run.meanwhile(lambda: client.post(f"/v1/tasks/{TASK}/workers/0:0/kill"))
        assert run.meanwhile(lambda: client.get(f"/v1/tasks/{TASK}/readings"))["workers"][0]["node"] == NODE
        run.meanwhile(lambda: client.post(f"/v1/tasks/{TASK}/cancel"))
        assert run.done == [("finish", "cancelled by an operator on its page")]


WORDS = """Promise.all([import("/web/words.js"), import("/web/chart.js")]).then(([words, chart]) => [
    words.awaited("D[50 stage 1 2]"), words.awaited("G[23 stage 0 0.3]"),
    chart.ticks(0, 1.25), chart.ticks(1.72, 5.56), chart.decimals([5.545, 5.55, 5.6]), words.loss(5.511),
    words.happened({ what: "killed by SIGKILL", workers: ["0:1"] }),
    words.happened({ what: "node a is gone", workers: ["0:1"] })])"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)")
def test_in_a_browser_the_address_is_enough_and_a_worker_is_killed_by_clicking_it(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        async with browser() as chromium, chromium.page() as page:
            await page.open(address)
            await page.until("document.getElementById('link')?.dataset.state === 'live'", within_s=60)
            await page.until(f"location.hash === '#/task/{TASK}'")  # not the token, and not a fleet of one
            assert await page.value("document.querySelector('nav a').offsetParent") is None, "no cluster here"
            await page.click("nav a[data-view=incidents]")
            await page.click("nav a[data-view=tasks]")  # the way back, which the page of a run did not have
            await page.until(f"location.hash === '#/task/{TASK}'")
            assert await page.value("document.querySelector('nav a[data-view=tasks]').innerText") == "Run"
            assert await page.value(WORDS) == [
                "waits for hashes of a vote of replica 2",
                "waits for gradient 0.3",
                [0, 0.5, 1, 1.5],
                [1, 2, 3, 4, 5, 6],
                3,
                "5.5110",
                "worker 0:1: killed by SIGKILL",
                "node a is gone",
            ]
            assert await page.value("scrollY") == 0, "its title is below the bar"
            assert await page.value("document.getElementById('hurt-kill').disabled")
            await page.click("#places tbody td")
            await page.until("document.querySelector('#places td').getAttribute('aria-pressed') === 'true'")
            await page.click("#hurt-kill")
            await page.until("document.getElementById('toast').innerText.includes('sent SIGKILL')")
            assert await page.value("document.getElementById('cancel').hidden"), "a demo runs to its end"
            await page.picture(tmp_path / "demo.png")
            assert page.complaints == []
            token = address.partition("#token=")[2]
            assert not any(token in asked for asked in page.requests)

    with running(may_hurt=True) as (run, _):
        run.meanwhile(lambda: asyncio.run(play(run.page.address)))
        assert run.done == [("kill", Worker(0, 0))]


def same(run: WordyRun, client: Client) -> None:
    """The follower's state becomes the run's. It hears a moment later; its death breaks the next call."""
    ours, deadline = digest(run.coordinator), time.monotonic() + 90
    while True:
        with contextlib.suppress(EverstepError):
            if run.meanwhile(lambda: client.get("/v1/digest"))["digest"] == ours:
                return
        assert time.monotonic() < deadline, "the follower is somewhere else"


@pytest.mark.slow
def test_train_prints_the_address_of_its_page_where_the_run_is_shown_and_cancelled(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        "steps = 100000\nreplicas = 2\nstages = 1\nmicrobatches = 2\n"
        '[model]\npreset = "gpt-tiny"\ndepth = 1\n[data]\nkind = "synthetic"\n'
    )
    command = [sys.executable, "-m", "everstep.cli.main", "train", str(job), "--json"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stderr is not None
        line = next(line for line in run.stderr if line.startswith("page: "))
        assert "token" not in line, "it is a log: all who read it could cancel the run"
        link = Path(line.rpartition("(link: ")[2].rstrip(")\n"))
        assert stat.S_IMODE(link.stat().st_mode) == 0o600
        address, _, token = link.read_text().strip().partition("/#token=")
        assert line.split()[1] == f"{address}/"
        client, deadline = Client(address=address, token=token), time.monotonic() + 60
        while client.get("/v1/status")["tasks"][0]["step"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        told = client.get("/v1/tasks/job")
        assert [row["step"] for row in told["rows"]] == list(range(1, len(told["rows"]) + 1))
        assert {row["worker"] for row in client.get("/v1/tasks/job/readings")["workers"]} == {
            "0:0",
            "1:0",
        }
        client.post("/v1/tasks/job/cancel")
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert len(json.loads(out)["losses"]) >= 2
        assert not link.exists()
    finally:
        run.kill()
        run.communicate()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/job.toml", "job"),
        ("my script (2).py", "my-script-2"),
        ("train.v2.py", "train.v2"),
        ("-.py", TASK),
    ],
)
def test_a_local_run_is_called_as_its_script_or_job_file(path: str, name: str) -> None:
    """Its page said "Task task", and its decisions "task task: ..."."""
    assert api.task_name(path) == name
