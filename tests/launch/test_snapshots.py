"""A script's state in the memory of nodes: handed over, copied, verified, and given back."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import UserError
from everstep.protocol.messages import KeptFile, SnapshotFile
from everstep.ranks import line as rank_line
from everstep.ranks import snapshots
from everstep.ranks.snapshots import NodeMemory


class Line:
    """A rank's line that keeps what is said."""

    def __init__(self, folder: Path) -> None:
        self.snapshots, self.restore_step = folder, None
        self.said: list[dict[str, Any]] = []

    def say(self, **message: Any) -> None:
        self.said.append(message)


def as_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, world: int) -> Line:
    line = Line(folder)
    monkeypatch.setattr(rank_line, "current", line)
    monkeypatch.setattr(snapshots, "_writing", None)
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
    everstep.snapshot(state, 7)
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
    everstep.snapshot({"w": torch.ones(2)}, 7)
    assert line.said == [{"kind": "snapshot", "step": 7, "name": ""}]


def test_shards_of_any_number_of_ranks_become_whole_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = torch.arange(24.0).reshape(6, 4)

    def staged(value: Any, key: str, shards: dict[str, Any], *, is_first: bool) -> Any:
        rank = int(snapshots.os.environ["RANK"])
        shards["/w"] = ((6, 4), (2 * rank, 0), whole[2 * rank : 2 * rank + 2].clone())
        return {"w": None, "n": 5}

    monkeypatch.setattr(snapshots, "_staged", staged)
    for rank in range(3):
        line = as_rank(monkeypatch, tmp_path, rank, 3)
        everstep.snapshot({}, 4)
        written()
    line.restore_step = 4
    found = everstep.restore()
    assert found is not None
    assert torch.equal(found.state["w"], whole)
    assert found.state["n"] == 5


def test_a_state_of_objects_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank(monkeypatch, tmp_path, 0, 1)
    with pytest.raises(UserError, match=r"state\.model is a Linear; .* Give its state_dict\(\)"):
        everstep.snapshot({"model": torch.nn.Linear(1, 1)}, 1)
    with pytest.raises(UserError, match="step is -1"):
        everstep.snapshot({}, -1)


def test_without_everstep_nothing_happens() -> None:
    everstep.snapshot({"w": torch.ones(1)}, 1)
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
        assert stranger.fetch(5, [wanted])
        stranger.close()
        with socket.create_connection(first.address) as sock:
            sock.sendall(b'{"secret": "s", "step": 5, "name": "../../../etc/passwd"}\n')
            assert sock.recv(8) == (-1).to_bytes(8, "little", signed=True)
    finally:
        first.close()
        second.close()
    assert not first.folder.exists()


def test_only_the_newest_steps_stay_in_memory() -> None:
    memory = NodeMemory("127.0.0.1", "s")
    try:
        for step in (1, 2, 9, 10, 11):
            snapshots.step_folder(memory.folder, step).mkdir()
        memory.trim()
        assert sorted(path.name for path in memory.folder.iterdir()) == ["step-10", "step-11", "step-9"]
    finally:
        memory.close()
