"""A checkpoint is complete or not there, whatever moment a writer dies at."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from everstep.errors import InternalError, UserError
from everstep.layout.box import Box
from everstep.store import index as indexes
from everstep.store.folder import (
    clean,
    commit,
    complete_steps,
    doomed,
    newest_valid,
    open_checkpoint,
    prune,
    read_description,
    write_description,
    write_part,
    write_slices,
)
from everstep.store.index import Refused, num_chunks
from everstep.store.parts import BLOCK_BYTES, CHUNK_BYTES, chunk_bytes_of
from everstep.store.places import place_of
from tests.store.states import all_of, same, save, tensors


def test_what_is_written_is_read(tmp_path: Path) -> None:
    save(tmp_path, 10)
    found, refused = newest_valid(tmp_path)
    assert found is not None
    assert refused == []
    assert found.step == 10
    assert found.meta == {"job": {"seed": 1}, "rows": 10}
    assert [group["lr"] for group in found.index.groups] == [0.1, 0.01]
    assert same(found.read(), all_of(10))
    entry = found.tensors["model/head.weight"]
    assert (entry.dtype, entry.shape, entry.slices[0].file) == ("BF16", (3, 5), "part-1.safetensors")
    assert list(found.read(["flag", "model/embed.weight"])) == ["flag", "model/embed.weight"]
    assert same(open_checkpoint(tmp_path / "step-00000010", access="mmap").read(), all_of(10))


def test_a_part_is_plain_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    read = [load_file(path / f"part-{i}.safetensors") for i in range(2)]
    assert same({**read[0], **read[1]}, all_of(10))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=2)
    assert complete_steps(tmp_path) == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000020"]


def test_every_so_many_steps_one_is_kept_for_ever(tmp_path: Path) -> None:
    assert doomed([5, 10, 15, 20, 25, 30], keep=2, keep_every=10) == [5, 15]
    for step in (5, 10, 15, 20):
        save(tmp_path, step, keep=9)
    assert prune(tmp_path, keep=1, keep_every=10, dry_run=True) == [5, 15]
    assert prune(tmp_path, keep=1, keep_every=10) == [5, 15]
    assert complete_steps(tmp_path) == [10, 20]


def test_pruning_never_takes_the_newest_that_is_whole(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "step-00000020" / "index.json").write_text("{")
    assert prune(tmp_path, keep=1) == []
    assert complete_steps(tmp_path) == [10, 20]


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
    write_part(tmp_path, 20, "part-0", tensors(20)[0])
    assert complete_steps(tmp_path) == [10]
    assert clean(tmp_path) == [tmp_path / "step-00000020.partial"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


class Crash(Exception):
    pass


def test_a_crash_at_any_moment_of_a_commit_leaves_a_valid_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before each call that changes the disk, in turn; the only checkpoint is saved once again."""
    real = {name: getattr(os, name) for name in ("fsync", "rename", "unlink", "rmdir", "pwrite")}
    for crash_at in range(1, 200):
        root = tmp_path / str(crash_at)
        save(root, 20)
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
        clean(root)
        save(root, 40)
        assert newest_valid(root)[0].step == 40
        if not crashed:
            break
    assert crash_at > 10
    assert not crashed


def test_ranks_write_slices_and_anyone_reads_any_box(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    boxes = [Box((0, 0), (4, 10)), Box((4, 0), (2, 3)), Box((4, 3), (2, 7))]
    parts = [
        write_slices(tmp_path, 1, f"rank-{i}", [("w", (6, 10), box, whole[box.slices()])], chunk_bytes=16)
        for i, box in enumerate(boxes)
    ]
    commit(tmp_path, 1, parts, {})
    for access in ("pread", "mmap"):
        found = open_checkpoint(tmp_path / "step-00000001", access)
        assert torch.equal(found.read(["w"])["w"], whole)
        for box in (Box((1, 2), (4, 5)), Box((0, 9), (6, 1)), Box((5, 0), (1, 10)), Box((2, 2), (0, 3))):
            for checked in (True, False):
                assert torch.equal(found.read_box("w", box, checked=checked), whole[box.slices()])
    with pytest.raises(UserError, match="reaches outside"):
        found.read_box("w", Box((5, 5), (2, 5)))


def test_a_partial_read_reads_what_it_needs_and_no_more(tmp_path: Path) -> None:
    whole = torch.randn(1024, 512)
    commit(tmp_path, 1, [write_part(tmp_path, 1, "a", {"w": whole})], {})
    for box, checked in ((Box((256, 0), (128, 512)), True), (Box((0, 64), (1024, 64)), False)):
        found = open_checkpoint(tmp_path / "step-00000001")
        before = found.bytes_read
        assert torch.equal(found.read_box("w", box, checked=checked), whole[box.slices()])
        read = found.bytes_read - before
        if checked:
            assert read == box.volume * 4
        else:
            assert read <= whole.numel() * 4  # short runs are read with what lies between
    assert num_chunks(1, 128) == 1


def test_any_fsspec_url_will_do() -> None:
    root = "memory://everstep-test/a"
    for step in (1, 2, 3):
        parts = [write_part(root, step, f"part-{i}", part) for i, part in enumerate(tensors(step))]
        commit(root, step, parts, {"rows": step}, keep=2)
    write_part(root, 4, "part-0", tensors(4)[0])
    assert complete_steps(root) == [2, 3]
    found, refused = newest_valid(root)
    assert found is not None
    assert (found.step, refused) == (3, [])
    assert same(found.read(), all_of(3))
    assert torch.equal(
        found.read_box("model/turned", Box((1, 1), (2, 2))), all_of(3)["model/turned"][1:3, 1:3]
    )
    assert len(clean(root)) == 1
    with pytest.raises(UserError, match="is not a place fsspec knows"):
        complete_steps("nosuchscheme://a")


def test_a_damaged_tensor_does_not_stop_the_reading_of_others(tmp_path: Path) -> None:
    path = save(tmp_path, 10) / "part-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = open_checkpoint(path.parent)
    assert same(found.read(["model/embed.weight"]), {"model/embed.weight": all_of(10)["model/embed.weight"]})
    with pytest.raises(UserError, match=r"optimizer/embed.weight/step"):
        found.read()


def test_names_that_are_not_there_are_named(tmp_path: Path) -> None:
    found = open_checkpoint(save(tmp_path, 10))
    with pytest.raises(UserError, match="no tensor 'model/other'"):
        found.read(["flag", "model/other"])


def test_our_own_mistakes_are_not_written(tmp_path: Path) -> None:
    parts = [write_part(tmp_path, 1, name, {"x": torch.zeros(1)}) for name in ("a", "b")]
    with pytest.raises(InternalError, match=r"'x' is in both a.safetensors and b"):
        commit(tmp_path, 1, parts, {})
    with pytest.raises(InternalError, match="not a name for a part"):
        write_part(tmp_path, 1, "../a", {})
    half = write_slices(tmp_path, 2, "a", [("w", (4,), Box((0,), (2,)), torch.zeros(2))])
    with pytest.raises(InternalError, match="elements of tensor 'w' are in no file"):
        commit(tmp_path, 2, [half], {})
    os.truncate(tmp_path / "step-00000001.partial" / "a.safetensors", 3)
    with pytest.raises(InternalError, match="not as long"):
        commit(tmp_path, 1, parts[:1], {})
    with pytest.raises(UserError, match="complex128"):
        write_part(tmp_path, 1, "c", {"x": torch.zeros(1, dtype=torch.complex128)})
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize("kind", ["path", "url"])
def test_a_label_is_small_whatever_the_part_and_its_description_is_checked(tmp_path: Path, kind: str) -> None:
    root = tmp_path if kind == "path" else f"memory://{tmp_path.name}"
    state = {f"model/{k}": torch.ones(3) for k in range(500)}
    part = write_part(root, 5, "stage-0", state)
    label = write_description(root, 5, "stage-0", part | {"meta": {"a": 1}})
    assert len(json.dumps(label)) < 200 < len(json.dumps(part))
    found = read_description(root, 5, label)
    assert found.pop("meta") == {"a": 1}
    with pytest.raises(Refused, match="fails its checksum"):
        read_description(root, 5, {**label, "xxh3": "0" * 16})
    with pytest.raises(UserError, match="not a name for a part"):
        read_description(root, 5, {**label, "name": "../stage-0"})
    name = commit(root, 5, [found], {})
    assert complete_steps(root) == [5]
    with pytest.raises(Refused, match="missing"):
        place_of(root).file(name, "stage-0.json")


def test_an_index_of_thousands_of_large_parts_can_be_read_back() -> None:
    """With chunks of one size a state of 8.8 TB had an index that was written and never read."""
    assert chunk_bytes_of(1 << 30) == CHUNK_BYTES
    assert chunk_bytes_of(1 << 50) == BLOCK_BYTES
    for workers, part in ((128, 70 << 30), (1024, 9 << 30), (4096, 4 << 30)):
        hashes = workers * num_chunks(part, chunk_bytes_of(part))
        assert 16 * hashes <= indexes.MAX_INDEX_BYTES // 2


def test_an_index_that_no_one_could_read_is_not_committed_and_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    monkeypatch.setattr(indexes, "MAX_INDEX_BYTES", 100)
    with pytest.raises(InternalError, match="would have"):
        save(tmp_path, 20)
    assert complete_steps(tmp_path) == [10]


def test_a_folder_that_another_part_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that fails takes the empty folder with it. One that began just then failed too, and its error
    was told instead of the first one's.
    """
    make, times = Path.mkdir, []

    def gone(path: Path, *args: object, **more: object) -> None:
        times.append(path)
        if len(times) == 1:
            raise FileExistsError(17, "File exists", str(path))  # it was there, and is no folder any more
        make(path, *args, **more)  # type: ignore[arg-type]
        if len(times) == 2:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", gone)
    part = write_part(tmp_path, 1, "a", {"w": torch.ones(3)})
    assert len(times) == 3
    commit(tmp_path, 1, [part], {})
    assert complete_steps(tmp_path) == [1]
