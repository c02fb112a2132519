"""A lane's wire between CPU workers of one machine: a local socket.

It does what `nccl` does, one transfer after the other, so that the protocol of `lanes` is tested where there
is no GPU. Faster than tcp it is not.
"""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress

import torch
from torch import Tensor

from everstep.errors import PeerError
from everstep.net import frames


class PipeWire:
    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._name = b""
        self._sends = False
        self._parts: list[memoryview] = []
        self._began: float | None = None

    def name(self) -> bytes:
        return b"everstep-" + secrets.token_hex(16).encode()

    def begin_open(self, name: bytes, *, sends: bool) -> None:
        self._name, self._sends = b"\0" + name, sends
        if sends:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(self._name)
            self._listener.listen(1)
            self._listener.setblocking(False)

    def is_open(self) -> bool:
        if self._socket is not None:
            return True
        try:
            if self._listener is not None:
                self._socket, _ = self._listener.accept()
            else:
                made = socket.socket(socket.AF_UNIX)
                made.connect(self._name)
                self._socket = made
        except (BlockingIOError, ConnectionRefusedError):
            return False
        self._socket.setblocking(False)
        return True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        self._parts, self._began = [frames.raw(tensor) for tensor in tensors], time.monotonic()

    def is_done(self) -> bool:
        assert self._socket is not None
        try:
            while self._parts:
                part = self._parts[0]
                count = self._socket.send(part) if self._sends else self._socket.recv_into(part)
                if count == 0:
                    raise PeerError("the other end has closed it")
                self._parts[0] = part[count:]
                if not self._parts[0]:
                    self._parts.pop(0)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerError(str(error)) from None
        self._began = None
        return True

    def waits_since(self) -> float | None:
        return self._began

    def interrupt(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it is closed, or the other end was first
                self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        for sock in (self._listener, self._socket):
            if sock is not None:
                sock.close()
        self._parts, self._began = [], None

    def close(self) -> None:
        """Nothing is left."""
