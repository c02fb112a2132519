"""A CA for one cluster: commands, coordinator and agents know each other by certificate."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import stat
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509

from everstep.cli import main
from everstep.cli.client import Client
from everstep.errors import EverstepError, UserError
from everstep.node.agent import Agent, AgentSettings
from everstep.server import certificates
from everstep.server.access import CredentialsFile, Role
from everstep.server.certificates import client_context, server_context
from everstep.server.serve import ServerSettings
from tests.support.served import served


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    where = ["--dir", str(folder / "ca")]
    assert main.run(["ca", "init", *where]) == 0
    assert main.run(["ca", "issue", "coordinator", "--host", "127.0.0.1", "--host", "localhost", *where]) == 0
    for role, name in (("admin", "root"), ("viewer", "eve"), ("node", "n1"), ("node", "n2")):
        assert main.run(["ca", "issue", role, name, *where]) == 0
    return folder / "ca" / "issued"


def served_with(issued: Path, folder: Path, **more: object) -> object:
    own = issued / "coordinator"
    files = {"cert": own / "cert.pem", "key": own / "key.pem", "client_ca": own / "ca.pem"}
    return served(folder, ca=own / "ca.pem", **files, **more)


def test_keys_are_private_and_a_second_ca_is_not_made_over_the_first(
    issued: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in [issued.parent / "ca.key", *issued.glob("*/key.pem")]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert main.run(["ca", "init", "--dir", str(issued.parent)]) == 2
    assert "has a CA already" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["king", "x"], "role is 'king'"),
        (["coordinator"], "give --host"),
        (["node"], "give the names"),
        (["node", "a/b"], "name is 'a/b'"),
        (["coordinator", "--host", "a b"], "neither a name nor an address"),
        (["node", "n1", "--dir", "nowhere"], "make a CA with everstep ca init"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    issued: Path, words: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    where = [] if "--dir" in words else ["--dir", str(issued.parent)]
    assert main.run(["ca", "issue", *words, *where]) == 2
    assert why in capfd.readouterr().err


def test_a_caller_is_known_by_its_certificate(issued: Path, tmp_path: Path) -> None:
    file = CredentialsFile(tmp_path / "credentials")
    file.revoke(Role.ADMIN, "mallory")
    file.write(0.0)
    assert main.run(["ca", "issue", "admin", "mallory", "--dir", str(issued.parent)]) == 0
    with served_with(issued, tmp_path / "state", credentials=file.path) as address:  # type: ignore[attr-defined]
        assert address.startswith("https://")
        assert Client(address=address, ca=issued / "root").get("/v1/audit") == []
        # Of another coordinator of this user: an agent with a certificate, and that in its home, was refused.
        assert Client(address=address, ca=issued / "root", token="x" * 32).get("/v1/audit") == []
        assert Client(address=address, ca=issued / "eve").get("/v1/status")["nodes"] == []
        with pytest.raises(UserError, match="viewer eve may not submit tasks"):
            Client(address=address, ca=issued / "eve").post("/v1/tasks")
        for nobody in (issued.parent / "ca.pem", issued / "coordinator", issued / "mallory"):
            with pytest.raises(UserError, match="token is missing or wrong"):
                Client(address=address, ca=nobody).get("/v1/status")
            with pytest.raises(UserError, match="token is missing or wrong"):
                Client(address=address, ca=nobody, token="x" * 32).get("/v1/status")
        with pytest.raises(UserError, match="CERTIFICATE_VERIFY_FAILED"):
            Client(address=address).get("/v1/status")
        with pytest.raises(EverstepError, match="does not answer"):
            Client(address=address.replace("https", "http")).get("/v1/status")


def test_a_certificate_of_another_authority_opens_nothing(issued: Path, tmp_path: Path) -> None:
    where = ["--dir", str(tmp_path / "other")]
    assert main.run(["ca", "init", *where]) == 0
    assert main.run(["ca", "issue", "admin", "root", *where]) == 0
    forged = tmp_path / "other" / "issued" / "root"
    shutil.copy(issued / "root" / "ca.pem", forged / "ca.pem")  # it knows the coordinator, and is not known
    with (
        served_with(issued, tmp_path / "state") as address,  # type: ignore[attr-defined]
        pytest.raises(EverstepError, match=r"alert unknown ca|UNKNOWN_CA|reset|closed|EOF"),
    ):
        Client(address=address, ca=forged).get("/v1/status")


def test_an_agent_speaks_for_the_node_of_its_certificate_only(issued: Path, tmp_path: Path) -> None:
    async def trouble(address: str, node: str) -> str:
        said: list[str] = []
        settings = AgentSettings(
            node=node, slots=1, coordinators=(address,), tls=lambda: client_context(issued / "n1")
        )
        agent = Agent(settings, say=said.append, warn=said.append)
        run = asyncio.create_task(agent.run())
        while not said:
            await asyncio.sleep(0.01)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        return said[0]

    with served_with(issued, tmp_path / "state") as address:  # type: ignore[attr-defined]
        assert "its credential is that of node n1" in asyncio.run(trouble(address, "n2"))
        assert "is connected" in asyncio.run(trouble(address, "n1"))
        nodes = Client(address=address, ca=issued / "root").get("/v1/status")["nodes"]
        assert [node["node"] for node in nodes] == ["n1"]


def test_the_wire_is_not_readable(issued: Path) -> None:
    """What crosses the socket between a client and a server, both of our contexts."""
    secret, seen = b"Authorization: Bearer s3cret", bytearray()
    own = issued / "coordinator"
    client_in, client_out, server_in, server_out = (ssl.MemoryBIO() for _ in range(4))
    client = client_context(issued / "root").wrap_bio(client_in, client_out, server_hostname="localhost")
    context = server_context(own / "cert.pem", own / "key.pem", own / "ca.pem")
    server = context.wrap_bio(server_in, server_out, server_side=True)
    heard, sent = b"", False
    for _ in range(20):
        for end, out, into in ((client, client_out, server_in), (server, server_out, client_in)):
            try:
                end.do_handshake()
                if end is client and not sent:
                    client.write(secret)
                    sent = True
                elif end is server:
                    heard += server.read(1000)
            except ssl.SSLWantReadError:
                pass
            data = out.read()
            seen += data
            into.write(data)
    assert heard == secret
    assert b"s3cret" not in seen
    shown = server.getpeercert()
    assert shown is not None
    assert ((("organizationalUnitName", "admin"),)) in shown["subject"]


def test_beyond_loopback_tls_is_needed_unless_insecure_is_said(issued: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="everstep ca"):
        ServerSettings(folder=tmp_path, host="0.0.0.0", token="t").check()
    ServerSettings(folder=tmp_path, host="0.0.0.0", token="t", is_insecure=True).check()
    own = issued / "coordinator"
    files = {"cert": own / "cert.pem", "key": own / "key.pem", "client_ca": own / "ca.pem"}
    ServerSettings(folder=tmp_path, host="0.0.0.0", **files).check()


def test_a_port_that_speaks_tls_tells_nothing_to_a_plain_caller(issued: Path, tmp_path: Path) -> None:
    with served_with(issued, tmp_path) as address:  # type: ignore[attr-defined]
        port = urlsplit(address).port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
            plain.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in plain.recv(1000)


def test_a_certificate_that_has_expired_is_refused_by_the_one_who_would_show_it(
    issued: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator hung up, and the caller read that the remote end had closed the connection."""
    place = issued / "eve"
    until = x509.load_pem_x509_certificate((place / "cert.pem").read_bytes()).not_valid_after_utc
    client_context(place)

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return until + timedelta(seconds=1)

    monkeypatch.setattr(certificates, "datetime", Later)
    with pytest.raises(UserError, match=f"expired on {until:%Y-%m-%d}; make another"):
        client_context(place)
