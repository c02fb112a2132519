"""What ranks write: kept as it is in files, passed on line by line with the rank in front, its end kept.

One thread reads all pipes and writes to the terminal, so that a terminal which does not take more (Ctrl-S, a
pager) holds the ranks up, as it would any program, but never the one who watches over them.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

from everstep.log import MOST_LOG, warn

_CHUNK_BYTES = 1 << 16
_MOST_AT_ONCE = 1 << 20  # of one stream: it may be written faster than it is shown, and others wait
_TAIL_BYTES = 8192
_MAX_LINE_BYTES = 1 << 16  # a longer one is passed on in parts
_BAR_EVERY_S = 1.0  # progress bars of several ranks cannot be drawn in place: a line now and then


def _visible(line: bytes) -> bytes:
    """What a terminal shows of a line: a progress bar is written over itself after each carriage return."""
    parts = [part for part in line.split(b"\r") if part.strip()]
    return parts[-1] if parts else b""


def _opened(path: Path) -> io.FileIO | None:
    with contextlib.suppress(OSError):
        return path.open("ab", buffering=0)
    return None


class OutputStream:
    """One pipe of one rank. What is read goes to file and tail at once, to the terminal when it can; without
    a terminal, to the file alone.
    """

    def __init__(self, rank: int, path: Path, terminal: BinaryIO | None) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.num_bytes = self.lost = 0  # read; and of these not written to the file
        self._prefix = f"[{rank}] ".encode()
        self._path, self._file = path, _opened(path)
        self._in_file = 0
        self._terminal = terminal
        self._tail: deque[bytes] = deque()
        self._partial = self._bar = b""  # a line that has not ended; what was shown of it
        self._bar_at = 0.0
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self.is_closed = False

    def started(self) -> None:
        """The rank holds the writing end now."""
        os.close(self.writer)

    def take(self) -> None:
        """What is in the pipe now, which is more than a pipe holds."""
        end = self.num_bytes + _MOST_AT_ONCE
        with self._lock:
            while not self.is_closed and self.num_bytes < end:
                try:
                    data = os.read(self.reader, _CHUNK_BYTES)
                except BlockingIOError:
                    return
                if not data:
                    self._close()
                    return
                self._keep(data)

    def show(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
        with contextlib.suppress(OSError, ValueError):
            if lines and self._terminal is not None:
                self._terminal.write(b"".join(lines))
                self._terminal.flush()

    def tail(self) -> str:
        with self._lock:
            return b"".join(self._tail)[-_TAIL_BYTES:].decode(errors="replace")

    def close(self) -> None:
        with self._lock:
            if not self.is_closed:
                self._close()

    def _close(self) -> None:
        self.is_closed = True
        if (rest := _visible(self._partial)) and rest != self._bar:
            self._lines.append(self._prefix + rest + b"\n")
            self._partial = b""
        if self._file is not None:
            self._file.close()

    def _keep(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._write(data)
        self._tail.append(data)
        while sum(map(len, self._tail)) - len(self._tail[0]) > _TAIL_BYTES:
            self._tail.popleft()
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_LINE_BYTES:
            whole, self._partial = [*whole, self._partial], b""
        for line in whole:
            if not self._bar or _visible(line) != self._bar:
                self._lines.append(self._prefix + _visible(line) + b"\n")
            self._bar = b""
        if b"\r" in self._partial:
            self._draw(_visible(self._partial))

    def _draw(self, bar: bytes) -> None:
        """Of a progress bar, what it shows now; and no more of it is kept."""
        self._partial = b"\r" + bar + (b"\r" if self._partial.endswith(b"\r") else b"")
        if bar not in (b"", self._bar) and time.monotonic() - self._bar_at >= _BAR_EVERY_S:
            self._bar, self._bar_at = bar, time.monotonic()
            self._lines.append(self._prefix + bar + b"\n")

    def _write(self, data: bytes) -> None:
        """This thread reads for all ranks: if it ended, they would wait in `print` without end."""
        try:
            if self._file is None or self._in_file > MOST_LOG:
                self._roll()
            assert self._file is not None
            written = self._file.write(data)
            self._in_file += written
            self.lost += len(data) - written
        except OSError as error:
            if not self.lost:
                warn(f"{self._path} cannot be written ({error.strerror}); the ranks continue")
            self.lost += len(data)

    def _roll(self) -> None:
        """What was written so far is NAME.1 from now on."""
        if self._file is not None:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file, self._in_file = self._path.open("ab", buffering=0), 0


class Pump:
    """The thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._new: deque[OutputStream] = deque()
        self._is_closing = False
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._work, name="everstep-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, stream: OutputStream) -> None:
        self._new.append(stream)
        os.write(self._wake_writer, b"+")

    def close(self) -> None:
        """When all that was written has been shown; a terminal that takes nothing is not waited for long."""
        self._is_closing = True
        os.write(self._wake_writer, b"-")
        self._thread.join(timeout=2)

    def _work(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_reader, 4096)
                    continue
                self._read(key.data)
            while self._new:
                stream = self._new.popleft()
                self._selector.register(stream.reader, selectors.EVENT_READ, stream)
            if self._is_closing:
                for key in list(self._selector.get_map().values()):
                    if key.data is not None:
                        self._read(key.data)
                return

    def _read(self, stream: OutputStream) -> None:
        stream.take()
        if stream.is_closed:
            self._selector.unregister(stream.reader)
            os.close(stream.reader)
        stream.show()
