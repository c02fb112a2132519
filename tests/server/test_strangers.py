"""Clients that may not ask, and hellos that no honest agent says, keep no one else from the coordinator."""

import asyncio
import gzip
import http.client
import json
import socket
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from everstep.net import strangers
from everstep.protocol.table import PROTOCOL
from everstep.store.memory_server import MemoryServer, MemoryStore
from tests.support.served import served

TOKEN = "a-token-of-the-cluster"


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "LOOK_S", 0.05)
    monkeypatch.setattr(strangers, "LOOKS", 4)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    with served(tmp_path, token=TOKEN) as address:
        yield urlsplit(address).port or 0


def half_a_request(
    port: int, text: bytes = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: "
) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(text)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Waits for it, up to the socket's time limit."""
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_who_shows_no_token_does_not_keep_a_connection(port: int) -> None:
    waiting = [half_a_request(port) for _ in range(20)]
    waiting += [half_a_request(port, b"") for _ in range(5)]
    refused = half_a_request(port, b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\n\r\n")
    assert refused.recv(12) == b"HTTP/1.1 401"
    while refused.recv(4096):
        pass
    assert all(is_closed(sock) for sock in waiting)
    for sock in (*waiting, refused):
        sock.close()


@pytest.fixture(scope="module")
def bomb() -> bytes:
    packer, zeros = zlib.compressobj(9, wbits=31), bytes(1 << 20)
    return b"".join(packer.compress(zeros) for _ in range(400)) + packer.flush()


def packed(bomb: bytes, path: str, token: str) -> bytes:
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{shown}Content-Type: application/json\r\n"
    return f"{head}Content-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n".encode() + bomb


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [("/v1/tasks", "", 401), ("/v1/health", "", 405), ("/", "", 405), ("/v1/tasks", TOKEN, 400)],
)
def test_a_packed_body_is_not_unpacked(port: int, bomb: bytes, path: str, token: str, status: int) -> None:
    """Four bodies of 900 KB became 900 MB each before they were refused: nobody was heard for 10 s."""
    before = time.process_time()
    for _ in range(4):
        with half_a_request(port, packed(bomb, path, token)) as sock:
            answer = sock.recv(4096)
            assert answer.startswith(b"HTTP/1.1 %d" % status), answer
            if status == 400:
                assert b"gzip is not unpacked here" in answer
    assert time.process_time() - before < 1.0


def test_every_server_takes_bodies_as_they_are_sent() -> None:
    """Also in pieces, and with what may be more than one layer."""

    async def play(encoding: str, piece: int) -> None:
        async def echo(request: web.Request) -> web.Response:
            return web.Response(body=await request.read())

        app = web.Application()
        app.router.add_post("/", echo)
        runner = strangers.StrangerLimit().runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        sent = gzip.compress(b"x" * 5000)

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(sent), piece):
                yield sent[at : at + piece]

        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://127.0.0.1:{runner.addresses[0][1]}/",
                data=pieces(),
                headers={"Content-Encoding": encoding},
            ) as answer,
        ):
            assert await answer.read() == sent
        await runner.cleanup()

    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        asyncio.run(play(encoding, 7))


def test_who_shows_it_keeps_its_connection(port: int) -> None:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    line.connect()
    kept = line.sock
    for _ in range(3):
        line.request("GET", "/v1/status", headers={"Authorization": f"Bearer {TOKEN}"})
        answer = line.getresponse()
        assert (answer.status, bool(answer.read())) == (200, True)
        assert line.sock is kept, "the coordinator closed it after its answer"
        time.sleep(0.5)  # twice as long as a stranger has; on one that was closed the next request fails
    line.close()


def test_the_oldest_strangers_go_first_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "LOOKS", 100)
    monkeypatch.setattr(strangers.resource, "getrlimit", lambda what: (8, 8))
    limit, connections = strangers.StrangerLimit(), [object() for _ in range(3)]
    assert limit.late(connections) == []  # type: ignore[arg-type]
    more = [*connections, *(object() for _ in range(3))]
    assert limit.late(more) == connections[:2]  # type: ignore[arg-type]
    assert limit.late(connections[2:]) == []  # type: ignore[arg-type]


def test_a_memory_store_closes_half_requests_too() -> None:
    store = MemoryStore()
    server = MemoryServer(store, "127.0.0.1")
    server.open()
    try:
        with half_a_request(server.port) as sock:
            assert is_closed(sock)
    finally:
        server.close()
        store.close()


HELLOS: list[dict[str, Any]] = [
    {"node": "\ud800"},  # could not be written as UTF-8: /metrics answered 500 from then on
    {"node": "a\nb"},
    {"node": "\x1b[31mred"},
    {"node": "\u202ebackwards"},
    {"node": "a/b"},
    {"node": ".."},
    {"node": " "},
    {"node": ""},
    {"node": "x" * 65},
    {"host": "\ud800"},
    {"host": "x" * 100_000},
    {"boot": "b" * 100_000},
    {"memory_port": -1},
    {"memory_port": 65_536},
    {"pair_port": -1},
    {"slots": 0},
    {"slots": 10**9},
]


def test_a_hello_that_no_agent_says_is_refused_and_metrics_still_answer(port: int) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}

    async def say_hello(change: dict[str, Any]) -> str:
        hello = {"node": "n", "boot": "1", "slots": 1, "host": "127.0.0.1", "protocol": PROTOCOL} | change
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.ws_connect(f"http://127.0.0.1:{port}/v1/agent") as line,
        ):
            await line.send_str(json.dumps({"hello": hello, "done": 0}))
            return (await line.receive_str(timeout=20))[:300]

    for change in HELLOS:
        answer = asyncio.run(say_hello(change))
        assert answer.startswith('{"refused"'), (change, answer)
    assert asyncio.run(say_hello({"node": "gpu-1.é"})).startswith('{"term"')
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    line.request("GET", "/metrics", headers=headers)
    assert line.getresponse().status == 200
    line.close()
