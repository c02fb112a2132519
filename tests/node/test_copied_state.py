"""A worker loads a state from the memory of nodes, over real sockets: a holder that cannot be read costs
nothing as long as another one has the part.
"""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everstep.engine.worker.work_items import whole_tensors
from everstep.job.job import Job, ModelSpec
from everstep.layout.box import whole
from everstep.protocol.messages import MemoryAddress, PartWritten, SaveFailed, Sender, StateFetched, Unsaved
from everstep.protocol.ops import Worker
from everstep.protocol.work import StateDirections, StoreCopy
from everstep.store import memory
from everstep.store.memory_server import MemoryServer, MemoryStore
from everstep.store.state_keeper import StateKeeper

SECRET, STEP = "ab" * 32, 8
NAMES = [f"s{stage}.{name}" for stage in (0, 1) for name in "abc"]


def tensors(stage: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(stage)
    return {f"model/s{stage}.{name}": torch.randn(300, 70, generator=generator) for name in "abc"}


class Holders:
    """Nodes b and c, each with a copy of both stages."""

    def __init__(self) -> None:
        self.servers: dict[str, MemoryServer] = {}
        self.labels: dict[str, list[memory.Label]] = {}
        for replica, node in enumerate("bc"):
            store = MemoryStore()
            store.open_task("t", SECRET)
            self.servers[node] = MemoryServer(store, "127.0.0.1")
            self.servers[node].open()
            self.labels[node] = [
                memory.put(
                    store.folder,
                    "t",
                    STEP,
                    f"stage-{stage}-{replica}",
                    [(name, tuple(t.shape), whole(t.shape), t) for name, t in tensors(stage).items()],
                )
                for stage in (0, 1)
            ]

    def address(self, node: str) -> MemoryAddress:
        return MemoryAddress(node, "127.0.0.1", self.servers[node].port)

    def file(self, node: str, stage: int) -> Path:
        folder = memory.folder_of(self.servers[node].store.folder, "t", STEP)
        return folder / f"{self.labels[node][stage]['name']}.safetensors"

    def directions(self, *order: str) -> StateDirections:
        parts = [[(self.address(node), self.labels[node][stage]) for node in order] for stage in (0, 1)]
        return StateDirections(
            copies=tuple(part[0] for part in parts), other_holders=tuple(tuple(part[1:]) for part in parts)
        )

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
            server.store.close()


@pytest.fixture
def holders() -> Iterator[Holders]:
    found = Holders()
    yield found
    found.close()


def load(tmp_path: Path, directions: StateDirections) -> tuple[dict[str, torch.Tensor] | None, StateFetched]:
    said: list[StateFetched] = []
    job = Job(model=ModelSpec(preset="gpt-tiny"), steps=9, base=tmp_path)
    states = StateKeeper(
        Sender("t", Worker(0, 0), 1),
        job,
        node="a",
        memory_root=tmp_path / "own",
        secret=SECRET,
        say=said.append,  # type: ignore[arg-type]
    )
    found: dict[str, torch.Tensor] = {}
    is_whole = states.load(STEP, NAMES, directions, found.update)
    return (found if is_whole else None), said[0]


def is_right(found: dict[str, torch.Tensor] | None) -> bool:
    wanted = {**tensors(0), **tensors(1)}
    return found is not None and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_damaged_copy_is_read_from_the_next_holder(tmp_path: Path, holders: Holders) -> None:
    path = holders.file("b", 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found, fetched = load(tmp_path, holders.directions("b", "c"))
    assert is_right(found)
    (read,) = fetched.failed
    assert (read.part, read.node, read.then) == (1, "b", "c")
    assert "fails its checksum" in read.because
    size = 300 * 70 * 4
    assert fetched.bytes_elsewhere == 7 * size, "the five tensors that were right are not read again"


def test_a_copy_that_is_gone_is_read_from_the_next_holder(tmp_path: Path, holders: Holders) -> None:
    holders.servers["b"].store.drop("t", STEP + 1)
    found, fetched = load(tmp_path, holders.directions("b", "c"))
    assert is_right(found)
    assert {(read.node, read.then) for read in fetched.failed} == {("b", "c")}


def test_a_node_that_does_not_answer_is_asked_once_not_once_per_part(
    tmp_path: Path, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and says nothing
        right = holders.directions("b", "c")
        silent = MemoryAddress("b", "127.0.0.1", mute.getsockname()[1])
        directions = StateDirections(
            copies=tuple((silent, label) for _, label in right.copies), other_holders=right.other_holders
        )
        found, fetched = load(tmp_path, directions)
    assert is_right(found)
    assert [(read.part, read.node, read.then) for read in fetched.failed] == [(0, "b", "c")]


def test_a_holder_that_goes_in_the_middle_of_a_read_costs_no_state(tmp_path: Path, holders: Holders) -> None:
    """Its description is there, and the file behind it is not."""
    holders.file("b", 0).unlink()
    found, fetched = load(tmp_path, holders.directions("b", "c"))
    assert is_right(found)
    assert fetched.failed[0].then == "c"


def test_a_part_without_a_holder_left_is_said_with_all_that_was_tried(
    tmp_path: Path, holders: Holders
) -> None:
    for node in "bc":
        holders.file(node, 1).unlink()
    found, fetched = load(tmp_path, holders.directions("b", "c"))
    assert found is None
    assert [(read.part, read.node, read.then) for read in fetched.failed] == [(1, "b", ""), (1, "c", "")]


def test_an_order_of_an_older_coordinator_names_one_holder(tmp_path: Path, holders: Holders) -> None:
    found, fetched = load(tmp_path, StateDirections(copies=holders.directions("c").copies))
    assert is_right(found)
    assert fetched.failed == ()


def copied(
    tmp_path: Path,
    holders: Holders,
    to: str | None,
    *,
    interval: int | None = None,
    leaving: bool = False,
    stages: int = 1,
    failed: list[SaveFailed] | None = None,
) -> set[str | None]:
    """The nodes that got a copy."""
    said: list[PartWritten | SaveFailed] = []
    job = Job(
        model=ModelSpec(preset="gpt-tiny"), steps=9, base=tmp_path, memory_interval=interval, stages=stages
    )
    states = StateKeeper(
        Sender("t", Worker(0, 0), 1),
        job,
        node="a",
        memory_root=tmp_path / "own",
        secret=SECRET,
        say=said.append,  # type: ignore[arg-type]
        slots=4,
    )
    address = None if to is None else MemoryAddress("a", "", 0) if to == "a" else holders.address(to)
    task, directions = StoreCopy(STEP + 1, 1, leaving), StateDirections(copy_to=address)
    if states.takes(task, directions):
        states.copy(task, whole_tensors(tensors(0), 0, 1), directions)
    states.finish()
    if failed is not None:
        failed += [one for one in said if isinstance(one, SaveFailed)]
    return {one.memory_of for one in said if isinstance(one, PartWritten)}


def test_by_default_a_copy_is_made_where_another_node_keeps_it(tmp_path: Path, holders: Holders) -> None:
    assert copied(tmp_path, holders, "b") == {"a", "b"}
    assert copied(tmp_path, holders, "a") == copied(tmp_path, holders, None) == set()
    assert copied(tmp_path, holders, "a", leaving=True) == {"a"}
    assert copied(tmp_path, holders, "a", interval=5) == {"a"}


def test_by_default_no_copy_is_made_where_all_of_them_would_take_more_than_half_of_what_is_free(
    tmp_path: Path, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sum(tensor.nbytes for tensor in tensors(0).values())
    for free, made in ((16 * one, {"a", "b"}), (16 * one - 2, set())):  # one stage: one worker copies
        # What earlier copies hold would be free without them.
        monkeypatch.setattr(
            memory, "room_bytes", lambda path, free=free: free - memory.held_bytes(tmp_path / "own")
        )
        assert copied(tmp_path, holders, "b") == made
    assert copied(tmp_path, holders, "a", interval=5) == {"a"}, "the job asks for it"


def test_a_copy_that_the_job_asks_for_leaves_half_of_the_memory_to_others_and_is_an_incident(
    tmp_path: Path, holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would have ended processes of the node. The last state of a shape is worth the risk."""
    one, failed = sum(tensor.nbytes for tensor in tensors(0).values()), list[SaveFailed]()
    for stages, free, made in ((1, 2 * one, {"a"}), (2, 4 * one, {"a"}), (2, 4 * one - 2, set())):
        monkeypatch.setattr(memory, "room_bytes", lambda path, free=free: free)
        assert copied(tmp_path, holders, "a", interval=5, stages=stages, failed=failed) == made
    (told,) = failed
    assert told.memory_of == "a"
    assert re.fullmatch(
        r"0\.00 GB from each of 2 workers is more than half of the memory that is free, 0\.00 GB; "
        "free some, or set memory_interval = 0",
        told.because,
    )
    assert told.reason is Unsaved.NO_MEMORY
    assert copied(tmp_path, holders, "a", interval=5, stages=2, leaving=True) == {"a"}
