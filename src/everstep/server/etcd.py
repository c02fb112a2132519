"""The journal in etcd, for coordinators of which one leads and the others wait.

    PREFIX/leader        who leads; bound to that process's lease, so it vanishes with the process
    PREFIX/head          the number of the last entry, and which append wrote it
    PREFIX/entries/N     the entries of one append, up to number N
    PREFIX/snapshot      which chunks make up the state, and after which entry
    PREFIX/chunks/…      the state, in parts that fit into a request

To lead is to have created `leader`. The lease is kept alive every third of its time; when that fails for a
whole lease, this process must take it that another one leads, and `lost` is set. But nothing rests on clocks:
every write is one transaction that holds only while `leader` is the very key this process created *and* the
head is the one it knows. A coordinator that slept through its lease, and a request that wandered through the
network for an hour, are refused by etcd itself.

A lost answer is no riddle either. The head names the append that wrote it, so the same request sent again
finds either the old head (now it is written) or its own (it had been). If it cannot be found out within the
lease, leadership is lost.

A batch that does not fit into one request (1.5 MiB) becomes several, in order: after a crash in between, its
first part is there, though it was never acknowledged, and no hole.

A waiting coordinator watches `leader`: it follows one that resigned at once, and one that died when its lease
is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import struct
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from everstep.errors import InternalError, UserError
from everstep.log import warn
from everstep.server.gateway import Gateway, Json, RequestRefused, Unreachable, bytes_of, end_of, text_of
from everstep.server.journal import (
    MAX_ENTRY_BYTES,
    JournalBroken,
    JournalEntry,
    LostLeadership,
    check_entries,
    check_snapshot,
)

_PAGE_BYTES = MAX_ENTRY_BYTES + (64 << 10)  # with keys and all, below etcd's 1.5 MiB
_CHUNK_BYTES = 1 << 20
_PAGES_AT_ONCE = 8
_ANSWER_S = 5.0  # for calls that no lease depends on
_LOOK_AGAIN_S = 0.2
HANG_S = 20.0  # without a turn of the coordinator's loop: another one should lead
_LENGTH = struct.Struct("<I")
T = TypeVar("T")


class LeaseKeeper:
    """Renews a lease from a thread: one slow event of the coordinator must not cost its leadership, or the
    next leader reads the same event and loses it too. A coordinator that hangs must lose it: when its loop
    has not turned for `HANG_S`, the lease is not renewed any more.
    """

    def __init__(
        self,
        gateway: Gateway,
        lease: str,
        lease_s: float,
        kept: Callable[[float], None],
        lost: Callable[[], None],
    ) -> None:
        self._gateway, self._lease, self._lease_s = gateway, lease, lease_s
        self._kept, self._lost, self._hang_s = kept, lost, HANG_S
        self._loop = asyncio.get_running_loop()
        self._turned_at = self._loop.time()  # the monotonic clock, for all threads the same
        self._turning: asyncio.Task[None] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        self._turning = asyncio.create_task(self._turn())
        self._thread.start()

    async def stop(self) -> None:
        self._end.set()
        if self._turning is not None:
            self._turning.cancel()
        await asyncio.to_thread(self._thread.join, 2.0)

    async def _turn(self) -> None:
        while True:
            self._turned_at = self._loop.time()
            await asyncio.sleep(self._lease_s / 6)

    def _run(self) -> None:
        asyncio.run(self._renew())

    async def _renew(self) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + self._lease_s
        await self._gateway.open()
        try:
            while not await asyncio.to_thread(self._end.wait, self._lease_s / 3):
                sent_at = clock()
                if sent_at - self._turned_at > self._hang_s:
                    warn(
                        f"coordinator: it has not answered for {self._hang_s:g} s and gives up its leadership"
                    )
                    break
                try:
                    answer = await self._gateway.call(
                        "lease/keepalive", {"ID": self._lease}, within_s=until - sent_at
                    )
                except (Unreachable, RequestRefused):
                    answer = {}
                if int(answer.get("TTL", 0)) <= 0:  # it expired, or etcd was unreachable before it did
                    break
                until = sent_at + self._lease_s
                self._kept(until)
        finally:
            await self._gateway.close()
        if not self._end.is_set():
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._loop.call_soon_threadsafe(self._lost)


class EtcdJournal:
    """`open`, then `campaign`, then read and append. `name` is what others see of the leader: an address."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str,
        name: str,
        lease_s: int = 3,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        compacts: bool = True,  # etcd keeps old revisions until someone compacts them; false on a shared etcd
    ) -> None:
        self.lost = asyncio.Event()
        self.name = name
        self._gateway = Gateway(endpoints, token=token, tls=tls)
        self._prefix = prefix.rstrip("/")
        self._lease_s = float(lease_s)
        self._compacts = compacts
        self._lease: str | None = None
        self._alive_until = 0.0
        self._keeper: LeaseKeeper | None = None
        self._term: str | None = None  # the revision at which this process became leader
        self._writing = asyncio.Lock()
        self._num_writes = 0
        self._last = 0
        self._head: bytes | None = None
        self._snapshot: bytes | None = None

    @property
    def term(self) -> int:
        return int(self._term or 0)

    # Opening and closing

    async def open(self) -> None:
        await self._gateway.open()
        try:
            await self._gateway.call("kv/range", {"key": text_of(self._key("leader"))}, within_s=_ANSWER_S)
        except (Unreachable, RequestRefused) as error:
            await self._gateway.close()
            raise UserError(f"{error}; start etcd, or correct its endpoints and credentials.") from None

    async def close(self) -> None:
        """Resign, so that the next one need not wait for the lease to run out."""
        async with self._writing:
            await self._resign()
            await self._gateway.close()

    async def leader(self) -> str | None:
        """The name of who leads now."""
        held, _ = await self._range(self._key("leader"))
        return bytes_of(held[0].get("value", "")).decode() if held else None

    # Leading

    async def campaign(self) -> None:
        while True:
            with contextlib.suppress(Unreachable):
                held, revision = await self._range(self._key("leader"))
                if not held and await self._try_to_lead():
                    return
                if held:
                    await self._until_vacant(revision)
                    continue
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _try_to_lead(self) -> bool:
        sent_at = self._now()
        granted = await self._asked("lease/grant", {"TTL": int(self._lease_s)})
        self._lease = str(granted["ID"])
        self._lease_s = float(granted["TTL"])
        self._alive_until = sent_at + self._lease_s
        self.lost.clear()
        self._keeper = LeaseKeeper(
            self._gateway.another(), self._lease, self._lease_s, self._kept, self._lose
        )
        self._keeper.start()
        try:
            if await self._create_leader():
                await self._learn()
                return True
        except (Unreachable, RequestRefused):  # the lease may be gone by now; try again with another
            pass
        await self._resign()
        return False

    async def _create_leader(self) -> bool:
        key = text_of(self._key("leader"))
        put = {"key": key, "value": text_of(self.name), "lease": self._lease}
        answer = await self._gateway.call(
            "kv/txn",
            {
                "compare": [{"key": key, "target": "CREATE", "create_revision": "0"}],
                "success": [{"request_put": put}],
                "failure": [{"request_range": {"key": key}}],
            },
            within_s=self._lease_s,
        )
        if answer.get("succeeded"):
            self._term = str(answer["header"]["revision"])
            return True
        [held] = answer["responses"][0]["response_range"].get("kvs") or [{}]
        if held.get("lease") == self._lease:  # it was created by the first sending of this very request
            self._term = str(held["create_revision"])
            return True
        return False

    async def _learn(self) -> None:
        """Where the journal ends. What an earlier leader had on its way has arrived by now or never will."""
        head, _ = await self._range(self._key("head"))
        self._head = bytes_of(head[0]["value"]) if head else None
        self._last = int(self._head.split()[0]) if self._head else 0
        snapshot, _ = await self._range(self._key("snapshot"))
        self._snapshot = bytes_of(snapshot[0]["value"]) if snapshot else None

    def _kept(self, until: float) -> None:
        self._alive_until = until

    async def _until_vacant(self, revision: int) -> None:
        """Until the leader key is deleted; or for the time of a lease, for a watch can die unheard."""
        watch = {"key": text_of(self._key("leader")), "start_revision": str(revision + 1)}
        with contextlib.suppress(TimeoutError, RequestRefused):
            async with asyncio.timeout(self._lease_s):
                stream = self._gateway.stream("watch", {"create_request": watch})
                async with contextlib.aclosing(stream) as answers:
                    async for answer in answers:
                        events = answer.get("events", ())
                        if answer.get("canceled") or any(e.get("type") == "DELETE" for e in events):
                            return

    def _lose(self) -> None:
        self._term = None
        self.lost.set()

    async def _resign(self) -> None:
        keeper, self._keeper = self._keeper, None
        lease, self._lease = self._lease, None
        self._term = None
        if keeper is not None:
            await keeper.stop()
        if lease is not None:
            with contextlib.suppress(Unreachable, RequestRefused):
                await self._gateway.call("lease/revoke", {"ID": lease}, within_s=1.0)

    # Writing

    async def append(self, bodies: Sequence[bytes]) -> int:
        check_entries(bodies)
        return await self._uninterrupted(self._append(list(bodies)))

    async def _append(self, bodies: list[bytes]) -> int:
        async with self._writing:
            for page in _pages(bodies):
                last = self._last + len(page)
                head = f"{last} {self._term}.{self._num_writes}".encode()
                key = self._key(f"entries/{last:020d}")
                await self._write("head", self._head, head, [_put(key, _packed(page))])
                self._head, self._last = head, last
            return self._last

    async def snapshot(self, upto: int, body: bytes) -> None:
        await self._uninterrupted(self._take_snapshot(upto, bytes(body)))

    async def _take_snapshot(self, upto: int, body: bytes) -> None:
        async with self._writing:
            check_snapshot(upto, body, earlier=self._snapshot_upto, last=self._last)
            name = f"{int(self._term or 0):020d}-{self._num_writes:010d}"
            chunks = [body[at : at + _CHUNK_BYTES] for at in range(0, len(body), _CHUNK_BYTES)]
            for number, chunk in enumerate(chunks):
                await self._write(None, None, b"", [_put(self._key(f"chunks/{name}/{number:08d}"), chunk)])
            described = {"upto": upto, "name": name, "chunks": len(chunks), "checksum": zlib.crc32(body)}
            committed = json.dumps(described).encode()
            mine, all_chunks = self._key(f"chunks/{name}/"), self._key("chunks/")
            dropped = [
                _delete(self._key("entries/"), self._key(f"entries/{upto + 1:020d}")),
                _delete(all_chunks, mine),
                _delete(end_of(mine), end_of(all_chunks)),
            ]
            revision = await self._write("snapshot", self._snapshot, committed, dropped)
            self._snapshot = committed
        if self._compacts:
            with contextlib.suppress(Unreachable, RequestRefused):  # another may have compacted further
                await self._gateway.call("kv/compaction", {"revision": revision}, within_s=_ANSWER_S)

    async def _write(
        self, guard: str | None, before: bytes | None, after: bytes, operations: list[Json]
    ) -> str:
        """One transaction, if this process leads and `guard` still holds `before`; then it holds `after`."""
        if self._term is None:
            raise LostLeadership("another coordinator leads, or may; this one must stop acting")
        self._num_writes += 1
        leader = text_of(self._key("leader"))
        compare: list[Json] = [{"key": leader, "target": "CREATE", "create_revision": self._term}]
        failure: list[Json] = [{"request_range": {"key": leader}}]
        if guard is not None:
            key = text_of(self._key(guard))
            holds = {"target": "VALUE", "value": text_of(before)} if before is not None else _ABSENT
            compare.append({"key": key, **holds})
            failure.append({"request_range": {"key": key}})
            operations = [*operations, _put(self._key(guard), after)]
        answer = await self._decided({"compare": compare, "success": operations, "failure": failure})
        if answer.get("succeeded") or (guard is not None and self._was_written(answer, after)):
            return str(answer["header"]["revision"])
        self._lose()
        raise LostLeadership("etcd says that another coordinator leads; this one must stop acting")

    def _was_written(self, answer: Json, after: bytes) -> bool:
        """Did an earlier sending of this request do its work, and only its answer get lost?"""
        ([leader], [held]) = (each["response_range"].get("kvs") or [{}] for each in answer["responses"])
        return leader.get("create_revision") == self._term and bytes_of(held.get("value", "")) == after

    async def _decided(self, transaction: Json) -> Json:
        try:
            left_s = self._alive_until - self._now()
            return await self._gateway.call("kv/txn", transaction, within_s=left_s)
        except Unreachable as error:
            self._lose()
            raise LostLeadership(
                f"{error}: it is not known who leads; this coordinator must stop acting"
            ) from None
        except RequestRefused as error:
            self._lose()
            raise JournalBroken(f"etcd takes no more ({error}); mend it, then restart") from None

    async def _uninterrupted(self, work: Awaitable[T]) -> T:
        """A caller that gives up leaves no write with an unknown result."""
        return await asyncio.shield(asyncio.ensure_future(work))

    # Reading

    async def entries(self, after: int = 0) -> list[JournalEntry]:
        """To be read by the leader: for others, entries may turn into a snapshot meanwhile."""
        found: list[JournalEntry] = []
        after = max(after, self._snapshot_upto)  # a page may hold entries of both sides of a snapshot
        first, last, more = after + 1, self._last, True
        while more:
            start = self._key(f"entries/{after + 1:020d}")
            pages, _ = await self._range(start, end_of(self._key("entries/")), limit=_PAGES_AT_ONCE)
            more = len(pages) == _PAGES_AT_ONCE
            for page in pages:
                found += _unpacked(page, after)
                after = found[-1].number
        numbers = [entry.number for entry in found if entry.number <= last]
        if self._term is not None and numbers != list(range(first, last + 1)):
            raise JournalBroken(
                f"{self._prefix} in etcd lacks an entry of the journal; restore etcd from a backup"
            )
        return found

    async def latest_snapshot(self) -> tuple[int, bytes] | None:
        held, _ = await self._range(self._key("snapshot"))
        if not held:
            return None
        described = json.loads(bytes_of(held[0]["value"]))
        parts = []
        for number in range(described["chunks"]):
            chunk, _ = await self._range(self._key(f"chunks/{described['name']}/{number:08d}"))
            parts += [bytes_of(kv.get("value", "")) for kv in chunk]
        body = b"".join(parts)
        if zlib.crc32(body) != described["checksum"]:
            raise JournalBroken(f"the snapshot {self._prefix} in etcd is damaged; restore etcd from a backup")
        return described["upto"], body

    @property
    def _snapshot_upto(self) -> int:
        return json.loads(self._snapshot)["upto"] if self._snapshot else 0

    async def _range(self, key: str, end: str | None = None, limit: int = 1) -> tuple[list[Json], int]:
        """What is there, and the revision at which it was looked at."""
        body: Json = {"key": text_of(key), "limit": str(limit)}
        if end is not None:
            body["range_end"] = text_of(end)
        answer = await self._asked("kv/range", body)
        return answer.get("kvs") or [], int(answer["header"]["revision"])

    async def _asked(self, method: str, body: Json) -> Json:
        try:
            return await self._gateway.call(method, body, within_s=_ANSWER_S)
        except RequestRefused as error:
            raise JournalBroken(f"etcd refuses {method} ({error}); mend it, then restart") from None

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


_ABSENT: Json = {"target": "CREATE", "create_revision": "0"}


def _put(key: str, value: bytes) -> Json:
    return {"request_put": {"key": text_of(key), "value": text_of(value)}}


def _delete(start: str, end: str) -> Json:
    return {"request_delete_range": {"key": text_of(start), "range_end": text_of(end)}}


def _pages(bodies: list[bytes]) -> Iterator[list[bytes]]:
    """The batch, cut where one request is full."""
    page: list[bytes] = []
    size = 0
    for body in bodies:
        if page and size + len(body) + _LENGTH.size > _PAGE_BYTES:
            yield page
            page, size = [], 0
        page.append(body)
        size += len(body) + _LENGTH.size
    if page:
        yield page


def _packed(page: list[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(body)) + body for body in page)


def _unpacked(kv: Json, after: int) -> list[JournalEntry]:
    """The entries of one page behind number `after`; a page is named by its last."""
    data, bodies, at = bytes_of(kv["value"]), [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        bodies.append(data[at + _LENGTH.size : at + _LENGTH.size + length])
        at += _LENGTH.size + length
    last = int(bytes_of(kv["key"]).rpartition(b"/")[2])
    if not bodies:
        raise InternalError(f"page {last} of the journal is empty")
    numbered = enumerate(bodies, last - len(bodies) + 1)
    return [JournalEntry(number, body) for number, body in numbered if number > after]
