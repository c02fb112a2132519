"""Requests that no honest client would send: refused in a sentence, never a 500."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.server.agent_connections import AgentConnections
from tests.support.served import JOB, served

HUGE = "9" * 400

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=20)
    | st.just("x" * 100_000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = """steps replicas stages microbatches threads seed device model data optimizer checkpoint log base
precision accumulate recompute memory_interval what"""
job_keys = st.sampled_from(KEYS.split())
jobs = st.dictionaries(job_keys, values, max_size=3).map(lambda changes: {**JOB, **changes})
submissions = st.fixed_dictionaries(
    {"name": st.text(max_size=8) | st.just("job")},
    optional={"job": jobs | values, "weight": values, "script": values, "faults": values, "odd": values},
)
paths = st.sampled_from(
    ["/v1/tasks", "/v1/tasks/{}", "/v1/tasks/{}/{}", "/v1/nodes/{}/{}", "/v1/incidents/{}"]
)
words = st.text(max_size=12) | st.sampled_from(
    ["job", "cancel", "pause", "resize", "reshape", "logs", "drain"]
)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with served(tmp_path_factory.mktemp("state")) as address:
        yield urlsplit(address).port or 0


def asked(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        line.request(method, path, body, headers)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(body=submissions)
def test_no_submission_breaks_it(port: int, body: dict[str, Any]) -> None:
    status, told = asked(port, "POST", "/v1/tasks", json.dumps(body))
    assert status in (201, 400), (status, told)
    if status == 400:
        sentence = json.loads(told)["error"]
        assert len(sentence) < 2000, "a wrong value is not repeated in full"


@quick
@given(path=paths, parts=st.tuples(words, words), method=st.sampled_from(["GET", "POST"]), body=values)
def test_no_path_breaks_it(port: int, path: str, parts: tuple[str, str], method: str, body: Any) -> None:
    filled = path.format(*(quote(part, safe="") for part in parts))
    status, told = asked(port, method, filled, json.dumps(body) if method == "POST" else None)
    assert status < 500 or status == 502, (status, told)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers"),
    [
        ("POST", "/v1/tasks", json.dumps({"name": "a", "job": JOB, "script": 5}), {}),
        ("POST", "/v1/tasks", f'{{"name": "a", "weight": {HUGE}, "job": {json.dumps(JOB)}}}', {}),
        ("POST", "/v1/tasks", json.dumps({"name": "a", "job": {**JOB, "replicas": 1_000_000}}), {}),
        ("POST", "/v1/tasks", json.dumps({"name": "a", "job": {**JOB, "shards": 2, "min_shards": 4}}), {}),
        ("GET", f"/v1/incidents?last={HUGE * 12}", None, {}),
        ("GET", "/v1/incidents?last=%C2%B2", None, {}),
        ("GET", f"/v1/plans?last={HUGE}", None, {}),
        ("GET", f"/v1/tasks/known/logs?worker={'9' * 5000}:0", None, {}),
        ("GET", "/v1/tasks/known/logs?worker=%EF%BC%91:0", None, {}),
        ("GET", "/v1/status", None, {"Host": "[::1"}),
        ("GET", "/v1/status", None, {"Origin": "http://[::1"}),
        ("POST", "/v1/tasks", "[" * 100_000, {}),
    ],
)
def test_requests_that_once_broke_it_are_refused_in_words(port, method, path, body, headers) -> None:
    if "known" in path:
        asked(port, "POST", "/v1/tasks", json.dumps({"name": "known", "job": JOB}))
    status, told = asked(port, method, path, body, **headers)
    assert status == 400
    assert json.loads(told)["error"].endswith(".")
    assert asked(port, "GET", "/v1/health")[0] == 200


@pytest.mark.parametrize("depth", [101, 900])
def test_a_job_that_is_nested_without_end_is_refused_in_words(port: int, depth: int) -> None:
    """900 levels were read, and then ended in a RecursionError: HTTP 500."""
    deep: Any = 1
    for _ in range(depth):
        deep = {"a": deep}
    body = json.dumps({"name": "deep", "job": {**JOB, "data": deep}})
    status, text = asked(port, "POST", "/v1/tasks", body)
    assert status == 400
    assert b"nested more than 100 levels deep" in text


def test_an_agent_that_hangs_up_before_it_is_answered_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the coordinator was stopped for a while and the agent's patience was over."""
    answered = threading.Event()
    serve = AgentConnections.serve

    async def late(self: AgentConnections, request: web.Request) -> web.WebSocketResponse:
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        try:
            return await serve(self, request)
        finally:
            answered.set()

    monkeypatch.setattr(AgentConnections, "serve", late)
    with served(tmp_path) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as caller:
            lines = [
                "GET /v1/agent HTTP/1.1",
                f"Host: {host}:{port}",
                "Upgrade: websocket",
                "Connection: Upgrade",
                "Sec-WebSocket-Version: 13",
                "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            ]
            caller.sendall("\r\n".join([*lines, "", ""]).encode())
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert answered.wait(20)
    assert "Error handling request" not in caplog.text
