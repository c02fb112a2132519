"""Signals as bytes in a socket: a selector can wait for them, and a blocking call in between loses none."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signal_socket() -> Iterator[socket.socket]:
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    before = {each: signal.signal(each, lambda *_: None) for each in _SIGNALS}
    old = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for each, handler in before.items():
            signal.signal(each, handler)
        reader.close()
        writer.close()
