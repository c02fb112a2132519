"""A stage's checkpoint, read by its replicas together over real sockets: every byte once, whoever fails."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from everstep.job.job import CheckpointSpec, Job, ModelSpec
from everstep.layout.box import Box
from everstep.net import shared_reads
from everstep.net.links import Address, LinkEvents, Links
from everstep.net.shared_reads import SMALLEST, UNIT, SharedLoad, SharedReads, Storage
from everstep.protocol.messages import Sender
from everstep.protocol.ops import Worker
from everstep.protocol.work import StateDirections
from everstep.store import folder
from everstep.store.ranges import LocalFile
from everstep.store.state_keeper import StateKeeper

TOKEN = b"t" * 32
FILES = {"a": 3 * UNIT + 5, "b": UNIT, "c": SMALLEST - 1}
STEP = 7


class Disk:
    """Bytes that say where they are; counts what is read."""

    def __init__(self, *, broken: Callable[[str], bool] = lambda file: False) -> None:
        self.reads: list[tuple[str, int, int]] = []
        self.closed = threading.Event()
        self._broken = broken

    def read(self, file: str, at: int, out: memoryview) -> None:
        if self._broken(file):
            raise OSError("no such device")
        self.reads.append((file, at, len(out)))
        out[:] = contents(file, at, len(out))

    def close(self) -> None:
        self.closed.set()


def contents(file: str, at: int, size: int) -> bytes:
    whole = bytes((ord(file) + i) % 251 for i in range(251)) * (at // 251 + size // 251 + 2)
    return whole[at : at + size]


class Replica:
    def __init__(self) -> None:
        self.links = Links(
            LinkEvents(
                deliver=lambda frame: self.reads.arrived(frame) and None,
                broken=lambda address: self.reads.link_broke(address),
                failed=lambda error: None,
            ),
            token=TOKEN,
            host="127.0.0.1",
            empty=lambda shape, dtype: torch.empty(shape, dtype=dtype),
        )
        self.reads = SharedReads(self.links.send)
        self.links.start()


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made = [Replica() for _ in range(3)]
    yield made
    for one in made:
        one.links.stop()


def others(replicas: list[Replica], me: int) -> dict[int, Address]:
    return {i: one.links.address for i, one in enumerate(replicas) if i != me}


def begin(replicas: list[Replica], me: int, disk: Storage) -> SharedLoad:
    return replicas[me].reads.begin(STEP, me, others(replicas, me), disk)


def load_all(load: SharedLoad, files: Mapping[str, int] = FILES) -> dict[str, bytes]:
    found = {}
    for file, size in files.items():
        out = bytearray(size)
        load.read(file, 0, memoryview(out))
        found[file] = bytes(out)
    load.end(whole=True)
    return found


def together(tasks: list[Callable[[], object]]) -> list[object]:
    """All at once, each in its own thread."""
    results: list[object] = [None] * len(tasks)

    def run(index: int) -> None:
        results[index] = tasks[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return results


WHOLE = {file: contents(file, 0, size) for file, size in FILES.items()}


def test_every_unit_is_read_by_one_replica_and_reaches_all(replicas: list[Replica]) -> None:
    disks = [Disk() for _ in replicas]
    loads = [begin(replicas, me, disk) for me, disk in enumerate(disks)]
    assert together([partial(load_all, load) for load in loads]) == [WHOLE] * 3
    units = [read for disk in disks for read in disk.reads if read[0] != "c"]
    assert sorted(units) == [
        ("a", 0, UNIT),
        ("a", UNIT, UNIT),
        ("a", 2 * UNIT, UNIT),
        ("a", 3 * UNIT, 5),
        ("b", 0, UNIT),
    ]
    assert all(any(read[0] == "a" for read in disk.reads) for disk in disks)  # the work is shared
    assert all(("c", 0, FILES["c"]) in disk.reads for disk in disks)  # too small for a message


def test_a_replica_that_begins_later_is_waited_for(replicas: list[Replica]) -> None:
    disks = [Disk() for _ in replicas]
    early = [begin(replicas, me, disks[me]) for me in (0, 1)]
    asked = threading.Event()
    real = replicas[2].reads.arrived
    replicas[2].reads.arrived = lambda frame: (real(frame), asked.set())[0]  # type: ignore[method-assign]

    def last() -> dict[str, bytes]:
        assert asked.wait(20)
        return load_all(begin(replicas, 2, disks[2]))

    assert together([*(partial(load_all, load) for load in early), last]) == [WHOLE] * 3
    assert len([read for disk in disks for read in disk.reads if read[0] == "a"]) == 4


def test_the_units_of_a_dead_replica_are_read_by_those_left(replicas: list[Replica]) -> None:
    """Its process is gone: the connection says so, and no one waits until its patience is over."""
    disks = [Disk() for _ in replicas]
    loads = [begin(replicas, me, disks[me]) for me in (0, 1)]
    replicas[2].links.stop()
    replicas[2].links._listener.close()
    began = time.monotonic()
    assert together([partial(load_all, load) for load in loads]) == [WHOLE] * 2
    assert time.monotonic() - began < shared_reads.PATIENCE_S
    assert not disks[2].reads


def test_a_replica_that_says_nothing_is_passed_over(
    replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "PATIENCE_S", 0.3)
    disks = [Disk() for _ in replicas]
    loads = [begin(replicas, me, disks[me]) for me in (0, 1)]  # the third never begins
    assert together([partial(load_all, load) for load in loads]) == [WHOLE] * 2


def test_a_replica_whose_storage_fails_harms_no_other(replicas: list[Replica]) -> None:
    disks = [Disk(), Disk(), Disk(broken=lambda file: True)]
    loads = [begin(replicas, me, disk) for me, disk in enumerate(disks)]

    def fails() -> str:
        try:
            load_all(loads[2])
        except OSError as error:
            loads[2].end(whole=False)
            return str(error)
        return "it has loaded what it cannot read"

    found = together([partial(load_all, loads[0]), partial(load_all, loads[1]), fails])
    assert found == [WHOLE, WHOLE, "no such device"]


def test_no_replica_runs_further_ahead_than_what_is_kept(
    replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one is slow at first; still nothing is read twice, and little is held for it."""
    monkeypatch.setattr(shared_reads, "UNIT", SMALLEST)
    monkeypatch.setattr(shared_reads, "WINDOW", 8 * SMALLEST)
    monkeypatch.setattr(shared_reads, "KEPT", 16 * SMALLEST)
    disks = [Disk() for _ in replicas]
    loads = [begin(replicas, me, disk) for me, disk in enumerate(disks)]
    size, steps = 200 * SMALLEST, 100
    ahead = 0

    def read(me: int) -> bytes:
        nonlocal ahead
        found = bytearray()
        for at in range(0, size, 2 * SMALLEST):
            if me == 2 and at < 20 * SMALLEST:
                time.sleep(0.01)
            out = bytearray(2 * SMALLEST)
            loads[me].read("a", at, memoryview(out))
            found += out
            ahead = max(ahead, loads[0]._position - loads[2]._position)
        loads[me].end(whole=True)
        return bytes(found)

    assert together([partial(read, me) for me in range(3)]) == [contents("a", 0, size)] * 3
    assert sum(len(disk.reads) for disk in disks) == 2 * steps
    assert ahead <= (8 + 2 * 3) * SMALLEST  # a read is of two units, and one of its own needs no peer


def test_storage_is_closed_when_no_one_asks_any_more(
    replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "LINGER_S", 0.05)
    disks = [Disk() for _ in replicas]
    loads = [begin(replicas, me, disk) for me, disk in enumerate(disks)]
    together([partial(load_all, load) for load in loads])
    assert all(disk.closed.wait(20) for disk in disks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reads, "PATIENCE_S", 60.0)  # a late one is told so, and reads alone
        late = Disk()
        assert load_all(begin(replicas, 0, late)) == WHOLE


# ------------------------------------------------------------------ a real checkpoint


def written(root: Path) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    state = {f"model/{i}.weight": torch.randn(300, 500, generator=draw) for i in range(6)}
    slices = [(n, tuple(t.shape), Box((0, 0), tuple(t.shape)), t) for n, t in state.items()]
    folder.commit(root, STEP, [folder.write_slices(root, STEP, "stage-0", slices)], {})
    return state


def keeper(root: Path, replica: int) -> StateKeeper:
    job = Job(model=ModelSpec(preset="gpt-tiny"), base=str(root), checkpoint=CheckpointSpec(folder=str(root)))
    sender = Sender("t", Worker(replica, 0), 1)
    return StateKeeper(sender, job, node="n", memory_root=root, secret="00", say=lambda report: None)


def restored(root: Path, replicas: list[Replica], me: int) -> dict[str, Tensor] | None:
    found: dict[str, Tensor] = {}
    names = [f"{i}.weight" for i in range(6)]
    peers = others(replicas, me)
    is_whole = keeper(root, me).load(
        STEP, names, StateDirections(), found.update, partial(replicas[me].reads.begin, STEP, me, peers)
    )
    return found if is_whole else None


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    real = LocalFile.read

    def read(file: LocalFile, offset: int, out: memoryview) -> None:
        if len(out) >= SMALLEST:
            sizes.append(len(out))
        real(file, offset, out)

    monkeypatch.setattr(LocalFile, "read", read)
    return sizes


def test_a_checkpoint_is_read_once_by_three_replicas(
    replicas: list[Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = written(tmp_path)
    sizes = counted(monkeypatch)
    for found in together([partial(restored, tmp_path, replicas, me) for me in range(3)]):
        assert isinstance(found, dict)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert sum(sizes) == sum(tensor.nbytes for tensor in state.values())


def test_bytes_that_a_peer_has_changed_are_read_again_from_storage(
    replicas: list[Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = written(tmp_path)
    real = SharedLoad._say

    def flipped(load: SharedLoad, ask: object, *found: Tensor) -> None:
        real(load, ask, *(tensor ^ 1 for tensor in found))  # type: ignore[arg-type]

    monkeypatch.setattr(SharedLoad, "_say", flipped)
    for found in together([partial(restored, tmp_path, replicas, me) for me in range(3)]):
        assert isinstance(found, dict)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_damaged_checkpoint_is_refused_by_all(replicas: list[Replica], tmp_path: Path) -> None:
    written(tmp_path)
    (path,) = tmp_path.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    assert together([partial(restored, tmp_path, replicas, me) for me in range(3)]) == [None] * 3
