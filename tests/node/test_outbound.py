"""A token goes to the address that a user gave, and nowhere else: not to a proxy of the environment, and not
to where an answer points.
"""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator

import aiohttp
import pytest

from everstep import outbound
from everstep.cli.client import Client
from everstep.errors import UserError
from everstep.node.cloud_notice import CloudNotice

Seen = list[tuple[str, str | None]]


class Host(http.server.ThreadingHTTPServer):
    """Writes down what it is asked, and by which token. `to`: where it sends everybody."""

    def __init__(self, to: str = "", status: int = 302) -> None:
        self.seen: Seen = []
        self.to, self.status = to, status
        super().__init__(("127.0.0.1", 0), _Handler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.thread.join(30)
        super().__exit__(*error)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.server.status if self.server.to else 200)
        self.send_header(outbound.OURS, "coordinator")
        if self.server.to:
            self.send_header("Location", f"{self.server.to}{self.path}")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_CONNECT = do_PUT = do_GET

    def log_message(self, *ignored: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[Host]:
    with Host() as host:
        yield host


PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@pytest.mark.parametrize("no_proxy", ["", "127.0.0.1", "*"])
@pytest.mark.parametrize("name", PROXIES)
def test_no_proxy_of_the_environment_sees_a_request(
    name: str, no_proxy: str, stranger: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, stranger.address)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    with Host() as coordinator:
        client = Client(address=coordinator.address, token="secret")
        assert client.get("/v1/status") == {}
        assert client.post("/v1/tasks") == {}
        assert coordinator.seen == [("/v1/status", "Bearer secret"), ("/v1/tasks", "Bearer secret")]

        async def ask() -> int:
            async with outbound.session() as session, session.get(coordinator.address) as answer:
                return answer.status

        assert asyncio.run(ask()) == 200
    assert stranger.seen == []


def test_who_can_only_reach_it_through_a_proxy_is_told_so(
    stranger: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", stranger.address)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(UserError, match=r"--address\. http_proxy is not used: it would see the token\."):
        Client(address="http://127.0.0.1:1", token="secret").get("/v1/status")
    assert stranger.seen == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status: int, stranger: Host) -> None:
    """Neither to another host nor to another port of the same one."""
    with Host(to=stranger.address, status=status) as coordinator:
        client = Client(address=coordinator.address, token="secret")
        for call in (client.get, client.post):
            with pytest.raises(UserError, match="sends callers elsewhere"):
                call("/v1/status")

        async def connect() -> None:
            headers = {"Authorization": "Bearer secret"}
            async with outbound.session(headers=headers) as session:
                for url in ("/v1/agent", "/v3/kv/range"):
                    with pytest.raises(aiohttp.ClientResponseError, match="not followed"):
                        await session.ws_connect(f"{coordinator.address}{url}")
                    with pytest.raises(aiohttp.ClientResponseError, match="not followed"):
                        await session.post(f"{coordinator.address}{url}", json={})

        asyncio.run(connect())
        asked = len(coordinator.seen)
        CloudNotice("aws", say=lambda text: None, service=coordinator.address).look()
        assert len(coordinator.seen) > asked
    assert stranger.seen == []
