"""The coordinator over real sockets: who may speak, what is refused, and that nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.cli import main
from everstep.cli.client import Client
from everstep.core.cluster.progress import DrainCost
from everstep.core.cluster.task import Task, TaskState
from everstep.drive.step_rows import StepRows
from everstep.errors import PeerError, UserError
from everstep.protocol import events as ev
from everstep.protocol import messages as msg
from everstep.protocol.actions import RecordStep
from everstep.protocol.ops import Worker
from everstep.protocol.shape import Shape
from everstep.protocol.table import PROTOCOL
from everstep.server import api, requests, views
from everstep.server.agent_connections import AgentConnections
from everstep.server.record import ClusterRecord
from everstep.server.serve import ServerSettings
from everstep.server.term import TICK_S, Term
from tests.support.fake_cluster import FakeCluster
from tests.support.served import JOB, agent, call, served


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture(scope="module")
def peopled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A coordinator that knows node a and task t."""

    async def play(address: str) -> None:
        async with agent(address, "a") as one:
            await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "t", "job": JOB})
            await one.until(msg.StartProcess)

    with served(tmp_path_factory.mktemp("peopled")) as found:
        asyncio.run(play(found))
        yield found


def test_without_its_token_nothing_but_health_is_answered(tmp_path: Path) -> None:
    with served(tmp_path, token="secret") as address:
        assert call(address, "/v1/health")[0] == 200
        assert call(address, "/v1/ready")[0] == 200, "it leads"
        assert call(address, "/v1/status")[0] == 401
        assert call(address, "/metrics")[0] == 401
        assert call(address, "/v1/tasks", body=b"{}", Authorization="Bearer wrong")[0] == 401
        assert call(address, "/v1/status", Authorization="Bearer secret")[0] == 200


def test_an_agent_without_the_token_is_refused(tmp_path: Path) -> None:
    async def knock(address: str) -> None:
        async with agent(address, "a"):
            pass

    with (
        served(tmp_path, token="secret") as address,
        pytest.raises(aiohttp.WSServerHandshakeError, match="401"),
    ):
        asyncio.run(knock(address))


def test_a_page_of_another_origin_is_refused(lasting: str) -> None:
    assert call(lasting, "/v1/status", Origin="http://evil.example")[0] == 403
    assert call(lasting, "/v1/status", Host="evil.example")[0] == 403
    assert call(lasting, "/v1/status", Origin=lasting)[0] == 200


def test_beyond_loopback_a_token_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not loopback"):
        ServerSettings(folder=tmp_path, host="0.0.0.0").check()
    ServerSettings(folder=tmp_path, host="0.0.0.0", token="t", is_insecure=True).check()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "name is None"),
        (b'{"name": "../x", "job": {}}', "name is '../x'"),
        (b'{"name": "x"}', "job is missing"),
        (b'{"name": "x", "job": {"stepz": 3}}', "stepz"),
        (b'{"name": "x", "jobs": {}}', "'jobs' is not a key"),
        (json.dumps({"name": "x", "job": JOB, "weight": 0}).encode(), "weight is 0"),
        (json.dumps({"name": "x", "job": JOB, "weight": True}).encode(), "weight is True"),
        (json.dumps({"name": "x", "job": JOB, "min_workers": 99}).encode(), "min_workers is 99; give 0 to"),
        (json.dumps({"name": "x", "ranks": {}, "min_workers": 2}).encode(), "a script has --nodes MIN:MAX"),
        (json.dumps({"name": "x", "job": JOB, "faults": ["stage=9"]}).encode(), "--kill"),
    ],
)
def test_a_wrong_submission_is_one_sentence(lasting: str, body: bytes, sentence: str) -> None:
    status, answer = call(lasting, "/v1/tasks", body=body)
    assert status == 400
    assert sentence in json.loads(answer)["error"]


LARGE = {
    **JOB,
    "steps": 1000,
    "device": "cuda",
    "model": {"preset": "gpt-1b"},
    "data": {"kind": "synthetic", "rows": 8},
}


@pytest.mark.parametrize(
    ("cannot", "changes", "told"),
    [
        ("", {}, {"is": True, "because": "fused layers are faster, and 1000 steps are worth compiling them"}),
        ("no C compiler", {}, {"is": False, "because": "node a cannot: no C compiler"}),
        ("no C compiler", {"compile": True}, {"is": True, "because": ""}),
    ],
)
def test_whether_a_task_compiles_is_decided_when_it_is_submitted(
    address: str, cannot: str, changes: dict[str, Any], told: dict[str, Any]
) -> None:
    """Its workers, and those that replace them on nodes that come later, get one and the same answer."""

    async def play() -> None:
        async with agent(address, "a", cannot_compile=cannot) as one:
            post = Client(address=address).post
            answer = await asyncio.to_thread(post, "/v1/tasks", {"name": "t", "job": {**LARGE, **changes}})
            assert answer["compile"] == told
            opened = await one.until(msg.OpenTask)
            assert opened.job["compile"] is told["is"]

    asyncio.run(play())


def test_who_submits_is_told_whether_it_compiles_and_why(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = 'steps = 300\ndevice = "cuda"\n[model]\npreset = "gpt-1b"\n[data]\nkind = "synthetic"\n'
    (tmp_path / "large.toml").write_text(f"{words}rows = 8\n[checkpoint]\nfolder = 'kept'\n")
    (tmp_path / "small.toml").write_text(f"{words}rows = 1\n")
    for name in ("large", "small"):
        assert main.run(["submit", str(tmp_path / f"{name}.toml"), "--address", address]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert 'compile = "auto" is true: fused layers are faster, and 300 steps are worth compiling' in said
    assert "(a checkpoint that it resumes from decides)" in said
    assert 'compile = "auto" is false: a microbatch has 4 M numbers per layer' in said


@pytest.mark.parametrize("compiled", [True, False])
def test_an_update_keeps_what_the_task_does_unless_it_says_otherwise(compiled: bool) -> None:
    submitted = requests.submission(
        {"name": "t", "job": {**LARGE, "compile": compiled}}, known={}, owner="alice"
    )
    task = Task(request=submitted, submitted_at=0.0)
    task.enter(TaskState.SEARCHING, "")
    task.enter(TaskState.RUNNING, "")

    def after(**changes: Any) -> Any:
        return requests.update(task, {"job": {**LARGE, **changes}}, by="alice").job["compile"]

    assert after() is compiled
    assert after(compile="auto") is compiled
    assert after(compile=not compiled) is not compiled
    assert after(recompute=True, recompute_part="attention") is False


def test_two_tasks_do_not_share_a_checkpoint_folder(address: str) -> None:
    """Both finished, and two of three checkpoints were one task's index over the other's bytes."""

    def submit(name: str, folder: str) -> tuple[int, dict[str, Any]]:
        job = {**JOB, "base": "/data", "checkpoint": {"folder": folder}}
        status, answer = call(address, "/v1/tasks", body=json.dumps({"name": name, "job": job}).encode())
        return status, json.loads(answer)

    assert submit("x", "runs/ck")[0] == 201
    status, answer = submit("y", "runs/../runs/ck/")
    assert status == 400
    assert "where task x (waiting) keeps its checkpoints; give this task another folder" in answer["error"]
    assert submit("z", "runs/other")[0] == 201
    assert call(address, "/v1/tasks/x/cancel", body=b"")[0] == 200
    assert submit("y", "runs/ck")[0] == 201


def test_too_large_a_body_is_refused(lasting: str) -> None:
    assert call(lasting, "/v1/tasks", body=b" " * (2 << 20))[0] == 413


@pytest.mark.parametrize("path", ["/v1/tasks/none", "/v1/incidents/7", "/v1/nowhere", "/v1/tasks/none/logs"])
def test_what_is_not_there_is_not_found(lasting: str, path: str) -> None:
    assert call(lasting, path)[0] == 404


def test_an_unknown_incident_is_told_by_what_a_person_can_type(lasting: str) -> None:
    assert b"everstep explain lists recent ones" in call(lasting, "/v1/incidents/7")[1]


def test_a_task_goes_to_an_agent_and_its_steps_are_on_record(address: str) -> None:
    async def play() -> None:
        async with agent(address, "a") as one:
            await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "t", "job": JOB})
            start = await one.until(msg.StartProcess)
            assert start.worker == Worker(0, 0)
            started = ev.WorkerStarted(worker=start.worker, incarnation=1, address=("127.0.0.1", 1))
            await one.say(1, msg.TaskEvent(task="t", event=started))
            await one.until(msg.ResumeTask)
            for step in (1, 2, 3):
                sealed = ev.StepSealed(step=step, stage=0, attempt=1, microbatches=2, executed=6)
                await one.say(step + 1, msg.TaskEvent(task="t", event=sealed))
            await one.until(msg.CloseTask)
            exited = ev.WorkerExited(worker=start.worker, incarnation=1, reason="exited with code 0")
            await one.say(5, msg.TaskEvent(task="t", event=exited))
            await one.acknowledged(5)
        told = await asyncio.to_thread(Client(address=address).get, "/v1/tasks/t")
        assert told["state"] == "finished"
        assert [row["step"] for row in told["rows"]] == [1, 2, 3]
        assert told["shape"] == {"replicas": 1, "stages": 1, "shards": 1, "microbatches": 2}

    asyncio.run(play())


def test_orders_not_acknowledged_are_sent_again_and_reports_heard_twice_count_once(address: str) -> None:
    async def play() -> None:
        async with agent(address, "a") as one:
            await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "t", "job": JOB})
            await one.until(msg.StartProcess)
            number = one.orders[-1][0]
            started = ev.WorkerStarted(worker=Worker(0, 0), incarnation=1, address=("127.0.0.1", 1))
            await one.say(1, msg.TaskEvent(task="t", event=started))
            await one.acknowledged(1)
        async with agent(address, "a", done=number - 1) as again:  # the line broke before it carried it out
            assert again.welcome["heard"] == 1
            start = await again.until(msg.StartProcess)
            assert again.orders[0] == (number, start)
            await again.say(1, msg.TaskEvent(task="t", event=started))  # heard before
            exited = ev.WorkerExited(worker=Worker(0, 0), incarnation=1, reason="killed by SIGKILL")
            await again.say(2, msg.TaskEvent(task="t", event=exited))
            second = await again.until(msg.StartProcess)
            assert second.incarnation == 2

    asyncio.run(play())


def test_reports_that_come_together_are_acknowledged_together(address: str) -> None:
    """Each ledger of thousands of nodes had a message of its own, in the middle of a recovery."""

    async def play() -> None:
        async with agent(address, "a") as one:
            for number in range(1, 21):
                await one.say(number, msg.TaskEvent(task="none", event=ev.CheckpointCommitted(step=1)))
            told: list[int] = []
            while told[-1:] != [20]:
                message = await one.line.receive_json(timeout=60)
                told += [message["heard"]] if "heard" in message else []
            assert len(told) < 20

    asyncio.run(play())


def test_a_report_that_no_journal_entry_holds_is_refused_and_the_coordinator_lives(address: str) -> None:
    """The description of a part of 16 GiB ended the coordinator, and again at every restart."""
    hashes = secrets.token_hex(1200 << 10)

    async def play() -> None:
        async with agent(address, "a") as one:
            await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "t", "job": JOB})
            start = await one.until(msg.StartProcess)
            started = ev.WorkerStarted(worker=start.worker, incarnation=1, address=("127.0.0.1", 1))
            await one.say(1, msg.TaskEvent(task="t", event=started))
            await one.until(msg.ResumeTask)
            part = {"file": "stage-0.safetensors", "bytes": 16 << 30, "slices": [{"xxh3": hashes}]}
            await one.say(2, msg.PartWritten(task="t", step=1, stage=0, attempt=1, part=part))
            await one.acknowledged(2)
            raised = ev.WorkerRaised(worker=start.worker, incarnation=1, error=hashes, where="F")
            await one.say(3, msg.TaskEvent(task="t", event=raised))
            await one.acknowledged(3)

    asyncio.run(play())
    incidents = Client(address=address).get("/v1/incidents")
    said = {incident["what"]: incident for incident in incidents}
    assert set(said) == {"its checkpoint cannot be saved", "a report (WorkerRaised) of node a is refused"}
    assert "more than the 1048576 that one journal entry holds" in str(said["its checkpoint cannot be saved"])
    assert Client(address=address).get("/v1/tasks/t")["state"] == "running"


def test_a_second_agent_of_the_same_name_is_refused(address: str) -> None:
    async def play() -> None:
        async with agent(address, "a"), agent(address, "a", boot="2") as other:
            assert "connected already" in other.welcome["refused"]

    asyncio.run(play())


def test_an_agent_of_an_older_protocol_is_refused_in_words(address: str) -> None:
    async def play() -> None:
        async with agent(address, "a", protocol=3) as older:
            said = older.welcome["refused"]
            assert "it speaks protocol 3, this coordinator 4; give both the same version of Everstep" in said
        async with agent(address, "a", protocol=None) as nameless:
            assert "it speaks protocol None" in nameless.welcome["refused"]

    asyncio.run(play())
    assert not Client(address=address).get("/v1/status")["nodes"]


def settled(address: str) -> Any:
    """The state's hash once the planner's answers are in: the journal has stopped growing."""
    client, last = Client(address=address), None
    for _ in range(100):
        now = client.get("/v1/digest")
        if now == last:
            return now
        last = now
        threading.Event().wait(0.3)
    raise TimeoutError("the journal grows on and on")


def test_a_restarted_coordinator_is_where_it_was(tmp_path: Path) -> None:
    async def play(address: str) -> None:
        async with agent(address, "a") as one:
            await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "t", "job": JOB})
            await one.until(msg.StartProcess)

    with served(tmp_path) as address:
        asyncio.run(play(address))
        before = settled(address)
    with served(tmp_path) as address:
        assert settled(address) == before


def test_metrics_name_nodes_and_tasks(peopled: str) -> None:
    async def play() -> tuple[int, Any]:
        async with agent(peopled, "b"):
            return await asyncio.to_thread(call, peopled, "/metrics")

    text = asyncio.run(play())[1].decode()
    assert 'everstep_nodes{state="up"}' in text
    assert 'everstep_node_heartbeat_age_seconds{node="b"}' in text
    assert 'task="t"' in text
    assert "everstep_journal_entries_total" in text


def test_a_node_is_listened_for_from_its_join_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lost power before its first beat was never missed, if names were forgotten while it joined."""
    handle = Term.handle

    async def slowly(term: Term, event: msg.ClusterEvent) -> None:
        await asyncio.sleep(5 * TICK_S)
        await handle(term, event)

    monkeypatch.setattr("everstep.server.term.FORGET_S", 0.0)
    monkeypatch.setattr(Term, "handle", slowly)

    async def play(address: str) -> bytes:
        async with agent(address, "b"):
            return (await asyncio.to_thread(call, address, "/metrics"))[1]

    with served(tmp_path) as address:
        assert b'everstep_node_heartbeat_age_seconds{node="b"}' in asyncio.run(play(address))


def words(address: str, texts: list[str]) -> None:
    async def play() -> None:
        async with agent(address, "fuzz", boot="f") as one:
            for text in texts:
                await one.line.send_str(text)
            await one.beat()

    asyncio.run(play())


JSON_TEXT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["number", "report", "beat", "done", "is", "task", "event", "answer"]), inner
        )
    ),
    max_leaves=8,
).map(json.dumps)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(JSON_TEXT | st.text(max_size=20), max_size=4))
def test_nonsense_from_an_agent_harms_nobody(lasting: str, texts: list[str]) -> None:
    with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # it may hang up on us
        words(lasting, texts)
    assert call(lasting, "/v1/health")[0] == 200


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=JSON_TEXT | st.text(max_size=50), path=st.sampled_from(["tasks", "tasks/t/resize", "nodes/a/drain"])
)
def test_nonsense_from_a_person_is_refused_and_never_an_internal_error(
    peopled: str, body: str, path: str
) -> None:
    """Of a node and a task that are there: otherwise the body is not read."""
    status, told = call(peopled, f"/v1/{path}", body=body.encode(errors="replace"))
    assert status in (200, 400), told
    if status == 200:
        assert path == "nodes/a/drain", "a drain needs no word of its own"
        assert not body or isinstance(json.loads(body), dict)


def test_an_action_is_traced_back_to_its_event(address: str) -> None:
    async def play() -> None:
        async with agent(address, "a"):
            pass

    asyncio.run(play())
    client = Client(address=address)
    (joined,) = [n for n in client.get("/v1/news") if n["kind"] == "NodeChanged"]
    found = client.get(f"/v1/events/{joined['event']}")
    assert found["text"] == "node a joined"
    assert {"text": "node a is up", "because": "it joined"} in found["actions"]
    assert call(address, "/v1/events/99999")[0] == 404
    assert call(address, "/v1/events/x")[0] == 400


def test_the_viewers_line_tells_what_happens(address: str) -> None:
    async def play() -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}/v1/watch") as line:
            assert (await line.receive_json(timeout=10))["kind"] == "status"
            async with agent(address, "a"):
                while (told := await line.receive_json(timeout=10))["kind"] != "NodeChanged":
                    assert told["kind"] == "ChooseAssignment", "the planner is asked once at the start"
                assert told["state"] == "up"

    asyncio.run(play())


def test_a_drain_that_costs_steps_which_cannot_be_made_safe_is_refused_unless_forced(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = "task t would go back from step 9 to step 5: only node a has stage 1"
    found = DrainCost(task="t", step=9, protected=5, stages=(1,), is_savable=False)
    monkeypatch.setattr("everstep.server.requests.costs_of_drain", lambda roster, node: [found])

    async def play() -> None:
        async with agent(address, "a"):
            status, refusal = await asyncio.to_thread(call, address, "/v1/nodes/a/drain", body=b"{}")
            assert status == 400
            assert cost in str(refusal)
            assert "--force" in str(refusal)
            forced = b'{"force": true}'
            status, told = await asyncio.to_thread(call, address, "/v1/nodes/a/drain", body=forced)
            assert (status, json.loads(told)["state"]) == (200, "draining")

    asyncio.run(play())


def test_a_report_of_a_later_version_is_acknowledged_and_counted(address: str) -> None:
    """The line was closed, the agent sent it again, for ever."""

    async def play() -> None:
        async with agent(address, "a") as one:
            said = {"number": 1, "report": {"is": "SaidByALaterVersion", "x": 1}, "sender": None}
            await one.line.send_str(json.dumps(said))
            event = {"is": "TaskEvent", "task": "t", "event": {"is": "LaterEvent"}}
            await one.line.send_str(json.dumps({"number": 2, "report": event, "sender": None}))
            await one.acknowledged(2)
            incidents = await asyncio.to_thread(Client(address=address).get, "/v1/incidents")
            assert sorted(row["what"] for row in incidents) == [
                "a report (LaterEvent) of node a is not understood",
                "a report (SaidByALaterVersion) of node a is not understood",
            ]

    asyncio.run(play())


def test_an_older_journal_is_known_by_orders_that_it_does_not_have_whatever_was_sent_since() -> None:
    """A real storm, seed 41: after the first agent's hello a task was ended, with orders to another node. Its
    agent came with as many orders done as had been sent by then, took those for done, and kept its workers.
    """
    cluster = FakeCluster(nodes={"c": 2})
    cluster.hear(msg.JournalBegun(journal="j", version="1", because="it is new"))
    machine = cluster.coordinator
    before = machine.nodes["c"].sent
    term = SimpleNamespace(machine=machine, number=0, sent_before={"c": before})
    lines = AgentConnections(cast(Term, term))
    hello = msg.NodeJoined(
        node="c", boot=machine.nodes["c"].boot, slots=2, host="h", journal="j", done=before + 1
    )
    cluster.submit(shape=Shape(1, 2, 1))
    assert machine.nodes["c"].sent > hello.done
    assert f"has carried out {before + 1} orders, and it has {before}" in lines.put_back(hello, 0)
    assert lines.put_back(hello, 0) == "", "its second hello in this term"
    term.sent_before = {"c": before}
    assert lines.put_back(replace(hello, done=before), 0) == ""
    term.sent_before = {"c": before}
    assert lines.put_back(replace(hello, boot="another"), 0) == ""


def test_a_question_fails_at_once_when_the_leadership_ends() -> None:
    """People who looked at logs waited for 5 to 15 s, for an answer that could not come any more."""

    async def play() -> None:
        lines = AgentConnections(cast(Term, SimpleNamespace()))
        lines._queues["a"] = asyncio.Queue()
        asking = asyncio.create_task(lines.ask("a", {"what": "log"}, within_s=60.0))
        await asyncio.sleep(0)
        lines.close()
        with pytest.raises(PeerError, match="no longer leads"):
            await asyncio.wait_for(asking, 1.0)

    asyncio.run(play())


def test_a_question_fails_at_once_when_its_node_is_gone(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked_for_a_minute(lines: Any, nodes: Any, question: dict[str, Any]) -> str:
        with pytest.raises(PeerError, match="not connected any more"):
            await lines.ask(nodes[0], question, within_s=60.0)
        return "it failed at once"

    monkeypatch.setattr(api, "newest_log", asked_for_a_minute)

    async def play() -> None:
        async with agent(address, "a") as one:
            await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "t", "job": JOB})
            await one.until(msg.StartProcess)
            asking = asyncio.create_task(asyncio.to_thread(call, address, "/v1/tasks/t/logs?worker=0:0"))
            while "ask" not in await one.line.receive_json(timeout=60):
                pass
        status, text = await asyncio.wait_for(asking, 20.0)
        assert (status, b"it failed at once" in text) == (404, True)

    asyncio.run(play())


def test_a_journal_that_was_put_back_gets_an_id_of_its_own(address: str) -> None:
    """Its terms are lower than those that agents know: they would refuse its coordinator for ever."""

    async def play() -> None:
        async with agent(address, "a") as one:
            journal = one.welcome["journal"]
        assert journal
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{address}/v1/agent") as line,
        ):
            hello = {"node": "b", "boot": "1", "slots": 2, "host": "127.0.0.1", "protocol": PROTOCOL}
            hello["journal"] = journal
            await line.send_str(json.dumps({"hello": hello, "done": 9, "term": 1203}))
            renamed = (await line.receive_json(timeout=60))["journal"]
            assert renamed not in ("", journal)
            first = await line.receive_json(timeout=60)
            assert (first["number"], first["order"]["is"]) == (10, "KeepOnly")
        for node in ("a", "b"):  # what it says again, or later, is no reason for one more
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"{address}/v1/agent") as line,
            ):
                hello = {"node": node, "boot": "1", "slots": 2, "host": "127.0.0.1", "protocol": PROTOCOL}
                hello["journal"] = renamed
                await line.send_str(json.dumps({"hello": hello, "done": 9, "term": 99999}))
                assert (await line.receive_json(timeout=60))["journal"] == renamed

    asyncio.run(play())


def test_nodes_are_asked_once_however_many_look_at_a_task(tmp_path: Path) -> None:
    """Each open page asked every agent of the task, twice a second."""
    row = {"worker": "0:0", "pid": 1}

    async def play(address: str) -> tuple[list[Any], int]:
        async with agent(address, "a") as one:
            await asyncio.to_thread(Client(address=address).post, "/v1/tasks", {"name": "t", "job": JOB})
            await one.until(msg.StartProcess)
            async with aiohttp.ClientSession() as session:

                async def look() -> Any:
                    async with session.get(f"{address}/v1/tasks/t/readings") as answer:
                        return await answer.json()

                looking = [asyncio.create_task(look()) for _ in range(10)]
                number_asked = 0
                while not all(each.done() for each in looking):
                    with contextlib.suppress(TimeoutError):
                        told = await one.line.receive_json(timeout=0.2)
                        if "ask" in told:
                            number_asked += 1
                            await asyncio.sleep(2.0)  # all of them are waiting by now
                            await one.line.send_json({"answer": told["ask"], "value": [row]})
                return [each.result()["workers"] for each in looking], number_asked

    with served(tmp_path) as address:
        found, number_asked = asyncio.run(play(address))
    assert found == [[row | {"node": "a"}]] * 10
    assert number_asked == 1


def test_only_what_is_new_is_asked_for() -> None:
    """`everstep track` asked for all rows and all incidents, each second."""
    cluster = FakeCluster()
    cluster.submit()
    record = ClusterRecord()
    record.begin(cluster.coordinator, record.hearts, 0, None)
    rows = record.steps["t"] = StepRows()
    for step in (1, 2, 3, 4, 3, 4, 5):  # it went back
        made = RecordStep(
            step=step,
            epoch=1,
            attempt=1,
            losses=(),
            norm=0.0,
            microbatches_committed=4,
            replayed_elsewhere=0,
            because="",
        )
        rows.add(made, float(step))

    def steps(after: int) -> list[int]:
        found = views.task(record, cluster.coordinator.tasks["t"], after=after)["rows"]
        return [row["step"] for row in found]

    assert steps(0) == [1, 2, 3, 4, 3, 4, 5]
    assert steps(2) == [3, 4, 3, 4, 5]
    assert steps(3) == [4, 5]
    assert steps(9) == []
