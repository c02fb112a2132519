"""A checkpoint is complete or not there; what is damaged is refused by name, and the one before is used."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from everstep.checkpoint import folder
from everstep.checkpoint.folder import (
    Checkpoint,
    clean,
    commit,
    complete_steps,
    newest_valid,
    open_checkpoint,
    partial,
    write_part,
)
from everstep.errors import InternalError, UserError


def tensors(step: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [
        {
            "model/embed.weight": torch.randn(5, 3, generator=draw),
            "optimizer/embed.weight/exp_avg": torch.randn(5, 3, generator=draw),
            "optimizer/embed.weight/step": torch.tensor(float(step)),
        },
        {
            "model/head.weight": torch.randn(3, 5, generator=draw).to(torch.bfloat16),
            "model/empty": torch.zeros(0, 4),
            "count": torch.tensor([step]),
            "flag": torch.tensor(True),
            "model/turned": torch.randn(4, 6, generator=draw).t(),
        },
    ]


def save(root: Path, step: int, keep: int = 3) -> Path:
    parts = [write_part(partial(root, step), f"part-{i}", part) for i, part in enumerate(tensors(step))]
    return commit(root, step, json.loads(json.dumps(parts)), {"job": {"seed": 1}, "rows": step}, keep=keep)


def all_of(step: int) -> dict[str, Tensor]:
    return {name: tensor for part in tensors(step) for name, tensor in part.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    save(tmp_path, 10)
    found, refused = newest_valid(tmp_path)
    assert found is not None
    assert refused == []
    assert found.step == 10
    assert found.meta == {"job": {"seed": 1}, "rows": 10}
    assert same(found.read(), all_of(10))
    assert found.tensors["model/head.weight"][:3] == ("part-1.safetensors", "BF16", (3, 5))
    assert list(found.read(["flag", "model/embed.weight"])) == ["flag", "model/embed.weight"]


def test_a_part_is_plain_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    read = [load_file(path / f"part-{i}.safetensors") for i in range(2)]
    assert same({**read[0], **read[1]}, all_of(10))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=2)
    assert complete_steps(tmp_path) == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


def test_a_run_that_went_back_keeps_what_it_writes(tmp_path: Path) -> None:
    """Step 30 was refused, the run went on from 20: its 25 must not be thrown away as older than 30."""
    for step in (20, 30):
        save(tmp_path, step)
    (tmp_path / "step-00000030" / "index.json").write_text("{")
    save(tmp_path, 25, keep=1)
    found, refused = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 25
    assert len(refused) == 1
    save(tmp_path, 30, keep=1)
    assert complete_steps(tmp_path) == [30]
    assert newest_valid(tmp_path)[1] == []


def test_an_empty_or_missing_root_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) == (None, [])
    assert newest_valid(tmp_path / "nowhere") == (None, [])
    assert complete_steps(tmp_path / "nowhere") == []


def test_what_a_crash_left_is_ignored_and_cleaned(tmp_path: Path) -> None:
    save(tmp_path, 10)
    write_part(partial(tmp_path, 20), "part-0", tensors(20)[0])
    assert complete_steps(tmp_path) == [10]
    assert clean(tmp_path) == [tmp_path / "step-00000020.partial"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


class Crash(Exception):
    pass


def test_a_crash_at_any_moment_of_a_commit_leaves_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before each call that changes the disk, in turn; once over a step that is there."""
    real = {name: getattr(os, name) for name in ("fsync", "rename", "unlink", "rmdir")}
    for crash_at in range(1, 200):
        root = tmp_path / str(crash_at)
        for step in (10, 20):
            save(root, step)
        calls = 0

        def stop(name: str, *args, _at: int = crash_at, **kwargs):
            nonlocal calls
            calls += 1
            if calls >= _at:
                raise Crash
            return real[name](*args, **kwargs)

        crashed = False
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, lambda *a, _name=name, **k: stop(_name, *a, **k))
            try:
                save(root, 20, keep=1)
                save(root, 30, keep=1)
            except Crash:
                crashed = True
        found, refused = newest_valid(root)
        assert found is not None
        assert refused == []
        assert same(found.read(), all_of(found.step))
        assert found.step >= 10
        clean(root)
        save(root, 40)
        assert newest_valid(root)[0].step == 40
        if not crashed:
            break
    assert crash_at > 10
    assert not crashed


def rewrite(path: Path, change) -> None:
    """Change the index as somebody would who also makes its hash right."""
    outer = json.loads((path / "index.json").read_text())
    change(outer["index"])
    outer["xxh3"] = folder._hash(folder._canonical(outer["index"]).encode())
    (path / "index.json").write_text(json.dumps(outer))


def truncate(path: Path) -> None:
    os.truncate(path / "part-1.safetensors", 100)


def truncate_and_say_so(path: Path) -> None:
    truncate(path)
    rewrite(path, lambda index: index["parts"][1].update(bytes=100))


def flip(path: Path, file: str = "part-0.safetensors", at: int = -1) -> None:
    data = bytearray((path / file).read_bytes())
    data[at] ^= 1
    (path / file).write_bytes(data)


def link(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    (path / "part-0.safetensors").rename(outside)
    (path / "part-0.safetensors").symlink_to(outside)


def twice(path: Path) -> None:
    again = write_part(path, "part-2", {"flag": torch.tensor(True)})
    rewrite(path, lambda index: index["parts"].append(again))


def swap(path: Path) -> None:
    write_part(path, "part-0", {**tensors(20)[0], "model/embed.weight": torch.zeros(3, 5)})


def same_key_twice(path: Path) -> None:
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text.replace('"step":20', '"step":20,"step":20'))


DAMAGE = {
    "part-1.safetensors has 100 bytes, and": truncate,
    "part-1.safetensors cannot be read": truncate_and_say_so,
    "part-0.safetensors: tensor 'optimizer/embed.weight/step' has not the bytes": flip,
    "part-0.safetensors cannot be read": lambda path: flip(path, at=7),
    "part-1.safetensors is missing": lambda path: (path / "part-1.safetensors").unlink(),
    "part-0.safetensors is not a plain file": link,
    "part-0.safetensors holds other tensors than index.json says": swap,
    "tensor 'flag' is in both part-1.safetensors and part-2.safetensors": twice,
    "index.json is missing": lambda path: (path / "index.json").unlink(),
    "index.json is not JSON": lambda path: os.truncate(path / "index.json", 50),
    "index.json is not JSON: a key is there twice": same_key_twice,
    "index.json is not the index of an Everstep": lambda path: (path / "index.json").write_text("[1, 2]"),
    "index.json is not JSON: maximum recursion": lambda path: (path / "index.json").write_text("[" * 200_000),
    "index.json has not the bytes": lambda path: (path / "index.json").write_text(
        (path / "index.json").read_text().replace('"rows":20', '"rows":21')
    ),
    "index.json names '../step-00000010/part-0.safetensors', which is no file of this folder": lambda path: (
        rewrite(path, lambda index: index["parts"][0].update(file="../step-00000010/part-0.safetensors"))
    ),
    "index.json names '/etc/passwd'": lambda path: rewrite(
        path, lambda index: index["parts"][0].update(file="/etc/passwd")
    ),
    "index.json does not describe the tensors of part-0": lambda path: rewrite(
        path, lambda index: index["parts"][0].update(tensors=["model/embed.weight"])
    ),
    "index.json is of version 2": lambda path: rewrite(path, lambda index: index.update(version=2)),
    "index.json has no parts": lambda path: rewrite(path, lambda index: index.pop("parts")),
    "index.json is of step 7, which is not the folder's": lambda path: rewrite(
        path, lambda index: index.update(step=7)
    ),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(tmp_path: Path, says: str) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    DAMAGE[says](tmp_path / "step-00000020")
    found, refused = newest_valid(tmp_path)
    assert isinstance(found, Checkpoint)
    assert found.step == 10
    assert same(found.read(), all_of(10))
    assert len(refused) == 1
    assert says in refused[0]
    assert "step-00000020" in refused[0]
    assert "\n" not in refused[0]


def test_any_flipped_bit_of_any_file_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), 7):
            flip(path, file.name, at)
            found, refused = newest_valid(tmp_path)
            assert found is None, (file.name, at)
            assert len(refused) == 1
            file.write_bytes(whole)


def test_a_damaged_tensor_does_not_stop_the_reading_of_others(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    flip(path)
    found = open_checkpoint(path)
    assert same(found.read(["model/embed.weight"]), {"model/embed.weight": all_of(10)["model/embed.weight"]})
    with pytest.raises(UserError, match=r"optimizer/embed.weight/step"):
        found.read()


def test_names_that_are_not_there_are_named(tmp_path: Path) -> None:
    found = open_checkpoint(save(tmp_path, 10))
    with pytest.raises(UserError, match="no tensor 'model/other'"):
        found.read(["flag", "model/other"])


def test_our_own_mistakes_are_not_written(tmp_path: Path) -> None:
    parts = [write_part(partial(tmp_path, 1), name, {"x": torch.zeros(1)}) for name in ("a", "b")]
    with pytest.raises(InternalError, match="hold one name"):
        commit(tmp_path, 1, parts, {})
    with pytest.raises(InternalError, match="no name for a part"):
        write_part(tmp_path, "../a", {})
    os.truncate(partial(tmp_path, 1) / "a.safetensors", 3)
    with pytest.raises(InternalError, match="not as long"):
        commit(tmp_path, 1, parts[:1], {})
    with pytest.raises(UserError, match="complex64"):
        write_part(tmp_path, "c", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert complete_steps(tmp_path) == []
