"""A coordinator's journal in an etcd that speaks TLS only, and only to those it knows."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.server.serve import ServerSettings, _journal
from harness.etcd import ABSENT, BINARY, Member, free_ports

pytestmark = [
    pytest.mark.skipif(BINARY is None, reason=ABSENT),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with"),
]


class StrictMember(Member):
    def _options(self, cluster: str) -> Iterator[str]:
        yield from super()._options(cluster)
        yield "--client-cert-auth"
        files = {"trusted-ca-file": "ca.pem", "cert-file": "etcd.pem", "key-file": "etcd.key"}
        for name, file in files.items():
            yield from (f"--{name}", str(self.folder.parent / file))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrictMember]:
    folder = tmp_path_factory.mktemp("tls")
    _certificates(folder)
    client, peer = free_ports(2)
    member = StrictMember(
        folder / "m", "m", client=f"https://127.0.0.1:{client}", peer=f"http://127.0.0.1:{peer}"
    )
    member.start(f"m={member.peer}")
    yield member
    member.kill()


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def _certificates(folder: Path) -> None:
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl(folder, *new, "-x509", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("etcd", "coordinator"):
        _openssl(folder, *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        _openssl(folder, *sign, "-out", f"{name}.pem", "-days", "2", "-extfile", "names")


def _settings(etcd: StrictMember, tmp_path: Path, *, known: bool = True) -> ServerSettings:
    folder = etcd.folder.parent
    return ServerSettings(
        folder=tmp_path,
        etcd=(etcd.client,),
        name="one",
        etcd_ca=folder / "ca.pem",
        etcd_cert=folder / "coordinator.pem" if known else None,
        etcd_key=folder / "coordinator.key" if known else None,
    )


def test_the_journal_is_kept_in_an_etcd_that_asks_for_a_certificate(
    etcd: StrictMember, tmp_path: Path
) -> None:
    async def one_life(bodies: list[bytes]) -> list[bytes]:
        journal = _journal(_settings(etcd, tmp_path))
        deadline = time.monotonic() + 20
        while True:
            try:
                await journal.open()
                break
            except UserError:  # it starts
                assert time.monotonic() < deadline, (etcd.folder / "log").read_text()[-2000:]
                await asyncio.sleep(0.05)
        await journal.campaign()
        await journal.append(bodies)
        found = [entry.body for entry in await journal.entries()]
        await journal.close()
        return found

    assert asyncio.run(one_life([b"a", b"b"])) == [b"a", b"b"]
    assert asyncio.run(one_life([b"c"])) == [b"a", b"b", b"c"]


def test_without_a_certificate_it_is_refused_in_one_sentence(
    etcd: StrictMember, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.server.etcd._ANSWER_S", 0.5)
    with pytest.raises(UserError, match="credentials"):
        asyncio.run(_journal(_settings(etcd, tmp_path, known=False)).open())


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("not one")
    settings = ServerSettings(folder=tmp_path, etcd=("https://127.0.0.1:1",), etcd_ca=tmp_path / "ca.pem")
    with pytest.raises(UserError, match=r"ca\.pem"):
        settings.etcd_tls()
    with pytest.raises(UserError, match="--etcd-key"):
        ServerSettings(folder=tmp_path, etcd_cert=tmp_path / "ca.pem").check()
