"""Memory that several processes read: named, mapped, and given back when its last reader is done."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from everstep.errors import PeerError
from everstep.net import frames, plane
from everstep.net.arena import Arena, Location, Mappings, UnmappableError
from everstep.net.envelope import Envelope
from everstep.net.plane import DataPlane, PlaneSettings
from everstep.protocol.parcels import Parcel, ParcelKind
from everstep.protocol.work import LinkBroke, LinkOpened
from harness.transports import SharedFiles, use_files

READER = """
import sys, torch
from everstep.net.arena import Location, Mappings
from harness.transports import SharedFiles
handle, slab, offset = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
read = Mappings(SharedFiles()).tensor("owner", Location(handle, slab, offset), (3,), torch.float32)
print(read.tolist(), flush=True)
sys.stdin.readline()
print(read.tolist(), flush=True)
"""


def test_another_process_reads_what_is_there_and_what_is_written_later() -> None:
    arena = Arena(SharedFiles())
    tensor = arena.empty((2, 3), dtype=torch.float32)
    tensor.copy_(torch.arange(6.0).view(2, 3))
    at = arena.location(tensor[1])
    assert at is not None
    command = [sys.executable, "-c", READER, at.handle, str(at.slab_bytes), str(at.offset)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "[3.0, 4.0, 5.0]\n"
        tensor[1].mul_(2)
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "[6.0, 8.0, 10.0]\n"


def test_memory_outlives_the_owner_as_long_as_somebody_reads_it() -> None:
    code = (
        "import torch\nfrom everstep.net.arena import Arena\nfrom harness.transports import SharedFiles\n"
        "a = Arena(SharedFiles())\nt = a.empty((4,), dtype=torch.int64)\nt.copy_(torch.arange(4))\n"
        "print(*a.location(t), sep='|', flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        handle, slab, offset = owner.stdout.readline().strip().split("|")
        at = Location(handle, int(slab), int(offset))
        mappings = Mappings(SharedFiles())
        read = mappings.tensor("owner", at, (4,), torch.int64)
        owner.kill()
        owner.wait()
    assert read.tolist() == [0, 1, 2, 3]
    with pytest.raises(PeerError, match="cannot be mapped"):
        Mappings(SharedFiles()).tensor("owner", at, (4,), torch.int64)


def test_a_block_returns_when_its_last_tensor_is_gone_and_a_mapping_closes_when_unused() -> None:
    arena, mappings = Arena(SharedFiles()), Mappings(SharedFiles())
    tensor = arena.empty((8,), dtype=torch.float32)
    at, address = arena.location(tensor), tensor.data_ptr()
    assert at is not None
    read = mappings.tensor("owner", at, (8,), torch.float32)[2:]
    mappings.keep(set())
    assert read.shape == (6,), "in use: it stays mapped"
    part = tensor[3:]
    del tensor
    gc.collect()
    assert arena.empty((8,), dtype=torch.float32).data_ptr() != address, "a view still holds the block"
    del part
    gc.collect()
    assert arena.empty((8,), dtype=torch.float32).data_ptr() == address
    assert mappings.num_open == 1
    del read
    gc.collect()
    assert mappings.num_open == 0, "without another change of membership"


@pytest.mark.parametrize(
    "at", [Location("1", 64, 0), Location("../x y", 64, 0), Location("1 2", 64, 60), Location("1 2", 64, -1)]
)
def test_a_name_of_memory_that_is_none_is_refused(at: Location) -> None:
    with pytest.raises(PeerError):
        Mappings(SharedFiles()).tensor("owner", at, (4,), torch.float32)


def test_memory_that_a_live_peer_cannot_map_goes_to_it_by_tcp_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As between two containers that share a GPU, and not each other's memory."""
    for name in ("CudaMemory", "_memory_and_lanes"):
        monkeypatch.setattr(plane, name, getattr(plane, name))  # as it was, after this test
    use_files()
    settings = PlaneSettings(secret=b"t" * 32, host="127.0.0.1", device=torch.device("cpu"))
    planes = sender, receiver = DataPlane(settings), DataPlane(settings)
    for each in planes:
        each.start()
    try:
        to = receiver.links.address
        sender.links.connect(to)
        assert sender.inbox.get(timeout=20) == LinkOpened(to)
        values = sender.kept(torch.arange(8.0))
        parcel = Parcel(ParcelKind.ACTIVATION, 0, 1, 0, None, 0, 0, 1)

        def post() -> frames.Incoming:
            sender.post(to, parcel, Envelope(beside={"tree": 1}), (values,))
            found = receiver.inbox.get(timeout=20)
            while not isinstance(found, frames.Incoming):
                found = receiver.inbox.get(timeout=20)
            return found

        assert receiver._mappings is not None
        monkeypatch.setattr(receiver._mappings.memory, "open", unmappable)
        lost = post()
        assert sender.carriers[to] == "ipc"
        with pytest.raises(PeerError, match="cannot be mapped"):
            receiver.opened(lost)
        assert sender.inbox.get(timeout=20) == LinkBroke(to), "what it is owed is sent again"
        found = post()
        assert sender.carriers[to] == "tcp"
        assert found.envelope.beside == {"tree": 1}
        assert torch.equal(receiver.opened(found)[0], values)
    finally:
        for each in planes:
            each.stop()


def unmappable(handle: str, nbytes: int) -> int:
    raise UnmappableError("a peer's memory cannot be mapped: not permitted")
