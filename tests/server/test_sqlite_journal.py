"""The journal in a file: what was acknowledged is there, in order, whatever kills the writer."""

import asyncio
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from everstep.errors import InternalError, UserError
from everstep.server import journal as module
from everstep.server.journal import JournalBroken, JournalEntry, JournalFull, SqliteJournal
from tests.server.journal_writer import read_back

T = TypeVar("T")


def with_journal(path: Path, use: Callable[[SqliteJournal], Awaitable[T]]) -> T:
    """Open, use, close: one life of a coordinator."""

    async def life() -> T:
        journal = SqliteJournal(path)
        await journal.open()
        try:
            await journal.campaign()
            return await use(journal)
        finally:
            await journal.close()

    return asyncio.run(life())


def test_entries_come_back_in_order_and_numbered_from_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def first(journal: SqliteJournal) -> None:
        assert await journal.entries() == []
        assert await journal.append([]) == 0
        assert await journal.append([b"a", b"b"]) == 2
        assert await journal.append([b"c"]) == 3
        assert await journal.entries(after=1) == [JournalEntry(2, b"b"), JournalEntry(3, b"c")]

    async def second(journal: SqliteJournal) -> None:
        assert await journal.append([b"d"]) == 4
        assert [entry.body for entry in await journal.entries()] == [b"a", b"b", b"c", b"d"]

    with_journal(path, first)
    with_journal(path, second)


def test_a_snapshot_takes_the_place_of_its_entries_and_numbers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def first(journal: SqliteJournal) -> None:
        assert await journal.latest_snapshot() is None
        await journal.append([b"a", b"b", b"c"])
        await journal.snapshot(2, b"state after b")
        assert await journal.entries() == [JournalEntry(3, b"c")]
        await journal.snapshot(3, b"state after c")
        with pytest.raises(InternalError, match="a snapshot of entry 2"):
            await journal.snapshot(2, b"older")
        with pytest.raises(InternalError, match="a snapshot of entry 4"):
            await journal.snapshot(4, b"not there yet")

    async def second(journal: SqliteJournal) -> None:
        assert await journal.latest_snapshot() == (3, b"state after c")
        assert await journal.append([b"d"]) == 4

    with_journal(path, first)
    with_journal(path, second)


def test_more_entries_than_a_page_are_all_read(tmp_path: Path) -> None:
    async def life(journal: SqliteJournal) -> None:
        await journal.append([str(n).encode() for n in range(1, 2502)])
        found = await journal.entries(after=1)
        assert [(e.number, int(e.body)) for e in found] == [(n, n) for n in range(2, 2502)]

    with_journal(tmp_path / "journal", life)


def test_appends_of_many_callers_at_once_never_share_a_number(tmp_path: Path) -> None:
    async def life(journal: SqliteJournal) -> None:
        numbers = await asyncio.gather(*(journal.append([str(n).encode()]) for n in range(50)))
        assert sorted(numbers) == list(range(1, 51))
        bodies = {entry.number: int(entry.body) for entry in await journal.entries()}
        assert bodies == {number: n for n, number in enumerate(numbers)}

    with_journal(tmp_path / "journal", life)


def test_the_file_is_synced_on_every_append_and_is_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def life(journal: SqliteJournal) -> None:
        await journal.append([b"a"])
        assert journal._database is not None
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert journal._database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert [f.stat().st_mode & 0o777 for f in tmp_path.iterdir()] == [0o600] * len(
            list(tmp_path.iterdir())
        )

    with_journal(path, life)


def test_sigkill_at_random_moments_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path, moments, last = tmp_path / "journal", random.Random(4), 0
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.server.journal_writer", "sqlite", str(path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"leads\n"
        timer = threading.Timer(moments.uniform(0.0, 0.25), writer.kill)
        timer.start()
        told = writer.stdout.read()
        timer.join()
        assert writer.wait() == -9
        acknowledged = [int(line) for line in told.splitlines(keepends=True) if line.endswith(b"\n")]
        before, last = last, with_journal(path, read_back)
        assert last >= max(acknowledged, default=before)
    assert last > 40  # there were snapshots too


def test_a_log_cut_at_any_byte_ends_at_a_whole_append(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    copies: list[bytes] = []

    async def life(journal: SqliteJournal) -> None:
        for first in range(1, 40, 3):
            await journal.append([f"{first + k}".encode() * 200 for k in range(3)])
        copies.extend([path.read_bytes(), Path(f"{path}-wal").read_bytes()])

    with_journal(path, life)
    main, log = copies
    lengths = set()
    for cut in [0, 31, *random.Random(1).sample(range(32, len(log)), 25), len(log)]:
        torn = tmp_path / f"torn-{cut}"
        torn.write_bytes(main)
        Path(f"{torn}-wal").write_bytes(log[:cut])

        async def read(journal: SqliteJournal) -> int:
            found = await journal.entries()
            assert [e.body for e in found] == [f"{n}".encode() * 200 for n in range(1, len(found) + 1)]
            assert await journal.append([b"goes on"]) == len(found) + 1
            return len(found)

        lengths.add(with_journal(torn, read))
    assert max(lengths) == 39
    assert len(lengths) > 5
    assert all(length % 3 == 0 for length in lengths)


def test_a_damaged_file_is_refused_or_read_rightly_never_half(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    bodies = [random.Random(n).randbytes(300) for n in range(200)]

    async def fill(journal: SqliteJournal) -> None:
        await journal.append(bodies[:50])
        await journal.snapshot(50, b"state" * 500)
        await journal.append(bodies[50:])

    with_journal(path, fill)
    good = path.read_bytes()
    draw, refused = random.Random(2), list[str]()
    for trial in range(40):
        bad = bytearray(good)
        if trial % 4 == 0:
            del bad[draw.randrange(1, len(bad)) :]
        else:
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)

        async def read(journal: SqliteJournal) -> tuple[tuple[int, bytes] | None, list[JournalEntry]]:
            return await journal.latest_snapshot(), await journal.entries(after=50)

        try:
            snapshot, found = with_journal(path, read)
        except UserError as error:
            refused.append(str(error))
        else:
            assert snapshot == (50, b"state" * 500)
            assert [entry.body for entry in found] == bodies[50:]
    assert len(refused) >= 20
    assert all(str(path) in sentence and "\n" not in sentence for sentence in refused)


def test_a_missing_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with_journal(path, lambda journal: journal.append([b"a", b"b", b"c"]))
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM entries WHERE number = 2")
    database.close()
    with pytest.raises(UserError, match=r"is damaged \(2 entries from 1 to 3"):
        with_journal(path, read_back)


def test_two_coordinators_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.server.journal_writer", "sqlite", str(path)], stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"leads\n"
        with pytest.raises(UserError, match="is in use by another coordinator; stop that one"):
            with_journal(path, read_back)
    finally:
        writer.kill()
        writer.communicate()
    with_journal(path, read_back)  # the lock is gone with the process

    async def twice_here(journal: SqliteJournal) -> None:
        with pytest.raises(UserError, match="in use"):
            await SqliteJournal(path).open()
        await journal.append([b"still mine"])

    with_journal(path, twice_here)


def test_what_cannot_be_a_journal_is_named_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("dear diary, " * 100)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE photographs (name)")
    other.close()
    with_journal(tmp_path / "newer", lambda journal: journal.append([b"a"]))
    with sqlite3.connect(tmp_path / "newer") as newer:
        newer.execute("PRAGMA user_version = 7")
    newer.close()
    for name, sentence in {
        "away/journal": r"No such file or directory\); give a file in a folder that is there",
        "": "Is a directory",
        "notes": "is not a journal; give another file",
        "other": "is a database of another program",
        "newer": "has format 7, this Everstep reads format 2",
    }.items():
        with pytest.raises(UserError, match=sentence):
            with_journal(tmp_path / name, read_back)
    assert (tmp_path / "notes").read_text() == "dear diary, " * 100


def test_a_full_disk_takes_nothing_and_leaves_what_was_there_until_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def life(journal: SqliteJournal) -> None:
        await journal.append([b"a"])
        assert journal._database is not None
        (pages,) = journal._database.execute("PRAGMA page_count").fetchone()
        journal._database.execute(f"PRAGMA max_page_count = {pages}")
        large = [b"b", b"x" * 100_000]
        for _ in range(2):
            with pytest.raises(JournalFull, match=r"cannot be written \(database or disk is full"):
                await journal.append(large)
        journal._database.execute(f"PRAGMA max_page_count = {100 * pages}")
        assert await journal.append(large) == 3

    with_journal(path, life)
    assert len(with_journal(path, lambda journal: journal.entries())) == 3


def test_a_disk_whose_state_is_unknown_stops_the_journal(tmp_path: Path) -> None:
    """An I/O error is not tried again: what a failed fsync has left on disk is not known."""

    class Failing:
        in_transaction = False

        def execute(self, text: str) -> None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error

        def close(self) -> None:
            pass

    async def life(journal: SqliteJournal) -> None:
        real, journal._database = journal._database, Failing()  # type: ignore[assignment]
        try:
            for sentence in ("disk I/O error", "then restart"):
                with pytest.raises(JournalBroken, match=sentence):
                    await journal.append([b"a"])
        finally:
            journal._database = real

    with_journal(tmp_path / "journal", life)


def test_bounds_are_kept_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(journal: SqliteJournal) -> None:
        with pytest.raises(UserError, match="1048577 bytes is more than the 1048576"):
            await journal.append([b"small", b"x" * (module.MAX_ENTRY_BYTES + 1)])
        assert await journal.append([b"x" * module.MAX_ENTRY_BYTES]) == 1
        monkeypatch.setattr(module, "MAX_SNAPSHOT_BYTES", 10)
        with pytest.raises(JournalBroken, match="a state of 11 bytes"):
            await journal.snapshot(1, b"x" * 11)

    with_journal(tmp_path / "journal", life)


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    async def life() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        await journal.open()
        await journal.close()
        await journal.close()
        with pytest.raises(JournalBroken, match="is closed"):
            await journal.append([b"a"])

    asyncio.run(life())
