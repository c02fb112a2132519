"""A script's state in the memory of nodes: handed over, copied, verified, and given back."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everstep
from everstep.errors import EverstepError, UserError
from everstep.protocol.messages import KeptFile, SnapshotFile
from everstep.ranks import line as rank_line
from everstep.ranks import snapshots
from everstep.ranks.snapshots import NodeMemory


class Line:
    """A rank's line that keeps what is said."""

    def __init__(self, folder: Path) -> None:
        self.snapshots, self.restore_step, self.copy_every = folder, None, 1
        self.said: list[dict[str, Any]] = []

    def say(self, **message: Any) -> None:
        self.said.append(message)


def as_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, world: int) -> Line:
    line = Line(folder)
    monkeypatch.setattr(rank_line, "current", line)
    monkeypatch.setattr(snapshots, "_writing", None)
    monkeypatch.setattr(snapshots, "_snapshots", 0)
    monkeypatch.setattr(snapshots, "_last", None)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    return line


def written() -> None:
    if snapshots._writing is not None:
        snapshots._writing.join()


def test_a_state_comes_back_as_it_was_whatever_happens_to_it_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3, "name": "x"}
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    line = as_rank(monkeypatch, tmp_path, 0, 2)
    everstep.snapshot(7, lambda: state)
    with torch.no_grad():
        model.weight.zero_()
    written()
    assert line.said[0]["name"] == "rank-0-of-2.pt"
    line.restore_step = 7
    found = everstep.restore()
    assert found is not None
    assert (found.step, found.state["epoch"], found.state["name"]) == (7, 3, "x")
    assert all(torch.equal(found.state["model"][key], kept[key]) for key in kept)
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    fresh.load_state_dict(found.state["optim"])
    assert fresh.state_dict()["state"][0]["step"] == 1


def test_other_ranks_hand_over_only_what_rank_0_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = as_rank(monkeypatch, tmp_path, 1, 2)
    everstep.snapshot(7, lambda: {"w": torch.ones(2)})
    assert line.said == [{"kind": "snapshot", "step": 7, "name": ""}]


def test_shards_of_any_number_of_ranks_become_whole_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = torch.arange(24.0).reshape(6, 4)

    def staged(value: Any, key: str, shards: dict[str, Any], *, keeps_rest: bool) -> Any:
        rank = int(snapshots.os.environ["RANK"])
        shards["['w']"] = ((6, 4), (2 * rank, 0), whole[2 * rank : 2 * rank + 2].clone())
        return {"w": None, "n": 5}

    monkeypatch.setattr(snapshots, "_staged", staged)
    for rank in range(3):
        line = as_rank(monkeypatch, tmp_path, rank, 3)
        everstep.snapshot(4, lambda: {})
        written()
    line.restore_step = 4
    found = everstep.restore()
    assert found is not None
    assert torch.equal(found.state["w"], whole)
    assert found.state["n"] == 5
    (snapshots.step_folder(tmp_path, 4) / "rank-1-of-3.pt").unlink()
    with pytest.raises(EverstepError, match="the shard of a rank is missing"):
        everstep.restore()


def test_each_rank_can_keep_its_own_for_as_many_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        as_rank(monkeypatch, tmp_path, rank, 2)
        everstep.snapshot(4, lambda rank=rank: {"part": torch.full((3,), float(rank))}, per_rank=True)
        written()
    for rank in range(2):
        as_rank(monkeypatch, tmp_path, rank, 2).restore_step = 4
        found = everstep.restore()
        assert found is not None
        assert found.state["part"].tolist() == [rank] * 3
    as_rank(monkeypatch, tmp_path, 0, 3).restore_step = 4
    assert everstep.restore() is None
    assert "kept by each of 2 ranks for itself, and there are 3 now" in capsys.readouterr().err


DIFFERENT = """
import sys
import torch
from torch import distributed
from everstep.errors import EverstepError, UserError
from everstep.ranks.snapshots import _require_alike

rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
_require_alike({"step": 3, "model": {"w": torch.ones(3)}, "betas": (0.9, 0.95)}, 2)
for state in ({"optim": {"w": torch.ones(3), "part": torch.full((2,), rank)}}, {f"of {rank}": 1}):
    try:
        _require_alike(state, 2)
    except UserError as error:
        print(error)
distributed.destroy_process_group()  # else the end of its threads can end the process before it has spoken
"""


def test_a_state_of_which_each_rank_has_another_part_is_refused(tmp_path: Path) -> None:
    """Else all parts but rank 0's would be lost, and nobody told."""
    meet = str(tmp_path / "meet")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DIFFERENT, str(rank), meet], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0] == said[1]
    assert "state['optim']['part'] is not the same on all ranks" in said[0]
    assert "ranks have other keys" in said[0]


def test_a_state_of_objects_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank(monkeypatch, tmp_path, 0, 1)
    with pytest.raises(UserError, match=r"state\['model'\] is a Linear; .* Give its state_dict\(\)"):
        everstep.snapshot(1, lambda: {"model": torch.nn.Linear(1, 1)})
    with pytest.raises(UserError, match="step is -1"):
        everstep.snapshot(-1, dict)


class Colour(enum.IntEnum):
    RED = 1


class Kind(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    ONE = "one"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"best": np.float64(1.5), "n": np.int64(3), "is": np.True_}, {"best": 1.5, "n": 3, "is": True}),
        ({np.str_("a"): Colour.RED, Colour.RED: 2}, {"a": 1, 1: 2}),
        ({(1, np.int64(2)): Kind.ONE, Kind.ONE: 1}, {(1, 2): "one", "one": 1}),
        ([1, (2.5, None, b"x", 1j, 10**100)], [1, (2.5, None, b"x", 1j, 10**100)]),
    ],
)
def test_numbers_and_texts_of_other_classes_are_read_back_as_pythons_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: Any, found: Any
) -> None:
    """The class was written with them, and reading it back was refused: no rank could start any more."""
    as_rank(monkeypatch, tmp_path, 0, 1)
    everstep.snapshot(3, lambda: given)
    written()
    as_rank(monkeypatch, tmp_path, 0, 1).restore_step = 3
    restored = everstep.restore()
    assert restored is not None
    assert restored.state == found
    assert repr(restored.state) == repr(found)


class Marked(torch.Tensor):
    """A kind of tensor of the script's own."""


@pytest.mark.parametrize(
    ("state", "because"),
    [
        ({"a": np.zeros(3)}, r"state\['a'\] is a ndarray"),
        ({"a": {frozenset(): 1}}, r"a key of state\['a'\] is a frozenset"),
        ({"a": torch.ones(2).as_subclass(Marked)}, r"state\['a'\] is a Marked, a kind of tensor"),
    ],
)
def test_what_could_not_be_read_back_is_refused_when_it_is_handed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: Any, because: str
) -> None:
    as_rank(monkeypatch, tmp_path, 0, 1)
    with pytest.raises(UserError, match=because):
        everstep.snapshot(3, lambda: state)


def test_paths_to_values_differ_wherever_the_values_do() -> None:
    """Shards are put together by their paths."""
    state = {"a/b": 1, "a": {"b": 2, 1: 3, "1": 4}, "a['b']": 5, ("a", "b"): 6}
    digests: dict[str, int] = {}
    snapshots._digests(state, "", digests)
    assert len(digests) == 6


def test_a_second_state_of_a_step_is_not_kept_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two nodes each could keep another one of them."""
    line = as_rank(monkeypatch, tmp_path, 0, 1)
    for value in (1.0, 2.0, 3.0):
        everstep.snapshot(5, lambda value=value: {"w": value})
    everstep.snapshot(2, lambda: {"w": 4.0})
    written()
    assert [said["step"] for said in line.said] == [5, 2]
    assert capsys.readouterr().err.count("a state of step 5 was handed over already") == 1
    line.restore_step = 5
    found = everstep.restore()
    assert found is not None
    assert found.state == {"w": 1.0}


def test_without_everstep_nothing_happens() -> None:
    everstep.snapshot(1, lambda: {"w": torch.ones(1)})
    assert everstep.restore() is None


def test_another_node_reads_a_file_and_refuses_one_that_was_changed() -> None:
    first, second = NodeMemory("127.0.0.1", "s"), NodeMemory("127.0.0.1", "s")
    try:
        folder = snapshots.step_folder(first.folder, 5)
        folder.mkdir()
        (folder / "rank-0-of-1.pt").write_bytes(b"x" * 100_000)
        file = snapshots.described(folder / "rank-0-of-1.pt")
        wanted = KeptFile(name="rank-0-of-1.pt", file=file, holders=(("127.0.0.1", 1), first.address))
        assert second.fetch(5, [wanted]) == ""
        copy = snapshots.step_folder(second.folder, 5) / "rank-0-of-1.pt"
        assert copy.read_bytes() == b"x" * 100_000
        copy.unlink()
        (folder / "rank-0-of-1.pt").write_bytes(b"y" * 100_000)
        assert "fails its checksum" in second.fetch(5, [wanted])
        assert not list(copy.parent.iterdir())
        absent = KeptFile(name="no", file=SnapshotFile(size=1, hash=""), holders=(first.address,))
        assert "does not have it" in second.fetch(5, [absent])
        stranger = NodeMemory("127.0.0.1", "other")
        assert "does not know the task's secret" in stranger.fetch(5, [wanted])
        stranger.close()
        with socket.create_connection(first.address) as sock, sock.makefile("rb") as stream:
            snapshots._prove(sock, snapshots.Opener(first._key))
            sock.sendall(b'{"step": 5, "name": "../../../etc/passwd"}\n')
            assert stream.read(8) == (-1).to_bytes(8, "little", signed=True)
        with socket.create_connection(first.address) as sock:
            sock.sendall(b'{"secret": "s", "step": 5, "name": "rank-0-of-1.pt"}\n')
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(8) == b""
    finally:
        first.close()
        second.close()
    assert not first.folder.exists()


def test_who_proves_itself_byte_by_byte_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte had 5 s, and there is room for few strangers."""
    monkeypatch.setattr(snapshots, "_STRANGER_S", 0.3)
    memory = NodeMemory("127.0.0.1", "s")

    def drip(sock: socket.socket) -> None:
        for byte in snapshots.Opener(b"x").hello() * 20:
            sock.sendall(bytes([byte]))
            time.sleep(0.1)

    with socket.create_connection(memory.address) as sock, pytest.raises(ConnectionError):
        drip(sock)
    memory.close()


def test_a_state_is_restored_while_a_thread_still_copies_it_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wrote one file; whoever was second did not find it. The steps that follow trimmed it as well."""
    first, second = NodeMemory("127.0.0.1", "s"), NodeMemory("127.0.0.1", "s")
    described, during = snapshots.described, []
    try:
        folder = snapshots.step_folder(first.folder, 5)
        folder.mkdir()
        (folder / "a.pt").write_bytes(b"x" * 1000)
        wanted = KeptFile(name="a.pt", file=described(folder / "a.pt"), holders=(first.address,))

        def busy(path: Path) -> SnapshotFile:
            """The other one comes before this one has looked at what it has read."""
            if not during:
                during.append(path)
                for step in (6, 7, 8):
                    snapshots.step_folder(second.folder, step).mkdir()
                second.trim()
                assert second.fetch(5, [wanted]) == ""
            return described(path)

        monkeypatch.setattr(snapshots, "described", busy)
        assert second.fetch(5, [wanted]) == ""
        assert during
        assert (snapshots.step_folder(second.folder, 5) / "a.pt").read_bytes() == b"x" * 1000
    finally:
        first.close()
        second.close()


def test_only_the_newest_steps_stay_in_memory() -> None:
    memory = NodeMemory("127.0.0.1", "s")
    try:
        for step in (1, 2, 9, 10, 11):
            snapshots.step_folder(memory.folder, step).mkdir()
            os.utime(snapshots.step_folder(memory.folder, step), (step, step))
        memory.trim()
        assert sorted(path.name for path in memory.folder.iterdir()) == ["step-10", "step-11", "step-9"]
    finally:
        memory.close()


def test_newest_is_what_was_written_last_and_what_nodes_have_copied_stays() -> None:
    """Ranks hand over more than can be copied, or begin again with a lower step."""
    first, second = NodeMemory("127.0.0.1", "s"), NodeMemory("127.0.0.1", "s")
    try:
        for at, step in enumerate((10, 11, 12, 3)):
            folder = snapshots.step_folder(first.folder, step)
            folder.mkdir()
            (folder / "a.pt").write_bytes(b"x")
            os.utime(folder, (at, at))
        wanted = KeptFile(
            name="a.pt",
            file=snapshots.described(snapshots.step_folder(first.folder, 11) / "a.pt"),
            holders=(first.address,),
        )
        assert second.fetch(11, [wanted]) == ""
        for at, step in enumerate((4, 5, 6)):
            for memory in (first, second):
                folder = snapshots.step_folder(memory.folder, step)
                folder.mkdir()
                os.utime(folder, (10 + at, 10 + at))
        os.utime(snapshots.step_folder(second.folder, 11), (1, 1))
        for memory in (first, second):
            memory.trim()
            left = sorted(int(path.name.removeprefix("step-")) for path in memory.folder.iterdir())
            assert left == [4, 5, 6, 11]
    finally:
        first.close()
        second.close()


def test_small_states_stay_while_they_are_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "YOUNG_BYTES", 250)
    memory = NodeMemory("127.0.0.1", "s")
    now = time.time()
    try:
        for step in range(10):
            folder = snapshots.step_folder(memory.folder, step)
            folder.mkdir()
            (folder / "a.pt").write_bytes(b"x" * 100)
            os.utime(folder, (now - 0.1 + step / 100,) * 2)
        memory.trim()
        left = sorted(int(path.name.removeprefix("step-")) for path in memory.folder.iterdir())
        assert left == [5, 6, 7, 8, 9]
    finally:
        memory.close()


def test_ranks_begin_with_no_file_of_another_number_of_ranks() -> None:
    memory = NodeMemory("127.0.0.1", "s")
    try:
        folder = snapshots.step_folder(memory.folder, 7)
        folder.mkdir()
        for name in ("rank-0-of-1.pt", "rank-0-of-2.pt"):
            (folder / name).write_bytes(b"x")
        wanted = KeptFile(
            name="rank-0-of-1.pt", file=snapshots.described(folder / "rank-0-of-1.pt"), holders=()
        )
        memory.leave_only(7, [wanted])
        assert [path.name for path in folder.iterdir()] == ["rank-0-of-1.pt"]
    finally:
        memory.close()


def test_a_state_on_disk_is_read_where_no_node_has_it_and_refused_if_it_was_changed(tmp_path: Path) -> None:
    first, second = NodeMemory("127.0.0.1", "s", tmp_path), NodeMemory("127.0.0.1", "s", tmp_path)
    try:
        (first.folder / "step-3").mkdir()
        (first.folder / "step-3" / "rank-0").write_bytes(b"x" * 100_000)
        file = snapshots.described(first.folder / "step-3" / "rank-0")
        held = first.hold(3, ["rank-0"])
        (first.folder / "step-3" / "rank-0").unlink()  # it is no longer kept, and still being written
        assert first.drain(3, held) == ""
        assert [path.name for path in (tmp_path / "step-3").iterdir()] == ["rank-0"]
        assert not held.exists()
        wanted = [KeptFile(name="rank-0", file=file, holders=())]
        assert second.fetch(3, wanted) == ""
        assert snapshots.described(second.folder / "step-3" / "rank-0") == file
        (tmp_path / "step-3" / "rank-0").write_bytes(b"y" * 100_000)
        assert "fails its checksum" in first.fetch(3, wanted)
    finally:
        first.close()
        second.close()


def test_a_disk_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = NodeMemory("127.0.0.1", "s", tmp_path / "file")
    try:
        (memory.folder / "step-3").mkdir()
        (memory.folder / "step-3" / "rank-0").write_bytes(b"x")
        assert memory.drain(3, memory.hold(3, ["rank-0"])).startswith("Not a directory: ")
    finally:
        memory.close()
