"""Several processes convert one checkpoint together: each writes a share, and the last one commits."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.errors import UserError
from everstep.store.folder import complete_steps
from everstep.store.places import LocalPlace, place_of
from everstep.store.stored import num_bytes
from everstep_convert import conversion, selfcheck
from everstep_convert.conversion import Target, read_state, write_state
from everstep_convert.formats.universal import missing_shares, shared
from everstep_convert.state import TrainingState
from tests.store.states import save


def source_of(root: Path, step: int = 10) -> TrainingState:
    save(root, step)
    state = read_state(root)
    state.tied["lm_head.weight"] = "embed.weight"
    state.frozen.append("turned")
    return state


def write(root: Path | str, state: TrainingState, index: int, count: int) -> None:
    write_state(root, state, Target(format="universal", share=(index, count)))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_shares_in_any_order_make_the_checkpoint_that_one_process_makes(tmp_path: Path, count: int) -> None:
    state = source_of(tmp_path / "a")
    order = [*range(2, count + 1), 1]
    for done, index in enumerate(order):
        assert complete_steps(tmp_path / "b") == []
        write(tmp_path / "b", state, index, count)
        assert missing_shares(tmp_path / "b", 10, count) == sorted(order[done + 1 :])
    assert complete_steps(tmp_path / "b") == [10]
    assert selfcheck.changes(state, read_state(tmp_path / "b")) == []
    assert [path.suffix for path in (tmp_path / "b/step-00000010").iterdir()].count(".json") == 1


def test_shares_are_balanced_by_bytes_and_hold_every_tensor_once(tmp_path: Path) -> None:
    state = source_of(tmp_path)
    parts = [shared(state, (index, 3)) for index in (1, 2, 3)]
    assert sorted(name for part in parts for name in part.tensors) == sorted(state.tensors)
    sizes = [part.num_bytes() for part in parts]
    assert max(sizes) - min(sizes) <= max(num_bytes(one) for one in state.tensors.values())


def test_processes_that_finish_at_one_time_commit_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see all shares: one of them renames the folder under the other's feet."""
    state = source_of(tmp_path / "a")
    both = threading.Barrier(2)
    commit = LocalPlace.commit

    def together(self: LocalPlace, *arguments: object) -> str:
        both.wait(30)
        return commit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalPlace, "commit", together)
    described = threading.Barrier(2)
    write_description = LocalPlace.write_description

    def describe(self: LocalPlace, *arguments: object) -> None:
        write_description(self, *arguments)  # type: ignore[arg-type]
        described.wait(30)

    monkeypatch.setattr(LocalPlace, "write_description", describe)
    failed: list[BaseException] = []

    def one(index: int) -> None:
        try:
            write(tmp_path / "b", state, index, 2)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert selfcheck.changes(state, read_state(tmp_path / "b")) == []


def test_a_share_that_failed_is_written_again_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = source_of(tmp_path / "a")
    write(tmp_path / "b", state, 1, 2)
    kept = (tmp_path / "b/step-00000010.partial/share-1-of-2.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(conversion.selfcheck, "changes", lambda *a, **k: [selfcheck.Change("lost", "meta/x")])
        with pytest.raises(UserError, match="not exact"):
            write(tmp_path / "b", state, 2, 2)
    assert not (tmp_path / "b/step-00000010.partial/share-2-of-2.safetensors").exists()
    write(tmp_path / "b", state, 1, 2)  # started again, although it was done
    assert (tmp_path / "b/step-00000010.partial/share-1-of-2.safetensors").stat().st_mtime_ns == kept
    write(tmp_path / "b", state, 2, 2)
    assert selfcheck.changes(state, read_state(tmp_path / "b")) == []


@pytest.mark.parametrize("what", ["count", "source"])
def test_shares_of_two_conversions_are_not_one_checkpoint(tmp_path: Path, what: str) -> None:
    """Names, shapes and step are equal; only values, or the number of shares, tell them apart."""
    state = source_of(tmp_path / "a")
    write(tmp_path / "b", state, 1, 2)
    other, count = (state, 3) if what == "count" else (source_of(tmp_path / "c", 11), 2)
    other.step = 10
    with pytest.raises(UserError, match="same source, options and number of shares"):
        write(tmp_path / "b", other, 2, count)
    assert complete_steps(tmp_path / "b") == []


def test_a_step_that_is_there_is_not_overwritten_by_shares(tmp_path: Path) -> None:
    state = source_of(tmp_path / "a")
    with pytest.raises(UserError, match="already has step 10"):
        write(tmp_path / "a", state, 1, 2)


def test_a_target_that_cannot_be_read_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = source_of(tmp_path / "a")

    def stale(self: LocalPlace) -> list[tuple[int, str]]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(LocalPlace, "complete", stale)
    with pytest.raises(UserError, match=r"is not written: .*Stale file handle"):
        write(tmp_path / "b", state, 1, 2)


def test_shares_go_to_an_object_store(tmp_path: Path) -> None:
    state = source_of(tmp_path / "a")
    url = f"memory://{tmp_path.name}"
    write(url, state, 2, 2)
    assert place_of(url).complete() == []
    write(url, state, 1, 2)
    assert selfcheck.changes(state, read_state(url)) == []


def test_the_command_says_which_shares_are_missing(everstep: Callable, tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    ran = everstep("ckpt", "convert", tmp_path / "a", tmp_path / "b", "--share", "3/3")
    assert ran.code == 0
    assert "share 3/3 of step 10, checked; waiting for shares 1, 2" in ran.out
    ran = everstep("ckpt", "convert", tmp_path / "a", tmp_path / "b", "--share", "1/3", "--json")
    assert ran.document()["missing_shares"] == [2]
    ran = everstep("ckpt", "convert", tmp_path / "a", tmp_path / "b", "--share", "2/3")
    assert "b: universal, step 10" in ran.out
    assert everstep("ckpt", "verify", tmp_path / "b").code == 0


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_share_that_is_none_is_a_sentence(everstep: Callable, tmp_path: Path, share: str) -> None:
    save(tmp_path / "a", 10)
    ran = everstep("ckpt", "convert", tmp_path / "a", tmp_path / "b", f"--share={share}")
    assert ran.code == 2
    assert "is not I/N" in ran.err
    ran = everstep("ckpt", "convert", tmp_path / "a", tmp_path / "b", "--to", "hf", "--share", "1/2")
    assert ran.code == 2
    assert "leave it out" in ran.err
