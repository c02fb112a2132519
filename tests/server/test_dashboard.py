"""The dashboard: what is served to whom, what viewers are told, and the page itself in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from everstep.cli.client import Client
from everstep.core.cluster.node_states import NodeState
from everstep.drive.step_rows import StepRows
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import RecordStep
from everstep.protocol.ops import Kind, Microbatch
from everstep.protocol.parcels import ParcelKind
from everstep.protocol.table import TABLE
from everstep.server import pages, viewers, views, words
from everstep.server.record import ClusterRecord
from harness.browser import CHROMIUM, LIVE, Page, browser
from tests.support.served import JOB, WordyAgent, agent, call, served

TOKEN = "a-secret-of-this-test"
WEB = resources.files("everstep.server").joinpath("web")
FILES = sorted(file.name for file in WEB.iterdir() if file.is_file())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("state"), token=TOKEN) as found:
        yield found


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("path", ["/", *(f"/web/{name}" for name in FILES), "/web/tables.js"])
def test_the_files_hold_no_data_and_need_no_token(guarded: str, path: str) -> None:
    assert call(guarded, path)[0] == 200
    assert call(guarded, path, Origin="http://evil.example")[0] == 403


@pytest.mark.parametrize("path", ["/web/none.js", "/web/..%2fapi.py", "/web/%2e%2e/api.py", "/web/", "/webs"])
def test_nothing_else_is_a_file(guarded: str, path: str) -> None:
    assert call(guarded, path)[0] in (401, 404)
    assert call(guarded, path, Authorization=f"Bearer {TOKEN}")[0] == 404


@pytest.mark.parametrize("name", FILES)
def test_no_file_asks_for_anything_from_elsewhere_or_runs_script_inline(name: str) -> None:
    text = WEB.joinpath(name).read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"(https?:)?//[a-z0-9]+\.[a-z]", text), "an address of another host"
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=|<style|javascript:", text)
    assert not re.search(r"\beval\(|innerHTML|insertAdjacentHTML|document\.write|new Function", text)


def test_the_policy_lets_nothing_in_and_nobody_frame_it(guarded: str) -> None:
    async def asked() -> Any:
        async with aiohttp.ClientSession() as session, session.get(guarded) as answer:
            tag = {"If-None-Match": answer.headers["ETag"]}
            async with session.get(guarded, headers=tag) as again:
                return answer.headers, again.status

    headers, again = asyncio.run(asked())
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert again == 304


# ------------------------------------------------------------------ words


def test_everything_that_is_shown_has_words() -> None:
    assert set(words.NODE_STATES) == set(NodeState)
    assert set(words.OPS) == set(Kind)
    assert set(words.PARCELS) == set(ParcelKind)
    shown = {*(row.says for row in TABLE.values()), *words.PLACES.values()}
    assert not [text for text in shown if re.search(r"[a-z][A-Z]", text)], "a class name on the page"


def test_the_page_imports_nothing_that_is_not_served(guarded: str) -> None:
    exported = set(re.findall(r"^export const (\w+) = ", words.script(), re.MULTILINE))
    used = WEB.joinpath("words.js").read_text()
    named = {
        name for names in re.findall(r"{([^}]*)} from \"./tables.js\"", used) for name in names.split(",")
    }
    assert {name.strip() for name in named} == exported


# ------------------------------------------------------------------ tickets


@contextlib.asynccontextmanager
async def watching(address: str, ticket: str, **headers: str) -> AsyncIterator[Any]:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(f"{address}/v1/watch?as=page", protocols=("everstep", f"ticket.{ticket}")) as line,
    ):
        yield line


def ticket_of(address: str) -> str:
    ticket: str = Client(address=address, token=TOKEN).post("/v1/tickets")["ticket"]
    return ticket


async def refused(address: str, ticket: str, **headers: str) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        async with watching(address, ticket, **headers):
            pass
    return caught.value.status


def test_a_ticket_needs_the_token_and_opens_one_line(guarded: str) -> None:
    async def play() -> None:
        ticket = ticket_of(guarded)
        async with watching(guarded, ticket) as line:
            assert line.protocol == "everstep"
            assert (await line.receive_json(timeout=10))["kind"] == "picture"
        assert await refused(guarded, ticket) == 401  # used up
        assert await refused(guarded, "made-up") == 401

    assert call(guarded, "/v1/tickets", body=b"")[0] == 401
    asyncio.run(play())


def test_a_ticket_is_of_no_use_to_another_origin_nor_for_another_route(guarded: str) -> None:
    ticket = ticket_of(guarded)
    assert asyncio.run(refused(guarded, ticket, Origin="http://evil.example")) == 403
    offered = {"Sec-WebSocket-Protocol": f"everstep, ticket.{ticket_of(guarded)}"}
    assert call(guarded, "/v1/status", **offered)[0] == 401
    assert call(guarded, "/v1/nodes/a/drain", body=b"", **offered)[0] == 401


def test_a_ticket_does_not_keep(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TICKET_S", 0.0)
    assert asyncio.run(refused(guarded, ticket_of(guarded))) == 401


# ------------------------------------------------------------------ what viewers are told


def test_viewers_are_told_what_changed_and_not_the_rest(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        async with agent(address, "a", token=TOKEN) as first, watching(address, ticket_of(address)) as line:
            picture = await line.receive_json(timeout=10)
            assert [node["node"] for node in picture["nodes"]] == ["a"]
            async with agent(address, "b", token=TOKEN):
                told: set[str] = set()
                while "b" not in told:
                    await first.beat()
                    changes = await line.receive_json(timeout=10)
                    told = {node["node"] for node in changes.get("nodes", [])}
                assert changes["kind"] == "changes"
                assert [news["node"] for news in changes["news"] if news["kind"] == "NodeChanged"] == ["b"]

    with served(tmp_path, token=TOKEN) as address:
        asyncio.run(play(address))


class StuckLine:
    """A viewer that stops reading after the first message until it is let go."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.goes_on = asyncio.Event()

    async def send_str(self, text: str) -> None:
        self.told.append(json.loads(text))
        await self.goes_on.wait()

    def __aiter__(self) -> StuckLine:
        return self

    async def __anext__(self) -> None:
        await asyncio.Event().wait()


def test_a_viewer_that_reads_too_slowly_gets_the_whole_picture_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "SOON_S", 0.001)

    async def play() -> None:
        record = ClusterRecord()
        crowd, line = viewers.Viewers(record, set), StuckLine()
        showing = asyncio.create_task(crowd.show(line, ()))  # type: ignore[arg-type]
        for number in range(50):
            for listen in record.listeners:
                listen({"at": float(number), "kind": "NodeChanged", "because": "test"})
            await asyncio.sleep(0.002)
        line.goes_on.set()
        while len(line.told) < 2:
            await asyncio.sleep(0.001)
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
        kinds = [told["kind"] for told in line.told]
        assert kinds[:2] == ["picture", "picture"]
        assert len(kinds) <= 1 + viewers.MAX_UNREAD
        assert not record.listeners, "nobody looks"

    asyncio.run(play())


# ------------------------------------------------------------------ in a browser


async def start(one: WordyAgent, number: int) -> msg.StartProcess:
    """The order to start a worker, obeyed."""
    order: msg.StartProcess = await one.until(msg.StartProcess)
    started = ev.WorkerStarted(
        worker=order.worker, incarnation=order.incarnation, address=("127.0.0.1", number)
    )
    await one.say(number, msg.TaskEvent(task=order.task, event=started))
    return order


async def beating(*agents: WordyAgent) -> None:
    while True:
        for one in agents:
            await one.beat()
        await asyncio.sleep(0.2)


async def answering(one: WordyAgent) -> None:
    """Whatever is asked of this agent, its one worker runs a microbatch of a replica that is not its own."""
    doing = {"at_ns": 1, "epoch": 1, "step": 1, "done": 3, "num_ops": 5, "busy": True, "doing": "0F1.0"}
    worker = {"worker": "0:0", "incarnation": 1, "pid": 1, "reading": doing}
    async for message in one.line:
        told = json.loads(message.data)
        if "ask" in told:
            await one.line.send_str(json.dumps({"answer": told["ask"], "value": [worker]}))


async def says(page: Page, place: str, text: str) -> None:
    await page.until(f"document.querySelector({json.dumps(place)})?.innerText.includes({json.dumps(text)})")


async def watch_a_life(page: Page, address: str, pictures: Path) -> None:
    """A node joins, a task runs, its worker dies and is back, the node is drained by a click."""
    await page.sign_in(address, TOKEN)
    async with agent(address, "node-a", token=TOKEN) as one:
        alive = [asyncio.create_task(beating(one))]
        await says(page, "#cluster-figures", "1 / 1")
        await says(page, "#news", "node node-a is up")
        submitted = {"name": "llama", "job": JOB}
        await asyncio.to_thread(Client(address=address, token=TOKEN).post, "/v1/tasks", submitted)
        order = await start(one, 1)
        alive.append(asyncio.create_task(answering(one)))
        await page.click("#cluster-tasks tbody a")
        await says(page, "#places td", "F 1.0 ⇄")
        await says(page, "#places td.elsewhere", "3 done, 5 to do · node-a:0")
        await page.picture(pictures / "before.png")
        exited = ev.WorkerExited(worker=order.worker, incarnation=1, reason="killed by SIGKILL")
        await one.say(2, msg.TaskEvent(task="llama", event=exited))
        await says(page, "#open-incidents", "1 open")
        await says(page, "#task-figures", "0 / 1")
        await page.picture(pictures / "during.png")
        await page.click("nav a[data-view=incidents]")
        await says(page, "#all-incidents", "killed by SIGKILL")
        await page.click("#all-incidents tbody td:nth-child(4)")  # a row opens as its link does
        await says(page, "#timeline", "evidence: exit")
        await says(page, "#timeline", "remedy: restart the worker")
        await says(page, "#suspects", "worker 0:0")
        await page.picture(pictures / "incident.png")
        await page.value("location.hash = '#tasks'")  # typed without its slash
        await page.until("!document.getElementById('tasks').hidden")
        await page.click("nav a[data-view=cluster]")
        await page.until("document.activeElement.id === 'main' && !document.getElementById('cluster').hidden")
        await page.value("document.getElementById('nodes').focus()")
        await page.key("ArrowRight")
        await says(page, "#node-details", "llama")
        await says(page, "#headline", "1 incident open")
        await says(page, "#headline", "llama is starting")
        await page.click("#node-verb")
        await page.click("#confirm-yes")
        await says(page, "#node-details", "draining")
        await says(page, "#node-details", "slots (draining)")
        await says(page, "#plan-because", "no slots to allocate")
        for task in alive:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    client = Client(address=address, token=TOKEN)
    assert client.get("/v1/status")["nodes"][0]["state"] == "draining"
    plans = client.get("/v1/plans")
    assert len(plans) > 1
    assert client.get("/v1/plans?last=1") == plans[:1]


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)")
def test_the_page_lives_with_the_cluster_and_through_a_restart_of_its_coordinator(tmp_path: Path) -> None:
    async def play() -> None:
        async with browser() as chromium, chromium.page() as page:
            with served(tmp_path, token=TOKEN) as address:
                await watch_a_life(page, address, tmp_path)
                await page.look(width=360, height=740, dark=True)
                await page.until("document.documentElement.scrollWidth <= 360 && innerWidth === 360")
                assert page.complaints == []
            await page.until(f"!({LIVE})")
            with served(tmp_path, token=TOKEN, port=urlsplit(address).port or 0):
                await page.until(LIVE)
                await says(page, "#node-details", "not connected")
                await says(page, "#cluster-figures", "0 / 1")
            ours = urlsplit(address).netloc
            assert {urlsplit(asked).netloc for asked in page.requests} == {ours}
            assert not any(TOKEN in asked or "ticket." in asked for asked in page.requests)

    asyncio.run(play())


def test_workers_are_counted_against_what_the_job_asked_for() -> None:
    """A job of 2 x 2 that the planner had put into 1 x 3 was shown as 3/3."""

    def asked(*, kept: bool = False, workers: int | None = None, **job: int) -> int:
        request = SimpleNamespace(most_workers=4, job=job)
        bounds = SimpleNamespace(is_shape_kept=kept, workers=workers)
        shape = SimpleNamespace(replicas=1, stages=3)
        return views._asked(SimpleNamespace(shape=shape, request=request, bounds=bounds))  # type: ignore[arg-type]

    assert asked() == 4
    assert asked(kept=True) == 3, "an operator's shape"
    assert asked(workers=2) == 2, "an operator's size"
    assert asked(max_replicas=2) == 3, "an elastic job has what the planner gives"


def test_the_curve_of_a_task_that_is_over_goes_from_its_first_loss_to_its_last() -> None:
    steps = StepRows()
    assert views._curve(None) == views._curve(steps) == []
    for step in range(1, 101):
        loss = 100.0 - step if step < 100 else math.nan
        steps.add(
            RecordStep(
                step=step,
                epoch=1,
                attempt=0,
                losses=((Microbatch(0, 0), loss),),
                norm=1.0,
                microbatches_committed=1,
                replayed_elsewhere=0,
                because="",
            ),
            float(step),
        )
        if step in (1, 3):
            assert views._curve(steps) == [100.0 - one for one in range(1, step + 1)]
    curve = views._curve(steps)
    assert (len(curve), curve[0], curve[-1]) == (views.CURVE, 99.0, None)
    assert curve[:-1] == sorted(curve[:-1], reverse=True)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)")
def test_nodes_are_shown_by_rack_with_their_checks_and_tasks_with_owner_goodput_and_queue(
    tmp_path: Path,
) -> None:
    checked = {"check": "memory", "state": "passed", "says": "as usual", "figures": {"GB/s": 12.5}}

    async def play() -> None:
        async with browser() as chromium, chromium.page() as page, contextlib.AsyncExitStack() as held:
            address = held.enter_context(served(tmp_path, token=TOKEN))
            joined = [("n1", "b"), ("n2", "a"), ("n3", "b"), ("n4", "a"), ("n5", "")]
            agents = [
                await held.enter_async_context(
                    agent(address, node, token=TOKEN, rack=rack, checks=[checked] if node == "n2" else [])
                )
                for node, rack in joined
            ]
            alive = asyncio.create_task(beating(*agents))
            held.callback(alive.cancel)
            await page.sign_in(address, TOKEN)
            await says(page, "#cluster-figures", "5 / 5")
            await page.value("document.getElementById('nodes').focus()")
            for key, node, rack in (
                ("Home", "n2", "a"),
                ("ArrowDown", "n4", "a"),
                ("ArrowRight", "n3", "b"),
                ("ArrowUp", "n1", "b"),
                ("ArrowLeft", "n2", "a"),
                ("End", "n5", ""),
            ):
                await page.key(key)
                await says(page, "#node-name", node)
                if rack:
                    await says(page, "#node-details", f"rack\n{rack}")
            await page.key("Home")
            await says(page, "#node-checks", "1 result")
            await page.click("#node-checks")
            await says(page, "#node-details", "memory: GB/s 12.5")
            client = Client(address=address, token=TOKEN)
            for name, replicas in (("small", 1), ("large", 400)):
                submitted = {"name": name, "job": JOB | {"replicas": replicas}, "min_workers": replicas}
                await asyncio.to_thread(client.post, "/v1/tasks", submitted)
            await page.click("nav a[data-view=tasks]")
            await says(page, "#all-tasks", "an operator")
            await says(page, "#all-tasks", "0.0 %")
            await says(page, "#queue", "it needs 400 slots")
            assert page.complaints == []

    asyncio.run(play())
