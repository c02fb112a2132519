"""The journal: what happened, in order and on disk, before anything is done about it.

Entries are numbered 1, 2, 3… without a hole. A snapshot is the state after entry `upto` and takes the place
of the entries up to it. A restarted coordinator reads the snapshot, then the entries after it, and is where
it was.

    append([a, b])      1 a   2 b                       durable when it returns
    append([c])         1 a   2 b   3 c
    snapshot(2, s)      s = state after 2   3 c         one transaction: never both, never neither
    (crash, restart)    latest_snapshot() -> 2, s       entries(after=2) -> 3 c

The promise: an append that returned is on disk; one that did not return may be there or not. A caller
that is cancelled while waiting for an append cannot know, as after a crash, and reads back.

`SqliteJournal` keeps it in one file, in WAL mode with synchronous=FULL: one fsync of the log for each append,
all of a batch or nothing, so that it outlives a power cut on a disk that keeps its word. A log torn by a
crash ends at its last whole append (SQLite checks every frame). A damaged database is refused in one
sentence, never half read: each body carries a checksum, and a missing number is an error. The file is locked
while it is open, with SQLite's own lock, which the kernel drops with the process: SIGKILL leaves none behind.

Rejected: a lock file beside it (a fork inherits it, or a crash leaves it), and an append-only file of our own
(all of this again, without twenty-five years of tests).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from everstep.errors import EverstepError, InternalError, UserError

MAX_ENTRY_BYTES = 1 << 20
MAX_SNAPSHOT_BYTES = 256 << 20
_APPLICATION_ID = 0x45565354  # "EVST": what `file` shows, and what tells our file from any other database
_VERSION = 2
_PAGE_ENTRIES = 1000
_SCHEMA = """
CREATE TABLE entries (number INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE snapshot (
  only INTEGER PRIMARY KEY CHECK (only = 1),
  upto INTEGER NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL
);
"""
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)
T = TypeVar("T")


class LostLeadership(EverstepError):
    """Another coordinator leads, or may: what was to be appended is not this process's to decide any more."""


class JournalBroken(EverstepError):
    """The journal took no more, or cannot be read: stop, for nothing may be done that is not written down."""


class JournalFull(EverstepError):
    """Nothing was written, and that is certain: there is no room, or the file system is read-only at the
    moment. It may be tried again.
    """


@dataclass(frozen=True, slots=True)
class JournalEntry:
    number: int
    body: bytes


class Journal(Protocol):
    lost: asyncio.Event  # set when this process may no longer append, until it is started again

    @property
    def term(self) -> int:
        """Of this leadership: higher than that of any before it. 0 where there can only be one leader."""

    async def open(self) -> None:
        """Ready to read; a `UserError` says in one sentence why it cannot be."""

    async def campaign(self) -> None:
        """Wait until this process may append: at once where no other process can."""

    async def append(self, bodies: Sequence[bytes]) -> int:
        """Durable on return; the number of the last entry."""

    async def entries(self, after: int = 0) -> list[JournalEntry]:
        """All entries behind number `after`, in order."""

    async def snapshot(self, upto: int, body: bytes) -> None:
        """Keep `body`, the state after entry `upto`, in place of the entries up to it."""

    async def latest_snapshot(self) -> tuple[int, bytes] | None:
        """The number of the last entry in it, and the state after it."""

    async def close(self) -> None:
        """Leave; may be called twice."""


def check_entries(bodies: Sequence[bytes]) -> None:
    for body in bodies:
        if len(body) > MAX_ENTRY_BYTES:
            raise UserError(
                f"an event of {len(body)} bytes is more than the {MAX_ENTRY_BYTES} one journal entry holds; "
                "make what is submitted smaller."
            )


def check_snapshot(upto: int, body: bytes, *, earlier: int, last: int) -> None:
    if not earlier <= upto <= last:
        raise InternalError(f"a snapshot of entry {upto}, but the journal holds {earlier} to {last}")
    if len(body) > MAX_SNAPSHOT_BYTES:
        raise JournalBroken(
            f"a state of {len(body)} bytes is more than the {MAX_SNAPSHOT_BYTES} a snapshot holds"
        )


class SqliteJournal:
    """One file, one process. SQLite runs in a thread of its own: an fsync never stops the event loop."""

    term = 0  # the file lock lets no other process lead

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = asyncio.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._database: sqlite3.Connection | None = None
        self._last = 0
        self._snapshot_upto = 0
        self._broken: str | None = None

    async def open(self) -> None:
        if self._thread is not None:
            raise InternalError(f"the journal {self.path} is open already")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        try:
            await self._in_thread(self._open)
        except BaseException:
            await self.close()
            raise

    async def campaign(self) -> None:
        """The lock on the file is leadership enough."""

    async def append(self, bodies: Sequence[bytes]) -> int:
        check_entries(bodies)
        batch = [bytes(body) for body in bodies]
        return await self._in_thread(lambda: self._append(batch))

    async def entries(self, after: int = 0) -> list[JournalEntry]:
        found: list[JournalEntry] = []
        while page := await self._in_thread(partial(self._page, after)):
            found += page
            after = page[-1].number
        return found

    async def snapshot(self, upto: int, body: bytes) -> None:
        await self._in_thread(lambda: self._snapshot(upto, bytes(body)))

    async def latest_snapshot(self) -> tuple[int, bytes] | None:
        return await self._in_thread(self._latest_snapshot)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._close)
            thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise JournalBroken(f"the journal {self.path} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # In the journal's own thread, from here on.

    def _open(self) -> None:
        self._create_file()
        self._database = sqlite3.connect(
            self.path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=16
        )
        try:
            self._lock_and_check(self._database)
        except sqlite3.Error as error:
            raise self._not_opened(error) from None

    def _create_file(self) -> None:
        """With a mode of our own: the journal holds what people submit."""
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise UserError(
                f"the journal {self.path} cannot be opened ({error.strerror}); "
                "give a file in a folder that is there and that this user may write to."
            ) from None

    def _lock_and_check(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # before WAL: then the index needs no shared file
        database.execute("BEGIN EXCLUSIVE")  # takes the lock; locking_mode keeps it
        database.execute("COMMIT")
        ours = self._is_ours(database)  # what is not ours is not changed
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise UserError(
                f"the file system of {self.path} allows no write-ahead log; give a file on another."
            )
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA journal_size_limit = 67108864")
        if not ours:
            database.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID};"
                f" PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self._damaged(verdict.splitlines()[-1])
        found = database.execute("SELECT upto FROM snapshot").fetchone()
        self._snapshot_upto = found[0] if found else 0
        self._last = self._last_without_hole(database)

    def _is_ours(self, database: sqlite3.Connection) -> bool:
        (application_id,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application_id == 0 and num_tables == 0:
            return False
        if application_id != _APPLICATION_ID:
            raise UserError(
                f"{self.path} is a database of another program, not a journal; give another file."
            )
        if version != _VERSION:
            raise UserError(
                f"the journal {self.path} has format {version}, this Everstep reads format {_VERSION}; "
                "start the version that wrote it, or give another file."
            )
        return True

    def _last_without_hole(self, database: sqlite3.Connection) -> int:
        first, last, count = database.execute(
            "SELECT min(number), max(number), count(*) FROM entries"
        ).fetchone()
        if count == 0:
            return self._snapshot_upto
        if first != self._snapshot_upto + 1 or last - first + 1 != count:
            raise self._damaged(
                f"{count} entries from {first} to {last} behind a snapshot of {self._snapshot_upto}"
            )
        return int(last)

    def _append(self, bodies: list[bytes]) -> int:
        first = self._last + 1
        rows = [(number, zlib.crc32(body), body) for number, body in enumerate(bodies, first)]
        if rows:
            self._write(lambda database: database.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows))
            self._last += len(rows)
        return self._last

    def _page(self, after: int) -> list[JournalEntry]:
        def read(database: sqlite3.Connection) -> list[JournalEntry]:
            rows = database.execute(
                "SELECT number, checksum, body FROM entries WHERE number > ? ORDER BY number LIMIT ?",
                (after, _PAGE_ENTRIES),
            )
            return [JournalEntry(number, self._checked(f"entry {number}", *rest)) for number, *rest in rows]

        return self._read(read)

    def _snapshot(self, upto: int, body: bytes) -> None:
        check_snapshot(upto, body, earlier=self._snapshot_upto, last=self._last)

        def replace(database: sqlite3.Connection) -> None:
            row = (upto, zlib.crc32(body), body)
            database.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?)", row)
            database.execute("DELETE FROM entries WHERE number <= ?", (upto,))

        self._write(replace)
        self._snapshot_upto = upto

    def _latest_snapshot(self) -> tuple[int, bytes] | None:
        def read(database: sqlite3.Connection) -> tuple[int, bytes] | None:
            row = database.execute("SELECT upto, checksum, body FROM snapshot").fetchone()
            return None if row is None else (row[0], self._checked("the snapshot", *row[1:]))

        return self._read(read)

    def _write(self, change: Callable[[sqlite3.Connection], object]) -> None:
        """One transaction. After a failed one the state on disk is unknown: nothing more is accepted. Unless
        SQLite says that it had no room and has taken everything back.
        """
        if self._broken is not None:
            raise JournalBroken(self._broken)
        database = self._database
        assert database is not None
        try:
            database.execute("BEGIN IMMEDIATE")
            change(database)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            said = f"the journal {self.path} cannot be written ({error})"
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM and not database.in_transaction:
                raise JournalFull(said) from None
            self._broken = f"{said}; mend the disk, then restart."
            raise JournalBroken(self._broken) from None

    def _read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        assert self._database is not None
        try:
            return question(self._database)
        except sqlite3.Error as error:
            raise self._damaged(str(error)) from None

    def _checked(self, what: str, checksum: int, body: bytes) -> bytes:
        if zlib.crc32(body) != checksum:
            raise self._damaged(f"{what} does not match its checksum")
        return body

    def _not_opened(self, error: sqlite3.Error) -> UserError:
        code = error.sqlite_errorcode & 0xFF  # the rest says which kind of busy
        if code == sqlite3.SQLITE_BUSY:
            return UserError(
                f"the journal {self.path} is in use by another coordinator; "
                "stop that one, or give another file."
            )
        if code == sqlite3.SQLITE_NOTADB:
            return UserError(f"{self.path} is not a journal; give another file.")
        return self._damaged(str(error))

    def _damaged(self, how: str) -> UserError:
        return UserError(
            f"the journal {self.path} is damaged ({how}); "
            "put back a copy, or move it away to start with nothing."
        )

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()
