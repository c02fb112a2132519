"""What a process says: lines for people, through one function that never raises and never waits.

    say("…") ──► logging, "everstep" ──► LineWriter, a thread ──► stderr
    print, tracebacks, libraries ──► sys.stdout and sys.stderr, which drop what cannot be written

A full disk, a closed pipe or a file system that hangs under the log costs lines, not processes: an agent that
ends because of a line ends its workers. Lines that cannot be written are kept up to a limit and written when
that is possible again, with the number of those that were lost. Only a terminal is written to at once, since
its lines and a picture below them must keep their order.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import queue
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TextIO

from everstep.errors import printable

Format = Literal["plain", "text", "json"]  # the line alone; with time and level; as a JSON object
MOST_HELD = 2000  # lines that wait to be written
MOST_LINE = 1 << 14  # bytes
RETRY_S = 0.5  # until a line is tried again
FLUSH_S = 2.0
MOST_LOG = 64 << 20  # bytes of a log file; the part before it is kept as NAME.1
_KEPT = 1 << 20  # of a log file, where there is no room for NAME.1

LOGGER = logging.getLogger("everstep")


def say(line: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """A line on stderr. `facts`: more keys of the line as JSON."""
    with contextlib.suppress(Exception):  # of handlers that others have added
        if not LOGGER.handlers:
            _use("plain", logging.INFO)
        LOGGER.log(level, "%s", line, extra={"facts": facts})


def warn(line: str, **facts: Any) -> None:
    say(line, level=logging.WARNING, **facts)


def start(*, form: Format = "plain", level: str = "info") -> None:
    """How this process says lines, from now on; and no print in it can raise any more."""
    for fd in (0, 1, 2):  # one that was closed would be the next file's or socket's number
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _unbreakable("stdout", 1), _unbreakable("stderr", 2)
    _use(form, logging.getLevelNamesMapping()[level.upper()])


def flush(within_s: float = FLUSH_S) -> None:
    """Before the process ends by `os._exit`."""
    for writer in list(_writers):
        writer.flush(within_s)


def lost_output() -> OSError | None:
    """Why a part of what was printed on stdout could not be written; a reader that exited is no reason."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, _Unbreakable) else None


# ------------------------------------------------------------------ files


class LineWriter:
    """Lines for one file, in order, written by a thread that starts with the first of them."""

    def __init__(self, fd: Callable[[], int], *, tell: Callable[[str], None] | None = None) -> None:
        """`fd`: called in the thread for every line. `tell`: hears why a line cannot be written, once until
        it can be. Without it, the lines themselves say how many were lost.
        """
        self._fd, self._tell = fd, tell
        self.forget()
        _writers.add(self)

    def forget(self) -> None:
        """In a forked process: what was held is its parent's to write."""
        # Its `put` may be called by a signal handler, also one that interrupts `put`.
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._started = threading.Lock()  # taken for good
        self._hurry = threading.Event()
        self.error: OSError | None = None  # of the line that is tried now
        self.lost = 0

    def add(self, line: str) -> None:
        if self._queue.qsize() >= MOST_HELD:
            self.lost += 1
            return
        self._queue.put(line.encode(errors="replace")[:MOST_LINE] + b"\n")
        if self._started.acquire(blocking=False):
            try:
                threading.Thread(target=self._work, name="everstep-lines", daemon=True).start()
            except RuntimeError:  # no more threads, now or because the interpreter ends
                self._started.release()

    @property
    def num_held(self) -> int:
        return self._queue.qsize()

    def flush(self, within_s: float = FLUSH_S) -> bool:
        """Until all lines so far are written, or dropped because they cannot be. Were they in time?"""
        if not self._started.locked():
            return True
        self._hurry.set()
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(within_s)

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                self._hurry.clear()
                item.set()
                continue
            self._write(item)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                if self.lost and self._tell is None:
                    os.write(self._fd(), f"{self.lost} lines were lost here\n".encode())
                    self.lost = 0
                data = data[os.write(self._fd(), data) :]
            except OSError as error:
                if self.error is None and self._tell is not None:
                    self._tell(error.strerror or str(error))
                self.error = error
                if self._hurry.wait(RETRY_S):
                    self.lost += 1
                    return
            else:
                self.error = None


class LineFile:
    """A file to which lines are appended; on a full disk they are kept until there is room."""

    def __init__(self, path: Path, *, tell: Callable[[str], None]) -> None:
        self.path = path
        self._open: int | None = None
        self._writer = LineWriter(self._descriptor, tell=tell)

    def add(self, line: str) -> None:
        self._writer.add(line)

    def close(self) -> int:
        """How many lines are not written, and will not be."""
        if not self._writer.flush():
            return self._writer.lost + self._writer.num_held  # its thread has the file, on storage that hangs
        if self._open is not None:
            os.close(self._open)
            self._open = None
        return self._writer.lost

    def _descriptor(self) -> int:
        """Again after it was removed, or after it could not be written."""
        if self._open is not None:
            if self._writer.error is None and os.fstat(self._open).st_nlink:
                return self._open
            os.close(self._open)
            self._open = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._open).st_size
        if self._writer.error is None and size and os.pread(self._open, 1, size - 1) != b"\n":
            os.write(self._open, b"\n")  # a process was killed in the middle of a line
        return self._open


def append_to(path: Path) -> int:
    """A descriptor for the output of a child; where there is no room for the file, it has none."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def trim(path: Path, most: int = MOST_LOG) -> None:
    """Of a log that other processes append to: if it is larger than this, it begins again, and what it had is
    NAME.1. A few lines that are written meanwhile may be lost.
    """
    with contextlib.suppress(OSError), path.open("r+b") as log:
        size = log.seek(0, os.SEEK_END)
        if size <= most:
            return
        log.seek(max(0, size - _KEPT))
        newest = log.read()
        log.seek(max(0, size - most))
        older = path.with_name(f"{path.name}.1")
        try:
            with older.open("wb") as kept:
                shutil.copyfileobj(log, kept)
        except OSError:
            older.unlink(missing_ok=True)
            log.truncate(0)
            log.seek(0)
            log.write(newest)
        else:
            log.truncate(0)


# ------------------------------------------------------------------ stderr


class _Unbreakable(io.FileIO):
    """A file whose writes never fail."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.error = error
            return len(data)
        return len(data) if written is None else written  # None: it does not block, and takes nothing now


def _unbreakable(name: str, fd: int) -> TextIO:
    now: TextIO | None = getattr(sys, name)
    if now is not None and now is not getattr(sys, f"__{name}__"):
        return now  # a test, or a user, has put another one there
    if now is not None:
        with contextlib.suppress(OSError, ValueError):
            now.flush()
    raw = _Unbreakable(fd, "w", closefd=False)
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    _ours.add(stream)
    return stream


class _Lines(logging.Handler):
    def __init__(self, form: Format) -> None:
        super().__init__()
        self._form = form

    def emit(self, record: logging.LogRecord) -> None:
        line, stream = _words(record, self._form), sys.stderr
        try:
            if stream is None:
                return
            if (stream is sys.__stderr__ or stream in _ours) and not stream.isatty():
                _stderr.add(line)
            else:
                print(line, file=stream, flush=True)
        except (OSError, ValueError):  # a terminal that is gone, a file that is closed
            _stderr.lost += 1


def _words(record: logging.LogRecord, form: Format) -> str:
    line = record.getMessage()
    if form != "json":  # which writes them out itself
        line = printable(line)
    if form == "plain":
        return line
    at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
    if form == "text":
        return f"{at} {record.levelname:<7} {line}"
    facts = getattr(record, "facts", {})
    return json.dumps({"at": at, "level": record.levelname.lower(), "message": line, **facts}, default=str)


def _use(form: Format, level: int) -> None:
    for handler in [handler for handler in LOGGER.handlers if isinstance(handler, _Lines)]:
        LOGGER.removeHandler(handler)
    LOGGER.addHandler(_Lines(form))
    LOGGER.setLevel(level)
    LOGGER.propagate = False


def _forked() -> None:
    for writer in list(_writers):
        writer.forget()


_writers: weakref.WeakSet[LineWriter] = weakref.WeakSet()
_ours: weakref.WeakSet[TextIO] = weakref.WeakSet()
_stderr = LineWriter(lambda: 2)
atexit.register(flush)
os.register_at_fork(after_in_child=_forked)
