"""Roles: what each may call, one node cannot speak for another, and who did what."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from everstep.cli import main
from everstep.errors import UserError
from everstep.protocol import messages as msg
from everstep.server import api
from everstep.server.access import (
    CALLS,
    Caller,
    Credentials,
    CredentialsFile,
    Role,
    matrix,
    parse_credentials,
    plain_path,
)
from everstep.server.record import ClusterRecord
from tests.support.served import JOB, agent, call, served

NAMES = {Role.VIEWER: "grafana", Role.SUBMITTER: "alice", Role.NODE: "n1", Role.ADMIN: "root"}


class Cluster:
    def __init__(self, address: str, file: Path, held: dict[str, str]) -> None:
        self.address, self.file, self.tokens = address, file, held

    def call(self, method: str, path: str, name: str | None, body: object = None) -> tuple[int, str]:
        shown = {} if name is None else {"Authorization": f"Bearer {self.tokens[name]}"}
        given = None if method == "GET" else json.dumps(body or {}).encode()
        status, text = call(self.address, path, body=given, **shown)
        return status, text.decode()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(api, "CREDENTIALS_S", 0.02)
    file = CredentialsFile(tmp_path / "credentials")
    held = {name: file.add(role, name) for role, name in NAMES.items()}
    held["bob"] = file.add(Role.SUBMITTER, "bob")
    held["n2"] = file.add(Role.NODE, "n2")
    file.write(time.time())
    with served(tmp_path / "state", token="the-one", credentials=file.path) as address:
        yield Cluster(address, file.path, held | {"": "the-one"})


def test_every_role_may_make_exactly_the_calls_of_the_table(cluster: Cluster) -> None:
    """Against the real server, each call of the table by each role, without and with a wrong credential."""
    assert cluster.call("POST", "/v1/tasks", "bob", {"name": "his", "job": JOB})[0] == 201
    for one in CALLS:
        if not one.roles:
            continue
        path = plain_path(one).format(task="his", node="x", number="1", verb="eat")
        assert cluster.call(one.method, path, None)[0] == 401, path
        for role, name in NAMES.items():
            status, text = cluster.call(one.method, path, name)
            refused = role not in one.roles or (one.own and role is Role.SUBMITTER)
            assert (status == 403) == refused, (path, role, status, text)
            assert status != 401
            if refused:
                assert name in text
                assert "may not" in text
        assert cluster.call(one.method, path, "")[0] not in (401, 403), "the cluster's token is an admin's"
    cluster.tokens["nobody"] = "guessed"
    assert cluster.call("GET", "/v1/status", "nobody")[0] == 401


def test_a_submitter_changes_its_own_tasks_and_it_is_written_down_who_did(cluster: Cluster) -> None:
    assert cluster.call("POST", "/v1/tasks", "alice", {"name": "hers", "job": JOB})[0] == 201
    status, text = cluster.call("POST", "/v1/tasks/hers/cancel", "bob")
    assert (status, "submitter bob may not cancel a task of alice" in text) == (403, True)
    status, text = cluster.call("POST", "/v1/tasks/hers/cancel", "alice")
    assert status == 200
    assert json.loads(text)["because"].startswith("alice cancelled it")
    rows = json.loads(cluster.call("GET", "/v1/audit", "grafana")[1])
    assert [(row["by"], row["text"]) for row in rows] == [
        ("alice", "alice cancels task hers"),
        ("alice", "alice submits task hers"),
    ]


def test_one_node_cannot_speak_for_another(cluster: Cluster) -> None:
    async def welcome(name: str, node: str) -> dict[str, object]:
        async with agent(cluster.address, node, token=cluster.tokens[name]) as line:
            found: dict[str, object] = line.welcome
            return found

    assert "its credential is that of node n1" in str(asyncio.run(welcome("n1", "n2")).get("refused"))
    assert asyncio.run(welcome("n1", "n1"))["welcome"] == "n1"
    assert asyncio.run(welcome("", "n2"))["welcome"] == "n2"


def test_a_question_is_answered_by_the_node_that_was_asked_and_about_its_own_workers(
    cluster: Cluster,
) -> None:
    """Another node guessed its number, and its text was shown as that of node n1."""
    forged = {"text": "forged", "at": 9e18, "next": 1}
    row = {"worker": "0:0", "pid": 1}

    async def play() -> None:
        async with (
            agent(cluster.address, "n1", token=cluster.tokens["n1"]) as n1,
            agent(cluster.address, "n2", token=cluster.tokens["n2"]) as n2,
        ):
            submitted = {"name": "his", "job": JOB}
            assert (await asyncio.to_thread(cluster.call, "POST", "/v1/tasks", "bob", submitted))[0] == 201
            runs = n1
            for line in (n1, n2):
                with contextlib.suppress(TimeoutError):
                    await line.until(msg.StartProcess, within_s=2.0)
                    runs = line
            other = n2 if runs is n1 else n1
            values = {
                "/v1/tasks/his/logs?worker=0:0": {"text": "true", "at": 1.0, "next": 4},
                "/v1/tasks/his/logs?worker=7:7": {"text": "true", "at": 1.0, "next": 4},  # it has no slot
                "/v1/tasks/his/readings": [row, row | {"worker": "3:0"}, "odd"],
            }
            for path, value in values.items():
                asking = asyncio.create_task(asyncio.to_thread(cluster.call, "GET", path, "bob"))
                while "ask" not in (told := await runs.line.receive_json(timeout=60)):
                    pass
                for number in range(60):
                    await other.line.send_json({"answer": number, "value": forged})
                await other.beat()
                await asyncio.sleep(0.2)
                assert not asking.done(), path
                await runs.line.send_json({"answer": told["ask"], "value": value})
                status, text = await asking
                assert status == 200, text
                assert "forged" not in text
                found = json.loads(text)
                if "logs" in path:
                    assert (found["text"], found["node"]) == ("true", runs.welcome["welcome"])
                else:
                    assert found["workers"] == [row | {"node": runs.welcome["welcome"]}]

    asyncio.run(play())


def test_a_token_is_replaced_while_the_coordinator_runs_and_a_removed_one_ends_its_lines(
    cluster: Cluster,
) -> None:
    file = CredentialsFile(cluster.file)
    cluster.tokens["new"] = file.rotate("grafana", time.time() + 3600)
    file.write(time.time())

    async def until_closed() -> aiohttp.WSMsgType:
        async with agent(cluster.address, "n1", token=cluster.tokens["n1"]) as line:
            assert "welcome" in line.welcome
            while cluster.call("GET", "/v1/status", "new")[0] != 200:
                await asyncio.sleep(0.01)
            assert cluster.call("GET", "/v1/status", "grafana")[0] == 200, "both are valid for an hour"
            file.remove("n1")
            file.write(time.time())
            while (heard := await line.line.receive(timeout=30)).type is aiohttp.WSMsgType.TEXT:
                pass
            return heard.type

    assert asyncio.run(until_closed()) in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE)
    assert cluster.call("GET", "/v1/agent", "n1")[0] == 401
    assert cluster.call("GET", "/v1/agent", "n2")[0] != 401


def test_what_a_file_says_counts_until_it_can_be_read_again(tmp_path: Path) -> None:
    now, said, path = [100.0], list[str](), tmp_path / "credentials"
    file = CredentialsFile(path)
    old = file.add(Role.VIEWER, "eve")
    new = file.rotate("eve", until=150.0)
    file.write(now[0])
    known = Credentials(file=path, clock=lambda: now[0], warn=said.append)
    caller = known.of_token(old)
    assert caller is not None
    assert (caller.role, caller.name) == (Role.VIEWER, "eve")
    now[0] = 151.0
    assert known.of_token(old) is None
    assert not known.is_valid(caller), "and a line opened with it ends"
    assert known.of_token(new) is not None
    path.write_text("root eve everything\n")
    assert not known.refresh()
    assert "line 1" in said[0]
    assert known.of_token(new) is not None
    path.chmod(0o644)
    known.refresh()
    assert "chmod 600" in said[1]
    path.unlink()
    assert known.refresh()
    assert known.of_token(new) is None


def test_a_certificate_names_its_role_and_can_be_revoked(tmp_path: Path) -> None:
    file = CredentialsFile(tmp_path / "credentials")
    file.revoke(Role.NODE, "n7")
    file.write(0.0)
    known = Credentials(file=file.path, clock=lambda: 0.0)

    def subject(role: str, name: str) -> Caller | None:
        return known.of_certificate(((("organizationalUnitName", role),), (("commonName", name),)))

    assert subject("node", "n1") == Caller(role=Role.NODE, name="n1")
    assert subject("node", "n7") is None
    assert subject("king", "n1") is None
    assert subject("node", "n 1") is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("king bob sha256:" + "0" * 64, "role is 'king'"),
        ("viewer b/b sha256:" + "0" * 64, "name is 'b/b'"),
        ("viewer bob secret", "line 1"),
        ("viewer bob sha256:" + "0" * 64 + " until soon", "until 'soon'"),
    ],
)
def test_a_line_that_is_no_credential_is_named(line: str, why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        parse_credentials(line, "FILE")


def test_who_did_what_survives_a_snapshot() -> None:
    record = ClusterRecord()
    record.audit.append({"event": 1, "at": 2.0, "by": "alice", "text": "alice submits task t"})
    other = ClusterRecord()
    other.begin(other.machine, other.hearts, 1, json.loads(json.dumps(record.snapshot())))
    assert list(other.audit) == list(record.audit)
    assert other.steps == {}


def test_the_commands_that_manage_access(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = ["--file", str(tmp_path / "credentials")]
    assert main.run(["access", "add", "node", "n1", "n2", *file, "-o", f"{tmp_path}/tokens/"]) == 0
    assert main.run(["access", "add", "viewer", "eve", *file]) == 0
    token = capfd.readouterr().out.strip()
    assert Credentials(file=tmp_path / "credentials", clock=time.time).of_token(token) is not None
    held = tmp_path / "tokens" / "n1.token"
    assert held.stat().st_mode & 0o077 == 0
    assert token not in (tmp_path / "credentials").read_text()
    assert main.run(["access", "add", "admin", "eve", *file]) == 2
    assert "eve is a viewer already" in capfd.readouterr().err
    assert main.run(["access", "rotate", "eve", "--overlap", "0s", *file, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tokens"]["eve"] != token
    assert main.run(["access", "remove", "n2", *file]) == 0
    assert main.run(["access", "revoke", "node", "n1", *file]) == 0
    assert main.run(["access", "list", *file, "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["credentials"]
    assert [(row["name"], row["revoked"]) for row in rows] == [("eve", False), ("n1", True)]
    assert main.run(["access", "roles", "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["calls"]) == len(matrix())


def test_a_token_that_was_handed_out_is_never_overwritten(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A token is shown once. A path that ends with a slash is a folder, also one that is not there yet."""
    file = ["--file", str(tmp_path / "credentials")]
    folder, single = f"{tmp_path}/tokens/", f"{tmp_path}/one"
    assert main.run(["access", "add", "viewer", "bob", *file, "-o", folder]) == 0
    assert main.run(["access", "add", "viewer", "carol", *file, "-o", folder]) == 0
    assert main.run(["access", "add", "viewer", "dave", *file, "-o", single]) == 0
    tokens = {path: path.read_text() for path in sorted((tmp_path / "tokens").iterdir())}
    assert [path.name for path in tokens] == ["bob.token", "carol.token"]
    before = (tmp_path / "credentials").read_text()
    for refused in (
        ["add", "viewer", "erin", "-o", single],
        ["add", "viewer", "erin", "bob", "-o", folder],
        ["add", "viewer", "bob", "-o", folder],
        ["rotate", "bob", "-o", single],
    ):
        assert main.run(["access", *refused, *file]) == 2
        assert "is there and would be overwritten; give another path to --out" in capfd.readouterr().err
    assert (tmp_path / "credentials").read_text() == before
    assert {path: path.read_text() for path in sorted((tmp_path / "tokens").iterdir())} == tokens
    assert (
        main.run(["access", "rotate", "bob", *file, "-o", folder]) == 0
    )  # his own: both are valid for a while
    held = Credentials(file=tmp_path / "credentials", clock=time.time)
    bob = tmp_path / "tokens" / "bob.token"
    assert bob.read_text() != tokens[bob]
    assert held.of_token(bob.read_text().strip()) is not None
    assert held.of_token(tokens[bob].strip()) is not None


def test_the_page_of_the_docs_has_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
    for path, cells in matrix():
        row = " | ".join(cells[role].replace("no", "") for role in Role)
        assert f"| `{path}` | {row} |".replace("  ", " ") in text.replace("  ", " "), path


def test_a_token_on_the_command_line_of_a_daemon_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run(["agent", "--token", "s3cret"]) == 2
    assert main.run(["coordinator", "--token", "s3cret", "--host", "0.0.0.0"]) == 2
    assert capfd.readouterr().err.count("can be read by every user of this machine") == 2
