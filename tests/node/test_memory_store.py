"""A node's memory store: parts go over real sockets, and only the task's own workers get in."""

import http.client
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import UserError
from everstep.layout.box import Box, whole
from everstep.net.seal import Suite
from everstep.store import memory
from everstep.store.memory import room_bytes
from everstep.store.memory_server import MemoryServer, MemoryStore
from tests.support.tap import Tap

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


def remote(door: MemoryServer, suite: Suite = Suite.PLAIN, port: int = 0) -> memory.Remote:
    return memory.Remote("127.0.0.1", port or door.port, memory.memory_key(SECRET), suite)


def ask(door: MemoryServer, method: str, path: str, secret: str = SECRET, size: str = "", **more: Any) -> int:
    request = memory.CopyRequest.new(method, path, size, Suite.PLAIN)
    headers = {**request.headers(memory.memory_key(secret)), "Everstep-Size": size} if secret else {}
    return told(door, method, path, headers | more.pop("headers", {}), **more)


def told(door: MemoryServer, method: str, path: str, headers: dict[str, str], **more: Any) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=5)
    connection.request(method, path, headers=headers, **more)
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
    ("method", "path", "secret", "status"),
    [
        ("GET", "/t/8/stage-0-0.safetensors", "", 403),
        ("GET", "/t/8/stage-0-0.safetensors", "cd" * 32, 403),
        ("PUT", "/t/8/stage-0-0.safetensors", "cd" * 32, 403),
        ("GET", "/other/8/stage-0-0.safetensors", SECRET, 403),
        ("GET", "/%2e%2e/8/stage-0-0.safetensors", SECRET, 403),
        ("GET", "/t/8/..%2f..%2fpasswd", SECRET, 400),
        ("GET", "/t/8/stage-0-0.txt", SECRET, 400),
        ("GET", "/t/-8/stage-0-0.safetensors", SECRET, 400),
        ("GET", "/t/8/nothing.safetensors", SECRET, 404),
    ],
)
def test_strangers_and_tricks_are_refused(
    door: MemoryServer, method: str, path: str, secret: str, status: int
) -> None:
    assert ask(door, method, path, secret) == status


@pytest.mark.parametrize("suite", [Suite.PLAIN, Suite.BLAKE2B])
@pytest.mark.parametrize("span", ["bytes=9-1", "bytes=-", "x", "bytes=99999999999-"])
def test_a_range_that_is_none_is_refused(door: MemoryServer, here: Path, span: str, suite: Suite) -> None:
    """Sealed ones were answered with 500."""
    memory.send(here, memory.put(here, "t", 8, "stage-0-0", whole_slices(state(0))), remote(door), "t", 8)
    request = memory.CopyRequest.new("GET", "/t/8/stage-0-0.json", span, suite)
    headers = {**request.headers(memory.memory_key(SECRET)), "Range": span}
    assert told(door, "GET", request.path, headers) == 416


def test_more_than_the_memory_that_is_free_is_refused_before_it_is_sent(door: MemoryServer) -> None:
    path = "/t/8/stage-0-0.safetensors"
    large = str(1 << 58)
    assert ask(door, "PUT", path, size=large, headers={"Content-Length": large}) == 413
    assert ask(door, "PUT", path, size="7", body=iter([b"no", b"length"]), encode_chunked=True) == 400
    assert not list(door.store.folder.rglob("*.safetensors"))


@pytest.mark.parametrize("suite", [Suite.BLAKE2B, Suite.AES_GCM])
def test_copies_travel_sealed_and_no_request_can_be_played_again(
    door: MemoryServer, here: Path, suite: Suite
) -> None:
    if suite is Suite.AES_GCM:
        pytest.importorskip("cryptography", reason="encryption needs cryptography")
    large = {"model/w": torch.randn(300, 700, generator=torch.Generator().manual_seed(3))}  # several chunks
    label = memory.put(here, "t", 8, "stage-0-0", whole_slices(large))
    with Tap(door.port) as tap:
        memory.send(here, label, remote(door, suite, tap.port), "t", 8)
        kept = memory.open_copies("t", 8, [(remote(door, suite, tap.port), label)])
        assert torch.equal(kept.read()["model/w"], large["model/w"])
        kept.close()
    seen = bytes(tap.seen)
    assert SECRET.encode() not in seen
    assert bytes.fromhex(SECRET) not in seen
    assert memory.memory_key(SECRET).hex().encode() not in seen
    in_clear = large["model/w"].numpy().tobytes()[1000:1064] in seen
    assert in_clear is (suite is Suite.BLAKE2B)
    request = memory.CopyRequest.new("GET", "/t/8/stage-0-0.json", "", Suite.PLAIN)
    headers = request.headers(memory.memory_key(SECRET))
    assert [told(door, "GET", request.path, headers) for _ in range(2)] == [200, 403]
    assert told(door, "GET", "/t/8/stage-0-0.safetensors", headers) == 403


@pytest.mark.parametrize("suite", [Suite.BLAKE2B, Suite.AES_GCM])
def test_a_byte_that_is_changed_on_its_way_to_or_from_a_memory_server_is_noticed(
    door: MemoryServer, here: Path, suite: Suite
) -> None:
    if suite is Suite.AES_GCM:
        pytest.importorskip("cryptography", reason="encryption needs cryptography")
    label = memory.put(here, "t", 8, "stage-0-0", whole_slices(state(0)))
    with Tap(door.port, flip=40_000) as tap, pytest.raises(OSError, match=r"400: .*tag is wrong"):
        memory.send(here, label, remote(door, suite, tap.port), "t", 8)
    assert not list(door.store.folder.rglob("stage-0-0*"))
    memory.send(here, label, remote(door, suite), "t", 8)
    with Tap(door.port, flip=40_000) as tap:
        file = memory.PeerFile(remote(door, suite, tap.port), "/t/8/stage-0-0.safetensors", 168_000)
        with pytest.raises(OSError, match="tag is wrong"):
            file.read(0, memoryview(bytearray(168_000)))
        file.close()


def test_a_memory_server_that_cannot_listen_says_so() -> None:
    """It waited for itself without end, and the agent never connected."""
    store = MemoryStore()
    with pytest.raises(UserError, match=r"cannot be served at 203\.0\.113\.7"):
        MemoryServer(store, "203.0.113.7").open()
    store.close()


def test_copies_fit_into_the_cgroup_and_the_file_system_not_only_into_the_machine(tmp_path: Path) -> None:
    """Half of the host's free memory was allowed: in a container the kernel ended the agent."""
    inner = tmp_path / "slice" / "agent.service"
    inner.mkdir(parents=True)
    whole_machine = room_bytes(tmp_path, tmp_path, "/")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("1000\n")
    assert room_bytes(tmp_path, tmp_path, "/slice/agent.service") == pytest.approx(whole_machine, rel=0.2)
    (tmp_path / "slice" / "memory.max").write_text("5000\n")
    (tmp_path / "slice" / "memory.current").write_text("2000\n")
    assert room_bytes(tmp_path, tmp_path, "/slice/agent.service") == 3000
    (inner / "memory.max").write_text("1500\n")
    assert room_bytes(tmp_path, tmp_path, "/slice/agent.service") == 500
    assert room_bytes(Path("/dev/shm")) <= shutil.disk_usage("/dev/shm").free
