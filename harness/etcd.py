"""A real etcd on loopback, with its data where the test says."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BINARY = shutil.which("etcd")
ABSENT = "no etcd here; Debian has it as etcd-server"
_UNSUPPORTED = {"aarch64": "arm64"}  # etcd before 3.5 wants to be told that this is meant


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass
class Member:
    folder: Path
    name: str
    client: str
    peer: str
    binary: str | None = BINARY
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self, cluster: str) -> None:
        assert self.binary is not None, ABSENT
        arch = _UNSUPPORTED.get(platform.machine())
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.binary, *self._options(cluster)],
                stdout=log,
                stderr=log,
                env=os.environ | ({"ETCD_UNSUPPORTED_ARCH": arch} if arch else {}),
            )

    def _options(self, cluster: str) -> Iterator[str]:
        options = {
            "name": self.name,
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": self.client,
            "advertise-client-urls": self.client,
            "listen-peer-urls": self.peer,
            "initial-advertise-peer-urls": self.peer,
            "initial-cluster": cluster,
            "log-outputs": "stderr",
        }
        for name, value in options.items():
            yield from (f"--{name}", value)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Etcd:
    """One member or several; `with` starts and ends them. `binary`: the program, where none is installed."""

    def __init__(self, folder: Path, members: int = 1, binary: str | None = None) -> None:
        ports = free_ports(2 * members)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.members = [
            Member(folder / f"m{k}", f"m{k}", urls[2 * k], urls[2 * k + 1], binary or BINARY)
            for k in range(members)
        ]
        self._cluster = ",".join(f"{member.name}={member.peer}" for member in self.members)

    @property
    def endpoints(self) -> list[str]:
        return [member.client for member in self.members]

    def start(self, *members: Member) -> None:
        for member in members or self.members:
            member.start(self._cluster)
        for member in members or self.members:
            self._wait(member)

    def stop(self) -> None:
        for member in self.members:
            member.kill()

    def __enter__(self) -> Etcd:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait(self, member: Member) -> None:
        """Until it answers a question that needs a leader."""
        deadline = time.monotonic() + 30
        question = urllib.request.Request(
            f"{member.client}/v3/kv/range", data=json.dumps({"key": "eA=="}).encode(), method="POST"
        )
        while True:
            try:
                with urllib.request.urlopen(question, timeout=2):
                    return
            except OSError:
                assert member.process is not None
                log = (member.folder / "log").read_text(errors="replace")[-2000:]
                assert member.process.poll() is None, f"etcd has ended:\n{log}"
                assert time.monotonic() < deadline, f"etcd does not answer:\n{log}"
                time.sleep(0.02)
