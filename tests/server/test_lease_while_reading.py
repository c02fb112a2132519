"""Reading a journal that takes longer than the lease lasts, in a real etcd: the lease is kept meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.core.cluster.coordinator import Coordinator
from everstep.protocol import messages as msg
from everstep.server import term as module
from everstep.server.etcd import EtcdJournal
from everstep.server.term import Daemon, pack
from harness.etcd import ABSENT, BINARY, Etcd

pytestmark = pytest.mark.skipif(BINARY is None, reason=ABSENT)
LEASE_S = 2  # etcd grants no shorter one
ENTRIES = 300


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def joined(number: int) -> bytes:
    return pack(msg.NodeJoined(node=f"n{number}", boot="1", slots=1, host="h", memory_port=0), float(number))


async def leading(etcd: Etcd, prefix: str, lease_s: int) -> EtcdJournal:
    journal = EtcdJournal(etcd.endpoints, prefix=prefix, name="a", lease_s=lease_s)
    await journal.open()
    await journal.campaign()
    return journal


async def written(etcd: Etcd, prefix: str, entries: int, *, snapshot: bool) -> None:
    journal = await leading(etcd, prefix, 60)
    await journal.append([joined(number) for number in range(entries)])
    if snapshot:
        machine = Coordinator()
        document = {"state": module.freeze(machine), "steps": {}, "at": 1.0}
        await journal.snapshot(1, module._packed(document))
    await journal.close()


async def read(etcd: Etcd, prefix: str, folder: Path) -> tuple[float, bool, int]:
    """Seconds to read it, whether the lease was lost, and the nodes that are known then."""
    journal = await leading(etcd, prefix, LEASE_S)
    began = time.monotonic()
    term = await Daemon(journal, folder=folder, say=lambda line: None).begin()
    took = time.monotonic() - began
    lost = journal.lost.is_set()
    await journal.append([joined(ENTRIES)])  # etcd's own word: only who has the lease may write
    term.close()
    await journal.close()
    return took, lost, len(term.machine.nodes)


@pytest.mark.parametrize("is_one_entry", [False, True])
def test_a_replay_that_outlasts_the_lease_keeps_it(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_one_entry: bool
) -> None:
    """The journal was handled in one go, and the lease ran out. `is_one_entry`: one takes all of the time, in
    which the loop does not turn.
    """
    handle, prefix = Coordinator.handle, f"/replay-{is_one_entry}"

    def slowly(self: Coordinator, event: msg.ClusterEvent, now: float) -> list[msg.ClusterAction]:
        if not is_one_entry:
            time.sleep(0.01)
        elif self.events == ENTRIES // 2:
            end = time.monotonic() + 2 * LEASE_S
            while time.monotonic() < end:
                pass  # busy, as a decision is
        return handle(self, event, now)

    asyncio.run(written(etcd, prefix, ENTRIES, snapshot=False))
    monkeypatch.setattr(Coordinator, "handle", slowly)
    took, lost, nodes = asyncio.run(read(etcd, prefix, tmp_path))
    assert took > 1.4 * LEASE_S
    assert not lost
    assert nodes == ENTRIES


def test_a_snapshot_that_takes_longer_to_load_than_the_lease_lasts_keeps_it(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was loaded on the event loop, which could not keep the lease meanwhile."""
    thaw = module.thaw

    def slowly(machine: Coordinator, frozen: dict[str, object]) -> None:
        end = time.monotonic() + 1.5 * LEASE_S
        while time.monotonic() < end:
            pass  # busy, as decoding is
        thaw(machine, frozen)

    asyncio.run(written(etcd, "/snapshot", 5, snapshot=True))
    monkeypatch.setattr(module, "thaw", slowly)
    took, lost, _ = asyncio.run(read(etcd, "/snapshot", tmp_path))
    assert took > LEASE_S
    assert not lost


def test_an_event_that_outlasts_the_lease_keeps_it_and_a_loop_that_hangs_loses_it(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop kept the lease. One long event lost it, and so it did again in every next leader's replay."""

    async def slow() -> None:
        journal = await leading(etcd, "/slow-event", LEASE_S)
        time.sleep(2 * LEASE_S)  # on the loop, as a decision is
        assert await journal.append([joined(1)]) == 1
        await asyncio.sleep(0.2)
        assert not journal.lost.is_set()
        await journal.close()

    async def hung() -> None:
        journal = await leading(etcd, "/hung-loop", LEASE_S)
        time.sleep(2 * LEASE_S)
        await asyncio.wait_for(journal.lost.wait(), 30.0)
        other = await leading(etcd, "/hung-loop", LEASE_S)
        await other.close()
        await journal.close()

    asyncio.run(slow())
    monkeypatch.setattr("everstep.server.etcd.HANG_S", 1.0)
    asyncio.run(hung())
