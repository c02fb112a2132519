"""The journal in a real etcd: one leads, the others wait, and who has been deposed writes nothing."""

import asyncio
import http.server
import itertools
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from everstep.errors import InternalError, UserError
from everstep.server import etcd as module
from everstep.server.etcd import EtcdJournal
from everstep.server.gateway import Gateway, text_of
from everstep.server.journal import MAX_ENTRY_BYTES, JournalBroken, JournalEntry, LostLeadership
from harness.etcd import ABSENT, BINARY, Etcd, free_ports
from tests.server.journal_writer import read_back
from tests.support.served import call, served

pytestmark = pytest.mark.skipif(BINARY is None, reason=ABSENT)
T = TypeVar("T")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/{request.node.name}"


def journal_at(etcd: Etcd, prefix: str, name: str = "a", lease_s: int = 30) -> EtcdJournal:
    """A lease that a busy machine does not lose, where losing it is not what is tested."""
    return EtcdJournal(etcd.endpoints, prefix=prefix, name=name, lease_s=lease_s)


async def leading(etcd: Etcd, prefix: str, name: str = "a", lease_s: int = 30) -> EtcdJournal:
    journal = journal_at(etcd, prefix, name, lease_s)
    await journal.open()
    await journal.campaign()
    return journal


def in_a_life(etcd: Etcd, prefix: str, use: Callable[[EtcdJournal], Awaitable[T]]) -> T:
    async def life() -> T:
        journal = await leading(etcd, prefix)
        try:
            return await use(journal)
        finally:
            await journal.close()

    return asyncio.run(life())


def test_entries_outlive_their_leader_in_order(etcd: Etcd, prefix: str) -> None:
    async def first(journal: EtcdJournal) -> None:
        assert await journal.entries() == []
        assert await journal.latest_snapshot() is None
        assert await journal.append([]) == 0
        assert await journal.append([b"a", b"", b"c"]) == 3
        assert await journal.append([b"\x00d"]) == 4
        assert await journal.entries(after=1) == [
            JournalEntry(2, b""),
            JournalEntry(3, b"c"),
            JournalEntry(4, b"\x00d"),
        ]

    async def second(journal: EtcdJournal) -> None:
        assert await journal.append([b"e"]) == 5
        assert [entry.number for entry in await journal.entries()] == [1, 2, 3, 4, 5]

    in_a_life(etcd, prefix, first)
    in_a_life(etcd, prefix, second)


def test_a_snapshot_in_chunks_takes_the_place_of_its_entries(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1000)
    state = random.Random(5).randbytes(4321)

    async def first(journal: EtcdJournal) -> None:
        await journal.append([b"a", b"b", b"c"])
        await journal.snapshot(1, b"")
        assert await journal.latest_snapshot() == (1, b"")
        assert await journal.entries() == [
            JournalEntry(2, b"b"),
            JournalEntry(3, b"c"),
        ]  # the three are one page
        await journal.snapshot(2, state)
        await journal.snapshot(2, state)
        with pytest.raises(InternalError, match="a snapshot of entry 1"):
            await journal.snapshot(1, b"older")
        chunks, _ = await journal._range(f"{prefix}/chunks/", f"{prefix}/chunks0", limit=100)
        assert len(chunks) == 5  # nothing is left of the ones before

    async def second(journal: EtcdJournal) -> None:
        assert await journal.latest_snapshot() == (2, state)
        assert await journal.entries(after=2) == [JournalEntry(3, b"c")]
        await journal.snapshot(3, b"all")
        assert await journal.entries(after=3) == []
        assert await journal.append([b"d"]) == 4

    in_a_life(etcd, prefix, first)
    in_a_life(etcd, prefix, second)


def test_a_batch_larger_than_a_request_is_cut_and_comes_back_whole(etcd: Etcd, prefix: str) -> None:
    bodies = [bytes([k]) * (MAX_ENTRY_BYTES if k == 3 else 300_000) for k in range(12)]

    async def use(journal: EtcdJournal) -> None:
        assert await journal.append(bodies) == 12
        assert await journal.append([b"%d" % n for n in range(3000)]) == 3012
        for n in range(20):  # more pages than are read at once
            await journal.append([b"page %d" % n])
        found = await journal.entries()
        assert [entry.body for entry in found[:12]] == bodies
        assert [entry.number for entry in found] == list(range(1, 3033))
        with pytest.raises(UserError, match="more than the 1048576"):
            await journal.append([bytes(MAX_ENTRY_BYTES + 1)])

    in_a_life(etcd, prefix, use)


def test_appends_of_many_callers_at_once_never_share_a_number(etcd: Etcd, prefix: str) -> None:
    async def use(journal: EtcdJournal) -> None:
        numbers = await asyncio.gather(*(journal.append([b"%d" % n]) for n in range(30)))
        assert {e.number: int(e.body) for e in await journal.entries()} == {
            number: n for n, number in enumerate(numbers)
        }

    in_a_life(etcd, prefix, use)


def test_a_caller_that_gives_up_leaves_no_doubt_behind(etcd: Etcd, prefix: str) -> None:
    async def use(journal: EtcdJournal) -> None:
        impatient = asyncio.create_task(journal.append([b"a"]))
        await asyncio.sleep(0)  # it has begun
        impatient.cancel()
        assert await journal.append([b"b"]) == 2
        assert await journal.entries() == [JournalEntry(1, b"a"), JournalEntry(2, b"b")]

    in_a_life(etcd, prefix, use)


def test_an_answer_that_is_lost_does_not_double_the_entry(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is carried out, its answer thrown away, the request sent again."""
    ask, sendings = Gateway._ask, itertools.count()

    async def forgetful(self: Gateway, method: str, body: dict[str, object], timeout_s: float) -> object:
        answer = await ask(self, method, body, timeout_s)
        if method == "kv/txn" and next(sendings) % 2 == 0:
            raise TimeoutError
        return answer

    async def use(journal: EtcdJournal) -> None:
        for n in range(5):
            assert await journal.append([b"%d" % n]) == n + 1
        await journal.snapshot(3, b"state")
        assert [entry.body for entry in await journal.entries(after=3)] == [b"3", b"4"]

    monkeypatch.setattr(Gateway, "_ask", forgetful)
    in_a_life(etcd, prefix, use)
    assert next(sendings) == 2 * (1 + 5 + 2)  # the leader key, five appends, a chunk and its commit


@pytest.mark.alone
def test_a_leader_that_resigns_is_followed_at_once(etcd: Etcd, prefix: str) -> None:
    async def scene() -> float:
        first = await leading(etcd, prefix, "first")
        second = journal_at(etcd, prefix, "second")
        await second.open()
        waiting = asyncio.create_task(second.campaign())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert await second.leader() == "first"
        await first.append([b"a"])
        began = time.perf_counter()
        await first.close()
        await waiting
        seconds = time.perf_counter() - began
        assert await second.leader() == "second"
        assert await second.append([b"b"]) == 2
        await second.close()
        assert await _leader_of(etcd, prefix) is None
        return seconds

    assert asyncio.run(scene()) < 2  # a lease is 30


async def _leader_of(etcd: Etcd, prefix: str) -> str | None:
    journal = journal_at(etcd, prefix)
    await journal.open()
    try:
        return await journal.leader()
    finally:
        await journal.close()


def test_a_deposed_leader_writes_nothing_whatever_it_believes(etcd: Etcd, prefix: str) -> None:
    async def scene() -> None:
        old = await leading(etcd, prefix, "old")
        await old.append([b"a"])
        await old._gateway.call("lease/revoke", {"ID": old._lease}, within_s=5)  # behind its back
        new = await leading(etcd, prefix, "new")
        assert not old.lost.is_set()  # it does not know
        with pytest.raises(LostLeadership, match="another coordinator leads"):
            await old.append([b"of the old"])
        assert old.lost.is_set()
        with pytest.raises(LostLeadership):
            await old.snapshot(1, b"of the old")
        assert await new.append([b"b"]) == 2
        assert await new.entries() == [JournalEntry(1, b"a"), JournalEntry(2, b"b")]
        await old.close()
        assert await new.append([b"c"]) == 3  # the old one's farewell took nothing with it
        await new.close()

    asyncio.run(scene())


def test_a_request_that_wandered_for_long_is_refused(etcd: Etcd, prefix: str) -> None:
    """An append of an earlier moment arrives when the head has moved on, under the same leader."""

    async def use(journal: EtcdJournal) -> None:
        sent = []
        call = journal._gateway.call

        async def recording(method: str, body: dict[str, object], *, within_s: float) -> dict[str, object]:
            sent.append((method, body))
            return await call(method, body, within_s=within_s)

        journal._gateway.call = recording  # type: ignore[method-assign]
        await journal.append([b"a"])
        await journal.snapshot(1, b"one")
        await journal.append([b"b"])
        await journal.snapshot(2, b"two")
        for method, body in list(sent):
            if method == "kv/txn":
                await call(method, body, within_s=5)
        assert await journal.latest_snapshot() == (2, b"two")
        assert await journal.entries(after=2) == []
        assert await journal.append([b"c"]) == 3

    in_a_life(etcd, prefix, use)


def test_a_missing_entry_or_chunk_is_told(etcd: Etcd, prefix: str) -> None:
    async def use(journal: EtcdJournal) -> None:
        for body in (b"a", b"b", b"c"):
            await journal.append([body])
        await journal.snapshot(1, b"state")
        await journal._gateway.call(
            "kv/deleterange", {"key": text_of(f"{prefix}/entries/{2:020d}")}, within_s=5
        )
        with pytest.raises(JournalBroken, match="lacks an entry"):
            await journal.entries(after=1)
        end = {"key": text_of(f"{prefix}/chunks/"), "range_end": text_of(f"{prefix}/chunks0")}
        await journal._gateway.call("kv/deleterange", end, within_s=5)
        with pytest.raises(JournalBroken, match="is damaged"):
            await journal.latest_snapshot()

    in_a_life(etcd, prefix, use)


def writer(etcd: Etcd, prefix: str, name: str) -> subprocess.Popen[bytes]:
    endpoints = ",".join(etcd.endpoints)
    command = [sys.executable, "-m", "tests.server.journal_writer", "etcd", endpoints, prefix, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def acknowledged(told: bytes) -> list[int]:
    return [int(line) for line in told.splitlines(keepends=True) if line.endswith(b"\n")]


def test_kill_9_of_the_leader_loses_nothing_and_the_next_takes_over_in_seconds(
    etcd: Etcd, prefix: str
) -> None:
    first, second = writer(etcd, prefix, "first"), writer(etcd, prefix, "second")
    assert first.stdout is not None
    assert second.stdout is not None
    said, _, _ = select.select([first.stdout, second.stdout], [], [], 20)
    leader, standby = (first.stdout, second.stdout) if first.stdout in said else (second.stdout, first.stdout)
    assert leader.readline() == b"leads\n"
    killed = first if leader is first.stdout else second
    killer = threading.Timer(random.Random(9).uniform(0.2, 0.6), killed.kill)
    killer.start()
    last = max(acknowledged(leader.read()))
    assert killed.wait() == -9
    killed_at = time.perf_counter()
    assert standby.readline() == b"leads\n"  # said after it has read everything back, without a hole
    assert time.perf_counter() - killed_at < 8  # a lease is 3, and the machine may be busy
    assert int(standby.readline()) >= last  # all that was acknowledged
    survivor = second if killed is first else first
    survivor.kill()
    last = max(acknowledged(standby.read()), default=last)
    survivor.wait()
    assert asyncio.run(_read_without_leading(etcd, prefix)) >= last


async def _read_without_leading(etcd: Etcd, prefix: str) -> int:
    journal = journal_at(etcd, prefix)
    await journal.open()
    try:
        return await read_back(journal)
    finally:
        await journal.close()


def test_a_coordinator_that_stands_by_answers_prometheus(etcd: Etcd, prefix: str, tmp_path: Path) -> None:
    """It answered 503: a target that is down, on every healthy one."""
    more: dict[str, Any] = {"etcd": tuple(etcd.endpoints), "etcd_prefix": prefix, "token": "one"}
    with served(tmp_path / "a", **more) as first, served(tmp_path / "b", leads=False, **more) as second:
        for address, leads in ((first, "1.0"), (second, "0.0")):
            status, body = call(address, "/metrics", Authorization="Bearer one")
            assert status == 200
            assert f"everstep_leader {leads}\n" in body.decode()
        assert "everstep_nodes" not in body.decode(), "or the cluster would be counted twice"
        assert call(second, "/metrics")[0] == 401
        assert call(second, "/v1/status", Authorization="Bearer one")[0] == 503


def test_etcd_may_be_killed_and_come_back_while_its_leader_waits(tmp_path: Path) -> None:
    async def scene(etcd: Etcd) -> None:
        journal = await leading(etcd, "/j")
        await journal.append([b"a"])
        etcd.members[0].kill()
        waiting = asyncio.create_task(journal.append([b"b"]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await asyncio.to_thread(etcd.start)
        assert await waiting == 2
        assert not journal.lost.is_set()
        assert await journal.entries() == [JournalEntry(1, b"a"), JournalEntry(2, b"b")]
        await journal.close()

    with Etcd(tmp_path) as etcd:
        asyncio.run(scene(etcd))


def test_etcd_away_for_longer_than_a_lease_ends_leadership(tmp_path: Path) -> None:
    async def scene(etcd: Etcd) -> None:
        journal = await leading(etcd, "/j", lease_s=2)
        etcd.members[0].kill()
        with pytest.raises(LostLeadership, match="it is not known who leads"):
            await journal.append([b"a"])
        assert journal.lost.is_set()
        await journal.close()

    with Etcd(tmp_path) as etcd:
        asyncio.run(scene(etcd))


def test_one_of_three_endpoints_may_be_down_or_go_down(tmp_path: Path) -> None:
    async def scene(etcd: Etcd) -> None:
        journal = await leading(etcd, "/j")
        for n, member in enumerate(etcd.members[:2]):
            assert await journal.append([b"%d" % n]) == 2 * n + 1
            member.kill()
            assert await journal.append([b"%d without" % n]) == 2 * n + 2
            await asyncio.to_thread(etcd.start, member)
        assert not journal.lost.is_set()
        assert len(await journal.entries()) == 4
        await journal.close()

    with Etcd(tmp_path, members=3) as etcd:
        asyncio.run(scene(etcd))


class NotEtcd(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"kvs": []}')

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_what_cannot_be_opened_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"

    async def opening(*endpoints: str) -> None:
        await EtcdJournal(endpoints, prefix="/j", name="a").open()

    with pytest.raises(
        UserError, match=r"no etcd answers at http://127.0.0.1:\d+ \(.*\); start etcd, or correct"
    ):
        asyncio.run(opening(nobody))
    with pytest.raises(UserError, match=r"'127\.0\.0\.1:2379' is not an address; write it like"):
        asyncio.run(opening("127.0.0.1:2379"))
    with pytest.raises(UserError, match="no etcd endpoint was given"):
        asyncio.run(opening())
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotEtcd)
    thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with pytest.raises(UserError, match=r"\(the answer is not etcd's\); start etcd, or correct"):
        asyncio.run(opening(f"http://127.0.0.1:{other.server_port}"))
    other.shutdown()
    thread.join()
    other.server_close()
