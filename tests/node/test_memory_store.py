"""A node's memory store: parts go over real sockets, and only the task's own workers get in."""

import http.client
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everstep.errors import UserError
from everstep.layout.box import Box, whole
from everstep.store import memory
from everstep.store.memory_server import MemoryServer, MemoryStore, token_of

SECRET = "ab" * 32


@pytest.fixture
def door() -> Iterator[MemoryServer]:
    store = MemoryStore()
    store.open_task("t", SECRET)
    opened = MemoryServer(store, "127.0.0.1")
    opened.open()
    yield opened
    opened.close()
    store.close()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def state(stage: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(stage)
    return {f"model/s{stage}.{name}": torch.randn(300, 70, generator=generator) for name in "ab"}


def whole_slices(tensors: dict[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
    return [(name, tuple(t.shape), whole(t.shape), t) for name, t in tensors.items()]


def remote(door: MemoryServer, token: str = token_of(SECRET)) -> memory.Remote:
    return memory.Remote("127.0.0.1", door.port, token)


def ask(door: MemoryServer, method: str, path: str, token: str = token_of(SECRET), **more: object) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=5)
    headers = {"Authorization": f"Bearer {token}", **more.pop("headers", {})}  # type: ignore[dict-item]
    connection.request(method, path, headers=headers, **more)  # type: ignore[arg-type]
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_state_of_two_stages_is_read_from_this_node_and_from_another(
    door: MemoryServer, here: Path
) -> None:
    first = memory.put(here, "t", 8, "stage-0-0", whole_slices(state(0)))
    second = memory.put(here, "t", 8, "stage-1-0", whole_slices(state(1)))
    memory.send(here, second, remote(door), "t", 8)
    (memory.folder_of(here, "t", 8) / "stage-1-0.safetensors").unlink()
    kept = memory.open_copies("t", 8, [(here, first), (remote(door), second)])
    wanted = {**state(0), **state(1)}
    assert {name: t.tolist() for name, t in kept.read().items()} == {n: t.tolist() for n, t in wanted.items()}
    assert memory.bytes_read(kept) == (2 * 300 * 70 * 4, 2 * 300 * 70 * 4)
    kept.close()


def test_a_state_that_is_gone_or_damaged_is_refused(door: MemoryServer, here: Path) -> None:
    part = memory.put(here, "t", 8, "stage-0-0", whole_slices(state(0)))
    path = memory.folder_of(here, "t", 8) / "stage-0-0.safetensors"
    memory.send(here, part, remote(door), "t", 8)
    kept = memory.open_copies("t", 8, [(remote(door), part)])
    door.store.drop("t", 9)
    with pytest.raises(UserError, match="cannot be read"):
        kept.read()
    with pytest.raises(UserError, match=r"stage-0-0\.json cannot be read"):
        memory.open_copies("t", 8, [(remote(door), part)])
    with pytest.raises(UserError, match="is not what was written"):
        memory.open_copies("t", 8, [(here, part | {"xxh3": "0" * 16})])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="fails its checksum"):
        memory.open_copies("t", 8, [(here, part)]).read()
    with pytest.raises(UserError, match="not whole"):
        memory.open_copies("t", 8, [(here, part), (here, part)])


def test_what_a_dead_owner_left_is_removed_and_what_a_live_one_has_is_not(door: MemoryServer) -> None:
    code = (
        "from everstep.store.memory_server import MemoryStore\nimport os, signal\n"
        "print(MemoryStore().folder, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(told.stdout.strip())
    assert left.is_dir()
    MemoryStore().close()
    assert not left.exists()
    assert door.store.folder.is_dir()


def test_older_states_make_room(door: MemoryServer, here: Path) -> None:
    for step in (1, 2, 3):
        memory.put(here, "t", step, "stage-0-0", whole_slices(state(0)))
    memory.drop(here, "t", 3)
    assert [path.name for path in (here / "t").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/t/8/stage-0-0.safetensors", "", 403),
        ("GET", "/t/8/stage-0-0.safetensors", "0" * 64, 403),
        ("PUT", "/t/8/stage-0-0.safetensors", "0" * 64, 403),
        ("GET", "/other/8/stage-0-0.safetensors", token_of(SECRET), 403),
        ("GET", "/%2e%2e/8/stage-0-0.safetensors", token_of(SECRET), 403),
        ("GET", "/t/8/..%2f..%2fpasswd", token_of(SECRET), 400),
        ("GET", "/t/8/stage-0-0.txt", token_of(SECRET), 400),
        ("GET", "/t/-8/stage-0-0.safetensors", token_of(SECRET), 400),
        ("GET", "/t/8/nothing.safetensors", token_of(SECRET), 404),
    ],
)
def test_strangers_and_tricks_are_refused(
    door: MemoryServer, method: str, path: str, token: str, status: int
) -> None:
    assert ask(door, method, path, token) == status


def test_more_than_the_memory_that_is_free_is_refused_before_it_is_sent(door: MemoryServer) -> None:
    path = "/t/8/stage-0-0.safetensors"
    assert ask(door, "PUT", path, headers={"Content-Length": str(1 << 60)}) == 413
    assert ask(door, "PUT", path, body=iter([b"no", b"length"]), encode_chunked=True) == 413
    assert not list(door.store.folder.rglob("*.safetensors"))
