"""Someone on the wire: passes bytes on, keeps them all, and may change one."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Tap:
    """Listens on a port of loopback and passes connections on to another. `flip`: the number of the byte, of
    all in one direction of one connection, whose lowest bit is changed, once.
    """

    def __init__(self, to: int, flip: int | None = None) -> None:
        self.seen = bytearray()
        self.connections: list[bytearray] = []  # what each one's opener said
        self._to, self._flip = to, flip
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for sock in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                said = bytearray()
                self.connections.append(said)
                for source, sink, record in ((near, far, said), (far, near, bytearray())):
                    threading.Thread(target=self._pass, args=(source, sink, record), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                with self._lock:
                    at = -1 if self._flip is None else self._flip - len(record)
                    if 0 <= at < len(data):
                        data[at] ^= 1
                        self._flip = None
                    record += data
                    self.seen += data
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
