"""All that goes over loopback in a network namespace of our own, and a cluster in it to be listened to.

    unshare -n python -m tests.server.wiretap FOLDER [--encrypt]

A coordinator and two agents train one task over TCP; a worker is killed, so a state is copied to another
one, and copies of states go into the memory of the other node. Then it is looked for in what was heard:
tokens, the task's secret, and tensors, by pieces of a copy that lies in the memory of a node. Prints JSON.
With --encrypt the control plane has TLS and the job `[net] encrypt = true`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from everstep.cli.client import Client
from everstep.errors import EverstepError
from harness.cluster import EVERSTEP, small_job

_ETH_P_ALL, _SOL_PACKET, _PACKET_STATISTICS, _SO_RCVBUFFORCE = 3, 263, 6, 33
TOKEN = "wiretap-token-0123456789abcdef"
STEPS, PIECE, WITHIN_S = 24, 48, 240.0


class Wiretap:
    """What goes over lo from now on; each frame is heard as it leaves and as it comes, and kept once."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 28)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self.heard, self._over = bytearray(), threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                frame, (_, _, kind, *_) = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if kind == socket.PACKET_OUTGOING:
                self.heard += frame

    def close(self) -> int:
        """How many frames were missed."""
        self._over.set()
        self._thread.join()
        _, missed = struct.unpack("2I", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        self._socket.close()
        return int(missed)


def pieces(data: bytes, count: int = 64) -> Iterator[bytes]:
    """Of a file of tensors: those that are no padding and no header."""
    for start in range(len(data) // 4, len(data) - PIECE, max(PIECE, len(data) // (2 * count))):
        piece = data[start : start + PIECE]
        if len(set(piece)) > PIECE // 2:
            yield piece


def _answered(true: Callable[[], Any]) -> Any:
    """A coordinator that starts answers with a sentence; a copy can be dropped while it is looked at."""
    try:
        return true()
    except (EverstepError, FileNotFoundError):
        return None


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (found := _answered(true)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(0.05)
    return found


def listened(folder: Path, *, encrypt: bool) -> dict[str, Any]:
    tap, tls = Wiretap(), folder / "ca" / "issued"
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(TOKEN)
    own: list[str] = ["--token-file", str(folder / "token")]
    ca: Path | None = None
    if encrypt:
        ca = tls / "coordinator" / "ca.pem"
        where = ["--dir", str(folder / "ca")]
        for words in (["init"], ["issue", "coordinator", "--host", "127.0.0.1"], ["issue", "node", "a", "b"]):
            subprocess.run([*EVERSTEP, "ca", *words, *where], check=True, stdout=subprocess.DEVNULL)
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            more = {"OMP_NUM_THREADS": "1"}
            started.append(
                subprocess.Popen(
                    [*EVERSTEP, *words], stdout=subprocess.PIPE, stderr=log, env=os.environ | more
                )
            )
        return started[-1]

    try:
        with_tls = ["--tls", str(tls / "coordinator")] if encrypt else []
        state = str(folder / "state")
        began = start(
            "coordinator", "coordinator", "--port", "0", "--json", "--state", state, *own, *with_tls
        )
        assert began.stdout is not None
        told = b""
        while not told.rstrip().endswith(b"}"):
            told += began.stdout.readline()
        address = json.loads(told)["address"].replace("localhost", "127.0.0.1")
        client = Client(address=address, token=TOKEN, ca=ca)
        for node in ("a", "b"):
            proof = ["--tls", str(tls / node)] if encrypt else own
            at = ["--node", node, "--slots", "2", "--coordinator", address, "--no-check", "--grace", "0"]
            start(node, "agent", *at, "--state", str(folder / node), *proof)
        until(lambda: len(client.get("/v1/status")["nodes"]) == 2, "both nodes are there")
        net = {"encrypt": True} if encrypt else {}
        job = small_job(folder, steps=100_000, transport="tcp", memory_interval=2, net=net)
        client.post("/v1/tasks", {"name": "t", "job": job})
        until(lambda: client.get("/v1/tasks/t")["step"] >= 6, "it trains")
        victim = client.get("/v1/tasks/t/readings")["workers"][0]["pid"]
        os.kill(victim, signal.SIGKILL)
        until(lambda: client.get("/v1/tasks/t")["step"] >= STEPS, "it trains on")
        until(lambda: client.get("/v1/incidents")[-1]["closed_at"], "the worker is replaced")
        records = [(folder / node / "record").read_text() for node in ("a", "b")]
        secret = next(found[1] for text in records if (found := re.search(r'"secret":"([0-9a-f]+)"', text)))
        stores = [Path(json.loads(text.partition("\n")[0])["memory"]) for text in records]
        # A copy that lies on both nodes went over the wire. One that is dropped meanwhile is looked at later.
        copies: list[bytes] = []

        def seen() -> bool:
            names = [{str(p.relative_to(s)) for p in s.rglob("*.safetensors")} for s in stores]
            for name in names[0] & names[1]:
                data = (stores[0] / name).read_bytes()
                copies.append(data)
            return bool(copies)

        until(seen, "a copy is in the memory of both nodes")
        client.post("/v1/tasks/t/cancel", {})
        until(lambda: client.get("/v1/tasks/t")["state"] == "cancelled", "it is cancelled")
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(60)
    missed = tap.close()
    heard, looked = bytes(tap.heard), [piece for data in copies for piece in pieces(data)]
    return {
        "encrypted": encrypt,
        "bytes": len(heard),
        "frames_missed": missed,
        "token": TOKEN.encode() in heard,
        "secret": secret.encode() in heard or bytes.fromhex(secret) in heard,
        "pieces_looked_for": len(looked),
        "tensors": sum(piece in heard for piece in looked),
    }


if __name__ == "__main__":
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print(json.dumps(listened(Path(sys.argv[1]), encrypt="--encrypt" in sys.argv)))
