"""A read that fails costs no checkpoint, and nothing starts from step 1 in silence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.job.job import Job
from everstep.node import disk_orders
from everstep.protocol import messages as msg
from everstep.store.folder import commit, complete_steps, newest_valid, prune, write_part
from everstep.store.places import UrlPlace
from everstep.store.ranges import LocalFile
from everstep.store.search import PAUSES_S, Newest, NoStart, newest_to_use
from tests.attacks.test_universal import flip, rewrite
from tests.store.states import all_of, same, save, tensors


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path, step)
    return tmp_path


def search(root: Path, **more: object) -> Newest:
    return newest_to_use(root, sleep=lambda seconds: None, **more)  # type: ignore[arg-type]


def failing_reads(patch: pytest.MonkeyPatch, which: str, times: int) -> list[int]:
    """The file system fails to read files of this folder, so many times."""
    real, failed = os.preadv, []

    def preadv(fd: int, *args: object) -> int:
        if which in os.readlink(f"/proc/self/fd/{fd}") and len(failed) < times:
            failed.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, *args)  # type: ignore[arg-type]

    patch.setattr(os, "preadv", preadv)
    return failed


def test_files_unreadable_for_a_while_cost_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = failing_reads(monkeypatch, "step-000000", times=2)
    assert search(root) == Newest(30)
    assert len(failed) == 2
    assert complete_steps(root) == [10, 20, 30]


def test_files_that_stay_unreadable_stop_the_run_and_are_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float] = []
    failing_reads(monkeypatch, "step-00000030", times=10**9)
    with pytest.raises(
        NoStart, match=r"step-00000030 cannot be read: .*Input/output error.*start_over"
    ) as told:
        newest_to_use(root, sleep=paused.append)
    assert told.value.passing
    assert paused == list(PAUSES_S)
    assert complete_steps(root) == [10, 20, 30]
    assert search(root, start_over=True).step == 20
    monkeypatch.undo()
    assert complete_steps(root) == [10, 20]
    os.rename(root / "step-00000030.unreadable", root / "step-00000030")
    found, refused = newest_valid(root)
    assert found is not None
    assert refused == []
    assert same(found.read(), all_of(30))


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(NoStart, match=r"folder .*loop cannot be read: .*symbolic links") as told:
        search(tmp_path / "loop")
    assert told.value.passing
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(NoStart, match=r"file cannot be read: .*Not a directory"):
        search(tmp_path / "file", start_over=True)
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    with pytest.raises(NoStart, match="link cannot be read"):
        search(tmp_path / "link")
    assert search(tmp_path / "not made yet") == Newest(0)


def _truncate(path: Path) -> None:
    os.truncate(path / "part-0.safetensors", 40)


def _fifo(path: Path) -> None:
    (path / "part-1.safetensors").unlink()
    os.mkfifo(path / "part-1.safetensors")


def _folder_for_file(path: Path) -> None:
    (path / "index.json").unlink()
    (path / "index.json").mkdir()


def _flip(path: Path) -> None:
    flip(path, "part-0.safetensors", -1)


@pytest.mark.parametrize("damage", [_truncate, _fifo, _folder_for_file, _flip])
def test_a_corrupt_one_is_set_aside_and_the_one_before_is_used(
    root: Path, damage: Callable[[Path], None]
) -> None:
    damage(root / "step-00000030")
    files = sorted(os.listdir(root / "step-00000030"))
    found = search(root, verify=True)
    assert found.step == 20
    (reason,) = found.refused
    assert "step-00000030 is damaged" in reason
    assert "kept as step-00000030.corrupt" in reason
    assert sorted(os.listdir(root / "step-00000030.corrupt")) == files
    assert search(root, verify=True) == Newest(20)
    save(root, 30)
    damage(root / "step-00000030")
    assert search(root, verify=True).step == 20
    assert (root / "step-00000030.corrupt-2").is_dir()


def test_a_start_reads_the_index_and_the_headers_and_no_tensor(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read every byte in one process, before the workers read and checked them all again."""
    reached: list[int] = []
    real = LocalFile.read

    def seen(file: LocalFile, offset: int, out: memoryview) -> None:
        if file.path.name == "part-0.safetensors":
            reached.append(offset + len(out))
        real(file, offset, out)

    monkeypatch.setattr(LocalFile, "read", seen)
    path = root / "step-00000030/part-0.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    _flip(path.parent)
    assert search(root) == Newest(30)
    assert max(reached) == header
    assert search(root, verify=True).step == 20
    assert max(reached) == (root / "step-00000030.corrupt/part-0.safetensors").stat().st_size


def test_to_start_from_nothing_where_checkpoints_were_needs_an_operators_word(root: Path) -> None:
    for step in (10, 20, 30):
        _truncate(root / f"step-{step:08d}")
    for _ in range(2):  # also the second time, when they are aside already
        with pytest.raises(NoStart, match=r"3 that cannot be used .*checkpoint\.start_over = true") as told:
            search(root)
        assert not told.value.passing
        assert str(root) in str(told.value)
    assert search(root, start_over=True) == Newest(0)
    assert len(os.listdir(root)) == 3


def test_a_version_we_do_not_know_is_refused_and_kept(root: Path) -> None:
    rewrite(root / "step-00000030", lambda index: index.update(version=99))
    with pytest.raises(NoStart, match="version 99") as told:
        search(root)
    assert not told.value.passing
    assert complete_steps(root) == [10, 20, 30]
    found = search(root, start_over=True)
    assert found.step == 20
    assert "version 99" in found.refused[0]
    assert (root / "step-00000030.unknown" / "index.json").is_file()


def test_a_folder_that_lost_what_was_committed_is_no_reason_to_go_back(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NoStart, match=r"step 40 is gone from .*newest is of step 30") as told:
        search(root, known=40)
    assert told.value.passing
    with pytest.raises(NoStart, match="holds none"):
        search(tmp_path / "not mounted", known=40)
    assert search(root, known=40, start_over=True).step == 30


def test_a_store_that_does_not_answer_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.implementations.memory as memory

    from everstep.store.folder import commit, write_part

    place = "memory://everstep-search/a"
    parts = [write_part(place, 3, f"part-{i}", part) for i, part in enumerate(tensors(3))]
    commit(place, 3, parts, {})
    with monkeypatch.context() as patch:

        def info(self: object, path: str, **kwargs: object) -> dict[str, object]:
            raise OSError(errno.ETIMEDOUT, "no answer", path)

        patch.setattr(memory.MemoryFileSystem, "info", info)
        with pytest.raises(NoStart, match="no answer"):
            newest_to_use(place, sleep=lambda seconds: None)
        with pytest.raises(OSError, match="no answer"):
            UrlPlace(place).clean()
    assert newest_to_use(place).step == 3
    assert UrlPlace(place).put_aside("step-00000003", "corrupt") == "step-00000003.corrupt"
    assert UrlPlace(place).set_aside() == ["step-00000003.corrupt"]
    with pytest.raises(NoStart, match="start_over"):
        newest_to_use(place)


def test_pruning_takes_nothing_when_nothing_can_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_reads(monkeypatch, "step-000000", times=10**9)
    with pytest.raises(UserError, match="so all stay"):
        prune(root, keep=1)
    assert complete_steps(root) == [10, 20, 30]


@pytest.mark.parametrize(("meta", "compiled"), [({}, None), ({"rng": {}}, False), ({"compile": True}, True)])
def test_an_agent_says_whether_the_run_of_a_checkpoint_was_compiled(
    tmp_path: Path, meta: dict[str, Any], compiled: bool | None
) -> None:
    """Earlier versions did not say it, and did not by default."""
    commit(tmp_path, 5, [write_part(tmp_path, 5, "all", all_of(5))], meta)
    needs = Job.from_dict(
        {"model": {"preset": "gpt-tiny"}, "checkpoint": {"folder": "."}, "base": str(tmp_path)}
    ).needs()
    order = msg.FindCheckpoint(task="t", needs=needs, search=3)
    found = disk_orders.work_on_disk(order, needs.checkpoints)
    assert found == msg.CheckpointFound(task="t", step=5, search=3, compiled=compiled)


def test_the_job_says_whether_to_start_over(root: Path) -> None:
    for step in (10, 20, 30):
        _truncate(root / f"step-{step:08d}")
    table = {"model": {"preset": "gpt-tiny"}, "checkpoint": {"folder": "."}, "base": str(root)}
    with pytest.raises(NoStart, match="start_over"):
        disk_orders.newest(Job.from_dict(table).needs().checkpoints)
    table["checkpoint"] = {"folder": ".", "start_over": True}
    assert disk_orders.newest(Job.from_dict(table).needs().checkpoints) == Newest(0)
