"""A process that appends until it is killed, and says on stdout what has been acknowledged.

    python -m tests.server.journal_writer sqlite PATH
    python -m tests.server.journal_writer etcd ENDPOINT,ENDPOINT PREFIX NAME

It says `leads` when it may append, the last number it has read, then `N` for every append that returned with
the number N. Entry n holds n, so that a reader can tell a hole, a repeat or a torn body. Every 40 entries it
takes a snapshot.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

from everstep.server.journal import Journal, SqliteJournal


def body_of(number: int) -> bytes:
    return json.dumps({"number": number, "filling": "x" * (number * 37 % 500)}).encode()


def number_in(body: bytes) -> int:
    number = int(json.loads(body)["number"])
    assert body == body_of(number), f"the body of entry {number} is not what was appended"
    return number


async def read_back(journal: Journal) -> int:
    """The last number, after a look at everything before it."""
    snapshot = await journal.latest_snapshot()
    upto = 0
    if snapshot is not None:
        upto, state = snapshot
        assert int(state) == upto
    found = await journal.entries(after=upto)
    assert [entry.number for entry in found] == list(range(upto + 1, upto + 1 + len(found)))
    assert [number_in(entry.body) for entry in found] == [entry.number for entry in found]
    return upto + len(found)


async def write(journal: Journal) -> None:
    await journal.open()
    await journal.campaign()
    last = await read_back(journal)
    print(f"leads\n{last}", flush=True)
    batches = random.Random(last)
    while True:
        size = batches.choice((1, 1, 1, 2, 5))
        last = await journal.append([body_of(last + k) for k in range(1, size + 1)])
        print(last, flush=True)
        if last % 40 < size:
            await journal.snapshot(last, str(last).encode())


def journal_of(kind: str, *rest: str) -> Journal:
    if kind == "sqlite":
        return SqliteJournal(Path(rest[0]))
    from everstep.server.etcd import EtcdJournal

    endpoints, prefix, name = rest
    return EtcdJournal(endpoints.split(","), prefix=prefix, name=name)


if __name__ == "__main__":
    asyncio.run(write(journal_of(*sys.argv[1:])))
