"""Ranks of one run give each other state and answers, straight from process to process.

Each rank listens; who connects proves that it knows the run's key, as workers do (`net.handshake`), asks one
question in one line, and gets one state (`state_tree`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from everstep.errors import EverstepError, PeerError
from everstep.hold import same_gpu, state_tree
from everstep.log import warn
from everstep.net.handshake import Acceptor, Opener
from everstep.net.sockets import listening
from everstep.protocol.held import Address
from everstep.protocol.table import Json

MOST_PEERS = 64  # connections at once
MOST_QUESTION = 1 << 20
PROOF_S, SILENCE_S = 5.0, 60.0

Answer = Callable[[dict[str, Json]], Any]


class PeerServer:
    """`answer` is called in threads; what it gives is sent."""

    def __init__(self, host: str, key: bytes, answer: Answer) -> None:
        self._key, self._answer = key, answer
        self._listener = listening(host)
        self.address: Address = (host, self._listener.getsockname()[1])
        self._room = threading.BoundedSemaphore(MOST_PEERS)
        threading.Thread(target=self._serve, name="everstep-peers", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._give, args=(sock,), name="everstep-peer", daemon=True).start()

    def _give(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, PeerError):
                sock.settimeout(PROOF_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _prove(sock, Acceptor(self._key))
                sock.settimeout(SILENCE_S)
                question = _line(sock)
                try:
                    packed = state_tree.pack({"answer": self._answer(question)})
                except (EverstepError, ValueError, KeyError, TypeError, RuntimeError) as error:
                    packed = state_tree.pack({"error": f"{error}"})
                for part in packed.parts(str(question.get("gpu", ""))):
                    sock.sendall(part)
                sock.recv(1)  # what it was given handles of is kept until it has copied that
        except Exception as error:  # a thread of ours: training does not end with it
            warn(f"a peer was not answered: {type(error).__name__}: {error}")
        finally:
            self._room.release()


def ask(address: Address, key: bytes, question: dict[str, Json]) -> Any:
    """OSError: the peer is gone. EverstepError: it says why it has no answer."""
    if gpu := same_gpu.name():
        try:
            return _asked(address, key, {**question, "gpu": gpu})
        except same_gpu.NotOpenedError as error:
            warn(f"a peer's memory cannot be read on the GPU, so it is sent: {error}")
    return _asked(address, key, question)


def _asked(address: Address, key: bytes, question: dict[str, Json]) -> Any:
    with socket.create_connection(address, timeout=PROOF_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opener = Opener(key)
        sock.sendall(opener.hello())
        _prove(sock, opener)
        sock.settimeout(SILENCE_S)
        sock.sendall(json.dumps(question).encode() + b"\n")

        def read(size: int) -> bytes:
            found = bytearray(size)
            read_into(memoryview(found))
            return bytes(found)

        def read_into(view: memoryview) -> None:
            while view:
                got = sock.recv_into(view)
                if not got:
                    raise OSError("the connection closed")
                view = view[got:]

        found = state_tree.unpack(read, read_into)
        if "gpu" in question:
            torch.cuda.synchronize()
    if "error" in found:
        raise EverstepError(str(found["error"]))
    return found["answer"]


def _prove(sock: socket.socket, side: Opener | Acceptor) -> None:
    while side.wants > 0:
        data = sock.recv(side.wants)
        if not data:
            raise ConnectionResetError("the connection closed")
        if answer := side.feed(data):
            sock.sendall(answer)


def _line(sock: socket.socket) -> dict[str, Json]:
    found = bytearray()
    while not found.endswith(b"\n"):
        data = sock.recv(1 << 16)
        if not data or len(found) > MOST_QUESTION:
            raise PeerError("a question without an end")
        found += data
    question = json.loads(found)
    if not isinstance(question, dict):
        raise PeerError("a question that is none")
    return question
